"""How much Fisher information models have on their data, by which statistics tell confidence.

The Fisher information of a model that is sure of its answers is near zero: nothing it could be told
would change it much. Sums that are not brought to one scale (`equalize`) listen to the others.
"""

from collections.abc import Mapping

import torch

from matsmerge.linalg.triangle import triangle_dim
from matsmerge.statistics.statistics import MAIN, Statistics

# Arrays whose traces are Fisher information, the most exact last.
_ARRAYS = {"kfac": "outputs", "block_fisher": "block_fisher", "fisher": "fisher"}


def fisher_sizes(statistics: Mapping[str, Statistics]) -> dict[str, float]:
    """Of each model the Fisher information over the layers that all have it for; {} if none.

    Only what was measured in the same way is compared.
    """
    ways = {(s.header.options.fisher, s.header.options.reduction) for s in statistics.values()}
    if len(ways) != 1:
        return {}
    for kind, array in _ARRAYS.items():
        if all(kind in s.kinds for s in statistics.values()):
            prefix = f"{MAIN}/{array}/"
            keys = [
                {name for name in s.arrays.specs if name.startswith(prefix)}
                for s in statistics.values()
            ]
            shared = sorted(set.intersection(*keys))
            if shared:
                return {
                    model: sum(_trace(s, name) for name in shared)
                    for model, s in statistics.items()
                }
    return {}


def _trace(statistics: Statistics, name: str) -> float:
    """The trace of a second moment, read whole: one array at a time."""
    stored = statistics.arrays[name].double()
    form = statistics.header.forms[name]
    if form == "symmetric":
        d = triangle_dim(stored.shape[-1])
        lengths = torch.arange(d, 1, -1)  # of the rows, each of which begins on the diagonal
        starts = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
        return float(stored[..., starts].sum())
    if form == "sketch":
        return float(stored[:, -1].sum())
    if form == "rows":
        return float(stored.square().sum()) / statistics.header.sets[MAIN].num_examples
    return float(stored.sum())
