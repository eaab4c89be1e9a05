"""Stacks of models that are unlike: other names, layers without parameters, several stacks."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import matsmerge
from matsmerge import MatsError
from matsmerge.recipes.recipe import make_recipe

State = dict[str, Tensor]
Save = Callable[..., Path]


def make_state(seed: int, num_layers: int, prefix: str = "layers", width: int = 4) -> State:
    generator = torch.Generator().manual_seed(seed)
    state = {"embed.weight": torch.randn(6, width, generator=generator)}
    for i in range(num_layers):
        state[f"{prefix}.{i}.w"] = torch.randn(width, width, generator=generator)
    state["norm.weight"] = torch.randn(width, generator=generator)
    return state


def write(save_model: Save, **states: State) -> None:
    for name, state in states.items():
        numbers = {int(n.split(".")[-2]) for n in state if n.endswith(".w")}
        save_model(name, state, config__json=json.dumps({"num_hidden_layers": len(numbers)}))


def merge(folder: Path, models: str, stack: list[Any], **more: Any) -> State:
    entries = [{"model": str(folder / name), "name": name} for name in models]
    if "base" in more:
        more["base"] = str(folder / more["base"])
    recipe = {"models": entries, "stack": stack, "method": "passthrough", **more}
    matsmerge.merge(make_recipe(recipe), out=folder / "out")
    return load_file(folder / "out" / "model.safetensors")


def problems_of(folder: Path, models: str, stack: list[Any], **more: Any) -> list[str]:
    with pytest.raises(MatsError) as error:
        merge(folder, models, stack, **more)
    assert not (folder / "out").exists()
    return error.value.problems


def test_a_layer_without_parameters_stays_one(save_model: Save, tmp_path: Path) -> None:
    """Layers are those of their numbers, and not the first so many that have parameters."""
    state = make_state(1, 4)
    del state["layers.1.w"]
    save_model("a", state, config__json='{"num_hidden_layers": 3}')
    found = merge(tmp_path, "a", [{"a": [0, 2]}, {"a": [1, 4]}])
    assert {n for n in found if n.startswith("layers")} == {
        "layers.0.w", "layers.3.w", "layers.4.w",
    }  # fmt: skip
    for new, old in ((0, 0), (3, 2), (4, 3)):
        assert torch.equal(found[f"layers.{new}.w"], state[f"layers.{old}.w"])


def test_models_of_other_names(save_model: Save, tmp_path: Path) -> None:
    write(save_model, a=make_state(1, 3), b=make_state(2, 3, "model.layers"))
    found = problems_of(tmp_path, "ab", [{"a": [0, 2]}, {"b": [1, 3]}])
    assert any("[1, 3] of" in p and "which has 0 (layers)" in p for p in found), found


def lacking(folder: Path, names: str) -> str:
    return (
        f"stack: the base {folder / 'c'} has nothing for {names}; say which of its layers belong "
        "to them, as in base: [0, 8]"
    )


def test_a_base_of_other_names(save_model: Save, tmp_path: Path) -> None:
    """It is no base for these layers, which is said before any work."""
    write(save_model, a=make_state(1, 3), b=make_state(2, 3), c=make_state(3, 3, "model.layers"))
    stack = [{"a": [0, 2], "b": [0, 2]}]
    found = problems_of(tmp_path, "ab", stack, base="c", method="task_arithmetic")
    assert found == [lacking(tmp_path, "layers.0.w, layers.1.w")]


def test_a_base_with_fewer_layers(save_model: Save, tmp_path: Path) -> None:
    """A model is not taken for the base in its place."""
    write(save_model, a=make_state(1, 4), b=make_state(2, 4), c=make_state(3, 2))
    stack = [{"a": [0, 4], "b": [0, 4]}]
    found = problems_of(tmp_path, "ab", stack, base="c", method="task_arithmetic")
    assert found == [lacking(tmp_path, "layers.2.w, layers.3.w")]
    stack[0]["base"] = [0, 4]
    (problem,) = problems_of(tmp_path, "ab", stack, base="c", method="task_arithmetic")
    assert "takes the layers [0, 4] of" in problem


def test_layers_of_a_base_that_is_not_there(save_model: Save, tmp_path: Path) -> None:
    write(save_model, a=make_state(1, 3))
    found = problems_of(tmp_path, "a", [{"a": [0, 2], "base": [0, 2]}])
    assert found == ["stack: layers.0 has layers of a base, and there is none (base:)"]


def test_heads_are_not_kept_apart(save_model: Save, tmp_path: Path) -> None:
    write(save_model, a=make_state(1, 3))
    found = problems_of(tmp_path, "a", [{"a": [0, 2]}], heads="norm.*", method="average")
    assert found == ["heads: cannot be kept apart from a stack; leave them out"]


def two_sided(seed: int, num_encoders: int, num_decoders: int) -> State:
    encoder = make_state(seed, num_encoders, "encoder.block")
    decoder = make_state(seed + 10, num_decoders, "decoder.block")
    return {
        "shared.weight": encoder["embed.weight"],
        **{n: v for n, v in encoder.items() if "block" in n},
        **{n: v for n, v in decoder.items() if "block" in n},
    }


@pytest.fixture
def two_sides(save_model: Save) -> tuple[State, State]:
    found = two_sided(1, 3, 2), two_sided(2, 3, 2)
    config = json.dumps({"num_layers": 3, "num_decoder_layers": 2})
    for name, state in zip("ab", found, strict=True):
        save_model(name, state, config__json=config)
    return found


def test_it_is_to_be_said_which_of_several_stacks(
    two_sides: tuple[State, State], tmp_path: Path
) -> None:
    (problem,) = problems_of(tmp_path, "ab", [{"a": [0, 2]}])
    assert "several stacks of layers, decoder.block, encoder.block" in problem
    assert "say which with match: PATTERN" in problem


def test_each_side_has_a_stack_of_its_own(two_sides: tuple[State, State], tmp_path: Path) -> None:
    a, b = two_sides
    stack = [
        {"match": "encoder.*", "layers": [{"a": [0, 2]}, {"b": [1, 3]}]},
        {"match": "decoder.*", "layers": [{"b": [0, 2]}, {"b": [1, 2]}]},
    ]
    found = merge(tmp_path, "ab", stack, method={"name": "passthrough", "model": "a"}, overrides=[
        {"match": "encoder.*", "layers": [2, 4], "method": {"model": "b"}},
        {"match": "decoder.*", "method": {"model": "b"}},
    ])  # fmt: skip
    expected = {"shared.weight": a["shared.weight"]}
    for new, (state, old) in enumerate(((a, 0), (a, 1), (b, 1), (b, 2))):
        expected[f"encoder.block.{new}.w"] = state[f"encoder.block.{old}.w"]
    for new, old in enumerate((0, 1, 1)):
        expected[f"decoder.block.{new}.w"] = b[f"decoder.block.{old}.w"]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[n], expected[n]) for n in expected)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["num_layers"], config["num_decoder_layers"]) == (4, 3)


def test_what_overlaps(two_sides: tuple[State, State], tmp_path: Path) -> None:
    stack = [{"match": m, "layers": [{"a": [0, 2]}]} for m in ("encoder.*", "encoder.block.0*")]
    (problem,) = problems_of(tmp_path, "ab", stack)
    assert problem == "stack ['encoder.block.0*']: encoder.block is stacked twice; stacks overlap"


@pytest.mark.parametrize("method", ["average", "task_arithmetic", "ties"])
def test_a_whole_stack_is_the_plain_merge(method: str, save_model: Save, tmp_path: Path) -> None:
    write(save_model, a=make_state(1, 3), b=make_state(2, 3), c=make_state(3, 3))
    found = merge(tmp_path, "ab", [{"a": [0, 3], "b": [0, 3]}], base="c", method=method)
    plain = matsmerge.merge([tmp_path / "a", tmp_path / "b"], tmp_path / "c", method)
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[name], plain[name]) for name in found)
