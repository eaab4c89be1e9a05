"""Scores of models on tasks: their order, how far they are apart, and their one table."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from statistics import fmean

from matsmerge.lab.experiments.score_tables import mean_and_error
from matsmerge.lab.reports.document import Cell, Column, Table
from matsmerge.lab.reports.numbers import NOTHING, fixed, paper_cell, points
from matsmerge.lab.reports.paired_interval import Interval, Scored, paired_interval


@dataclass(frozen=True)
class ShownScore:
    """A score as reports show it: in percent where usual, with its standard error if known."""

    value: float
    error: float | None = None

    @classmethod
    def of(cls, value: float, error: float | None, factor: float) -> "ShownScore | None":
        """A score times a factor; None if it is no finite number, as that of a broken model."""
        value, error = factor * value, None if error is None else factor * error
        known = error is not None and math.isfinite(error)
        return cls(value, error if known else None) if math.isfinite(value) else None

    @classmethod
    def over_seeds(cls, shares: Sequence[float], error: float | None = None) -> "ShownScore | None":
        """The mean of shares in percent; of one alone, `error` is that over examples."""
        if not shares:
            return None
        mean, over_seeds = mean_and_error(shares)
        return cls.of(mean, error if over_seeds is None else over_seeds, factor=100)


@dataclass(frozen=True)
class ScoreRow:
    """A model or, over seeds, a method."""

    name: str
    tasks: Mapping[str, ShownScore]
    mean: ShownScore | None
    is_reference: bool = False  # no merge
    is_this: bool = False  # the one the report is about
    paper: float | None = None
    paper_tasks: Mapping[str, float | None] = field(default_factory=dict)
    scored: Scored = field(default_factory=dict)  # what its scores are made of


@dataclass(frozen=True)
class ScoreTable:
    """Rows on the same tasks."""

    tasks: Sequence[str]
    rows: Sequence[ScoreRow]
    unit: str  # what the numbers are
    errors: str  # what the standard errors are over
    individual: str  # the row of each task's own model
    higher_is_better: bool = True
    digits: int = 1
    factor: float = 100.0  # from what is scored to what is shown

    @property
    def ordered(self) -> list[ScoreRow]:
        """Merges from the best to the worst, then what they are compared with."""
        sign = -1 if self.higher_is_better else 1

        def place(row: ScoreRow) -> tuple[bool, bool, float]:
            return row.is_reference, row.mean is None, sign * row.mean.value if row.mean else 0.0

        return sorted(self.rows, key=place)

    @property
    def merges(self) -> list[ScoreRow]:
        """Those with a mean, the best first."""
        return [row for row in self.ordered if not row.is_reference and row.mean]

    @property
    def subject(self) -> ScoreRow | None:
        """The merge that the report is about, or the best one."""
        this = [row for row in self.merges if row.is_this]
        return next(iter([*this, *self.merges]), None)

    def row(self, name: str) -> ScoreRow | None:
        return next((row for row in self.rows if row.name == name and row.mean), None)

    def interval(self, ours: ScoreRow, theirs: ScoreRow | None) -> Interval | None:
        """How far a row's mean is above another's."""
        if theirs is None or theirs is ours or not (ours.mean and theirs.mean):
            return None
        found = paired_interval(ours.scored, theirs.scored)
        return found.times(self.factor) if found else None

    def show(self, value: float | None) -> str:
        return fixed(value, self.digits)

    def show_interval(self, found: Interval) -> str:
        return f"{points(found.low, self.digits)} to {points(found.high, self.digits)}"

    def show_difference(self, found: Interval) -> str:
        return f"{points(found.difference, self.digits)} ({self.show_interval(found)})"


def score_cells(
    scores: Sequence[ShownScore | None],
    are_merges: Sequence[bool],
    digits: int = 1,
    higher_is_better: bool = True,
    shades: Sequence[float | None] = (),
) -> list[Cell | str]:
    """A column of scores; the best merge in it is marked."""
    pairs = list(zip(scores, are_merges, strict=True))
    merges = [score.value for score, is_merge in pairs if score and is_merge]
    # With one merge, being the best of all says nothing.
    best = (max if higher_is_better else min)(merges) if len(merges) > 1 else None
    return [
        Cell(
            fixed(score.value, digits),
            "" if score.error is None else fixed(score.error, digits),
            is_merge and score.value == best,
            shade=shade,
        )
        if score
        else NOTHING
        for (score, is_merge), shade in zip(pairs, shades or [None] * len(pairs), strict=True)
    ]


def gaps(
    scores: Sequence[ShownScore | None], own: ShownScore | None, higher_is_better: bool = True
) -> list[float | None]:
    """How much better each score is than that of the task's own model, or than the best."""
    sign = 1 if higher_is_better else -1
    known = [sign * score.value for score in scores if score]
    if not known:
        return [None] * len(scores)
    zero = max(known) if own is None else sign * own.value
    return [None if score is None else sign * score.value - zero for score in scores]


def score_rows(table: ScoreTable, title: str = "") -> Table:
    """Every model's scores, coloured by the distance to the task's own model."""
    rows, own = table.ordered, table.row(table.individual)
    are_merges = [not row.is_reference for row in rows]
    given: list[tuple[str, list[ShownScore | None], ShownScore | None]] = [
        (task, [row.tasks.get(task) for row in rows], own.tasks.get(task) if own else None)
        for task in table.tasks
    ]
    has_mean = len(table.tasks) > 1 and any(row.mean for row in rows)
    if has_mean:
        given.insert(0, ("mean", [row.mean for row in rows], own.mean if own else None))
    away = [gaps(scores, zero, table.higher_is_better) for _, scores, zero in given]
    scale = colour_scale([gap for column in away for gap in compress(column, are_merges)])
    columns: list[Column] = [("", [row.name for row in rows])]
    for (head, scores, _), column in zip(given, away, strict=True):
        shades = [None if gap is None else gap / scale for gap in column]
        cells = score_cells(scores, are_merges, table.digits, table.higher_is_better, shades)
        columns.append((head, cells))
    beside: list[Column] = []
    if own:
        intervals = [table.interval(row, own) for row in rows]
        cells = [table.show_difference(found) if found else NOTHING for found in intervals]
        beside.append(("mean against own models (95\u00a0%)", cells))
    if any(row.paper is not None for row in rows):
        beside.append(("paper's mean", [paper_cell(table.show(row.paper)) for row in rows]))
    at = 2 if has_mean else len(columns)
    columns[at:at] = beside
    return Table.of_columns(
        columns,
        title,
        marked=frozenset(i for i, row in enumerate(rows) if row is table.subject),
        shades=shades_text(scale, table.digits, "the task's own model" if own else "the best"),
        has_errors=True,
    )


def colour_scale(gaps_of_merges: Sequence[float | None]) -> float:
    """What the strongest colour means: the farthest of merges."""
    return max((abs(gap) for gap in gaps_of_merges if gap is not None), default=0.0) or 1.0


def shades_text(scale: float, digits: int, zero: str) -> list[str]:
    size = fixed(scale, digits)
    return [f"{size} worse", f"as {zero}", f"{size} better"]


def paper_rows(table: ScoreTable) -> Table | None:
    """The paper's scores by task, where it has them."""
    rows: list[list[Cell | str]] = [
        [row.name, *(paper_cell(table.show(row.paper_tasks.get(task))) for task in table.tasks)]
        for row in table.ordered
        if any(row.paper_tasks.values())
    ]
    heads = ["the paper's", *table.tasks]
    return Table(heads, rows, "The paper's numbers, by task", folded=True) if rows else None


def mean_over_tasks(tasks: Mapping[str, ShownScore]) -> ShownScore:
    """Over tasks whose errors are independent."""
    errors = [score.error for score in tasks.values()]
    known = [error for error in errors if error is not None]
    error = sum(e * e for e in known) ** 0.5 / len(errors) if len(known) == len(errors) else None
    return ShownScore(fmean(score.value for score in tasks.values()), error)
