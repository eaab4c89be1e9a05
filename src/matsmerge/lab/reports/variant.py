"""One variant of a suite, with everything a section of its report is made from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from matsmerge.lab.evaluation.results import INDIVIDUAL
from matsmerge.lab.experiments.score_tables import grouped
from matsmerge.lab.experiments.suite_results import REFERENCES, MethodRow, Scores, VariantResults
from matsmerge.lab.reports.numbers import count
from matsmerge.lab.reports.paired_interval import TaskScore
from matsmerge.lab.reports.paper_numbers import NO_COLUMN, PaperColumn
from matsmerge.lab.reports.scores import ScoreRow, ScoreTable, ShownScore, mean_over_tasks


@dataclass(frozen=True)
class Variant:
    """What was found, how the suite calls its methods, and the paper's numbers beside it."""

    found: VariantResults
    name: str = ""
    label: Callable[[str], str] = str
    paper: PaperColumn = NO_COLUMN  # where the setting is that of the paper
    is_one_of_several: bool = False

    def named(self, method: str) -> str:
        """A method's label, with the variant's name where there are several."""
        label = self.label(method)
        return f"{self.name}: {label}" if self.is_one_of_several else label

    @cached_property
    def rows(self) -> dict[str, list[MethodRow]]:
        """Rows of the comparison by method, in the order of the results."""
        return grouped((row.method, row) for row in self.found.comparison)

    @property
    def merges(self) -> list[MethodRow]:
        """The merges of the first seed, the last one first; references are none."""
        methods = [method for method in reversed(self.rows) if method not in REFERENCES]
        return [self.rows[method][0] for method in methods]

    @cached_property
    def table(self) -> ScoreTable | None:
        """Every method over its seeds, in percent; None where nothing was compared."""
        if not self.found.comparison:
            return None
        groups = list(self.rows.values())
        tasks = list(self.found.tasks) or list(groups[0][0].test.tasks)
        has_seeds = any(len(group) > 1 for group in groups)
        return ScoreTable(
            tasks,
            [self._score_row(group, tasks) for group in groups],
            "score in percent",
            f"over {count(max(map(len, groups)), 'seed')}" if has_seeds else "over examples",
            self.label(INDIVIDUAL),
        )

    def _score_row(self, rows: Sequence[MethodRow], tasks: Sequence[str]) -> ScoreRow:
        method, scores = rows[0].method, {}
        for task in tasks:
            shares = [row.test.tasks[task] for row in rows if task in row.test.tasks]
            if score := ShownScore.over_seeds(shares, rows[0].test.errors.get(task)):
                scores[task] = score
        over_seeds = ShownScore.over_seeds([row.test.mean for row in rows])
        return ScoreRow(
            self.label(method),
            scores,
            over_seeds if len(rows) > 1 or over_seeds is None else mean_over_tasks(scores),
            is_reference=method in REFERENCES,
            paper=self.paper.mean.get(method),
            paper_tasks={task: self.paper.of_task(method, task) for task in tasks},
            scored={row.seed: _scored(row.test) for row in rows},
        )

    @property
    def mean_scores(self) -> dict[str, float]:
        """Mean test scores by method in percent, of those that are numbers: those of the table."""
        rows = self.table.rows if self.table else []
        return {m: row.mean.value for m, row in zip(self.rows, rows, strict=True) if row.mean}


def _scored(scores: Scores) -> dict[str, TaskScore]:
    return {
        task: TaskScore(value, scores.errors.get(task), scores.right.get(task, ""))
        for task, value in scores.tasks.items()
    }
