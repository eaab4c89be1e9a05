"""Scores of models on tasks: their order, their table, and the numbers that matter most."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from matsmerge.lab.reports.document import Cell, KeyFigure, Table
from matsmerge.lab.reports.numbers import NOTHING, fixed, paper_cell


@dataclass(frozen=True)
class Score:
    """As it is shown, in percent where that is usual, with a standard error if there is one."""

    value: float
    error: float | None = None

    @classmethod
    def of(cls, value: float, error: float | None = None, factor: float = 1.0) -> "Score | None":
        """A score that can be compared; a model that broke has none."""
        value, error = factor * value, None if error is None else factor * error
        known = error is not None and math.isfinite(error)
        return cls(value, error if known else None) if math.isfinite(value) else None


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

    def row(self, name: str) -> ScoreRow | None:
        return next((row for row in self.rows if row.name == name), None)

    def show(self, value: float | None) -> str:
        return fixed(value, self.digits)


def score_rows(table: ScoreTable, title: str = "") -> Table:
    """Every model's scores; the best merge of each column is marked."""
    has_mean = any(row.mean for row in table.rows)
    has_paper = any(row.paper is not None for row in table.rows)
    columns = [[row.mean for row in table.ordered]] if has_mean else []
    columns += [[row.tasks.get(task) for row in table.ordered] for task in table.tasks]
    shown: list[list[Cell | str]] = [[row.name for row in table.ordered]]
    shown += [_column(table, scores) for scores in columns]
    heads = ["", *(["mean"] if has_mean else []), *table.tasks]
    if has_paper:
        place = 1 + has_mean
        heads.insert(place, "paper's mean")
        shown.insert(place, [paper_cell(table.show(row.paper)) for row in table.ordered])
    marked = frozenset(i for i, row in enumerate(table.ordered) if row.is_this)
    return Table(heads, list(map(list, zip(*shown, strict=True))), title, marked)


def _column(table: ScoreTable, scores: Sequence[Score | None]) -> list[Cell | str]:
    pairs = zip(table.ordered, scores, strict=True)
    merges = [score.value for row, score in pairs if score and not row.is_reference]
    # With one merge, being the best of all says nothing.
    best = (max if table.higher_is_better else min)(merges) if len(merges) > 1 else None
    return [
        Cell(
            table.show(score.value),
            "" if score.error is None else table.show(score.error),
            not row.is_reference and score.value == best,
        )
        if score
        else NOTHING
        for row, score in zip(table.ordered, scores, strict=True)
    ]


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
    this = next((row for row in table.rows if row.is_this and row.mean), None)
    subject, best = this or table.best, table.best
    below, above = table.row(average), table.row(individual)
    if subject is None or subject.mean is None:
        return []
    value = subject.mean.value
    error = "" if subject.mean.error is None else f" ± {table.show(subject.mean.error)}"
    label, note = ("this merge", table.unit) if this else ("best merge", subject.name)
    found = [KeyFigure(label, table.show(value) + error, note)]
    if this and best is not None and best is not this and best.mean:
        found.append(KeyFigure("best of those scored", table.show(best.mean.value), best.name))
    if above and above.mean:
        difference = f"{value - above.mean.value:+.{table.digits}f}".replace("-", "−")
        found.append(
            KeyFigure("individual models", table.show(above.mean.value), f"{label}: {difference}")
        )
    if below and below.mean and below is not subject:
        found.append(KeyFigure("plain averaging", table.show(below.mean.value), "the simplest"))
        gap = above.mean.value - below.mean.value if above and above.mean else 0.0
        if gap > 0 if table.higher_is_better else gap < 0:
            share = (value - below.mean.value) / gap
            found.append(KeyFigure("gap closed", f"{share:.0%}", "from averaging to individual"))
    return found


def mean_over_tasks(tasks: Mapping[str, Score]) -> Score:
    """Over tasks whose errors are independent."""
    errors = [score.error for score in tasks.values()]
    known = [error for error in errors if error is not None]
    error = sum(e * e for e in known) ** 0.5 / len(errors) if len(known) == len(errors) else None
    return Score(fmean(score.value for score in tasks.values()), error)
