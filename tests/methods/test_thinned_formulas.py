"""Methods that thin task vectors, and their relatives, against dense formulas in float64."""

import math
import warnings
from collections.abc import Mapping
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

import matsmerge
from matsmerge import RecipeError
from matsmerge.methods import arcee_fusion
from matsmerge.methods.site import BLOCK_ELEMENTS

Array = NDArray[np.float64]
SIZES = {"p": (30, 17), "q": (41,), "s": ()}
WEIGHTS = [0.5, 1.0, 0.25, 2.0]


def models(num: int = 4, seed: int = 0) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    g = torch.Generator().manual_seed(seed)
    base = {name: torch.randn(shape, generator=g) for name, shape in SIZES.items()}
    tuned = [
        {k: v + 0.1 * (1 + m) * torch.randn(v.shape, generator=g) for k, v in base.items()}
        for m in range(num)
    ]
    return base, tuned


def deltas(base: dict[str, Tensor], tuned: list[dict[str, Tensor]], name: str) -> Array:
    rows = [m[name].double() - base[name].double() for m in tuned]
    return torch.stack([row.flatten() for row in rows]).numpy()


def check(
    merged: Mapping[str, Tensor], base: dict[str, Tensor], changes: Mapping[str, Array]
) -> None:
    for name, change in changes.items():
        expected = base[name].double().numpy() + change.reshape(base[name].shape)
        np.testing.assert_allclose(merged[name].double().numpy(), expected, rtol=2e-7, atol=1e-9)


def elected(d: Array, w: Array, *, normalize: bool) -> Array:
    """Entry by entry: what has the sign of the weighted sum, added up or averaged."""
    result = np.zeros(d.shape[1])
    for i, column in enumerate((w[:, None] * d).T):
        agree = np.sign(column) == (1 if column.sum() >= 0 else -1)
        if agree.any():
            result[i] = column[agree].sum() / (w[agree].sum() if normalize else 1)
    return result


def without_outliers(d: Array, density: float, gamma: float) -> Array:
    """Sorted in full, as mergekit does it."""
    result = np.zeros_like(d)
    n = d.shape[1]
    kept, top = int(density * n), int(gamma * n)
    bottom = max(0, n - kept - top)
    for row, out in zip(d, result, strict=True):
        order = np.argsort(np.abs(row))[bottom : bottom + kept]
        out[order] = row[order]
    return result


def rescaled(thinned: Array, whole: Array) -> Array:
    after = np.abs(thinned).sum(1)
    factors = np.abs(whole).sum(1) / np.where(after > 0, after, 1)
    return thinned * np.where(after > 0, factors, 1)[:, None]


@pytest.mark.parametrize("rescale", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("density", "gamma"), [(0.5, 0.1), (0.95, 0.2), (0.3, 0.0), (1.0, 0.5)])
def test_breadcrumbs(density: float, gamma: float, normalize: bool, rescale: bool) -> None:
    base, tuned = models()
    w = np.array(WEIGHTS)
    linear, election = {}, {}
    for name in base:
        whole = deltas(base, tuned, name)
        d = whole if density == 1 else without_outliers(whole, density, gamma)
        d = rescaled(d, whole) if rescale else d
        linear[name] = 0.7 * (w @ d) / (w.sum() if normalize else 1)
        election[name] = 0.7 * elected(d, w, normalize=normalize)
    options: dict[str, Any] = {
        "weights": WEIGHTS, "scale": 0.7, "density": density, "gamma": gamma,
        "normalize": normalize, "rescale": rescale,
    }  # fmt: skip
    check(matsmerge.merge(tuned, base, "breadcrumbs", **options), base, linear)
    check(matsmerge.merge(tuned, base, "breadcrumbs_ties", **options), base, election)


def test_breadcrumbs_ranks_exactly_where_it_samples() -> None:
    g = torch.Generator().manual_seed(3)
    n = 3 * BLOCK_ELEMENTS + 5
    base = {"p": torch.randn(n, generator=g).bfloat16()}
    model = {"p": (base["p"] + 0.1 * torch.randn(n, generator=g)).bfloat16()}
    merged = matsmerge.merge([model], base, "breadcrumbs", density=0.3, gamma=0.05)
    size = (model["p"].double() - base["p"].double()).abs()
    ranked = size.sort(descending=True).values
    num_kept, num_dropped = int(0.3 * n), int(0.05 * n)
    kept = (size <= ranked[num_dropped]) & (size >= ranked[num_dropped + num_kept - 1])
    assert torch.equal(merged["p"], torch.where(kept, model["p"], base["p"]))


def test_shares_of_single_models() -> None:
    base, tuned = models(2)
    named = dict(zip("ab", tuned, strict=True))
    own = {"a": {"density": 0.4, "gamma": 0.3}, "b": {"density": 0.8}}
    merged = matsmerge.merge(
        named, base, "breadcrumbs", gamma=0.1, overrides=[{"match": "*", "models": own}]
    )
    changes = {}
    for name in base:
        d = deltas(base, tuned, name)
        first, second = without_outliers(d[:1], 0.4, 0.3), without_outliers(d[1:], 0.8, 0.1)
        changes[name] = (first + second)[0]
    check(merged, base, changes)
    with pytest.raises(RecipeError, match="magnitude_prune has no gamma"):
        matsmerge.merge(named, base, "magnitude_prune", overrides=[{"match": "*", "models": own}])


@pytest.mark.parametrize("density", [0.3, 1.0])
def test_magnitude_prune(density: float) -> None:
    """As `magnitude_prune` of peft.utils.merge_utils does it to the changes."""
    from peft.utils.merge_utils import magnitude_prune

    base, tuned = models(3)
    weights = torch.tensor([0.5, 1.0, 2.0])
    merged = matsmerge.merge(
        tuned, base, "magnitude_prune", weights=weights.tolist(), density=density
    )
    for name in ("p", "q"):
        changes = [m[name].double() - base[name].double() for m in tuned]
        with warnings.catch_warnings(action="ignore"):  # that a density of 1 prunes nothing
            change = magnitude_prune(changes, weights, density)
        check(merged, base, {name: change.numpy()})


def sce(base: dict[str, Tensor], tuned: list[dict[str, Tensor]], topk: float) -> dict[str, Array]:
    """Everything sorted; entries that vary as much as the last one selected are, too."""
    changes = {}
    for name in base:
        d = deltas(base, tuned, name)
        if topk < 1:
            variance = d.var(0)
            num = int(np.count_nonzero(variance) * topk)
            d = d * (variance >= np.sort(variance)[-num]) if num else 0 * d
        squares = (d**2).mean(1)
        w = squares / squares.sum() if squares.sum() >= 1e-6 else np.full(len(d), 1 / len(d))
        sign = np.where(d.sum(0) >= 0, 1, -1)
        agree = np.sign(d) == sign
        changes[name] = (d * agree * w[:, None]).sum(0) / np.maximum(
            1e-6, (agree * w[:, None]).sum(0)
        )
    return changes


@pytest.mark.parametrize("topk", [1.0, 0.6, 0.05, 0.0])
@pytest.mark.parametrize("size", [1.0, 1e-4])
def test_sce(topk: float, size: float) -> None:
    base, tuned = models()
    tuned = [{n: base[n] + size * (m[n] - base[n]) for n in base} for m in tuned]
    check(matsmerge.merge(tuned, base, "sce", select_topk=topk), base, sce(base, tuned, topk))


@pytest.mark.parametrize("topk", [0.9, 0.3, 1e-5])
@pytest.mark.parametrize("num_values", [5, 2**20])
def test_sce_of_a_large_parameter(topk: float, num_values: int) -> None:
    """It is sampled; of five values most variances occur thousands of times, and some are zero."""
    g = torch.Generator().manual_seed(0)
    shape = (3, BLOCK_ELEMENTS + 1)
    base = {"p": torch.zeros(shape)}
    tuned = [
        {"p": torch.randint(num_values, shape, generator=g).div(num_values).sub(0.4)}
        for _ in range(3)
    ]
    merged = matsmerge.merge(tuned, base, "sce", select_topk=topk)
    check(merged, base, sce(base, tuned, topk))


@pytest.mark.parametrize(("r", "alpha"), [(0.0, 0.2), (0.1, 0.2), (0.5, 10.0)])
def test_ram(r: float, alpha: float) -> None:
    """Entry by entry: unique changes whole (RAM+: amplified), shared ones averaged."""
    base, tuned = models()
    epsilon = 0.2
    plain, plus = {}, {}
    for name in base:
        d = deltas(base, tuned, name)
        changed = np.abs(d) > epsilon
        num = changed.sum(0)
        factors = []
        for row in changed:
            unique, shared = int((row & (num == 1)).sum()), int((row & (num > 1)).sum())
            factors.append(1 + r * min(alpha, shared / max(unique, 1e-5)))
        plain[name], plus[name] = np.zeros(d.shape[1]), np.zeros(d.shape[1])
        for i in range(d.shape[1]):
            of = np.flatnonzero(changed[:, i])
            if len(of):
                plain[name][i] = plus[name][i] = d[of, i].mean()
            if len(of) == 1:
                plus[name][i] *= factors[of[0]]
    check(matsmerge.merge(tuned, base, "ram", epsilon=epsilon), base, plain)
    merged = matsmerge.merge(tuned, base, "ramplus_tl", epsilon=epsilon, r=r, alpha=alpha)
    check(merged, base, plus)


@pytest.mark.parametrize("t", [0.0, 0.05, 10.0])
def test_nearswap(t: float) -> None:
    base, tuned = models(1)
    changes = {}
    for name in base:
        d = deltas(base, tuned, name)[0]
        weight = np.clip(t / np.maximum(np.abs(d), 1e-6), 0, 1)
        changes[name] = weight * d
    check(matsmerge.merge(tuned, base, "nearswap", t=t), base, changes)


@pytest.mark.parametrize("shape", [(30, 17), (41,), (5, 40001)])
def test_arcee_fusion(shape: tuple[int, ...]) -> None:
    """The last shape has rows that do not end where stretches do, and is sampled."""
    g = torch.Generator().manual_seed(0)
    base = {"p": torch.randn(shape, generator=g)}
    spread = torch.rand((*shape[:-1], 1), generator=g)
    tuned = {"p": base["p"] + spread * torch.randn(shape, generator=g)}
    a, b = base["p"].double().numpy(), tuned["p"].double().numpy()
    p, q = (np.exp(x - x.max(-1, keepdims=True)) for x in (b, a))
    p, q = (x / x.sum(-1, keepdims=True) + 1e-8 for x in (p, q))
    importance = np.abs(b - a) * (p * np.log(p / q)).sum(-1, keepdims=True)
    ordered = np.sort(importance.flatten())
    low, middle, high = (ordered[int(f * (len(ordered) - 1))] for f in (0.25, 0.5, 0.75))
    is_kept = importance >= middle + 1.5 * (high - low)
    assert 0 < is_kept.sum() < is_kept.size
    merged = matsmerge.merge([tuned], base, "arcee_fusion")["p"]
    assert torch.equal(merged, torch.where(torch.from_numpy(is_kept), tuned["p"], base["p"]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-6, 1e-3, 1 / 40])
def test_divergences_of_small_changes_are_exact(dtype: torch.dtype, size: float) -> None:
    """Against 50 digits; probabilities go down to epsilon."""
    g = torch.Generator().manual_seed(0)
    base = torch.randn(3, 41, generator=g, dtype=dtype) * 6
    delta = torch.randn(3, 41, generator=g, dtype=dtype)
    delta *= size / delta.abs().max()
    found = arcee_fusion._divergence_of_small(base, delta)[:, 0]
    with localcontext() as context:
        context.prec = 50
        for row, value in enumerate(found.tolist()):
            b = [Decimal(x) for x in base[row].tolist()]
            m = [x + Decimal(d) for x, d in zip(b, delta[row].tolist(), strict=True)]
            q, p = ([x.exp() for x in of] for of in (b, m))
            q, p = ([x / sum(of) + Decimal("1e-8") for x in of] for of in (q, p))
            exact = sum((x * (x / y).ln() for x, y in zip(p, q, strict=True)), Decimal(0))
            assert value == pytest.approx(float(exact), rel=200 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_arcee_fusion_of_small_changes(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    base = torch.randn(7, 30, generator=g).mul(0.5).to(dtype)
    tuned = (base.float() * (1 + 0.01 * torch.rand(7, 30, generator=g))).to(dtype)
    change = tuned.double() - base.double()
    assert change.abs().max() < 1 / 32
    p, q = (x.double().softmax(1) + 1e-8 for x in (tuned, base))
    importance = change.abs() * (p * (p / q).log()).sum(1, keepdim=True)
    ordered = importance.flatten().sort().values
    low, middle, high = (ordered[int(f * (len(ordered) - 1))] for f in (0.25, 0.5, 0.75))
    bound = middle + 1.5 * (high - low)
    assert ((importance / bound - 1).abs() > 1e-4).all()  # none is too near to tell
    merged = matsmerge.merge([{"p": tuned}], {"p": base}, "arcee_fusion")["p"]
    assert torch.equal(merged, torch.where(importance >= bound, tuned, base))
    assert 0 < (importance >= bound).sum() < importance.numel()


def test_arcee_fusion_of_a_model_that_did_not_change() -> None:
    base, _ = models()
    merged = matsmerge.merge([base], base, "arcee_fusion")
    assert all(torch.equal(merged[n], base[n]) for n in base)


def kept_by_della(values: Tensor, **options: Any) -> Tensor:
    zeros = {"p": torch.zeros_like(values)}
    return matsmerge.merge({"m": {"p": values}}, zeros, "della_linear", **options)["p"] != 0


@pytest.mark.parametrize("length", [257, 70001])
def test_della_keeps_large_entries_more_often(length: int) -> None:
    """By rank within rows, which begin and end anywhere in stretches; 5 sigma."""
    num_rows = max(3, 400_000 // length)
    g = torch.Generator().manual_seed(0)
    ranks = torch.stack([torch.randperm(length, generator=g) for _ in range(num_rows)])
    values = (1.0 + ranks) * torch.randint(0, 2, ranks.shape, generator=g).mul(2).sub(1)
    kept = kept_by_della(values, density=0.6, epsilon=0.2, rescale=False)
    for low in (0.0, 0.25, 0.5, 0.75):
        part = (ranks >= low * length) & (ranks < (low + 0.25) * length)
        expected = 0.4 + 0.4 * (low + 0.125)
        share = float(kept[part].double().mean())
        assert abs(share - expected) < 5 * math.sqrt(0.25 / int(part.sum())) + 1 / length
    assert not torch.equal(kept, kept_by_della(values, density=0.6, epsilon=0.2, seed=1))


def test_della_keeps_equal_entries_as_often_as_the_density_says() -> None:
    values = torch.ones(64, 1000)
    share = float(kept_by_della(values, density=0.4, epsilon=0.3).double().mean())
    assert abs(share - 0.4) < 5 * math.sqrt(0.25 / values.numel()) + 1e-3


def test_della_with_vectors_of_one_element() -> None:
    kept = torch.stack(
        [kept_by_della(torch.ones(1), density=0.5, epsilon=0.4, seed=s) for s in range(400)]
    )
    assert abs(float(kept.double().mean()) - 0.5) < 5 * math.sqrt(0.25 / 400)


@pytest.mark.parametrize("rescale", [False, True])
def test_della_is_task_arithmetic_and_ties_on_its_own_masks(rescale: bool) -> None:
    base, tuned = models()
    named = {f"m{i}": m for i, m in enumerate(tuned)}
    options: dict[str, Any] = {"density": 0.5, "epsilon": 0.3}
    w = np.array(WEIGHTS)
    masks = {
        name: matsmerge.merge({name: m}, base, "della_linear", rescale=False, **options)
        for name, m in named.items()
    }
    linear, election = {}, {}
    for n in base:
        whole = deltas(base, tuned, n)
        kept = np.stack([(masks[m][n] != base[n]).flatten().numpy() for m in named])
        assert n == "s" or 0 < kept.sum() < kept.size
        d = rescaled(whole * kept, whole) if rescale else whole * kept
        linear[n] = 0.6 * w @ d
        election[n] = 0.6 * elected(d, w, normalize=True)
    options |= {"weights": WEIGHTS, "scale": 0.6, "rescale": rescale}
    check(matsmerge.merge(named, base, "della_linear", **options), base, linear)
    check(matsmerge.merge(named, base, "della", **options), base, election)


@pytest.mark.parametrize(("density", "epsilon"), [(0.9, 0.15), (0.1, 0.15), (0.5, 0.5)])
def test_della_refuses_probabilities_that_are_none(density: float, epsilon: float) -> None:
    base, tuned = models()
    with pytest.raises(RecipeError, match="epsilon"):
        matsmerge.merge(tuned, base, "della", density=density, epsilon=epsilon)


def test_ties_rescales_what_is_left() -> None:
    base, tuned = models()
    changes = {}
    for name in ("p", "q"):
        whole = deltas(base, tuned, name)
        d = rescaled(without_outliers(whole, 0.3, 0.0), whole)
        changes[name] = elected(d, np.array(WEIGHTS), normalize=True)
    merged = matsmerge.merge(
        tuned, base, "ties", weights=WEIGHTS, density=0.3, trim="parameter", rescale=True
    )
    check(merged, base, changes)


def test_ties_rescales_some_parameters_ranked_with_others() -> None:
    base, tuned = models()
    changes = [{"match": "q", "method": {"rescale": True}}]
    merged = matsmerge.merge(tuned, base, "ties", density=0.9, overrides=changes)
    alone = [{"q": m["q"]} for m in tuned]
    expected = matsmerge.merge(alone, {"q": base["q"]}, "ties", density=0.9, rescale=True)
    plain = matsmerge.merge(alone, {"q": base["q"]}, "ties", density=0.9)
    assert torch.equal(merged["q"], expected["q"])
    assert not torch.equal(merged["q"], plain["q"])


@settings(max_examples=30, deadline=None)
@given(density=st.floats(0.01, 0.99), gamma=st.floats(0, 0.99), seed=st.integers(0, 1000))
def test_breadcrumbs_property(density: float, gamma: float, seed: int) -> None:
    """At least as many entries as asked for are left, and they lie between those dropped."""
    g = torch.Generator().manual_seed(seed)
    delta = torch.randint(-9, 10, (97,), generator=g).float()
    merged = matsmerge.merge(
        [{"p": delta}], {"p": torch.zeros(97)}, "breadcrumbs", density=density, gamma=gamma
    )["p"]
    kept = merged != 0
    dropped = delta[~kept & (delta != 0)].abs()
    assert torch.equal(merged[kept], delta[kept])
    assert int(kept.sum()) + int((delta == 0).sum()) >= int(density * 97)
    if kept.any():
        size = delta[kept].abs()
        assert not ((dropped >= size.min()) & (dropped <= size.max())).any()
        assert int((dropped > size.max()).sum()) <= int(gamma * 97)
