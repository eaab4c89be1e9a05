"""Fisher information of models on their data, from the arrays of their statistics."""

from typing import Any

import pytest
import torch
from solved_models import loss, make_batches, make_nets, make_statistics

import matsmerge
from matsmerge.advice.fisher_sizes import fisher_sizes
from matsmerge.statistics.statistics import Statistics


def collect(kinds: str, **options: Any) -> dict[str, Statistics]:
    models = make_nets()[1][:2]
    return {
        f"m{i}": matsmerge.collect(model, make_batches(i, 2), kinds, loss=loss, **options)
        for i, model in enumerate(models)
    }


def test_kfac_by_the_traces_of_output_factors() -> None:
    statistics = {f"m{i}": s for i, s in enumerate(make_statistics())}
    found = fisher_sizes(statistics)
    for name, own in statistics.items():
        modules = [m.module for m in own.header.maps if own.has(f"outputs/{m.module}")]
        assert len(modules) > 3
        traces = [own.output_factor(m).double().diagonal(dim1=-2, dim2=-1).sum() for m in modules]
        assert found[name] == pytest.approx(float(sum(traces)), rel=1e-6)


def test_sketches_have_the_same_traces() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 60)
    batches = [(torch.randn(30, 8), torch.randint(60, (30,))) for _ in range(2)]
    found = [
        fisher_sizes({"m": matsmerge.collect(model, batches, "kfac", loss=_predict, rank=rank)})
        for rank in ("full", 6)
    ]
    assert found[1]["m"] == pytest.approx(found[0]["m"], rel=1e-5)
    assert found[1]["m"] > 0


def _predict(model: Any, batch: Any) -> Any:
    return model(batch[0]), batch[1]


@pytest.mark.parametrize("kind", ["fisher", "block_fisher"])
def test_diagonals_and_blocks(kind: str) -> None:
    statistics = collect(kind)
    found = fisher_sizes(statistics)
    for name, own in statistics.items():
        total = 0.0
        for parameter in own.parameters(kind):
            if kind == "fisher":
                total += float(own.fisher(parameter).double().sum())
            else:
                total += float(own.block_fisher(parameter).double().trace())
        assert found[name] == pytest.approx(total, rel=1e-5)


def test_what_cannot_be_compared() -> None:
    assert fisher_sizes(collect("gram")) == {}
    one, other = collect("fisher"), collect("fisher", reduction="mean")
    assert fisher_sizes({"a": one["m0"], "b": other["m1"]}) == {}
    assert fisher_sizes({"a": one["m0"], "b": collect("kfac")["m1"]}) == {}
