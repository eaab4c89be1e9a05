"""The last two steps of TIES: elect a sign for every parameter, then merge what agrees with it."""

from collections.abc import Iterable

import torch
from torch import Tensor

from matsmerge.methods.method import Task


def merge_agreeing(
    deltas: Iterable[tuple[Task, Tensor]], like: Tensor, *, normalize: bool
) -> Tensor:
    """Sum (or weighted mean) of the task vectors' entries whose sign carries more mass.

    One model at a time: positive and negative entries are summed apart, and the side with the
    larger sum wins at the end. Yadav et al., 2023 (arXiv:2306.01708), eqs. for elect and
    disjoint merge, with each task vector weighted by w_m.
    """
    positive, negative = torch.zeros_like(like), torch.zeros_like(like)
    positive_weight, negative_weight = torch.zeros_like(like), torch.zeros_like(like)
    scratch = torch.empty_like(like)
    for task, delta in deltas:
        delta.mul_(task.weight)
        positive.add_(torch.clamp_min(delta, 0, out=scratch))
        negative.add_(torch.clamp_max(delta, 0, out=scratch))
        if normalize:
            # sign() is -1, 0 or 1: its positive and negative parts count the agreeing models.
            delta.sign_()
            positive_weight.add_(torch.clamp_min(delta, 0, out=scratch), alpha=task.weight)
            negative_weight.sub_(torch.clamp_max(delta, 0, out=scratch), alpha=task.weight)
    positive_wins = torch.add(positive, negative, out=scratch) >= 0
    if normalize:
        # Where nothing agreed the sum is zero, whatever it is divided by.
        positive.div_(positive_weight.masked_fill_(positive_weight == 0, 1))
        negative.div_(negative_weight.masked_fill_(negative_weight == 0, 1))
    return torch.where(positive_wins, positive, negative)
