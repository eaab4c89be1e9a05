"""Statistics whose second moments are kept by a rank: of sums, of whole ones, of a higher rank.

What is made of whole moments is what collecting at that rank gives, but for rounding. Fewer
directions of a higher rank are the first of them.
"""

import torch
from torch import Tensor

from matsmerge.errors import StatisticsError
from matsmerge.linalg.nystrom import is_smaller, least_dim, num_columns
from matsmerge.linalg.triangle import triangle_dim
from matsmerge.statistics.kinds import kind_of
from matsmerge.statistics.kinds.sketch_sum import kept_of_moment, kept_of_wide
from matsmerge.statistics.kinds.statistic import Form
from matsmerge.statistics.statistics import Sketching, Statistics, in_memory, with_constant


def compress_statistics(statistics: Statistics, rank: int) -> Statistics:
    """The same statistics with second moments of linear maps kept by a rank."""
    header, label = statistics.header, statistics.arrays.label
    before = header.sketching
    if before is not None and rank >= before.rank:
        raise StatisticsError(
            f"{label}: holds sketches of rank {before.rank}, which know nothing of further "
            f"directions; give a rank below {before.rank}, or collect anew"
        )
    options = header.options.model_copy(update={"rank": rank})
    changed = header.model_copy(update={"options": options, "sketching": None})
    found = finish(Statistics(changed, statistics.arrays, statistics.device))
    if found.header.sketching is None:
        raise StatisticsError(
            f"{label}: has no second moment of a linear map that a sketch of rank {rank} is "
            f"smaller than, which takes {least_dim(rank)} inputs or outputs; give a smaller rank"
        )
    return found


def finish(statistics: Statistics) -> Statistics:
    """Second moments kept by the rank of the options, once all that is to be added is there."""
    header = statistics.header
    rank = header.options.sketch_rank
    if rank is None or header.sketching is not None:
        return statistics
    arrays: dict[str, Tensor] = {}
    forms: dict[str, Form] = {}
    for name, form in header.forms.items():
        kept = _kept(statistics, name, rank)
        arrays[name] = statistics.arrays[name] if kept is None else kept
        forms[name] = form if kept is None else "sketch"
    sketching = Sketching(rank=rank) if "sketch" in forms.values() else None
    changes = {"forms": forms, "sketching": sketching}
    return in_memory(header.model_copy(update=changes), arrays)


def _kept(statistics: Statistics, name: str, rank: int) -> Tensor | None:
    """A second moment as a sketch, as it is stored; None for what stays as it is."""
    of, array, key = name.split("/", 2)
    form = statistics.header.forms[name]
    if form == "wide":
        return kept_of_wide(statistics.arrays[name], rank)
    if form == "sketch":
        stored = statistics.arrays[name]
        return torch.cat([stored[:, :rank], stored[:, -1:]], 1)
    kind = kind_of(array)
    if kind is None or "sketch" not in kind.arrays[array] or form != "symmetric":
        return None
    shape = statistics.arrays.specs[name].shape
    dim = triangle_dim(shape[-1])
    if len(shape) > 1 or not is_smaller(dim, rank):  # there are groups, or it is small
        return None
    moment = statistics.array(f"{array}/{key}", of).double()
    if array == "inputs" and statistics.has(f"mean/{key}", of):
        moment = with_constant(moment, statistics.stored(f"mean/{key}", of).double(), dim)
    return kept_of_moment(moment, rank, num_columns(dim, rank))
