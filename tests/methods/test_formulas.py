"""Each method against its formula, written out densely and independently in float64."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

import matsmerge
from matsmerge.methods.site import BLOCK_ELEMENTS
from matsmerge.methods.trimming import SAMPLE_ABOVE

Array = NDArray[np.float64]
NUM_MODELS = 4
WEIGHTS = [0.5, 1.0, 0.25, 2.0]


def models(sizes: tuple[int, ...] = (300, 40)) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    g = torch.Generator().manual_seed(0)
    base = {f"p{i}": torch.randn(n, generator=g) for i, n in enumerate(sizes)}
    tuned = [
        {k: v + 0.1 * (1 + m) * torch.randn(v.shape, generator=g) for k, v in base.items()}
        for m in range(NUM_MODELS)
    ]
    return base, tuned


def arrays(
    base: dict[str, Tensor], tuned: list[dict[str, Tensor]], name: str
) -> tuple[Array, Array]:
    return base[name].double().numpy(), np.stack([m[name].double().numpy() for m in tuned])


def check(actual: Mapping[str, Tensor], expected: dict[str, Array]) -> None:
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name].double().numpy(), value, rtol=2e-7, atol=1e-9)


def test_average() -> None:
    base, tuned = models()
    w = np.array(WEIGHTS)[:, None]
    thetas = {n: arrays(base, tuned, n)[1] for n in base}
    check(
        matsmerge.merge(tuned, method="average", weights=WEIGHTS),
        {n: (w * t).sum(0) / w.sum() for n, t in thetas.items()},
    )
    check(
        matsmerge.merge(tuned, method="average", weights=WEIGHTS, normalize=False),
        {n: (w * t).sum(0) for n, t in thetas.items()},
    )


@pytest.mark.parametrize("normalize", [True, False])
def test_task_arithmetic(normalize: bool) -> None:
    base, tuned = models()
    w = np.array(WEIGHTS)[:, None]
    expected = {}
    for n in base:
        b, t = arrays(base, tuned, n)
        expected[n] = b + 0.3 * (w * (t - b)).sum(0) / (w.sum() if normalize else 1)
    merged = matsmerge.merge(
        tuned, base, "task_arithmetic", weights=WEIGHTS, scale=0.3, normalize=normalize
    )
    check(merged, expected)


def trim(deltas: Array, density: float) -> Array:
    """Keep the entries of each row that reach its k-th largest magnitude."""
    k = max(1, int(density * deltas.shape[1]))
    threshold = np.sort(np.abs(deltas), axis=1)[:, -k][:, None]
    return np.where(np.abs(deltas) >= threshold, deltas, 0)


def elect_and_merge(trimmed: Array, w: Array, normalize: bool) -> Array:
    """Parameter by parameter, as the paper describes it."""
    result = np.zeros(trimmed.shape[1])
    for i in range(trimmed.shape[1]):
        column = w * trimmed[:, i]
        sign = 1 if column.sum() >= 0 else -1
        agree = np.sign(column) == sign
        if agree.any():
            result[i] = column[agree].sum() / (w[agree].sum() if normalize else 1)
    return result


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("trimming", ["global", "parameter"])
@pytest.mark.parametrize("weights", [WEIGHTS, [1.0, -0.5, 0.25, 2.0]])
def test_ties(trimming: str, normalize: bool, weights: list[float]) -> None:
    base, tuned = models()
    w = np.array(weights)
    deltas = {n: arrays(base, tuned, n)[1] - arrays(base, tuned, n)[0] for n in base}
    if trimming == "global":
        whole = trim(np.concatenate(list(deltas.values()), axis=1), 0.3)
        split = np.split(whole, np.cumsum([d.shape[1] for d in deltas.values()])[:-1], axis=1)
        trimmed = dict(zip(deltas, split, strict=True))
    else:
        trimmed = {n: trim(d, 0.3) for n, d in deltas.items()}
    expected = {
        n: base[n].double().numpy() + 0.4 * elect_and_merge(t, w, normalize)
        for n, t in trimmed.items()
    }
    merged = matsmerge.merge(
        tuned, base, "ties", weights=weights, density=0.3, scale=0.4, trim=trimming,
        normalize=normalize,
    )  # fmt: skip
    check(merged, expected)


@pytest.mark.parametrize("trimming", ["global", "parameter"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ties_ranks_exactly_where_it_samples(trimming: str, dtype: torch.dtype) -> None:
    """Large enough for sampling, several jobs and several blocks, with deltas of uneven size."""
    g = torch.Generator().manual_seed(1)
    sizes = {"a": 3 * BLOCK_ELEMENTS + 5, "b": 2 * BLOCK_ELEMENTS, "c": 70}
    base = {n: torch.randn(s, generator=g).to(dtype) for n, s in sizes.items()}
    spread = {"a": 0.05, "b": 0.2, "c": 1.0}
    model = {
        n: (v + spread[n] * torch.randn(v.shape, generator=g)).to(dtype) for n, v in base.items()
    }
    assert sum(sizes.values()) > SAMPLE_ABOVE
    merged = matsmerge.merge([model], base, "ties", density=0.1, trim=trimming)
    deltas = {n: (model[n].double() - base[n].double()).abs() for n in base}
    groups = [list(base)] if trimming == "global" else [[n] for n in base]
    for group in groups:
        ranked = torch.cat([deltas[n] for n in group]).sort(descending=True).values
        threshold = ranked[max(1, int(0.1 * len(ranked))) - 1]
        for n in group:
            kept = deltas[n] >= threshold
            assert torch.equal(merged[n], torch.where(kept, model[n], base[n]))


@pytest.mark.parametrize("weights", [WEIGHTS, [1.0, -0.5, 0.25, 2.0]])
def test_magmax(weights: list[float]) -> None:
    """Entry by entry, as the paper describes it."""
    base, tuned = models()
    expected = {}
    for n in base:
        b, t = arrays(base, tuned, n)
        changes = np.array(weights)[:, None] * (t - b)
        largest = [column[np.argmax(np.abs(column))] for column in changes.T]
        expected[n] = b + 0.4 * np.array(largest)
    check(matsmerge.merge(tuned, base, "magmax", weights=weights, scale=0.4), expected)


def test_polarize_layers() -> None:
    """Matrices by their size among those of their kind, which differ in numbers alone."""
    g = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]]
    shapes = {f"block.{i}.{part}": (7, 600) for i in range(3) for part in ("up", "down2", "down3")}
    shapes |= {
        "embedding": (9, 4),
        "block.0.bias": (5,),
        "block.1.bias": (5,),
        "block.0.odd": (2, 2),
    }
    base = {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}
    change = {
        name: 0.1 * (1 + i) * torch.randn(shape, generator=g)
        for i, (name, shape) in enumerate(shapes.items())
    }
    change["block.0.odd"].zero_()
    tuned = {name: base[name] + change[name] for name in base}
    expected = {}
    for name in base:
        b, (t,) = arrays(base, [tuned], name)
        kind = [n for n in base if n.split(".")[2:] == name.split(".")[2:]]
        sizes = {n: np.linalg.norm((tuned[n].double() - base[n].double()).numpy()) for n in kind}
        mean = sum(sizes.values()) / len(sizes)
        factor = (sizes[name] / mean) ** 1.5 if b.ndim > 1 and mean else 1.0
        expected[name] = b + 0.7 * factor * (t - b)
    check(matsmerge.merge([tuned], base, "polarize_layers", power=1.5, scale=0.7), expected)


def test_magmax_of_changes_that_are_equal_but_for_their_sign() -> None:
    up, down, base = ({"p": torch.tensor([value, 0.0])} for value in (1.5, 0.5, 1.0))
    for pair in ([up, down], [down, up]):
        assert matsmerge.merge(pair, base, "magmax")["p"].tolist() == [1.5, 0.0]


@pytest.mark.parametrize("weights", [WEIGHTS, [1.0, -0.5, 0.25, 2.0]])
def test_localize_and_stitch(weights: list[float]) -> None:
    """Entry by entry, as the paper describes it: masks over the whole model, then their average."""
    base, tuned = models()
    deltas = {n: arrays(base, tuned, n)[1] - arrays(base, tuned, n)[0] for n in base}
    whole = trim(np.concatenate(list(deltas.values()), axis=1), 0.3)
    stitched = np.zeros(whole.shape[1])
    for i, column in enumerate(whole.T):
        kept = [m for m in range(NUM_MODELS) if column[m] != 0]
        if kept:
            total = sum(weights[m] for m in kept)
            stitched[i] = sum(weights[m] * column[m] for m in kept) / total
    parts = np.split(stitched, np.cumsum([d.shape[1] for d in deltas.values()])[:-1])
    expected = {n: base[n].double().numpy() + p for n, p in zip(deltas, parts, strict=True)}
    merged = matsmerge.merge(tuned, base, "localize_and_stitch", weights=weights, density=0.3)
    check(merged, expected)
    untouched = {n: torch.from_numpy(p == 0) for n, p in zip(deltas, parts, strict=True)}
    assert all(untouched[n].any() for n in base)
    assert all(torch.equal(merged[n][mask], base[n][mask]) for n, mask in untouched.items())


def test_localize_and_stitch_with_a_density_for_each_model() -> None:
    """What a model did not change is not in its mask, even if all of it is kept."""
    base = {"p": torch.zeros(4)}
    tuned = {"a": {"p": torch.tensor([4.0, 3.0, 2.0, 0.0])}, "b": {"p": torch.ones(4)}}
    own = [{"match": "*", "models": {"a": {"density": 0.5}, "b": {"density": 1.0}}}]
    merged = matsmerge.merge(tuned, base, "localize_and_stitch", overrides=own)["p"]
    assert merged.tolist() == [2.5, 2.0, 1.0, 1.0]
    tuned["b"]["p"] = torch.tensor([0.0, 1.0, 1.0, 1.0])
    merged = matsmerge.merge(tuned, base, "localize_and_stitch", overrides=own)["p"]
    assert merged.tolist() == [4.0, 2.0, 1.0, 1.0]


def test_slerp() -> None:
    base, tuned = models()
    expected = {}
    for n in base:
        _, t = arrays(base, tuned[:2], n)
        cosine = t[0] @ t[1] / np.linalg.norm(t[0]) / np.linalg.norm(t[1])
        angle = math.acos(cosine)
        assert abs(cosine) < 0.9995
        a, b = math.sin(0.7 * angle), math.sin(0.3 * angle)
        expected[n] = (a * t[0] + b * t[1]) / math.sin(angle)
    check(matsmerge.merge(tuned[:2], method="slerp", weights=[0.7, 0.3]), expected)


def test_slerp_of_nearly_parallel_models_is_linear() -> None:
    base, _ = models()
    doubled = {n: 2 * v for n, v in base.items()}
    merged = matsmerge.merge([base, doubled], method="slerp", weights=[0.75, 0.25])
    check(merged, {n: 1.25 * v.double().numpy() for n, v in base.items()})


def test_model_stock() -> None:
    base, tuned = models()
    shared = {
        n: torch.randn(v.shape, generator=torch.Generator().manual_seed(7)) for n, v in base.items()
    }
    tuned = [{n: v + 0.3 * shared[n] for n, v in m.items()} for m in tuned]
    expected = {}
    for n in base:
        b, t = arrays(base, tuned, n)
        d = t - b
        cosines = [
            d[i] @ d[j] / np.linalg.norm(d[i]) / np.linalg.norm(d[j])
            for i in range(NUM_MODELS)
            for j in range(i)
        ]
        cosine = np.mean(cosines)
        ratio = NUM_MODELS * cosine / (1 + (NUM_MODELS - 1) * cosine)
        expected[n] = ratio * t.mean(0) + (1 - ratio) * b
    check(matsmerge.merge(tuned, base, "model_stock"), expected)


def test_model_stock_of_rows() -> None:
    base, tuned = models()
    expected = {}
    for n, v in base.items():
        b = v.double().numpy()
        rows = b.reshape(-1, b.shape[-1] if b.ndim else 1)
        d = np.stack([m[n].double().numpy().reshape(rows.shape) for m in tuned]) - rows
        ratios = []
        for r in range(len(rows)):
            cosines = [
                d[i, r] @ d[j, r] / np.linalg.norm(d[i, r]) / np.linalg.norm(d[j, r])
                for i in range(NUM_MODELS)
                for j in range(i)
            ]
            below = 1 + (NUM_MODELS - 1) * np.mean(cosines)
            ratios.append(NUM_MODELS * np.mean(cosines) / below if below > 1e-6 else 0)
        expected[n] = (rows + np.array(ratios)[:, None] * d.mean(0)).reshape(-1)
    check(matsmerge.merge(tuned, base, "model_stock", filter_wise=True), expected)


def test_passthrough() -> None:
    base, tuned = models()
    named = {f"m{i}": m for i, m in enumerate(tuned)}
    merged = matsmerge.merge(named, base, "passthrough", model="m2")
    assert all(torch.equal(merged[n], tuned[2][n]) for n in base)
    merged = matsmerge.merge(named, base, "passthrough", model="base")
    assert all(torch.equal(merged[n], base[n]) for n in base)


@pytest.mark.parametrize("method", ["dare_linear", "dare_ties"])
def test_dare_keeps_a_random_share_and_rescales(method: str) -> None:
    n = 3 * BLOCK_ELEMENTS + 11
    base = {"p": torch.zeros(n)}
    model = {"p": torch.ones(n)}
    merged = matsmerge.merge([model], base, method, density=0.25)["p"]
    assert set(merged.tolist()) == {0.0, 4.0}
    share = (merged > 0).double().mean().item()
    assert abs(share - 0.25) < 5 * math.sqrt(0.25 * 0.75 / n)
    plain = matsmerge.merge([model], base, method, density=0.25, rescale=False)["p"]
    assert torch.equal(plain, merged / 4)
    other = matsmerge.merge([model], base, method, density=0.25, seed=1)["p"]
    assert not torch.equal(other, merged)
    # Nothing repeats from one random stream to the next.
    assert not torch.equal(merged[: 1 << 16], merged[1 << 16 : 1 << 17])


def test_dare_is_task_arithmetic_and_ties_on_its_own_masks() -> None:
    base, tuned = models()
    named = {f"m{i}": m for i, m in enumerate(tuned)}
    masks = {}
    for name in named:
        ones = {n: torch.ones_like(v) for n, v in base.items()}
        zeros = {n: torch.zeros_like(v) for n, v in base.items()}
        masks[name] = matsmerge.merge(
            {name: ones}, zeros, "dare_linear", density=0.5, rescale=False
        )
    w = np.array(WEIGHTS)
    linear, election = {}, {}
    for n in base:
        b, t = arrays(base, tuned, n)
        d = (t - b) * np.stack([masks[m][n].double().numpy() for m in named]) * 2
        linear[n] = b + 0.6 * (w[:, None] * d).sum(0)
        election[n] = b + 0.6 * elect_and_merge(d, w, True)
    options: dict[str, Any] = {"weights": WEIGHTS, "density": 0.5, "scale": 0.6}
    check(matsmerge.merge(named, base, "dare_linear", **options), linear)
    check(matsmerge.merge(named, base, "dare_ties", **options), election)


@settings(max_examples=30, deadline=None)
@given(density=st.floats(0.01, 1), seed=st.integers(0, 1000))
def test_ties_trim_property(density: float, seed: int) -> None:
    """At least k entries survive, and none that is smaller than one that did not."""
    g = torch.Generator().manual_seed(seed)
    delta = torch.randint(-5, 6, (97,), generator=g).float()
    merged = matsmerge.merge([{"p": delta}], {"p": torch.zeros(97)}, "ties", density=density)["p"]
    kept, dropped = delta[merged != 0].abs(), delta[(merged == 0) & (delta != 0)].abs()
    assert len(kept) >= min(max(1, int(density * 97)), int((delta != 0).sum()))
    assert len(kept) == 0 or len(dropped) == 0 or kept.min() > dropped.max()


def test_ties_ends_even_if_most_is_not_a_number() -> None:
    base, model = {"p": torch.zeros(10)}, {"p": torch.arange(10.0)}
    model["p"][:5] = float("nan")
    merged = matsmerge.merge([model], base, "ties", density=0.9, allow_nonfinite=True)["p"]
    assert merged[5:].tolist() == [5, 6, 7, 8, 9]


def test_dare_with_hardly_any_density() -> None:
    base, model = {"p": torch.zeros(10)}, {"p": torch.ones(10)}
    recipe_density = [{"match": "p", "models": {"m": {"density": 1e-6}}}]
    merged = matsmerge.merge({"m": model}, base, "dare_linear", overrides=recipe_density)["p"]
    assert merged.isfinite().all()
