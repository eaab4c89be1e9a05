"""Scores of models on tasks: the chart that compares them, and the table by task."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from matsmerge.reports import score_figures
from matsmerge.reports.document import Block, Cell, Figure, KeyFigure, Table
from matsmerge.reports.numbers import NOTHING


@dataclass(frozen=True)
class Score:
    """As it is shown, in percent where that is usual, with a standard error if there is one."""

    value: float
    error: float | None = None

    @classmethod
    def of(cls, value: float, error: float | None = None) -> "Score | None":
        """A score that can be compared; a model that broke has none."""
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
    paper_tasks: Mapping[str, float | None] | None = None


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
        return NOTHING if value is None else f"{value:.{self.digits}f}"


def score_blocks(table: ScoreTable, title: str = "") -> list[Block]:
    """The charts and the tables."""
    blocks: list[Block] = []
    ours = score_rows(table)
    if any(row.mean for row in table.rows):
        blocks.append(_comparison(table, ours))
    if len(table.tasks) > 1:
        blocks.append(_by_task(table, ours))
    blocks.append(Table(ours.heads, ours.rows, title or f"Test scores: {table.unit}", ours.marked))
    papers = paper_rows(table)
    return [*blocks, papers] if papers else blocks


def score_rows(table: ScoreTable) -> Table:
    """Every model's scores; the best merge of each column is marked."""
    has_mean = any(row.mean for row in table.rows)
    has_paper = any(row.paper is not None for row in table.rows)
    heads = ["", *(["mean"] if has_mean else []), *(["paper's mean"] if has_paper else [])]
    rows = []
    for row in table.ordered:
        cells: list[Cell | str] = [row.name]
        if has_mean:
            cells.append(_cell(table, row, row.mean, [r.mean for r in _merges(table)]))
        if has_paper:
            cells.append(Cell(table.show(row.paper), papers=True))
        for task in table.tasks:
            others = [r.tasks.get(task) for r in _merges(table)]
            cells.append(_cell(table, row, row.tasks.get(task), others))
        rows.append(cells)
    marked = frozenset(i for i, row in enumerate(table.ordered) if row.is_this)
    return Table([*heads, *table.tasks], rows, marked=marked)


def paper_rows(table: ScoreTable) -> Table | None:
    """The paper's scores by task, where it has them."""
    rows = [row for row in table.ordered if any((row.paper_tasks or {}).values())]
    if not rows:
        return None
    cells: list[list[Cell | str]] = [
        [
            row.name,
            *(Cell(table.show((row.paper_tasks or {}).get(t)), papers=True) for t in table.tasks),
        ]
        for row in rows
    ]
    return Table(["the paper's", *table.tasks], cells, "The paper's numbers, by task", folded=True)


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


def _merges(table: ScoreTable) -> list[ScoreRow]:
    return [row for row in table.rows if not row.is_reference]


def _cell(
    table: ScoreTable, row: ScoreRow, score: Score | None, others: Sequence[Score | None]
) -> Cell:
    if score is None:
        return Cell(NOTHING)
    values = [other.value for other in others if other is not None]
    # With one merge, being the best of all says nothing.
    best = not row.is_reference and len(values) > 1
    best = best and score.value == (max if table.higher_is_better else min)(values)
    return Cell(
        table.show(score.value), "" if score.error is None else table.show(score.error), best
    )


def _comparison(table: ScoreTable, behind: Table) -> Figure:
    rows = [row for row in table.ordered if row.mean]
    top = table.best
    seen = f"{top.name} is the best merge on test data" if top else "No merge was scored"
    num = f"the mean over {len(table.tasks)} tasks" if len(table.tasks) > 1 else table.tasks[0]
    caption = f"{seen}; {table.unit}, {num}, with standard errors {table.errors}."
    if any(row.is_reference for row in rows):
        caption += " Grey diamonds are references; the dotted line is the individual models'."
    this = any(row.is_this for row in rows)
    return score_figures.dots(
        "Merges compared",
        caption,
        [
            score_figures.Dot(
                row.name,
                row.mean.value,
                row.mean.error,
                row.is_reference,
                row.is_this if this else row is top,
                row.paper,
            )
            for row in rows
            if row.mean
        ],
        next((row.mean.value for row in rows if row.name == "individual" and row.mean), None),
        table.unit,
        table.show,
        behind,
        "this merge" if this else "the best",
    )


def _by_task(table: ScoreTable, behind: Table) -> Figure:
    means = [(row.mean.value if row.mean else 0.0, row.is_reference) for row in table.ordered]
    low = score_figures.lowest_shown(means)
    rows = [r for r, (mean, _) in zip(table.ordered, means, strict=True) if mean >= low]
    left_out = [row.name for row in table.ordered if row not in rows]
    also = f" Left out, far below: {', '.join(left_out)}." if left_out else ""
    chosen = [row for row in rows if not row.is_reference][:1] + [
        row for row in rows if row.is_this
    ]
    best = chosen[-1].name if chosen else rows[0].name
    return score_figures.dots_by_task(
        "Task by task",
        f"Every task's scores: {best} in colour, individual models as diamonds, all others small; "
        f"a name in the legend hides or shows its points.{also}",
        table.tasks,
        {
            row.name: [s.value if (s := row.tasks.get(t)) else None for t in table.tasks]
            for row in rows
        },
        best,
        [row.name for row in rows if row.is_reference],
        table.unit,
        behind,
    )


def mean_of(tasks: Mapping[str, Score]) -> Score:
    """Over tasks whose errors are independent."""
    errors = [score.error for score in tasks.values()]
    known = [error for error in errors if error is not None]
    error = sum(e * e for e in known) ** 0.5 / len(errors) if len(known) == len(errors) else None
    return Score(fmean(score.value for score in tasks.values()), error)
