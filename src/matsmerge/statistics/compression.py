"""Statistics with smaller second moments: whole ones as sketches, sketches of a lower rank.

Both are what collecting at that rank gives, but for rounding: Y = G Ω of the same Ω, and fewer
directions are the first of more.
"""

import torch
from torch import Tensor

from matsmerge.errors import StatisticsError
from matsmerge.linalg.nystrom import directions, least_dim, num_directions
from matsmerge.linalg.triangle import triangle_dim
from matsmerge.statistics.kinds import kind_of
from matsmerge.statistics.kinds.sketch_sum import factored, multiplied
from matsmerge.statistics.kinds.statistic import Form
from matsmerge.statistics.statistics import Sketching, Statistics, in_memory, with_constant


def compress(statistics: Statistics, rank: int) -> Statistics:
    """The same statistics with second moments of linear maps kept by a rank."""
    header, label = statistics.header, statistics.arrays.label
    before = header.sketching
    if before is not None and rank >= before.rank:
        raise StatisticsError(
            f"{label}: holds sketches of rank {before.rank}, which know nothing of further "
            f"directions; give a rank below {before.rank}, or collect anew"
        )
    new = {} if before is None else {"seed": before.seed}
    sketching = Sketching(rank=rank, **new)
    arrays: dict[str, Tensor] = {}
    forms: dict[str, Form] = {}
    for name, form in header.forms.items():
        found = _sketch(statistics, name, sketching)
        arrays[name] = statistics.arrays[name] if found is None else found
        forms[name] = form if found is None else "sketch"
    if "sketch" not in forms.values():
        raise StatisticsError(
            f"{label}: has no second moment of a linear map that a sketch of rank {rank} is "
            f"smaller than, which takes {least_dim(rank)} inputs or outputs; give a smaller rank"
        )
    options = header.options.model_copy(update={"rank": rank})
    changes = {"options": options, "forms": forms, "sketching": sketching}
    return in_memory(header.model_copy(update=changes), arrays)


def _sketch(statistics: Statistics, name: str, sketching: Sketching) -> Tensor | None:
    """A second moment as a smaller sketch, as it is stored; None for what stays as it is."""
    of, array, key = name.split("/", 2)
    stored, form = statistics.arrays.specs[name], statistics.header.forms[name]
    num, seed = sketching.rank, sketching.seed
    if form == "sketch":
        return factored(multiplied(statistics.arrays[name], seed, num), seed)
    kind = kind_of(array)
    if kind is None or "sketch" not in kind.arrays[array] or form != "symmetric":
        return None
    dim = triangle_dim(stored.shape[-1])
    has_groups = len(stored.shape) > 1
    if has_groups or num_directions(dim, sketching.rank) is None:
        return None
    moment = statistics.array(f"{array}/{key}", of).double()
    if array == "inputs" and statistics.has(f"mean/{key}", of):
        moment = with_constant(moment, statistics.stored(f"mean/{key}", of).double(), dim)
    y = moment @ directions(len(moment), num, seed).double()
    return factored(torch.cat([y, moment.diagonal()[:, None]], 1), seed)
