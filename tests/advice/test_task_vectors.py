"""Norms and angles of task vectors against the same from whole vectors, written out."""

import math

import pytest
import torch
from torch import Tensor

from matsmerge.advice import task_vectors
from matsmerge.advice.task_vectors import OUTSIDE, TaskVectors, measure_task_vectors
from matsmerge.checkpoints.alignment import align
from matsmerge.checkpoints.in_memory import InMemoryCheckpoint
from matsmerge.errors import NonFiniteError

State = dict[str, Tensor]


def make_states(num: int = 3) -> list[State]:
    g = torch.Generator().manual_seed(0)
    shapes = {"embed": (5, 4), "layers.0.w": (4, 4), "layers.0.b": (4,), "layers.1.w": (4, 4)}
    return [{n: torch.randn(s, generator=g) for n, s in shapes.items()} for _ in range(num + 1)]


def measure(base: State, models: list[State]) -> TaskVectors:
    opened = {f"m{i}": InMemoryCheckpoint(f"m{i}", state) for i, state in enumerate(models)}
    return measure_task_vectors(align(opened, InMemoryCheckpoint("base", base)))


def flat(state: State, names: list[str]) -> Tensor:
    return torch.cat([state[name].double().flatten() for name in names])


def test_norms_and_angles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_vectors, "_BLOCK_ELEMENTS", 7)  # parameters are read in pieces
    base, *models = make_states()
    found = measure(base, models)
    for names, geometry in (
        (list(base), found.whole),
        (["layers.0.w", "layers.0.b"], found.layers["layers.0"]),
        (["embed"], found.layers[OUTSIDE]),
    ):
        start = flat(base, names)
        vectors = [flat(model, names) - start for model in models]
        assert geometry.norms == pytest.approx([float(v.norm()) for v in vectors])
        assert geometry.changes == pytest.approx([float(v.norm() / start.norm()) for v in vectors])
        cosine = torch.nn.functional.cosine_similarity
        for i, a in enumerate(vectors):
            own = float(cosine(a + start, start, dim=0))
            assert geometry.cosines_with_base[i] == pytest.approx(own)
            for j, b in enumerate(vectors):
                assert float(geometry.cosines[i, j]) == pytest.approx(float(cosine(a, b, dim=0)))


def test_typical_changes_are_of_matrices_that_moved() -> None:
    """A LoRA leaves most matrices alone."""
    base, _ = make_states(1)
    lora = base | {"layers.0.w": base["layers.0.w"] * 1.2}
    assert measure(base, [lora, base]).typical_changes == pytest.approx([0.2, 0.0])


def test_typical_changes_are_of_matrices_alone() -> None:
    base, model = make_states(1)
    moved = {n: t * 1.5 for n, t in base.items()} | {"layers.0.b": model["layers.0.b"] * 100}
    assert measure(base, [moved]).typical_changes == pytest.approx([0.5])
    vectors = {n: t for n, t in base.items() if t.ndim == 1}
    assert measure(vectors, [{n: t * 3 for n, t in vectors.items()}]).typical_changes == (
        pytest.approx([2.0])
    )


def test_some_parameters_are_left_out() -> None:
    base, *models = make_states(2)
    left = {n: t for n, t in base.items() if n != "embed"}
    fewer = measure(base, models).without(["embed"])
    same = measure(left, [{n: m[n] for n in left} for m in models])
    assert fewer.whole.norms == pytest.approx(same.whole.norms)
    assert fewer.matrices == same.matrices


def test_what_is_zero() -> None:
    base = {"w": torch.zeros(2, 2)}
    moved, same = measure(base, [{"w": torch.ones(2, 2)}, {"w": torch.zeros(2, 2)}]).whole.changes
    assert math.isinf(moved)
    assert same == 0
    unchanged = measure({"w": torch.ones(2, 2)}, [{"w": torch.ones(2, 2)}] * 1).whole
    assert unchanged.cosines.tolist() == [[0.0]]
    assert unchanged.cosines_with_base == pytest.approx([1.0])


@pytest.mark.parametrize("who", [0, 1])
def test_values_that_are_not_finite_are_named(who: int) -> None:
    states = make_states(2)
    states[who]["layers.1.w"][0, 0] = math.nan
    with pytest.raises(NonFiniteError, match=rf"^{['base', 'm0'][who]}: tensor 'layers.1.w'"):
        measure(states[0], states[1:])
