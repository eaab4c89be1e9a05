"""The last two steps of TIES: elect a sign for every parameter, then merge what agrees with it."""

from collections.abc import Sequence

import torch
from torch import Tensor

# Columns that are treated at once, few enough to stay in the processor's cache.
_CHUNK_ELEMENTS = 1 << 16


def merge_agreeing(deltas: Tensor, weights: Sequence[float], *, normalize: bool) -> Tensor:
    """Sum (or mean) of the weighted task vectors' entries whose sign carries more mass.

    `deltas` (models, elements) is used up. With d_m = w_m delta_m and s = sign(sum_m d_m), the
    result is sum_m d_m [s d_m > 0], divided by sum_m w_m [s d_m > 0] for the mean. Yadav et al.,
    2023 (arXiv:2306.01708), section 3.2, with each task vector weighted by w_m.
    """
    w = deltas.new_tensor(weights)
    if min(weights) < 0:
        deltas.mul_(torch.sign(w)[:, None])
    # From here on a row of `deltas` stands for d_m / |w_m|, which has the sign of d_m.
    merged = deltas.new_empty(deltas.shape[1])
    for start in range(0, len(merged), _CHUNK_ELEMENTS):
        chunk = slice(start, start + _CHUNK_ELEMENTS)
        _merge_chunk(deltas[:, chunk], w, min(weights) if normalize else None, merged[chunk])
    return merged


def _merge_chunk(deltas: Tensor, w: Tensor, smallest: float | None, merged: Tensor) -> None:
    """Merge some columns into `merged`; `smallest` is the smallest weight if a mean is wanted."""
    sizes = w.abs()
    sign = torch.copysign(w.new_ones(()), sizes @ deltas)
    agreeing = deltas.mul_(sign).relu_()
    torch.mul(sizes @ agreeing, sign, out=merged)
    if smallest is not None:
        weight = w @ agreeing.gt_(0)
        # Where nothing agreed the sum is zero, whatever it is divided by. Raising that divisor to
        # the smallest weight changes no other one, and is much faster than a mask.
        if smallest > 0:
            merged.div_(weight.clamp_min_(smallest))
        else:
            merged.div_(weight.masked_fill_(weight == 0, 1))
