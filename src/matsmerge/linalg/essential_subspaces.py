"""Merging changes in the directions of outputs in which they do something to a layer's data.

    Δ_m G_m Δ_mᵀ = P_m Λ_m P_mᵀ,   U_m = P_m E_m,   V_m = E_m P_mᵀ Δ_m

of the leading directions P_m, which are the principal components of what Δ_m changes in the layer's
outputs. E_m = (Λ_m / mean)^power, divided by its own mean, raises the first of them. With U all U_m
side by side and V all V_m one below the other, U⊥ and V⊥ the nearest matrices whose singular
values are all equal, the merged change is U⊥ V⊥. Before that, V_m may be multiplied by
(|Δ_m| / mean of all)^task_power, then each column of V by (its norm / mean of all)^input_power.
"""

from collections.abc import Iterable

import torch
from torch import Tensor


def merge_in_subspaces(
    terms: Iterable[tuple[Tensor, Tensor]],
    num: int,
    power: float,
    task_power: float = 0.0,
    input_power: float = 0.0,
) -> Tensor:
    """Merge changes (out, in), each with the second moment (out, out) of its outputs.

    They are taken one at a time. Each of the `num` changes has an equal share of the directions, at
    least one.
    """
    lefts, rights, sizes = [], [], []
    for change, moment in terms:
        num_kept = max(1, len(moment) // num)
        values, vectors = torch.linalg.eigh(moment)  # in ascending order
        values, vectors = values[-num_kept:].flip(0), vectors[:, -num_kept:].flip(1)
        values = torch.where(values > _rounding(values), values, 0)
        # Models that change nothing have no directions; their part is zero.
        raised = _relative(torch.where(values > 0, _relative(values) ** power, 0))
        lefts.append(vectors * raised)
        rights.append(raised[:, None] * (vectors.mT @ change))
        sizes.append(change.norm())
    tasks = _relative(torch.stack(sizes)) ** task_power
    right = torch.cat([own * task for own, task in zip(rights, tasks, strict=True)])
    right *= _relative(right.norm(dim=0)) ** input_power
    return _evened(torch.cat(lefts, 1)) @ _evened(right)


def _relative(sizes: Tensor) -> Tensor:
    """Sizes divided by their mean; zeros stay."""
    return sizes / (float(sizes.mean()) or 1.0)


def _evened(matrix: Tensor) -> Tensor:
    """A matrix with the mean of its singular values in place of each; null directions stay null."""
    p, s, q = torch.linalg.svd(matrix, full_matrices=False)
    evened: Tensor = p * ((s > _rounding(s)) * s.mean()) @ q
    return evened


def _rounding(values: Tensor) -> Tensor:
    """What rounding leaves of zeros among values that begin with the largest."""
    return len(values) * torch.finfo(values.dtype).eps * values[0].clamp(min=0)
