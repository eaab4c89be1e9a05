"""The report of a suite, from its results alone."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from matsmerge.lab.experiments.score_tables import grouped
from matsmerge.lab.experiments.suite_results import STEPS, MethodRow, SuiteResults
from matsmerge.lab.reports import document as doc
from matsmerge.lab.reports.headline import loading, verdict
from matsmerge.lab.reports.numbers import choice_text, count, duration, percent
from matsmerge.lab.reports.paper_numbers import NO_COLUMN, paper_column
from matsmerge.lab.reports.sections import merge_details
from matsmerge.lab.reports.sections.cost_scatter import cost_scatter
from matsmerge.lab.reports.sections.donor_scores import donor_scores
from matsmerge.lab.reports.sections.fisher_ways import fisher_ways
from matsmerge.lab.reports.sections.init_gains import init_gains
from matsmerge.lab.reports.sections.iteration_curves import iteration_curves
from matsmerge.lab.reports.sections.level_sets import level_sets
from matsmerge.lab.reports.sections.rank_curves import rank_curves
from matsmerge.lab.reports.sections.score_table import suite_scores
from matsmerge.lab.reports.sections.subspace_figures import overlap_blocks
from matsmerge.lab.reports.variant import Variant
from matsmerge.lab.tuning.trials import MODEL
from matsmerge.problems import shortened


def suite_report(results: SuiteResults, run: Path | None = None, beside: str = "") -> doc.Report:
    """Everything a suite found; what it did not look for is left out.

    In the folder of its `run`, if that is known, models are looked for; `beside` is how the folder
    is called where the report is read.
    """
    variants = _variants(results)
    merges = {v.named(row.method): row.merge for v in variants for row in _ranked(v) if row.merge}

    def each(make: Callable[[Variant], list[doc.Block]]) -> list[doc.Block]:
        """What is made of every variant, under their names where there are several."""
        found: list[doc.Block] = []
        for variant in variants:
            if made := make(variant):
                found += [doc.Heading(variant.name), *made] if len(variants) > 1 else made
        return found

    # What is made of each variant is a function in a file of `sections/` and a line here.
    sections: dict[str, list[doc.Block]] = {
        "Scores": each(suite_scores),
        "What was merged": _what_was_merged(results, variants),
        "Init and objective": each(init_gains),
        "Fisher information": each(fisher_ways),
        "Iterations": each(iteration_curves),
        "Rank of statistics": each(rank_curves),
        "Convergence of layers": merge_details.convergence(merges),
        "Cost": each(cost_scatter),
        "Level sets": each(level_sets),
        "Subspaces": each(lambda variant: overlap_blocks(variant.found.subspaces)),
        "Intermediate tasks": each(donor_scores),
        "Recipes": [code for variant in variants for code in _recipes(variant)],
        "Provenance": _provenance(results),
        "Parameters that were not solved": merge_details.otherwise(merges),
    }
    return doc.Report(
        results.title,
        results.about,
        [doc.ReportSection(title, blocks) for title, blocks in sections.items()],
        [found for v in variants if (found := _verdict(results, v, run, beside))],
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


def _verdict(
    results: SuiteResults, variant: Variant, run: Path | None, beside: str
) -> doc.Verdict | None:
    if variant.table is None:
        return None
    training = (results.suite.get("variants") or {}).get(variant.name, {}).get("training") or {}
    found = verdict(
        variant.table,
        len(variant.table.tasks),
        variant.label("average"),
        smaller=training.get("adapter", "full") == "full",
        name=variant.name if variant.is_one_of_several else "",
    )
    if found is None or run is None:
        return found
    row = _ranked(variant)[0]
    name = f"merge {variant.name} {row.seed} {row.method}"
    keys = [step.key[:12] for step in results.steps if step.name == name]
    folders = [path for key in keys for path in run.glob(f"{STEPS}/*-{key}/{MODEL}")]
    if not folders:
        return found
    place = (PurePosixPath(beside) / folders[0].relative_to(run).as_posix()).as_posix()
    tasks = list((row.merge or {}).get("heads") or {})
    return replace(found, code=loading(place, tasks))


def _ranked(variant: Variant) -> list[MethodRow]:
    """The merges of the first seed, in the order of the table."""
    order = [row.name for row in variant.table.ordered] if variant.table else []
    return sorted(variant.merges, key=lambda row: order.index(variant.label(row.method)))


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
    blocks: list[doc.Block] = []
    for i, row in enumerate(_ranked(variant)):
        if row.recipe:
            title = variant.named(row.method) + ("" if i else ", the highest on test data")
            blocks.append(merge_details.recipe_code(title, row.recipe, folded=i > 0))
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
