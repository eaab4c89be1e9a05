"""The report of a suite, from its results alone."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matsmerge.experiments.results import (
    INDIVIDUAL,
    REFERENCES,
    Row,
    StepRecord,
    SuiteResults,
    VariantResults,
)
from matsmerge.experiments.summary import mean_and_error
from matsmerge.reports import merge_details, studies
from matsmerge.reports.document import (
    Block,
    Caution,
    Heading,
    Items,
    KeyFigure,
    Paragraph,
    Report,
    Section,
    Table,
)
from matsmerge.reports.numbers import choice_text, count, duration, percent
from matsmerge.reports.paper_numbers import PaperColumn, paper_column
from matsmerge.reports.scores import (
    Score,
    ScoreRow,
    ScoreTable,
    key_figures,
    mean_of,
    score_blocks,
)

AVERAGE = "average"
_SHOWN = 8  # missing steps that are named


def suite_report(results: SuiteResults) -> Report:
    """Everything a suite found; what it did not look for is left out."""
    suite = _Suite(results)
    merges = suite.merges()
    sections = [
        Section("What was merged", suite.what_was_merged()),
        Section("Scores", suite.each(lambda v: _score_blocks(v))),
        Section(
            "Init and objective", suite.each(lambda v: studies.heat_map(v.found.heat_map, v.label))
        ),
        Section(
            "Fisher information",
            suite.each(lambda v: studies.fisher(v.found.fisher, v.label, v.paper)),
        ),
        Section("Iterations", suite.each(lambda v: studies.curves(v.found.curves, v.label))),
        Section("Convergence of layers", merge_details.convergence(merges)),
        Section(
            "Cost",
            suite.each(lambda v: studies.costs(v.found.costs, v.mean_scores(), v.label, v.paper)),
        ),
        Section("Level sets", suite.each(lambda v: studies.landscape(v.found.landscape, v.label))),
        Section("Subspaces", suite.each(lambda v: studies.subspaces(v.found.subspaces))),
        Section(
            "Intermediate tasks",
            suite.each(
                lambda v: studies.intermediate(
                    v.found.intermediate, v.found.target, v.label, v.paper
                )
            ),
        ),
        Section("Left to otherwise", merge_details.otherwise(merges)),
        Section("Recipes", suite.recipes()),
        Section("Provenance", _provenance(results)),
    ]
    return Report(
        results.title,
        results.about,
        sections,
        suite.key_figures(),
        _warnings(results),
        f"matsmerge {results.versions.get('matsmerge', '')}".strip(),
        f"Suite {results.name}",
    )


def method_label(results: SuiteResults, method: str) -> str:
    """As the suite's file calls a method, or its name."""
    about = (results.suite.get("methods") or {}).get(method)
    given = about.get("label") if isinstance(about, dict) else None
    return str(given or method)


def comparison_table(
    variant: VariantResults,
    label: Callable[[str], str] = str,
    paper: PaperColumn | None = None,
) -> ScoreTable | None:
    """Every method over its seeds, in percent; None where nothing was compared."""
    if not variant.comparison:
        return None
    methods = list(dict.fromkeys(row.method for row in variant.comparison))
    groups = [[r for r in variant.comparison if r.method == method] for method in methods]
    tasks = list(variant.tasks) or list(groups[0][0].test.tasks)
    has_seeds = any(len(group) > 1 for group in groups)
    return ScoreTable(
        tasks,
        [_score_row(group, tasks, label, paper) for group in groups],
        "score, percent",
        f"over {count(max(map(len, groups)), 'seed')}" if has_seeds else "over examples",
    )


def _score_row(
    rows: Sequence[Row],
    tasks: Sequence[str],
    label: Callable[[str], str],
    paper: PaperColumn | None,
) -> ScoreRow:
    method = rows[0].method
    scores = {}
    for task in tasks:
        values = [row.test.tasks[task] for row in rows if task in row.test.tasks]
        if values:
            mean, error = mean_and_error(values)
            if error is None:
                error = rows[0].test.errors.get(task)
            if shown := Score.of(100 * mean, None if error is None else 100 * error):
                scores[task] = shown
    mean, error = mean_and_error([row.test.mean for row in rows])
    over_seeds = Score.of(100 * mean, None if error is None else 100 * error)
    return ScoreRow(
        label(method),
        scores,
        over_seeds if len(rows) > 1 or over_seeds is None else mean_of(scores),
        is_reference=method in REFERENCES,
        paper=None if paper is None else paper.mean.get(method),
        paper_tasks=None if paper is None else {t: paper.of_task(method, t) for t in tasks},
    )


@dataclass(frozen=True)
class _Variant:
    name: str
    found: VariantResults
    label: Callable[[str], str]
    paper: PaperColumn | None

    @property
    def table(self) -> ScoreTable | None:
        return comparison_table(self.found, self.label, self.paper)

    def mean_scores(self) -> dict[str, float]:
        methods = {row.method for row in self.found.comparison}
        return {
            m: mean_and_error([r.test.mean for r in self.found.comparison if r.method == m])[0]
            for m in methods
        }


class _Suite:
    """Results, with the names and the paper's columns that the suite's file gives."""

    def __init__(self, results: SuiteResults) -> None:
        self.results = results
        # The paper's numbers stand beside ours where the setting is the same.
        columns = {} if results.replaced else results.suite.get("paper") or {}
        self.variants = [
            _Variant(
                name, found, self.label, paper_column(columns[name]) if name in columns else None
            )
            for name, found in results.variants.items()
        ]

    def label(self, method: str) -> str:
        return method_label(self.results, method)

    def each(self, make: Callable[[_Variant], list[Block]]) -> list[Block]:
        """The blocks of all variants, under their names where there are several."""
        blocks: list[Block] = []
        for variant in self.variants:
            if made := make(variant):
                blocks += [Heading(variant.name)] if len(self.variants) > 1 else []
                blocks += made
        return blocks

    def _named(self, variant: _Variant, method: str) -> str:
        name = self.label(method)
        return f"{variant.name}: {name}" if len(self.variants) > 1 else name

    def _rows(self) -> list[tuple[_Variant, Row]]:
        """Of the first seed, merges only."""
        return [
            (variant, row)
            for variant in self.variants
            for row in {r.method: r for r in reversed(variant.found.comparison)}.values()
            if row.method not in REFERENCES
        ]

    def merges(self) -> dict[str, Mapping[str, Any]]:
        found = {self._named(v, row.method): row.merge for v, row in self._rows()}
        return {name: found[name] or {} for name in sorted(found) if found[name]}

    def what_was_merged(self) -> list[Block]:
        results, suite = self.results, self.results.suite
        tasks = next((v.found.tasks for v in self.variants if v.found.tasks), [])
        tasks = tasks or list(suite.get("tasks") or {})
        base = suite.get("base")
        base = base.get("source") if isinstance(base, dict) else base
        text = f"{count(len(tasks), 'model')}, each fine-tuned from {base or 'the same model'} for "
        text += f"one task ({', '.join(tasks)})"
        if len(self.variants) > 1:
            text += f", in {len(self.variants)} ways ({', '.join(v.name for v in self.variants)})"
        if self._is_tuned:
            text += ". What a method leaves open was chosen by the mean score on validation data"
        else:
            text += ". Settings were fixed beforehand"
        text += f"; test data was scored once, with {count(len(results.seeds), 'seed')}."
        if results.replaced:
            text += f" Local files took the place of the suite's: {'; '.join(results.replaced)}."
        return [Paragraph(text), *(self._choices() if self._is_tuned else [])]

    @property
    def _is_tuned(self) -> bool:
        """Is there anything to choose?"""
        suite = self.results.suite
        methods = (suite.get("methods") or {}).values()
        return any(m.get("search") for m in methods) or "heat_map" in (suite.get("studies") or {})

    def _choices(self) -> list[Block]:
        """What was chosen for the comparison of all models."""
        rows = []
        order = [variant.name for variant in self.variants]
        for variant, row in sorted(
            self._rows(), key=lambda pair: (order.index(pair[0].name), -(pair[1].validation or 0))
        ):
            rows.append(
                [
                    self._named(variant, row.method),
                    choice_text(row.chosen) or "nothing to choose",
                    str(row.num_tried),
                    percent(row.validation),
                ]
            )
        seeds = self.results.seeds
        title = f"Methods (seed {seeds[0]})" if len(seeds) > 1 else "Methods"
        heads = ["method", "chosen by validation", "tried", "validation"]
        return [Table(heads, rows, title)] if rows else []

    def key_figures(self) -> list[KeyFigure]:
        tables = [(v.name, table) for v in self.variants if (table := v.table)]
        if len(tables) == 1:
            return key_figures(tables[0][1], self.label(AVERAGE), self.label(INDIVIDUAL))
        found = []
        for name, table in tables:
            for figure in key_figures(table, self.label(AVERAGE), self.label(INDIVIDUAL)):
                if figure.label in ("best merge", "gap closed"):
                    found.append(KeyFigure(f"{figure.label}, {name}", figure.value, figure.note))
        return found

    def recipes(self) -> list[Block]:
        blocks: list[Block] = []
        for variant in self.variants:
            table = variant.table
            best = table.best.name if table and table.best else None
            rows = [row for v, row in self._rows() if v is variant and row.recipe]
            for row in sorted(rows, key=lambda row: self.label(row.method) != best):
                is_best = self.label(row.method) == best
                title = self._named(variant, row.method) + (
                    ", the highest on test data" if is_best else ""
                )
                blocks.append(
                    merge_details.recipe_code(title, row.recipe or {}, folded=not is_best)
                )
        return blocks


def _score_blocks(variant: _Variant) -> list[Block]:
    table = variant.table
    if table is None:
        return []
    blocks = score_blocks(table, f"Test scores in percent, with standard errors {table.errors}")
    if variant.paper is not None:
        text = f"The paper's numbers are from its own setting: {variant.paper.setting}."
        blocks.append(Paragraph(text))
    return blocks


def _warnings(results: SuiteResults) -> list[Caution]:
    """That a suite is not finished, with the first of what is missing."""
    num_missing = len(results.missing)
    if not num_missing:
        return []
    num_steps = num_missing + len(results.steps)
    more = [f"and {num_missing - _SHOWN} more"] if num_missing > _SHOWN else []
    title = f"This suite is not finished: {num_missing} of {num_steps} steps are not done"
    return [Caution(title, [*results.missing[:_SHOWN], *more])]


def _provenance(results: SuiteResults) -> list[Block]:
    rows = [[f"{name} version", version] for name, version in results.versions.items()]
    rows += [["commit", results.commit]] if results.commit else []
    rows += [[str(key), str(value)] for key, value in results.machine.items()]
    rows.append(["seeds", ", ".join(map(str, results.seeds))])
    rows += _total(results.steps)
    times = studies.step_times((step.kind, step.seconds) for step in results.steps)
    blocks: list[Block] = [Table(["", ""], rows, "Where and with what")]
    blocks += [times] if times else []
    return [*blocks, Items("Notes", results.notes)] if results.notes else blocks


def _total(steps: Sequence[StepRecord]) -> list[list[str]]:
    if not steps:
        return []
    return [["time of all steps", duration(sum(step.seconds for step in steps))]]
