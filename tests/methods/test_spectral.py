"""Methods of whole matrices against their formulas, written out in numpy, and their invariants."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

import matsmerge
from matsmerge.methods import METHODS
from matsmerge.methods.spectral import SpectralMethod

Array = NDArray[np.float64]
State = dict[str, Tensor]
SHAPES = {"wide": (6, 20), "tall": (21, 9), "square": (8, 8), "vector": (7,), "kernel": (2, 3, 4)}
WEIGHTS = [0.5, 1.0, 2.0]
NAMES = [name for name, cls in METHODS.items() if issubclass(cls, SpectralMethod)]


def make(num: int = 3) -> tuple[State, list[State]]:
    torch.manual_seed(0)
    base = {n: torch.randn(shape, dtype=torch.float64) for n, shape in SHAPES.items()}
    return base, [{n: t + 0.1 * torch.randn_like(t) for n, t in base.items()} for _ in range(num)]


def changes(base: State, models: list[State], name: str) -> list[Array]:
    return [w * (m[name] - base[name]).numpy() for m, w in zip(models, WEIGHTS, strict=True)]


def polar(matrix: Array) -> Array:
    """(A Aᵀ)^(-1/2) A, by the eigenvectors of the smaller Gram matrix."""
    values, vectors = np.linalg.eigh(matrix.T @ matrix)
    result: Array = matrix @ (vectors / np.sqrt(values)) @ vectors.T
    return result


def tsv_m(deltas: list[Array]) -> Array:
    kept = min(deltas[0].shape) // len(deltas)
    u, s, v = zip(*(np.linalg.svd(d, full_matrices=False) for d in deltas), strict=True)
    left = polar(np.hstack([part[:, :kept] for part in u]))
    right = polar(np.hstack([part[:kept].T for part in v]))
    sizes = np.hstack([part[:kept] for part in s])
    merged: Array = left @ np.diag(sizes) @ right.T
    return merged


def iso_c(deltas: list[Array]) -> Array:
    total = np.sum(deltas, axis=0)
    u, s, v = np.linalg.svd(total, full_matrices=False)
    merged: Array = u @ np.diag(np.full_like(s, s.mean())) @ v
    return merged


def iso_cts(deltas: list[Array], common: float = 0.8) -> Array:
    total, num = np.sum(deltas, axis=0), min(deltas[0].shape)
    each = min(round((num - int(num * common)) / len(deltas)), num // len(deltas))
    shared = num - each * len(deltas)
    u, s, v = np.linalg.svd(total, full_matrices=False)
    lefts, sizes, rights = [u[:, :shared]], [s[:shared]], [v[:shared].T]
    for delta in deltas:
        rest = delta - lefts[0] @ lefts[0].T @ delta
        a, b, c = np.linalg.svd(rest, full_matrices=False)
        lefts, sizes, rights = [*lefts, a[:, :each]], [*sizes, b[:each]], [*rights, c[:each].T]
    mean = np.hstack(sizes).mean()
    merged: Array = mean * polar(np.hstack(lefts)) @ polar(np.hstack(rights)).T
    return merged


def size_spread(deltas: list[Array]) -> float:
    """How much the sizes of task vectors differ, as ACE has it."""
    logs = np.log([np.trace(d.T @ d) + 1e-12 for d in deltas])
    return float(np.var(logs, ddof=1) / (np.mean(logs) ** 2 + 1e-12))


def ace(deltas: list[Array]) -> Array:
    """The matrices written out, one after the other; the sum is inverted."""
    num, is_mixed = deltas[0].shape[1], size_spread(deltas) > 0.3
    centred = [d - np.ones((len(d), 1)) @ d.mean(0)[None] for d in deltas]
    moments = [d.T @ d for d in centred]
    traces = [np.trace(m) + 1e-12 if is_mixed else 1.0 for m in moments]
    plain = [m / t for m, t in zip(moments, traces, strict=True)]
    raised = [m + 0.01 / t * np.eye(num) for m, t in zip(plain, traces, strict=True)]
    mean_row = np.ones((num, num)) @ np.sum(plain, axis=0) / num
    if is_mixed:
        mean_row /= np.mean([np.trace(d.T @ d) for d in deltas]) + 1e-12
    numerator = np.sum([d @ m for d, m in zip(centred, raised, strict=True)], axis=0)
    merged: Array = numerator @ np.linalg.inv(np.sum(raised, axis=0) + mean_row)
    if is_mixed:
        mean = np.mean(raised, axis=0)
        rest = np.sum([d @ (m - mean) for d, m in zip(deltas, plain, strict=True)], axis=0)
        u, s, v = np.linalg.svd(rest + merged, full_matrices=False)
        kept = int(0.3 * len(s))
        merged = merged + s[:kept].mean() * u[:, :kept] @ v[:kept]
    return merged


FORMULAS: dict[str, Any] = {"tsv_m": tsv_m, "iso_c": iso_c, "iso_cts": iso_cts, "ace": ace}


def test_every_method_is_here() -> None:
    assert list(FORMULAS) == NAMES


@pytest.mark.parametrize("method", NAMES)
def test_formulas(method: str) -> None:
    formula = FORMULAS[method]
    base, models = make()
    merged = matsmerge.merge(models, base, method, weights=WEIGHTS, scale=0.7)
    for name, shape in SHAPES.items():
        deltas = changes(base, models, name)
        change = formula(deltas) if len(shape) == 2 else np.sum(deltas, axis=0) / sum(WEIGHTS)
        expected = base[name].numpy() + 0.7 * change
        np.testing.assert_allclose(merged[name].numpy(), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("common", [0.0, 0.5, 1.0])
def test_share_of_common_directions(common: float) -> None:
    base, models = make()
    merged = matsmerge.merge(models, base, "iso_cts", weights=WEIGHTS, common=common)
    expected = base["wide"].numpy() + iso_cts(changes(base, models, "wide"), common)
    np.testing.assert_allclose(merged["wide"].numpy(), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("sizes", "is_mixed"), [([1, 1.1, 0.9], False), ([0.02, 0.2, 1], True)])
def test_ace_with_task_vectors_of_other_sizes(sizes: list[float], is_mixed: bool) -> None:
    base, models = make()
    for model, size in zip(models, sizes, strict=True):
        model["tall"] = base["tall"] + size * (model["tall"] - base["tall"])
    deltas = [(m["tall"] - base["tall"]).numpy() for m in models]
    assert (size_spread(deltas) > 0.3) == is_mixed
    merged = matsmerge.merge(models, base, "ace")["tall"]
    expected = base["tall"].numpy() + ace(deltas)
    np.testing.assert_allclose(merged.numpy(), expected, rtol=1e-9, atol=1e-9)


def test_one_model_in_the_same_out() -> None:
    base, (model,) = make(1)
    merged = matsmerge.merge([model], base, "tsv_m")
    for name in SHAPES:
        torch.testing.assert_close(merged[name], model[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("method", NAMES)
def test_models_that_are_the_base_give_the_base(method: str) -> None:
    base, _ = make()
    merged = matsmerge.merge([dict(base), dict(base)], base, method)
    for name in SHAPES:
        assert torch.equal(merged[name], base[name])


@pytest.mark.parametrize("method", NAMES)
def test_order_does_not_matter(method: str) -> None:
    base, models = make()
    forward = matsmerge.merge(models, base, method, weights=WEIGHTS)
    backward = matsmerge.merge(models[::-1], base, method, weights=WEIGHTS[::-1])
    for name in SHAPES:
        torch.testing.assert_close(forward[name], backward[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("method", NAMES)
def test_a_model_that_does_not_change_a_matrix_has_no_part_in_it(method: str) -> None:
    base, models = make()
    frozen = dict(models[1], tall=base["tall"])
    merged = matsmerge.merge([models[0], frozen, models[2]], base, method)
    others = matsmerge.merge([models[0], models[2]], base, method)
    assert torch.equal(merged["tall"], others["tall"])
    assert not torch.equal(merged["wide"], others["wide"])


@pytest.mark.parametrize("method", ["tsv_m", "iso_c", "iso_cts"])
def test_changes_of_low_rank_merge_in_the_directions_that_they_have(method: str) -> None:
    torch.manual_seed(0)
    base = torch.randn(30, 20, dtype=torch.float64)
    factors = [(torch.randn(30, r).double(), torch.randn(r, 20).double()) for r in (2, 3)]
    models = [{"w": base + a @ b} for a, b in factors]
    merged = matsmerge.merge(models, {"w": base}, method)["w"] - base
    left = torch.linalg.qr(torch.cat([a for a, _ in factors], 1)).Q
    right = torch.linalg.qr(torch.cat([b for _, b in factors]).mT).Q
    core = left.mT @ merged @ right  # (5, 5), of all that there is
    torch.testing.assert_close(left @ core @ right.mT, merged, rtol=1e-9, atol=1e-9)
    assert torch.linalg.matrix_rank(core, rtol=1e-6) == 5
    within = [left.mT @ a @ b @ right for a, b in factors]
    if method == "iso_c":  # no other method has all directions of such small matrices
        expected = torch.from_numpy(iso_c([c.numpy() for c in within]))
        torch.testing.assert_close(core, expected, rtol=1e-9, atol=1e-9)


def test_more_models_than_directions() -> None:
    torch.manual_seed(0)
    base = {"w": torch.randn(2, 5)}
    models = [{"w": base["w"] + torch.randn(2, 5)} for _ in range(3)]
    merged = matsmerge.merge(models, base, "tsv_m")["w"]
    torch.testing.assert_close(merged, torch.stack([m["w"] for m in models]).mean(0))


@pytest.mark.parametrize("method", NAMES)
def test_tensors_longer_than_a_block_are_merged_as_a_whole(method: str) -> None:
    torch.manual_seed(0)
    base = {"w": torch.randn(300, 400)}
    models = [{"w": base["w"] + 0.1 * torch.randn(300, 400)} for _ in range(2)]
    merged = matsmerge.merge(models, base, method)["w"]
    deltas = [(m["w"].double() - base["w"].double()).numpy() for m in models]
    expected = base["w"].double().numpy() + FORMULAS[method](deltas)
    np.testing.assert_allclose(merged.numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:merged by:UserWarning")
@pytest.mark.parametrize("method", NAMES)
def test_as_inits(method: str) -> None:
    """No iterations leave the init; what no objective has anything for gets it, if asked to."""
    base, models = make()
    plain = matsmerge.merge(models, base, method, scale=0.5)
    started = matsmerge.merge(
        models, base, "actmat", init={"name": method, "scale": 0.5}, iterations=0, otherwise="init"
    )
    for name in SHAPES:
        torch.testing.assert_close(started[name], plain[name], rtol=1e-12, atol=1e-12)
