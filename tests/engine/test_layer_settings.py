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
