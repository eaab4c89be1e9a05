"""Language models merged with models that contain one of the same shape."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import matsmerge
from matsmerge import AlignmentError
from matsmerge.checkpoints.in_memory import InMemoryCheckpoint
from matsmerge.checkpoints.model_parts import find_part

State = dict[str, Tensor]
LAYOUTS = {  # where the language model's inner model and its output layer are in the larger one
    "qwen": ("model.language_model.", "", "model.visual."),
    "llava": ("language_model.model.", "language_model.", "vision_tower."),
    "thinker": ("thinker.model.", "thinker.", "thinker.visual."),
}


def language_model(seed: int) -> State:
    g = torch.Generator().manual_seed(seed)
    names = [
        "embed_tokens",
        *(f"layers.{i}.{p}" for i in range(6) for p in ("q", "mlp.up")),
        "norm",
    ]
    return {f"model.{n}.weight": torch.randn(6, 5, generator=g) for n in names} | {
        "lm_head.weight": torch.randn(6, 5, generator=g)
    }


def seeing(seed: int, layout: str) -> State:
    inner, outer, tower = LAYOUTS[layout]
    g = torch.Generator().manual_seed(100 + seed)
    state = {
        n.replace("model.", inner, 1) if n.startswith("model.") else outer + n: v
        for n, v in language_model(seed).items()
    }
    shapes = [f"{tower}blocks.{i}.qkv.weight" for i in range(2)] + [f"{tower}merger.bias"]
    return state | {n: torch.randn(3, 4, generator=g) for n in shapes}


def towers(state: State, layout: str) -> State:
    return {n: v for n, v in state.items() if n.startswith(LAYOUTS[layout][2])}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seeing_is", ["first", "last", "base"])
@pytest.mark.parametrize("method", ["ties", "task_arithmetic"])
def test_towers_are_copied(layout: str, seeing_is: str, method: str) -> None:
    """The language model is merged as it would be alone, wherever the larger model is named."""
    larger = seeing(0, layout)
    models: dict[str, State] = {"lm": language_model(1), "other": language_model(2)}
    base = language_model(3)
    plain = dict(models) | {"larger": language_model(0)}
    plain_base: State = base
    if seeing_is == "base":
        base, plain_base = larger, language_model(0)
        del plain["larger"]
    elif seeing_is == "first":
        models = {"larger": larger, **models}
    else:
        models["larger"] = larger
    plain = {name: plain[name] for name in models}
    options: dict[str, Any] = {"scale": 0.4}
    planned = matsmerge.plan(models, base, method, **options)
    assert any("not merged" in note and "tensors of" in note for note in planned.notes)
    merged = planned.merge()
    expected = matsmerge.merge(plain, plain_base, method, **options)
    assert merged.keys() == larger.keys()
    inner, outer, _ = LAYOUTS[layout]
    for name, value in expected.items():
        renamed = name.replace("model.", inner, 1) if name.startswith("model.") else outer + name
        torch.testing.assert_close(merged[renamed], value, rtol=0, atol=0)
    for name, value in towers(larger, layout).items():
        assert torch.equal(merged[name], value)


@pytest.mark.filterwarnings("ignore:.*(read as|not merged):UserWarning")
def test_the_output_is_the_larger_model(tmp_path: Path) -> None:
    states = {"base": language_model(3), "lm": language_model(1), "vlm": seeing(0, "qwen")}
    for name, state in states.items():
        (tmp_path / name).mkdir()
        save_file(state, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": name}))
    matsmerge.merge(
        [tmp_path / "lm", tmp_path / "vlm"], tmp_path / "base", "ties", out=tmp_path / "out"
    )
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == states["vlm"].keys()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "vlm"


@pytest.mark.filterwarnings("ignore:.*(read as|not merged):UserWarning")
def test_an_override_says_which_tower() -> None:
    models = {"lm": language_model(1), "one": seeing(0, "qwen"), "two": seeing(2, "qwen")}
    chosen = [{"match": "model.visual.*", "method": {"name": "passthrough", "model": "two"}}]
    merged = matsmerge.merge(models, method="average", overrides=chosen)
    for name, value in towers(models["two"], "qwen").items():
        assert torch.equal(merged[name], value)
    first = matsmerge.merge(models, method="average")
    for name, value in towers(models["one"], "qwen").items():
        assert torch.equal(first[name], value)


def test_what_a_language_model_lacks_is_said() -> None:
    small, large = language_model(1), seeing(0, "qwen")
    del small["model.layers.1.q.weight"]
    with pytest.raises(AlignmentError, match=r"has 1 tensor .*layers\.1\.q"):
        matsmerge.merge({"small": small, "large": large}, method="average")


def opened(state: State) -> InMemoryCheckpoint:
    return InMemoryCheckpoint("m", state)


def test_heads_are_no_towers() -> None:
    encoder = {f"layers.{i}.w": torch.ones(2, 2) for i in range(12)}
    with_head = {f"bert.{n}": v.clone() for n, v in encoder.items()} | {"head.w": torch.ones(2)}
    assert find_part(opened(with_head), opened(encoder)) is None
    assert find_part(opened(encoder), opened(with_head)) is None


def test_other_models_are_no_parts() -> None:
    assert find_part(opened(seeing(0, "qwen")), opened(seeing(1, "qwen"))) is None
    other = {f"transformer.h.{i}.w": torch.ones(2) for i in range(3)}
    assert find_part(opened(seeing(0, "qwen")), opened(other)) is None
