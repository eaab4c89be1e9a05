"""One variant of a suite, with everything a section of its report is made from."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from matsmerge.lab.experiments.score_tables import mean_and_error
from matsmerge.lab.experiments.suite_results import REFERENCES, Row, VariantResults
from matsmerge.lab.reports.numbers import count, grouped
from matsmerge.lab.reports.paper_numbers import NO_COLUMN, PaperColumn
from matsmerge.lab.reports.scores import Score, ScoreRow, ScoreTable, mean_over_tasks


@dataclass(frozen=True)
class Variant:
    """What was found, how the suite calls its methods, and the paper's numbers beside it."""

    found: VariantResults
    name: str = ""
    label: Callable[[str], str] = str
    paper: PaperColumn = NO_COLUMN  # where the setting is that of the paper

    @cached_property
    def rows(self) -> dict[str, list[Row]]:
        """Rows of the comparison by method, in the order of the results."""
        return grouped((row.method, row) for row in self.found.comparison)

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
            "score, percent",
            f"over {count(max(map(len, groups)), 'seed')}" if has_seeds else "over examples",
        )

    def _score_row(self, rows: Sequence[Row], tasks: Sequence[str]) -> ScoreRow:
        method = rows[0].method
        scores = {}
        for task in tasks:
            if values := [row.test.tasks[task] for row in rows if task in row.test.tasks]:
                mean, error = mean_and_error(values)
                error = rows[0].test.errors.get(task) if error is None else error
                if shown := Score.of(mean, error, factor=100):
                    scores[task] = shown
        over_seeds = Score.of(*mean_and_error([row.test.mean for row in rows]), factor=100)
        return ScoreRow(
            self.label(method),
            scores,
            over_seeds if len(rows) > 1 or over_seeds is None else mean_over_tasks(scores),
            is_reference=method in REFERENCES,
            paper=self.paper.mean.get(method),
            paper_tasks={task: self.paper.of_task(method, task) for task in tasks},
        )

    @property
    def mean_scores(self) -> dict[str, float]:
        """Mean test scores by method, of those that are numbers."""
        means = {m: mean_and_error([r.test.mean for r in rows])[0] for m, rows in self.rows.items()}
        return {method: mean for method, mean in means.items() if math.isfinite(mean)}
