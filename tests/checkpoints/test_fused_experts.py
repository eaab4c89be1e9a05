"""Fused experts as tensors of their own, and experts under the names of another layout."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from matsmerge.checkpoints.alignment import align
from matsmerge.checkpoints.checkpoint import Checkpoint
from matsmerge.checkpoints.fingerprint import fingerprint
from matsmerge.checkpoints.fused_experts import match_experts, pieces_of, separate_experts
from matsmerge.checkpoints.in_memory import InMemoryCheckpoint
from matsmerge.errors import AlignmentError

NUM, HIDDEN, INNER = 3, 4, 6
PREFIX = "model.layers.0.mlp."


def fused(seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        f"{PREFIX}gate.weight": torch.randn(NUM, HIDDEN, generator=g),
        f"{PREFIX}experts.gate_up_proj": torch.randn(NUM, 2 * INNER, HIDDEN, generator=g),
        f"{PREFIX}experts.down_proj": torch.randn(NUM, HIDDEN, INNER, generator=g),
    }


def apart(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same, as Qwen's checkpoints have it."""
    found = {f"{PREFIX}gate.weight": state[f"{PREFIX}gate.weight"]}
    for i in range(NUM):
        both = state[f"{PREFIX}experts.gate_up_proj"][i]
        found[f"{PREFIX}experts.{i}.gate_proj.weight"] = both[:INNER].clone()
        found[f"{PREFIX}experts.{i}.up_proj.weight"] = both[INNER:].clone()
        down = state[f"{PREFIX}experts.down_proj"][i]
        found[f"{PREFIX}experts.{i}.down_proj.weight"] = down.clone()
    return found


def mixtral(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same, as Mixtral's have it."""
    others = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2", "mlp": "block_sparse_moe"}
    return {
        ".".join(others.get(part, part) for part in name.split(".")): values
        for name, values in apart(state).items()
    }


def opened(state: dict[str, Tensor], label: str = "model") -> Checkpoint:
    return InMemoryCheckpoint(label, state)


def test_each_expert_is_read_as_one_tensor() -> None:
    checkpoint = opened(fused())
    found = separate_experts(checkpoint)
    expected = apart(fused())
    assert found.specs.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name], values), name
        middle = found.read(name, 3, 7)
        assert torch.equal(middle, values.flatten()[3:7])
    assert fingerprint(found) == fingerprint(checkpoint)


def test_transposed_gates_stay_together() -> None:
    shapes = {
        "gate_up_proj": (NUM, HIDDEN, 2 * INNER),
        "gate_up_proj_bias": (NUM, 2 * INNER),
        "down_proj": (NUM, INNER, HIDDEN),
        "down_proj_bias": (NUM, HIDDEN),
    }
    state = {f"{PREFIX}experts.{n}": torch.randn(shape) for n, shape in shapes.items()}
    found = separate_experts(opened(state))
    assert len(found.specs) == 4 * NUM
    for name, values in state.items():
        part = name.rpartition(".")[2].removesuffix("_bias")
        attribute = "bias" if name.endswith("_bias") else "weight"
        for i in range(NUM):
            assert torch.equal(found[f"{PREFIX}experts.{i}.{part}.{attribute}"], values[i])


def test_experts_without_gates() -> None:
    pieces = pieces_of({"up_proj": (2, 6, 4), "down_proj": (2, 4, 6)})
    assert {n: (p.tensor, p.start, p.shape) for n, p in pieces.items()} == {
        "0.up_proj.weight": ("up_proj", 0, (6, 4)),
        "1.up_proj.weight": ("up_proj", 24, (6, 4)),
        "0.down_proj.weight": ("down_proj", 0, (4, 6)),
        "1.down_proj.weight": ("down_proj", 24, (4, 6)),
    }


@pytest.mark.parametrize(
    "shapes",
    [
        {"down_proj": (2, 4, 6)},
        {"gate_up_proj": (2, 12, 4), "down_proj": (3, 4, 6)},
        {"gate_up_proj": (2, 10, 4), "down_proj": (2, 4, 6)},
        {"gate_up_proj": (12, 4), "down_proj": (4, 6)},
        {"gate_up_proj": (2, 12, 4), "down_proj": (2, 4, 6), "scale": (2, 4)},
    ],
)
def test_what_is_no_fused_experts_stays_as_it_is(shapes: dict[str, tuple[int, ...]]) -> None:
    assert pieces_of(shapes) == {}
    checkpoint = opened({f"experts.{n}": torch.zeros(s) for n, s in shapes.items() if n != "scale"})
    if "scale" not in shapes:
        assert separate_experts(checkpoint) is checkpoint


LAYOUTS: dict[str, Callable[[], dict[str, Tensor]]] = {
    "fused": fused,
    "apart": lambda: apart(fused()),
    "mixtral": lambda: mixtral(fused()),
}


@pytest.mark.parametrize("of_base", LAYOUTS)
@pytest.mark.parametrize("of_model", LAYOUTS)
def test_all_layouts_align(of_base: str, of_model: str) -> None:
    """Under the names of the base, and none of the values at another place."""
    models = {"a": opened(LAYOUTS[of_model]()), "b": opened(LAYOUTS["apart"]())}
    base = opened(LAYOUTS[of_base](), "base")
    aligned = align(models, base)
    assert aligned.base is not None
    if of_base != of_model:
        own = {name: name for name in separate_experts(base).specs}
        assert dict(aligned.base.names) == own
    assert len(aligned.names) == 1 + 3 * NUM
    for name in aligned.names:
        size = aligned.base.spec(name).num_elements
        expected = aligned.base.read(name, 0, size)
        for model in aligned.models:
            assert torch.equal(model.read(name, 0, size), expected)


def test_missing_experts_are_named() -> None:
    smaller = mixtral(fused())
    del smaller["model.layers.0.block_sparse_moe.experts.2.w3.weight"]
    with pytest.raises(AlignmentError, match=r"experts\.2\.up_proj\.weight"):
        align({"a": opened(smaller, "small"), "b": opened(fused())}, opened(fused(), "base"))


def test_other_models_are_not_renamed() -> None:
    assert match_experts(["a.mlp.experts.0.w9.weight"], ["a.mlp.experts.0.w1.weight"]) is None
    assert match_experts(["a.weight"], ["a.weight"]) is None
