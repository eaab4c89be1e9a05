"""One model in, the same out; identical models in, the same out; order does not matter.

Each method with the settings under which it should not change anything.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import matsmerge
from matsmerge import Merged
from matsmerge.methods import METHODS as ALL_METHODS
from matsmerge.methods.site import Grain

# Those of whole tensors are in test_spectral.py, those that solve systems in
# test_solved_invariants.py.
# model_stock is of stretches unless asked otherwise. arcee_fusion takes a part of one model's changes, whatever they are.
METHODS = {
    name: cls
    for name, cls in ALL_METHODS.items()
    if (cls.grain is Grain.STRETCH or name == "model_stock") and name != "arcee_fusion"
}
# What makes a merge of n copies of a model that model again.
NEUTRAL: dict[str, Any] = {
    "average": lambda n: {},
    "task_arithmetic": lambda n: {"scale": 1 / n},
    "ties": lambda n: {"density": 1.0},
    "dare_linear": lambda n: {"density": 1.0, "normalize": True},
    "dare_ties": lambda n: {"density": 1.0},
    "breadcrumbs": lambda n: {"scale": 1 / n},
    "breadcrumbs_ties": lambda n: {"normalize": True},
    "della": lambda n: {},
    "della_linear": lambda n: {"normalize": True},
    "magnitude_prune": lambda n: {"density": 1.0, "normalize": True},
    "sce": lambda n: {},
    "ram": lambda n: {"epsilon": 0.0},
    "ramplus_tl": lambda n: {"epsilon": 0.0},
    "magmax": lambda n: {},
    "localize_and_stitch": lambda n: {"density": 1.0},
    "slerp": lambda n: {},
    "multislerp": lambda n: {},
    "karcher": lambda n: {},
    "nearswap": lambda n: {"t": 1e4},
    "model_stock": lambda n: {},
    "linear": lambda n: {},
    "passthrough": lambda n: {"model": "m0"},
    "polarize_layers": lambda n: {"power": 0.0},
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

shapes = st.lists(st.integers(1, 7), min_size=0, max_size=3).map(tuple)
values = st.fixed_dictionaries(
    {
        "shape": shapes,
        "dtype": st.sampled_from(DTYPES),
        "seed": st.integers(0, 2**31),
        "magnitude": st.sampled_from([1e-3, 1.0, 100.0]),
    }
)


def state(spec: dict[str, Any], seed_offset: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(spec["seed"] + seed_offset)
    tensor = spec["magnitude"] * torch.randn(spec["shape"], generator=g)
    return {"p": tensor.to(spec["dtype"]), "q.1.w": tensor.flatten().to(spec["dtype"]).clone()}


def copies(model: dict[str, Tensor], num: int) -> dict[str, dict[str, Tensor]]:
    return {f"m{i}": {n: t.clone() for n, t in model.items()} for i in range(num)}


def assert_same(
    method: str, merged: Mapping[str, Tensor], model: dict[str, Tensor], base: dict[str, Tensor]
) -> None:
    """Bit for bit; methods that add to the base may lose what is tiny beside the base's value."""
    cls = METHODS[method]
    adds_to_base = cls.needs_base and method not in ("task_arithmetic", "model_stock", "nearswap")
    for name, tensor in model.items():
        assert merged[name].dtype == tensor.dtype
        compute = torch.float64 if tensor.dtype == torch.float32 else torch.float32
        lost = 2 * torch.finfo(compute).eps * base[name].double().abs() * adds_to_base
        off = (merged[name].double() - tensor.double()).abs()
        assert torch.all((merged[name] == tensor) | (off <= lost))


def test_every_method_is_here() -> None:
    assert NEUTRAL.keys() == METHODS.keys()


@pytest.mark.parametrize("method", [m for m in METHODS if m != "slerp"])
@settings(max_examples=25, deadline=None)
@given(spec=values)
def test_one_model_in_the_same_out(method: str, spec: dict[str, Any]) -> None:
    model, base = state(spec), state(spec, 1)
    merged = matsmerge.merge({"m0": model}, base, method, **NEUTRAL[method](1))
    assert_same(method, merged, model, base)


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=25, deadline=None)
@given(spec=values, num=st.integers(2, 5))
def test_identical_models_in_the_same_out(method: str, spec: dict[str, Any], num: int) -> None:
    num = METHODS[method].num_models or num
    model, base = state(spec), state(spec, 1)
    merged = matsmerge.merge(copies(model, num), base, method, **NEUTRAL[method](num))
    assert_same(method, merged, model, base)


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=25, deadline=None)
@given(spec=values, order=st.permutations(range(4)))
def test_order_does_not_matter(method: str, spec: dict[str, Any], order: list[int]) -> None:
    order = [i for i in order if i < (METHODS[method].num_models or 4)]
    base = state(spec)
    models = {i: (f"m{i}", state(spec, i + 1), 0.5 + i) for i in sorted(order)}
    options: dict[str, Any] = {"passthrough": {"model": "m1"}, "nearswap": {"t": 0.1}}
    parameters = options.get(method, {})

    def merge(indices: list[int]) -> Merged:
        named = {models[i][0]: models[i][1] for i in indices}
        weights = [models[i][2] for i in indices]
        return matsmerge.merge(named, base, method, weights=weights, **parameters)

    forward, permuted = merge(sorted(order)), merge(list(order))
    for name in base:
        # Summing in another order may round the last bit the other way, of the result or, where
        # large values cancel, of the sum.
        compute = torch.float64 if spec["dtype"] == torch.float32 else torch.float32
        largest = max(float(m[name].abs().max()) for _, m, _ in models.values())
        rounding = 32 * torch.finfo(compute).eps * largest
        epsilon = torch.finfo(spec["dtype"]).eps
        torch.testing.assert_close(forward[name], permuted[name], rtol=epsilon, atol=rounding)


@pytest.mark.filterwarnings("ignore:merged by:UserWarning")
@pytest.mark.parametrize("method", [name for name in METHODS if name != "passthrough"])
def test_as_inits(method: str) -> None:
    """No iterations leave the init; what no objective has anything for gets it, if asked to."""
    spec = {"shape": (6, 5), "dtype": torch.float32, "seed": 0, "magnitude": 1.0}
    base, *tuned = (
        {"w.weight": s["p"], "b": s["q.1.w"]} for s in map(partial(state, spec), range(4))
    )
    num = METHODS[method].num_models or 3
    models = {f"m{i}": model for i, model in enumerate(tuned[:num])}
    # As the default init, task arithmetic has another scale.
    own: dict[str, Any] = {"nearswap": {"t": 0.3}, "task_arithmetic": {"scale": 1.0}}
    options = own.get(method, {})
    expected = matsmerge.merge(models, base, method, **options)
    merged = matsmerge.merge(
        models, base, "actmat", init={"name": method, **options}, iterations=0, otherwise="init"
    )
    for name in base:
        torch.testing.assert_close(merged[name], expected[name], rtol=1e-6, atol=1e-7)


def test_inputs_are_left_alone() -> None:
    for dtype in (torch.float64, torch.float32):
        spec = {"shape": (4, 4), "dtype": dtype, "seed": 0, "magnitude": 1.0}
        for method in METHODS:
            num = METHODS[method].num_models or 2
            models = {f"m{i}": state(spec, i + 1) for i in range(num)}
            base = state(spec)
            before = {n: {k: t.clone() for k, t in m.items()} for n, m in models.items()}
            kept = {k: t.clone() for k, t in base.items()}
            matsmerge.merge(models, base, method, **NEUTRAL[method](2))
            assert all(torch.equal(models[n][k], before[n][k]) for n in models for k in base)
            assert all(torch.equal(base[k], kept[k]) for k in base)
