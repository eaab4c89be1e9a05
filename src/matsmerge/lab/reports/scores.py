"""Scores of models on tasks: their order, their table, and the numbers that matter most."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from matsmerge.lab.experiments.score_tables import mean_and_error
from matsmerge.lab.reports.document import Cell, Column, KeyFigure, Table
from matsmerge.lab.reports.numbers import NOTHING, fixed, paper_cell


@dataclass(frozen=True)
class Score:
    """A score as reports show it: in percent where usual, with its standard error if known."""

    value: float
    error: float | None = None

    @classmethod
    def of(cls, value: float, error: float | None, factor: float) -> "Score | None":
        """A score times a factor; None if it is no finite number, as that of a broken model."""
        value, error = factor * value, None if error is None else factor * error
        known = error is not None and math.isfinite(error)
        return cls(value, error if known else None) if math.isfinite(value) else None

    @classmethod
    def over_seeds(cls, shares: Sequence[float], error: float | None = None) -> "Score | None":
        """The mean of shares in percent; of one alone, `error` is that over examples."""
        if not shares:
            return None
        mean, over_seeds = mean_and_error(shares)
        return cls.of(mean, error if over_seeds is None else over_seeds, factor=100)


@dataclass(frozen=True)
class ScoreRow:
    """A model or, over seeds, a method."""

    name: str
    tasks: Mapping[str, Score]
    mean: Score | None
    is_reference: bool = False  # no merge
    is_this: bool = False  # the one the report is about
    paper: float | None = None
    paper_tasks: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class ScoreTable:
    """Rows on the same tasks."""

    tasks: Sequence[str]
    rows: Sequence[ScoreRow]
    unit: str  # what the numbers are
    errors: str  # what the standard errors are over
    higher_is_better: bool = True
    digits: int = 1

    @property
    def ordered(self) -> list[ScoreRow]:
        """Merges from the best to the worst, then what they are compared with."""
        sign = -1 if self.higher_is_better else 1

        def place(row: ScoreRow) -> tuple[bool, bool, float]:
            return row.is_reference, row.mean is None, sign * row.mean.value if row.mean else 0.0

        return sorted(self.rows, key=place)

    @property
    def best(self) -> ScoreRow | None:
        merges = [row for row in self.ordered if not row.is_reference and row.mean]
        return merges[0] if merges else None

    def show(self, value: float | None) -> str:
        return fixed(value, self.digits)


def score_cells(
    scores: Sequence[Score | None],
    are_merges: Sequence[bool],
    digits: int = 1,
    higher_is_better: bool = True,
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
        )
        if score
        else NOTHING
        for score, is_merge in pairs
    ]


def score_rows(table: ScoreTable, title: str = "") -> Table:
    """Every model's scores; the best merge of each column is marked."""
    rows = table.ordered
    are_merges = [not row.is_reference for row in rows]

    def column(head: str, scores: Sequence[Score | None]) -> Column:
        return head, score_cells(scores, are_merges, table.digits, table.higher_is_better)

    columns: list[Column] = [("", [row.name for row in rows])]
    if any(row.mean for row in rows):
        columns.append(column("mean", [row.mean for row in rows]))
    if any(row.paper is not None for row in rows):
        columns.append(("paper's mean", [paper_cell(table.show(row.paper)) for row in rows]))
    columns += [column(task, [row.tasks.get(task) for row in rows]) for task in table.tasks]
    marked = frozenset(i for i, row in enumerate(rows) if row.is_this)
    return Table.of_columns(columns, title, marked=marked)


def paper_rows(table: ScoreTable) -> Table | None:
    """The paper's scores by task, where it has them."""
    rows: list[list[Cell | str]] = [
        [row.name, *(paper_cell(table.show(row.paper_tasks.get(task))) for task in table.tasks)]
        for row in table.ordered
        if any(row.paper_tasks.values())
    ]
    heads = ["the paper's", *table.tasks]
    return Table(heads, rows, "The paper's numbers, by task", folded=True) if rows else None


def key_figures(table: ScoreTable, average: str, individual: str) -> list[KeyFigure]:
    """The merge it is about or the best one, what to compare it with, and the gap it closes."""
    means = {row.name: row.mean for row in table.rows if row.mean}
    this = next((row.name for row in table.rows if row.is_this and row.mean), None)
    best = table.best.name if table.best else None
    subject = this or best
    if subject is None:
        return []
    value, error = means[subject].value, means[subject].error
    shown = table.show(value) + ("" if error is None else f" ± {table.show(error)}")
    label, note = ("this merge", table.unit) if this else ("best merge", subject)
    found = [KeyFigure(label, shown, note)]
    if best not in (None, subject):
        found.append(KeyFigure("best of those scored", table.show(means[best].value), best))
    above, below = means.get(individual), means.get(average)
    if above:
        difference = f"{value - above.value:+.{table.digits}f}".replace("-", "−")
        found.append(
            KeyFigure("individual models", table.show(above.value), f"{label}: {difference}")
        )
    if below and subject != average:
        found.append(KeyFigure("plain averaging", table.show(below.value), "the simplest"))
        gap = above.value - below.value if above else 0.0
        if gap > 0 if table.higher_is_better else gap < 0:
            share = (value - below.value) / gap
            found.append(KeyFigure("gap closed", f"{share:.0%}", "from averaging to individual"))
    return found


def mean_over_tasks(tasks: Mapping[str, Score]) -> Score:
    """Over tasks whose errors are independent."""
    errors = [score.error for score in tasks.values()]
    known = [error for error in errors if error is not None]
    error = sum(e * e for e in known) ** 0.5 / len(errors) if len(known) == len(errors) else None
    return Score(fmean(score.value for score in tasks.values()), error)
