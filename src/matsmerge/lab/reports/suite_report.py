"""The report of a suite, from its results alone."""

from collections.abc import Callable, Sequence

from matsmerge.lab.experiments.score_tables import grouped
from matsmerge.lab.experiments.suite_results import INDIVIDUAL, SuiteResults
from matsmerge.lab.reports import document as doc
from matsmerge.lab.reports.numbers import choice_text, count, duration, percent
from matsmerge.lab.reports.paper_numbers import NO_COLUMN, paper_column
from matsmerge.lab.reports.scores import key_figures
from matsmerge.lab.reports.sections import merge_details
from matsmerge.lab.reports.sections.cost_scatter import cost_scatter
from matsmerge.lab.reports.sections.donor_scores import donor_scores
from matsmerge.lab.reports.sections.fisher_ways import fisher_ways
from matsmerge.lab.reports.sections.init_gains import init_gains
from matsmerge.lab.reports.sections.iteration_curves import iteration_curves
from matsmerge.lab.reports.sections.level_sets import level_sets
from matsmerge.lab.reports.sections.rank_curves import rank_curves
from matsmerge.lab.reports.sections.score_dots import suite_scores
from matsmerge.lab.reports.sections.subspace_figures import overlap_blocks
from matsmerge.lab.reports.variant import Variant
from matsmerge.problems import shortened


def suite_report(results: SuiteResults) -> doc.Report:
    """Everything a suite found; what it did not look for is left out."""
    variants = _variants(results)
    merges = {v.named(row.method): row.merge for v in variants for row in v.merges if row.merge}
    merges = dict(sorted(merges.items()))

    def each(make: Callable[[Variant], list[doc.Block]]) -> list[doc.Block]:
        """What is made of every variant, under their names where there are several."""
        found: list[doc.Block] = []
        for variant in variants:
            if made := make(variant):
                found += [doc.Heading(variant.name), *made] if len(variants) > 1 else made
        return found

    # What is made of each variant is a function in a file of `sections/` and a line here.
    sections: dict[str, list[doc.Block]] = {
        "What was merged": _what_was_merged(results, variants),
        "Scores": each(suite_scores),
        "Init and objective": each(init_gains),
        "Fisher information": each(fisher_ways),
        "Iterations": each(iteration_curves),
        "Rank of statistics": each(rank_curves),
        "Convergence of layers": merge_details.convergence(merges),
        "Cost": each(cost_scatter),
        "Level sets": each(level_sets),
        "Subspaces": each(lambda variant: overlap_blocks(variant.found.subspaces)),
        "Intermediate tasks": each(donor_scores),
        "Left to otherwise": merge_details.otherwise(merges),
        "Recipes": [code for variant in variants for code in _recipes(variant)],
        "Provenance": _provenance(results),
    }
    return doc.Report(
        results.title,
        results.about,
        [doc.Section(title, blocks) for title, blocks in sections.items()],
        _key_figures(variants),
        _warnings(results),
        f"matsmerge {results.versions.get('matsmerge', '')}".strip(),
        f"Suite {results.name}",
    )


def _variants(results: SuiteResults) -> list[Variant]:
    """The suite's variants, with the labels and the paper's columns that its file names."""
    about = results.suite.get("methods") or {}
    # The paper's numbers stand beside ours where the setting is the same.
    columns = {} if results.replaced else results.suite.get("paper") or {}

    def label(method: str) -> str:
        return str(about.get(method, {}).get("label") or method)

    return [
        Variant(
            found,
            name,
            label,
            paper_column(columns[name]) if name in columns else NO_COLUMN,
            len(results.variants) > 1,
        )
        for name, found in results.variants.items()
    ]


def _key_figures(variants: Sequence[Variant]) -> list[doc.KeyFigure]:
    found = {
        v.name: key_figures(v.table, v.label("average"), v.label(INDIVIDUAL))
        for v in variants
        if v.table
    }
    if len(found) == 1:
        return next(iter(found.values()))
    return [
        doc.KeyFigure(f"{figure.label}, {name}", figure.value, figure.note)
        for name, figures in found.items()
        for figure in figures
        if figure.label in ("best merge", "gap closed")
    ]


def _what_was_merged(results: SuiteResults, variants: Sequence[Variant]) -> list[doc.Block]:
    about = results.suite
    tasks = next((v.found.tasks for v in variants if v.found.tasks), [])
    tasks = tasks or list(about.get("tasks") or {})
    base = about.get("base")
    base = base.get("source") if isinstance(base, dict) else base
    methods = about.get("methods") or {}
    is_tuned = any(m.get("search") for m in methods.values()) or "heat_map" in (
        about.get("studies") or {}
    )
    text = f"{count(len(tasks), 'model')}, each fine-tuned from {base or 'the same model'} for "
    text += f"one task ({', '.join(tasks)})"
    if len(variants) > 1:
        text += f", in {len(variants)} ways ({', '.join(v.name for v in variants)})"
    if is_tuned:
        text += ". What a method leaves open was chosen by the mean score on validation data"
        if named := [m for m, of in methods.items() if of.get("unlabelled")]:
            text += f", of {', '.join(named)} by the distance to each task's own model instead"
    else:
        text += ". Settings were fixed beforehand"
    text += f"; test data was scored once, with {count(len(results.seeds), 'seed')}."
    if results.replaced:
        text += f" Local files took the place of the suite's: {'; '.join(results.replaced)}."
    return [doc.Paragraph(text), *(_choices(results.seeds, variants) if is_tuned else [])]


def _choices(seeds: Sequence[int], variants: Sequence[Variant]) -> list[doc.Block]:
    """What was chosen for the comparison of all models."""
    rows = [
        [
            variant.named(row.method),
            choice_text(row.chosen) or "nothing to choose",
            str(row.num_tried),
            percent(row.validation),
        ]
        for variant in variants
        for row in sorted(variant.merges, key=lambda row: -(row.validation or 0))
    ]
    title = f"Methods (seed {seeds[0]})" if len(seeds) > 1 else "Methods"
    heads = ["method", "chosen", "tried", "validation"]
    return [doc.Table(heads, rows, title)] if rows else []


def _recipes(variant: Variant) -> list[doc.Block]:
    """Every merge's recipe, the best one's first and open."""
    best = variant.table.best.name if variant.table and variant.table.best else None
    blocks: list[doc.Block] = []
    for row in sorted(variant.merges, key=lambda row: variant.label(row.method) != best):
        if row.recipe:
            is_best = variant.label(row.method) == best
            title = variant.named(row.method) + ", the highest on test data" * is_best
            blocks.append(merge_details.recipe_code(title, row.recipe, folded=not is_best))
    return blocks


def _provenance(results: SuiteResults) -> list[doc.Block]:
    times = grouped((step.kind, step.seconds) for step in results.steps)
    rows = [[f"{name} version", version] for name, version in results.versions.items()]
    rows += [["commit", results.commit]] if results.commit else []
    rows += [[str(key), str(value)] for key, value in results.machine.items()]
    rows.append(["seeds", ", ".join(map(str, results.seeds))])
    blocks: list[doc.Block] = []
    if times:
        rows.append(["time of all steps", duration(sum(map(sum, times.values())))])
        took = [[kind, str(len(t)), duration(sum(t))] for kind, t in times.items()]
        blocks.append(doc.Table(["step", "times", "took"], took, "Time by kind of step"))
    notes = [doc.Items("Notes", results.notes)] if results.notes else []
    return [doc.Table(["", ""], rows, "Where and with what"), *blocks, *notes]


def _warnings(results: SuiteResults) -> list[doc.Items]:
    """That a suite is not finished, with the first of what is missing."""
    num_missing = len(results.missing)
    if not num_missing:
        return []
    num_steps = num_missing + len(results.steps)
    title = f"This suite is not finished: {num_missing} of {num_steps} steps are not done"
    return [doc.Items(title, shortened(results.missing))]
