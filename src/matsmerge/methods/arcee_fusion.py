"""Arcee Fusion: the changes of one model that matter most."""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from matsmerge.methods.method import Measuring, Method
from matsmerge.methods.site import Site, SiteTask
from matsmerge.methods.trimming import find_ranked

_EPSILON = 1e-8  # mergekit's, added to probabilities
# Changes up to this make r at most 0.07. So many terms of the series of exp(delta) - 1 and of the
# divergence are then as exact as the functions; exponentials would take four times as long.
_SMALL_CHANGE = 1 / 32
_NUM_TERMS = {torch.float32: (4, 6), torch.float64: (9, 14)}


class ArceeFusion(Method):
    """theta = theta_1 where a change is important, else theta_base.

    Importance is |theta_1 - theta_base| times the divergence KL(softmax(row of theta_1) ||
    softmax(row of theta_base)), a row being along the last dimension; it has to reach median + 1.5
    (upper - lower quartile) of the parameter. Quartiles are exact, where mergekit samples large
    parameters.
    """

    name = "arcee_fusion"
    needs_base = True
    num_models = 1

    @property
    def measured_over(self) -> Literal["parameter"]:
        return "parameter"

    @property
    def works_on_changes(self) -> bool:
        return False

    def measure(self, tasks: Sequence[SiteTask], num_elements: int) -> Measuring:  # noqa: ARG002
        ranks = [num_elements - int(q * (num_elements - 1)) for q in (0.25, 0.5, 0.75)]
        ((lower, median, upper),) = yield from find_ranked([ranks], num_elements, _importance)
        return {"threshold": [median + 1.5 * (upper - lower)]}

    def merge(self, site: Site) -> Tensor:
        importance, base = _importance_and_base(site)
        is_important = importance >= site.measured["threshold"][0]
        return torch.where(is_important, site.tasks[0].load(), base)


def _importance(site: Site) -> list[Tensor]:
    return [_importance_and_base(site)[0]]


def _importance_and_base(site: Site) -> tuple[Tensor, Tensor]:
    length = max(1, site.shape[-1]) if site.shape else 1
    rows, own = site.whole_rows(length)
    base, delta = (v.view(-1, length) for v in (rows.load_base(), rows.tasks[0].load()))
    delta.sub_(base)
    least, most = (float(v) for v in delta.aminmax()) if delta.numel() else (0.0, 0.0)
    is_small = max(-least, most) <= _SMALL_CHANGE
    divergence = _divergence_of_small(base, delta) if is_small else _divergence(base, delta)
    return delta.abs_().mul_(divergence).view(-1)[own], base.view(-1)[own]


def _divergence(base: Tensor, delta: Tensor) -> Tensor:  # (rows, 1)
    base = base.double()
    p, q = (v.softmax(1).add_(_EPSILON) for v in (base + delta, base))
    return (p * (p / q).log_()).sum(1, keepdim=True).clamp_min_(0).to(delta.dtype)


def _divergence_of_small(base: Tensor, delta: Tensor) -> Tensor:  # (rows, 1)
    """The same without a logarithm, and without differences of nearly equal numbers.

    With q = softmax(base) and c = exp(delta) - 1, softmax(model) is q (1 + c) / (1 + s), s = sum q
    c. So p / q, both with epsilon, is 1 + r, r = q / (q + epsilon) (c - s) / (1 + s), and as the
    sum of (q + epsilon) r is 0, the divergence is the sum of (q + epsilon) ((1 + r) log(1 + r) - r)
    = (q + epsilon) r^2 (1/2 - r/6 + r^2/12 - ...).
    """
    num_change, num_divergence = _NUM_TERMS[delta.dtype]
    q = base.softmax(1)
    change = _series(delta, [1 / math.factorial(k + 1) for k in range(num_change)]).mul_(delta)
    s = torch.linalg.vecdot(q, change)[:, None]
    whole = q + _EPSILON
    r = change.sub_(s).div_(1 + s).mul_(q).div_(whole)
    series = _series(r, [(-1) ** k / ((k + 1) * (k + 2)) for k in range(num_divergence)])
    divergence: Tensor = torch.linalg.vecdot(series.mul_(r).mul_(r), whole)
    return divergence[:, None]


def _series(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    """sum_k c_k x^k, from the last term on."""
    *others, before, last = coefficients
    found = torch.add(x.new_tensor(before), x, alpha=last)
    for coefficient in reversed(others):
        torch.addcmul(x.new_tensor(coefficient), found, x, out=found)
    return found
