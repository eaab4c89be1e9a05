"""How far apart two models are, with an interval: paired, example by example and seed by seed.

Both models answer the same examples, so what makes an example hard for both falls out of the
difference. With d[s, e] the difference on an example with a seed, the variance of its mean is
V = V_seeds + V_examples - V_rest: that of means over examples, that of means over seeds, and what
both contain, the rest after both effects (a random-effects analysis of two factors). Where every
seed has examples of its own, V_examples and V_rest cancel, as they should.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from matsmerge.lab.evaluation.metrics import Floats
from matsmerge.lab.reports.numbers import count

# Student's t, 97.5 %, of 1 to 30 degrees of freedom.
_STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True)
class TaskScore:
    """One model on one task with one seed."""

    value: float
    error: float | None = None  # standard error over examples
    right: str = ""  # 1 or 0 for each example, if known


@dataclass(frozen=True)
class Interval:
    """A difference of mean scores and where it lies in 95 of 100 cases."""

    difference: float
    low: float
    high: float
    over: str  # what was compared with what: "paired over 400 examples a task and 3 seeds"

    @property
    def has_zero(self) -> bool:
        return self.low <= 0 <= self.high

    def times(self, factor: float) -> "Interval":
        return Interval(factor * self.difference, factor * self.low, factor * self.high, self.over)


Scored = Mapping[int, Mapping[str, TaskScore]]  # by seed and task


def paired_interval(ours: Scored, theirs: Scored) -> Interval | None:
    """Of the mean over tasks and over the seeds that both have; None if nothing is known."""
    seeds = [seed for seed in ours if seed in theirs]
    if not seeds:
        return None
    tasks = [t for t in ours[seeds[0]] if all(t in m[s] for m in (ours, theirs) for s in seeds)]
    if not tasks:
        return None
    means = np.array([[ours[s][t].value - theirs[s][t].value for t in tasks] for s in seeds])
    if not np.isfinite(means).all():
        return None
    parts: list[tuple[float, int]] = []  # a variance, and its degrees of freedom
    over = []
    by_task = [_by_example([(ours[s][t].right, theirs[s][t].right) for s in seeds]) for t in tasks]
    whole = [d for d in by_task if d is not None]
    if len(whole) == len(tasks):
        of_examples = sum(_variance(d.mean(0)) - _rest(d) for d in whole) / len(tasks) ** 2
        parts.append((max(of_examples, 0.0), sum(d.shape[1] - 1 for d in whole)))
        sizes = sorted({d.shape[1] for d in whole})
        shown = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
        over.append(f"{shown} examples" + (" a task" if len(tasks) > 1 else ""))
    if len(seeds) > 1:
        parts.append((_variance(means.mean(1)), len(seeds) - 1))
        over.append(count(len(seeds), "seed"))
    said = f"paired over {' and '.join(over)}"
    if not parts:
        errors = [m[seeds[0]][t].error for m in (ours, theirs) for t in tasks]
        known = [e for e in errors if e is not None and math.isfinite(e)]
        if len(known) < len(errors):
            return None
        parts.append((sum(e * e for e in known) / len(tasks) ** 2, 10**9))
        said = "not paired: which examples were right was not kept"
    middle, half = float(means.mean()), _half_width(parts)
    return Interval(middle, middle - half, middle + half, said)


def _by_example(pairs: Sequence[tuple[str, str]]) -> Floats | None:  # (seeds, examples)
    """Differences by seed and example; None if they are not known of the same examples."""
    lengths = {len(right) for pair in pairs for right in pair}
    if len(lengths) != 1 or min(lengths) < 2:
        return None
    ours, theirs = (
        np.array([list(map(int, pair[i])) for pair in pairs], np.float64) for i in (0, 1)
    )
    return ours - theirs


def _variance(values: Floats) -> float:
    """Of the mean of values."""
    return float(values.var(ddof=1)) / len(values)


def _rest(d: Floats) -> float:
    """The variance of the mean that is neither of seeds nor of examples; 0 of a single seed."""
    seeds, examples = d.shape
    if seeds < 2:
        return 0.0
    rest = d - d.mean(0) - d.mean(1, keepdims=True) + d.mean()
    return float((rest**2).sum() / ((seeds - 1) * (examples - 1)) / d.size)


def _half_width(parts: Sequence[tuple[float, int]]) -> float:
    """Of the interval; degrees of freedom after Welch and Satterthwaite, rounded down."""
    total = sum(variance for variance, _ in parts)
    if total == 0:
        return 0.0
    freedom = total**2 / sum(variance**2 / num for variance, num in parts)
    t = _STUDENT[max(int(freedom), 1) - 1] if freedom < 30 else 1.96 + 2.46 / freedom
    return t * math.sqrt(total)
