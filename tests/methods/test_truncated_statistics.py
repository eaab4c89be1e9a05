"""Merges by statistics that are known by their leading directions, against whole matrices."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from solved_models import State, make_nets, make_statistics, solve_dense
from torch import Tensor

import matsmerge
from matsmerge.linalg.triangle import pack_upper, unpack_upper
from matsmerge.linalg.truncated import Truncated, truncate
from matsmerge.statistics.statistics import MAIN, Statistics, in_memory

pytestmark = pytest.mark.filterwarnings("ignore:merged by:UserWarning")

BASE, *MODELS = (
    {name: values.double() for name, values in net.state_dict().items()}
    for net in (make_nets()[0], *make_nets()[1])
)

def _regular(statistics: Statistics) -> Statistics:
    """In float64, and with a little of every direction."""
    arrays = {}
    for name in statistics.arrays.specs:
        values = statistics.arrays[name].double()
        if statistics.header.forms[name] == "symmetric":
            matrix = unpack_upper(values)
            diagonal = matrix.diagonal(dim1=-2, dim2=-1)
            diagonal += 0.05 * diagonal.mean() * torch.linspace(0.5, 1.5, matrix.shape[-1])
            values = pack_upper(matrix)
        arrays[name] = values
    return in_memory(statistics.header, arrays)


WHOLE = [_regular(s) for s in make_statistics()]
LAYERS = ["first", "gate", "second", "out"]
METHODS = ["mats", "mats_kfac", "regmean", "block_fisher"]
CHANGES: list[dict[str, Any]] = [
    {},
    {"bias": True},
    {"ridge": 0.1},
    {"equalize": True},
    {"anchor": 0.1},
    {"weights": [0.5, 2.0, 1.0]},
    {"stop": "held_out"},
    {"bias": True, "ridge": 0.1, "equalize": True, "anchor": 0.1, "weights": [0.5, 2.0, 1.0]},
]


@dataclass(frozen=True)
class Truncating(Statistics):
    """Statistics that give the leading directions of whole second moments."""

    rank: int = 3
    of_outputs: int | None = None  # if not as many

    def truncated_gram(
        self, module: str, of: str = MAIN, *, bias: bool = False
    ) -> Truncated | None:
        gram = self.gram(module, of, bias=bias)
        return truncate(gram, self.rank) if gram.ndim == 2 else None

    def truncated_output_factor(self, module: str, of: str = MAIN) -> Truncated | None:
        factor = self.output_factor(module, of)
        rank = self.rank if self.of_outputs is None else self.of_outputs
        return truncate(factor, rank) if factor.ndim == 2 else None
    

def truncating(*ranks: int) -> list[Statistics]:
    return [Truncating(s.header, s.arrays, r) for s, r in zip(WHOLE, ranks, strict=True)]


def merge(method: str, statistics: Any, **parameters: Any) -> State:
    return matsmerge.merge(MODELS, BASE, method, statistics=statistics, force=True, **parameters).state_dict()


@pytest.mark.parametrize("changes", CHANGES, ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_all_directions_are_the_whole(method: str, changes: dict[str, Any]) -> None:
    if method == "regmean" and "stop" in changes: return
    whole, truncated = merge(method, WHOLE, **changes), merge(method, truncating(99,99,99), **changes)
    for name, values in whole.items():
        off = float((truncated[name].double() - values.double()).norm() / values.double().norm())
        print(method, changes, name, off)
        assert off < 1e-8

@pytest.mark.parametrize("changes", CHANGES, ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_runs(method: str, changes: dict[str, Any]) -> None:
    if method == "regmean" and "stop" in changes: return
    truncated = merge(method, truncating(1,1,1), **changes)
