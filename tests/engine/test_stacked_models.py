"""Stacks against tensors put together by hand."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tiny_models import llama_config, make_tokenizer, save
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import matsmerge
from matsmerge import MatsError, RecipeError

State = dict[str, Tensor]
NUM = {"a": 4, "b": 4, "c": 3, "base": 4}


def make_state(name: str, num_layers: int, width: int = 6) -> State:
    generator = torch.Generator().manual_seed(sum(map(ord, name)))

    def values(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    state = {"embed.weight": values(10, width), "norm.weight": values(width)}
    for i in range(num_layers):
        state[f"layers.{i}.up.weight"] = values(8, width)
        state[f"layers.{i}.down.weight"] = values(width, 8)
    return state


@pytest.fixture
def states(save_model: Callable[..., Path]) -> dict[str, State]:
    found = {name: make_state(name, num) for name, num in NUM.items()}
    for name, state in found.items():
        config = {
            "num_hidden_layers": NUM[name],
            "layer_types": [f"{name}{i}" for i in range(NUM[name])],
        }
        save_model(name, state, config__json=json.dumps(config))
    return found


def merge(folder: Path, recipe: dict[str, Any]) -> tuple[State, dict[str, Any]]:
    names = recipe.get("models", ["a", "b", "c"])
    entries = [{"model": str(folder / n), "name": n} if isinstance(n, str) else n for n in names]
    base = {"base": str(folder / "base")} if recipe.pop("with_base", False) else {}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({**recipe, "models": entries, **base}))
    matsmerge.merge(path, out=folder / "out", overwrite=True)
    return load_file(folder / "out/model.safetensors"), json.loads(
        (folder / "out/config.json").read_text()
    )


def test_layers_of_several_models_as_they_are(states: dict[str, State], tmp_path: Path) -> None:
    ranges: list[tuple[str, list[int]]] = [
        ("a", [0, 3]),
        ("b", [1, 4]),
        ("b", [1, 3]),
        ("c", [2, 3]),
    ]
    stack = [{name: layers} for name, layers in ranges]
    found, config = merge(tmp_path, {"method": "passthrough", "stack": stack})
    sources = [(name, j) for name, layers in ranges for j in range(*layers)]
    expected = {
        f"layers.{k}.{part}.weight": states[name][f"layers.{j}.{part}.weight"]
        for k, (name, j) in enumerate(sources)
        for part in ("up", "down")
    }
    expected["embed.weight"] = states["a"]["embed.weight"]
    expected["norm.weight"] = states["c"]["norm.weight"]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[n], expected[n]) for n in expected)
    assert config["num_hidden_layers"] == len(sources) == 9
    assert config["layer_types"] == [f"{name}{j}" for name, j in sources]


def test_layers_that_are_merged(states: dict[str, State], tmp_path: Path) -> None:
    """Each range its own method, weights over its own layers, and its own base."""
    found, _ = merge(
        tmp_path,
        {
            "with_base": True,
            "method": "task_arithmetic",
            "stack": [
                {"a": [0, 2], "b": [1, 3], "base": [2, 4]},
                {"c": [1, 2]},
                {"a": [3, 4], "base": {"model": "c", "layers": [0, 1]}},
            ],
            "overrides": [
                {"layers": [0, 2], "models": {"a": {"weight": [1, 0.5]}, "b": {"weight": 2}}},
                {"layers": [2, 3], "method": {"name": "passthrough", "scale": 3}},
                {"match": "*.up.*", "layers": [3, 4], "method": {"scale": [0.25]}},
                {"layers": "after", "method": {"scale": 0}},
            ],
        },
    )
    a, b, c, base = (states[n] for n in ("a", "b", "c", "base"))
    for part in ("up", "down"):
        own = f"{part}.weight"
        for k, weight in ((0, 1), (1, 0.5)):
            start = base[f"layers.{k + 2}.{own}"].double()
            first, second = a[f"layers.{k}.{own}"], b[f"layers.{k + 1}.{own}"]
            expected = start + weight * (first - start) + 2 * (second - start)
            torch.testing.assert_close(found[f"layers.{k}.{own}"], expected.float())
        torch.testing.assert_close(found[f"layers.2.{own}"], 3 * c[f"layers.1.{own}"])
        start = c[f"layers.0.{own}"].double()
        scale = 0.25 if part == "up" else 1
        expected = start + scale * (a[f"layers.3.{own}"] - start)
        torch.testing.assert_close(found[f"layers.3.{own}"], expected.float())
    start = base["embed.weight"].double()  # of the first range, without weights of its own
    expected = start + (a["embed.weight"] - start) + (b["embed.weight"] - start)
    torch.testing.assert_close(found["embed.weight"], expected.float())
    torch.testing.assert_close(found["norm.weight"], c["norm.weight"])


def test_one_range_of_all_layers_is_the_merge(states: dict[str, State], tmp_path: Path) -> None:
    recipe = {"with_base": True, "models": ["a", "b"], "method": {"name": "ties", "density": 0.4}}
    plain, _ = merge(tmp_path, dict(recipe))
    stacked, _ = merge(tmp_path, {**recipe, "stack": [{"a": [0, 4], "b": [0, 4]}]})
    assert plain.keys() == stacked.keys() == states["a"].keys()
    assert all(torch.equal(plain[n], stacked[n]) for n in plain)


def test_a_long_stack_takes_the_memory_of_a_short_one(
    states: dict[str, State], tmp_path: Path
) -> None:
    def plan(num: int) -> Any:
        recipe = {
            "models": [str(tmp_path / "a")],
            "method": "passthrough",
            "stack": [{"a": [0, 4]}] * num,
        }
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe))
        return matsmerge.plan(path)

    one, many = plan(1), plan(50)
    assert many.num_parameters > 30 * one.num_parameters
    assert many.peak_bytes() == one.peak_bytes()


def test_only_some_models_take_part(states: dict[str, State], tmp_path: Path) -> None:
    overrides = [{"match": "*.up.*", "only": ["b"]}]
    found, _ = merge(tmp_path, {"models": ["a", "b"], "method": "average", "overrides": overrides})
    assert torch.equal(found["layers.1.up.weight"], states["b"]["layers.1.up.weight"])
    mean = (states["a"]["norm.weight"] + states["b"]["norm.weight"]) / 2
    torch.testing.assert_close(found["norm.weight"], mean)


@pytest.mark.parametrize(
    ("recipe", "messages"),
    [
        (
            {"stack": [{"a": [2, 6]}, {"b": [4, 5], "base": [9, 10]}], "with_base": True},
            [r"layers \[2, 6\] of .*a, which has 4", r"\[4, 5\] of .*b, which has 4", r"\[9, 10\] of .*base"],
        ),
        ({"stack": [{"a": [1, 1]}]}, ["expected .FIRST, LAST"]),
        ({"stack": [{"a": [0, 2], "b": [0, 1]}]}, ["2 of a, 1 of b"]),
        ({"stack": [{"base": [0, 1]}]}, ["names no model"]),
        ({"stack": [{"d": [0, 1]}]}, ["no model 'd'"]),
        ({"stack": [{"a": [0, 1], "b": [0, 1]}]}, ["takes one model, and 2 take part"]),
        ({"stack": [{"a": [0, 1], "wide": [0, 1]}, {"wide": [1, 2]}], "models": ["a", "wide"]}, ["another width.*up.weight .8, 7. instead of .8, 6."]),
        ({"stack": [{"match": "layers.*", "layers": [{"a": [0, 1]}]}, {"match": "*.up.*", "layers": [{"a": [0, 1]}]}]}, ["stacked twice"]),
        ({"stack": [{"match": "blocks.*", "layers": [{"a": [0, 1]}]}]}, ["no layers"]),
        ({"stack": [{"a": [0, 1], "b": [1, 2]}], "method": "task_arithmetic", "with_base": True}, ["which of the base belong"]),
        ({"stack": [{"a": [0, 1]}], "method": "regmean"}, ["uses statistics"]),
        ({"stack": [{"a": [0, 1]}], "method": {"name": "passthrough", "model": "b"}}, ["b takes no part"]),
    ],
)  # fmt: skip
def test_what_cannot_be_stacked(
    recipe: dict[str, Any],
    messages: list[str],
    states: dict[str, State],
    save_model: Callable[..., Path],
    tmp_path: Path,
) -> None:
    save_model("wide", make_state("wide", 2, 7), config__json='{"num_hidden_layers": 2}')
    with pytest.raises(MatsError) as error:
        merge(tmp_path, {"method": "passthrough", **recipe})
    for message in messages:
        assert any(re.search(message, p) for p in error.value.problems), error.value.problems
    assert not (tmp_path / "out").exists()


def test_a_configuration_that_does_not_say_how_many_layers(
    states: dict[str, State], tmp_path: Path
) -> None:
    (tmp_path / "a/config.json").write_text('{"num_hidden_layers": 7}')
    with pytest.raises(RecipeError, match="does not say by any of num_hidden_layers"):
        merge(tmp_path, {"method": "passthrough", "stack": [{"a": [0, 1]}]})


def test_a_stacked_llama_runs(tmp_path: Path) -> None:
    model = LlamaForCausalLM(llama_config(num_hidden_layers=3))
    save(model, tmp_path / "llama", make_tokenizer())
    found, config = merge(
        tmp_path,
        {
            "models": ["llama"],
            "method": "passthrough",
            "stack": [{"llama": [0, 2]}, {"llama": [1, 3]}],
        },
    )
    assert config["num_hidden_layers"] == 4
    stacked = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert stacked(torch.tensor([[1, 2]])).logits.isfinite().all()
    assert "model.layers.3.mlp.up_proj.weight" in found
