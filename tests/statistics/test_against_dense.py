"""Every statistic of every architecture against one computed slowly, an example at a time."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from dense_statistics import (
    dense_block,
    dense_conv_factors,
    dense_fisher,
    flat_rows,
    inputs_and_gradients,
    per_example_gradients,
)
from statistics_cases import CASES, Case, make_case
from torch import Tensor, nn

from matsmerge.statistics.collection import Collection
from matsmerge.statistics.collection_options import make_collection_options
from matsmerge.statistics.statistics import Map, Origin, Statistics

EVERYTHING = ("gram", "kfac", "fisher", "block_fisher")


def gather(case: Case, size: int, padding: int = 0, **options: object) -> Statistics:
    collection = Collection(
        case.model, make_collection_options(**{"statistics": EVERYTHING} | options), case.predict
    )
    with collection.running():
        for batch in case.batches(size, padding):
            collection.add(batch)
        return collection.statistics(Origin(name="m", fingerprint="f"), ())


def assert_same(found: Tensor, expected: Tensor, what: str) -> None:
    """Equal to one in a million; what should be nothing but rounding is nothing but rounding."""
    assert found.shape == expected.shape, what
    error = float((found - expected).norm())
    assert error <= 1e-6 * float(expected.norm()) + 1e-20, f"{what}: {error}"


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return make_case(request.param)


@pytest.mark.parametrize("size", [1, 3])
def test_fisher(case: Case, size: int) -> None:
    statistics = gather(case, size)
    num = len(case.examples)
    gradients = per_example_gradients(case.model, case.runs())
    expected = dense_fisher(gradients, num)
    for name, values in expected.items():
        if name in statistics.header.without["fisher"]:
            assert not values.any(), name
        else:
            assert_same(statistics.fisher(name), values, name)
    vectors = [n for n, v in gradients[0].items() if v.numel() == max(v.shape)]
    assert set(vectors) == {
        *statistics.parameters("block_fisher"),
        *(
            n
            for n, why in statistics.header.without["block_fisher"].items()
            if why != "not a vector"
        ),
    }
    for name in statistics.parameters("block_fisher"):
        assert_same(statistics.block_fisher(name), dense_block(gradients, name, num), name)


def test_factors(case: Case) -> None:
    for size in (1, 3):
        statistics = gather(case, size, padding=2)
        if size == 1:
            expected = dense_factors(case, statistics.header.maps)
        for m in statistics.header.maps:
            z, o = expected[m.module]
            assert_same(statistics.gram(m.module), z, f"inputs of {m.module}")
            assert_same(statistics.output_factor(m.module), o, f"outputs of {m.module}")


def dense_factors(case: Case, maps: Sequence[Map]) -> dict[str, tuple[Tensor, Tensor]]:
    """Of each module, from one pass over the examples."""
    modules = [case.model.get_submodule(m.module) for m in maps]
    seen = inputs_and_gradients(modules, case.runs())
    return {
        m.module: _factors(m, module, *own, len(case.examples))
        for m, module, own in zip(maps, modules, seen, strict=True)
    }


def _factors(
    m: Map, module: nn.Module, inputs: Sequence[Tensor], grads: Sequence[Tensor], num: int
) -> tuple[Tensor, Tensor]:
    if m.layout == "conv2d":
        assert isinstance(module, nn.Conv2d)
        return dense_conv_factors(module, inputs, grads, num)
    z, o = flat_rows(module, inputs, grads)
    if isinstance(module, nn.Embedding):
        counts = torch.bincount(z.flatten(), minlength=module.num_embeddings)
        return counts / counts.sum(dtype=torch.float64), o.T @ o / num
    if m.layout == "scale":  # a vector of (IA)^3, before or after the layer it belongs to
        layer: Any = module.base_layer
        with torch.no_grad():
            z, o = (z, o @ layer.weight) if module.is_feedforward else (layer(z), o)
    return z.T @ z / len(z), o.T @ o / num
