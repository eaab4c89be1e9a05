"""The report of one merge: its folder, scores if there are any, and what was tried."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from matsmerge.checkpoints.fingerprint import fingerprint
from matsmerge.checkpoints.source import open_checkpoint
from matsmerge.engine.merge_file import read_merge_file
from matsmerge.engine.output_folder import MANIFEST
from matsmerge.errors import CheckpointError, DataError
from matsmerge.lab.evaluation import metrics as evaluation_metrics
from matsmerge.lab.evaluation.results import ENSEMBLE, INDIVIDUAL, Reading, Results
from matsmerge.lab.evaluation.results_folder import RESULTS, read_evaluation
from matsmerge.lab.experiments.suite_results import REFERENCES
from matsmerge.lab.reports import document as doc
from matsmerge.lab.reports.headline import loading, verdict
from matsmerge.lab.reports.numbers import NOTHING, count
from matsmerge.lab.reports.paired_interval import TaskScore
from matsmerge.lab.reports.scores import ScoreRow, ScoreTable, ShownScore
from matsmerge.lab.reports.sections import merge_details
from matsmerge.lab.reports.sections.score_table import score_blocks
from matsmerge.lab.reports.sections.subspace_figures import overlap_blocks
from matsmerge.lab.reports.sections.tuning_trials import tuning_trials
from matsmerge.lab.tuning.trials import MODEL, REPORT, read_tuning_report


def merge_report(
    folder: Path,
    scores: Sequence[Path] = (),
    subspaces: Mapping[str, Any] | str | None = None,
    beside: str = "",
) -> doc.Report:
    """Of a merged model's folder, or of a tuned one's; `subspaces`, or why there are none.

    `beside` is how the folder is called where the report is read.
    """
    content = read_merge_file(folder / MANIFEST)
    tuning = read_tuning_report(folder / REPORT) if (folder / REPORT).exists() else {}
    table = _score_table(_read_scores(scores), folder, content) if scores else None
    recipe = content["recipe"]
    method = merge_details.describe_method(recipe)
    name = method.partition(" (")[0]
    models = [_model_name(entry) for entry in recipe["models"]]
    base = f" from {merge_details.short_source(recipe['base'])}" if recipe.get("base") else ""
    title = f"{count(len(models), 'model')} merged by {name}"
    # What a report has is made by a function in a file of `sections/`, or here.
    sections: dict[str, list[doc.Block]] = {
        "Scores": score_blocks(table) if table else [],
        "What was merged": _what_was_merged(content),
        "What was tried": tuning_trials(tuning),
        "Convergence of layers": merge_details.convergence({name: content}),
        "Subspaces": [doc.Paragraph(subspaces)]
        if isinstance(subspaces, str)
        else overlap_blocks(subspaces),
        "Recipe": [merge_details.recipe_code("recipe.yaml", recipe)],
        "Provenance": _provenance(content, tuning),
        "Parameters that were not solved": merge_details.otherwise({name: content}),
    }
    return doc.Report(
        title,
        f"{', '.join(models)}: each fine-tuned{base}, now one model, merged by {method}.",
        [doc.ReportSection(title, blocks) for title, blocks in sections.items()],
        [_verdict(title, table, content, folder, beside)],
        made_by=f"matsmerge {content.get('versions', {}).get('matsmerge', '')}".strip(),
    )


def _read_scores(folders: Sequence[Path]) -> Results:
    """Of one evaluation or several: of other models on the same tasks, or on other tasks."""
    first, *others = [folder / RESULTS if folder.is_dir() else folder for folder in folders]
    combined = read_evaluation(first)
    for path in others:
        found = read_evaluation(path)
        is_same = set(found.tasks) == set(combined.tasks)
        combined = _with_rows(combined, found, path) if is_same else combined.beside(found)
    return combined


def _with_rows(first: Results, second: Results, path: Path) -> Results:
    both = [m for m in second.scores if m in first.scores and m not in (INDIVIDUAL, ENSEMBLE)]
    if both:
        raise DataError(f"{path}: a model '{both[0]}' is among other scores too; rename one")
    models, scores = {**first.models, **second.models}, {**first.scores, **second.scores}
    return Results(first.tasks, models, scores)


def _score_table(results: Results, folder: Path, merge: Mapping[str, Any]) -> ScoreTable:
    readings = {name: task.metrics[task.metric] for name, task in results.tasks.items()}
    how = next(iter(readings.values()))
    names = {task.metric for task in results.tasks.values()}
    unit = names.pop() if len(names) == 1 else "score"
    used = {one.get("fingerprint") for one in merge.get("inputs", ()) if "source" in one}
    own = _fingerprint(folder / MODEL if (folder / MODEL).is_dir() else folder)

    def shown(score: evaluation_metrics.Score | None, reading: Reading) -> ShownScore | None:
        factor = 100.0 if reading.in_percent else 1.0
        return ShownScore.of(score.value, score.error, factor) if score else None

    rows = []
    for name in results.scores:
        known = results.models.get(name, {}).get("fingerprint")
        given = {task: results.score(name, task) for task in readings}
        scores = {task: shown(given[task], reading) for task, reading in readings.items()}
        tasks = {task: score for task, score in scores.items() if score}
        several = len(results.tasks) > 1
        scored = {0: {t: TaskScore(s.value, s.error, s.right) for t, s in given.items() if s}}
        rows.append(
            ScoreRow(
                name,
                tasks,
                shown(results.average(name), how) if several else next(iter(tasks.values()), None),
                is_reference=name in REFERENCES or (known is not None and known in used),
                is_this=known is not None and known == own,
                scored=scored,
            )
        )
    return ScoreTable(
        list(results.tasks),
        rows,
        f"{unit} in percent" if how.in_percent else unit,
        "over examples",
        INDIVIDUAL,
        how.higher_is_better,
        1 if how.in_percent else 3,
        100.0 if how.in_percent else 1.0,
    )


def _fingerprint(folder: Path) -> str | None:
    try:
        return fingerprint(open_checkpoint(folder))
    except CheckpointError:  # the report is of its merge.json all the same
        return None


def _verdict(
    title: str, table: ScoreTable | None, merge: Mapping[str, Any], folder: Path, beside: str
) -> doc.Verdict:
    """What the scores say; without scores, what was done."""
    num_models = len(merge["recipe"]["models"])
    smaller = "lora" not in merge  # an adapter is small beside the base that all share
    found = verdict(table, num_models, "average", smaller=smaller) if table else None
    if found is None:
        parameters = merge["parameters"]
        solved = sum("solved" in p for p in parameters.values())
        said = f"{count(len(parameters), 'tensor')}"
        said += f", of which {solved:,} by solving a linear system" if solved else ""
        said += ". Not scored yet; mats evaluate does that, and mats report --scores adds it."
        found = doc.Verdict(title, said)
    name = f"{beside or folder.name}{f'/{MODEL}' if (folder / MODEL).is_dir() else ''}"
    return replace(found, code=loading(name, list(merge.get("heads") or {})))


def _what_was_merged(content: Mapping[str, Any]) -> list[doc.Block]:
    examples = {
        one["name"]: f"{sum(one['num_examples'].values()):,}"
        for one in content.get("inputs", ())
        if isinstance(one.get("num_examples"), dict)
    }
    rows = []
    for entry in content["recipe"]["models"]:
        name, weight = _model_name(entry), entry.get("weight", 1.0)
        shown = f"{weight:g}" if isinstance(weight, (int, float)) else str(weight)
        source = merge_details.short_source(entry["model"])
        rows.append([name, source, shown, examples.get(name, NOTHING)])
    columns = ["", "model", "weight", "examples of its statistics"]
    blocks: list[doc.Block] = [doc.Table(columns, rows, "Models")]
    if kept := content.get("heads"):
        heads = ", ".join(sorted({name for names in kept.values() for name in names}))
        text = f"Each model keeps its own head, which is not merged: {heads}."
        blocks.append(doc.Paragraph(text))
    return blocks


def _provenance(content: Mapping[str, Any], tuning: Mapping[str, Any]) -> list[doc.Block]:
    kinds = ("source", "statistics", "data")
    rows = [[f"{name} version", str(v)] for name, v in content.get("versions", {}).items()]
    rows += [[f"tuning, {key}", str(v)] for key, v in tuning.get("options", {}).items() if v]
    inputs = [
        [one["name"], kind, str(one.get("fingerprint") or NOTHING)[:16]]
        for one in content.get("inputs", ())
        if (kind := next((kind for kind in kinds if kind in one), None))
    ]
    blocks: list[doc.Block] = [doc.Table(["", ""], rows, "Versions")]
    if inputs:
        heads, title = ["", "kind", "fingerprint"], "Fingerprints of the inputs"
        blocks.append(doc.Table(heads, inputs, title, folded=True, in_markdown=False))
    notes = list(content.get("notes", ()))
    return [*blocks, doc.Items("Notes", notes)] if notes else blocks


def _model_name(entry: Mapping[str, Any]) -> str:
    return str(entry.get("name") or merge_details.short_source(entry["model"]))
