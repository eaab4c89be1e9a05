from typing import Any

import pytest

from matsmerge import RecipeError
from matsmerge.engine.layer_settings import restack


def changed(config: dict[str, Any], prefix: str, num: int, layers: list[int]) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    restack(config, prefix, num, [(config, j) for j in layers], changes)
    return changes


def test_lists_of_layers_and_of_their_numbers() -> None:
    config = {
        "num_hidden_layers": 3,
        "layer_types": ["full", "sliding", "full"],
        "mlp_only_layers": [0, 2],
        "eos_token_id": [1, 2, 3],
        "architectures": ["A"],
    }
    assert changed(config, "model.layers", 3, [0, 1, 1, 2]) == {
        "num_hidden_layers": 4,
        "layer_types": ["full", "sliding", "sliding", "full"],
        "mlp_only_layers": [0, 3],
    }


@pytest.mark.parametrize(
    ("config", "prefix", "expected"),
    [
        ({"n_layer": 2}, "h", {"n_layer": 3}),
        ({"num_layers": 2, "num_decoder_layers": 2}, "decoder.block", {"num_decoder_layers": 3}),
        ({"num_layers": 2, "num_decoder_layers": 2}, "encoder.block", {"num_layers": 3}),
        ({"text_config": {"num_hidden_layers": 2}, "vision_config": {"num_hidden_layers": 2}},
         "model.language_model.layers", {"text_config": {"num_hidden_layers": 3}}),
        ({"text_config": {"num_hidden_layers": 2}, "vision_config": {"depth": 2}},
         "visual.blocks", {"vision_config": {"depth": 3}}),
    ],
)  # fmt: skip
def test_where_the_number_is(config: Any, prefix: str, expected: Any) -> None:
    assert changed(config, prefix, 2, [0, 1, 1]) == expected


def test_no_number() -> None:
    with pytest.raises(RecipeError, match="does not say"):
        changed({"num_hidden_layers": 5}, "model.layers", 2, [0])


def test_layers_of_models_with_other_lists() -> None:
    """A layer has what its own model says of it; where that says less, the first model does."""
    ours = {"num_hidden_layers": 2, "layer_types": ["a0", "a1"], "moe_layers": [0]}
    theirs = {"num_hidden_layers": 3, "layer_types": ["b0", "b1", "b2"], "moe_layers": [2]}
    shorter = {"num_hidden_layers": 3, "layer_types": ["c0"]}
    changes: dict[str, Any] = {}
    restack(ours, "model.layers", 2, [(ours, 0), (theirs, 2), (shorter, 0), (shorter, 2)], changes)
    assert changes == {
        "num_hidden_layers": 4,
        "layer_types": ["a0", "b2", "c0", "a1"],
        "moe_layers": [0, 1, 2],
    }


def test_changes_of_several_stacks_are_gathered() -> None:
    config = {"text_config": {"num_hidden_layers": 2}, "vision_config": {"depth": 2}}
    changes: dict[str, Any] = {}
    for prefix, num in (("model.language_model.layers", 3), ("visual.blocks", 1)):
        restack(config, prefix, 2, [(config, 0)] * num, changes)
    assert changes == {"text_config": {"num_hidden_layers": 3}, "vision_config": {"depth": 1}}


def test_lists_of_another_length_are_not_of_layers() -> None:
    config = {
        "num_hidden_layers": 2,
        "layer_types": ["x"],
        "num_heads_list": [4, 8],
        "sizes": [1, 2],
    }
    found = changed(config, "layers", 2, [1, 1, 0])
    assert found == {"num_hidden_layers": 3, "num_heads_list": [8, 8, 4]}


def test_the_message_names_what_was_looked_for() -> None:
    with pytest.raises(RecipeError) as error:
        changed({"n_layer": 5}, "decoder.block", 2, [0])
    (problem,) = error.value.problems
    assert "num_decoder_layers" in problem
    assert "that there are 2 layers (decoder.block)" in problem
