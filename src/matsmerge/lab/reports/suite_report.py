"""The report of a suite, from its results alone."""

from collections.abc import Callable, Mapping
from typing import Any

from matsmerge.lab.experiments.suite_results import INDIVIDUAL, REFERENCES, Row, SuiteResults
from matsmerge.lab.reports.document import (
    Block,
    Heading,
    Items,
    KeyFigure,
    Paragraph,
    Report,
    Section,
    Table,
)
from matsmerge.lab.reports.numbers import choice_text, count, duration, grouped, percent
from matsmerge.lab.reports.paper_numbers import paper_column
from matsmerge.lab.reports.scores import key_figures
from matsmerge.lab.reports.sections import merge_details
from matsmerge.lab.reports.sections.cost_scatter import cost_scatter
from matsmerge.lab.reports.sections.donor_scores import donor_scores
from matsmerge.lab.reports.sections.fisher_ways import fisher_ways
from matsmerge.lab.reports.sections.init_gains import init_gains
from matsmerge.lab.reports.sections.iteration_curves import iteration_curves
from matsmerge.lab.reports.sections.level_sets import level_sets
from matsmerge.lab.reports.sections.score_dots import suite_scores
from matsmerge.lab.reports.sections.subspace_figures import suite_subspaces
from matsmerge.lab.reports.variant import Variant

_SHOWN = 8  # missing steps that are named


def suite_report(results: SuiteResults) -> Report:
    """Everything a suite found; what it did not look for is left out."""
    suite = _Suite(results)
    return Report(
        results.title,
        results.about,
        [Section(title, make(suite)) for title, make in _SECTIONS.items()],
        suite.key_figures(),
        _warnings(results),
        f"matsmerge {results.versions.get('matsmerge', '')}".strip(),
        f"Suite {results.name}",
    )


class _Suite:
    """Results, with the names and the paper's columns that the suite's file gives."""

    def __init__(self, results: SuiteResults) -> None:
        self.results = results
        # The paper's numbers stand beside ours where the setting is the same.
        columns = {} if results.replaced else results.suite.get("paper") or {}
        self.variants = [
            Variant(
                found, name, self.label, *([paper_column(columns[name])] if name in columns else [])
            )
            for name, found in results.variants.items()
        ]

    def label(self, method: str) -> str:
        """As the suite's file calls a method, or its name."""
        about = (self.results.suite.get("methods") or {}).get(method)
        return str((about.get("label") if isinstance(about, dict) else None) or method)

    def named(self, variant: Variant, method: str) -> str:
        name = self.label(method)
        return f"{variant.name}: {name}" if len(self.variants) > 1 else name

    def rows(self, variant: Variant) -> list[Row]:
        """A variant's merges, of the first seed."""
        first = {row.method: row for row in reversed(variant.found.comparison)}
        return [row for row in first.values() if row.method not in REFERENCES]

    def merges(self) -> dict[str, Mapping[str, Any]]:
        """Every merge.json, by the name of its merge."""
        found = {self.named(v, r.method): r.merge for v in self.variants for r in self.rows(v)}
        return {name: merge for name, merge in sorted(found.items()) if merge}

    def key_figures(self) -> list[KeyFigure]:
        names = self.label("average"), self.label(INDIVIDUAL)
        found = {v.name: key_figures(v.table, *names) for v in self.variants if v.table}
        if len(found) == 1:
            return next(iter(found.values()))
        return [
            KeyFigure(f"{figure.label}, {name}", figure.value, figure.note)
            for name, figures in found.items()
            for figure in figures
            if figure.label in ("best merge", "gap closed")
        ]


def _each(make: Callable[[Variant], list[Block]]) -> Callable[[_Suite], list[Block]]:
    """A section of what is made of every variant, under their names where there are several."""

    def blocks(suite: _Suite) -> list[Block]:
        found: list[Block] = []
        for variant in suite.variants:
            if made := make(variant):
                found += [Heading(variant.name)] if len(suite.variants) > 1 else []
                found += made
        return found

    return blocks


def _what_was_merged(suite: _Suite) -> list[Block]:
    results, about = suite.results, suite.results.suite
    tasks = next((v.found.tasks for v in suite.variants if v.found.tasks), [])
    tasks = tasks or list(about.get("tasks") or {})
    base = about.get("base")
    base = base.get("source") if isinstance(base, dict) else base
    methods = (about.get("methods") or {}).values()
    is_tuned = any(m.get("search") for m in methods) or "heat_map" in (about.get("studies") or {})
    text = f"{count(len(tasks), 'model')}, each fine-tuned from {base or 'the same model'} for "
    text += f"one task ({', '.join(tasks)})"
    if len(suite.variants) > 1:
        text += f", in {len(suite.variants)} ways ({', '.join(v.name for v in suite.variants)})"
    if is_tuned:
        text += ". What a method leaves open was chosen by the mean score on validation data"
    else:
        text += ". Settings were fixed beforehand"
    text += f"; test data was scored once, with {count(len(results.seeds), 'seed')}."
    if results.replaced:
        text += f" Local files took the place of the suite's: {'; '.join(results.replaced)}."
    return [Paragraph(text), *(_choices(suite) if is_tuned else [])]


def _choices(suite: _Suite) -> list[Block]:
    """What was chosen for the comparison of all models."""
    rows = [
        [
            suite.named(variant, row.method),
            choice_text(row.chosen) or "nothing to choose",
            str(row.num_tried),
            percent(row.validation),
        ]
        for variant in suite.variants
        for row in sorted(suite.rows(variant), key=lambda row: -(row.validation or 0))
    ]
    seeds = suite.results.seeds
    title = f"Methods (seed {seeds[0]})" if len(seeds) > 1 else "Methods"
    heads = ["method", "chosen by validation", "tried", "validation"]
    return [Table(heads, rows, title)] if rows else []


def _recipes(suite: _Suite) -> list[Block]:
    """Every merge's recipe, the best one's first and open."""
    blocks: list[Block] = []
    for variant in suite.variants:
        best = variant.table.best.name if variant.table and variant.table.best else None
        for row in sorted(suite.rows(variant), key=lambda row: suite.label(row.method) != best):
            if row.recipe:
                is_best = suite.label(row.method) == best
                title = suite.named(variant, row.method)
                title += ", the highest on test data" if is_best else ""
                blocks.append(merge_details.recipe_code(title, row.recipe, folded=not is_best))
    return blocks


def _provenance(suite: _Suite) -> list[Block]:
    results = suite.results
    times = grouped((step.kind, step.seconds) for step in results.steps)
    rows = [[f"{name} version", version] for name, version in results.versions.items()]
    rows += [["commit", results.commit]] if results.commit else []
    rows += [[str(key), str(value)] for key, value in results.machine.items()]
    rows.append(["seeds", ", ".join(map(str, results.seeds))])
    blocks: list[Block] = []
    if times:
        rows.append(["time of all steps", duration(sum(map(sum, times.values())))])
        took = [[kind, str(len(t)), duration(sum(t))] for kind, t in times.items()]
        blocks.append(Table(["step", "times", "took"], took, "Time by kind of step"))
    blocks.insert(0, Table(["", ""], rows, "Where and with what"))
    return [*blocks, Items("Notes", results.notes)] if results.notes else blocks


def _warnings(results: SuiteResults) -> list[Items]:
    """That a suite is not finished, with the first of what is missing."""
    num_missing = len(results.missing)
    if not num_missing:
        return []
    num_steps = num_missing + len(results.steps)
    more = [f"and {num_missing - _SHOWN} more"] if num_missing > _SHOWN else []
    title = f"This suite is not finished: {num_missing} of {num_steps} steps are not done"
    return [Items(title, [*results.missing[:_SHOWN], *more])]


# What is made of each variant is a function in a file of `sections/` and a line here.
_SECTIONS: dict[str, Callable[[_Suite], list[Block]]] = {
    "What was merged": _what_was_merged,
    "Scores": _each(suite_scores),
    "Init and objective": _each(init_gains),
    "Fisher information": _each(fisher_ways),
    "Iterations": _each(iteration_curves),
    "Convergence of layers": lambda suite: merge_details.convergence(suite.merges()),
    "Cost": _each(cost_scatter),
    "Level sets": _each(level_sets),
    "Subspaces": _each(suite_subspaces),
    "Intermediate tasks": _each(donor_scores),
    "Left to otherwise": lambda suite: merge_details.otherwise(suite.merges()),
    "Recipes": _recipes,
    "Provenance": _provenance,
}
