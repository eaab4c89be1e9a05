"""The report of one merge: its folder, scores if there are any, and what was tried."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matsmerge.checkpoints.fingerprint import fingerprint
from matsmerge.checkpoints.opening import open_checkpoint
from matsmerge.engine.merge_file import read_merge_file
from matsmerge.errors import CheckpointError, DataError
from matsmerge.evaluation.results import ENSEMBLE, INDIVIDUAL, Results
from matsmerge.evaluation.results_folder import RESULTS, read_results
from matsmerge.reports import merge_details, score_figures, studies
from matsmerge.reports.document import (
    Block,
    Cell,
    Items,
    KeyFigure,
    Paragraph,
    Report,
    Section,
    Table,
)
from matsmerge.reports.numbers import NOTHING, count, percent
from matsmerge.reports.scores import Score, ScoreRow, ScoreTable, key_figures, score_blocks
from matsmerge.tuning.report_file import read_tuning_report

MERGE, TUNING, MODEL = "merge.json", "tuning.json", "model"
_NO_MERGES = (INDIVIDUAL, ENSEMBLE, "base", "joint")


def merge_report(
    folder: Path, scores: Sequence[Path] = (), subspaces: Mapping[str, Any] | str | None = None
) -> Report:
    """Of a merged model's folder, or of a tuned one's; `subspaces`, or why there are none."""
    merge = read_merge(folder)
    recipe = merge["recipe"]
    tuning = read_tuning_report(folder / TUNING) if (folder / TUNING).exists() else {}
    table = _score_table(read_scores(scores), folder, merge) if scores else None
    models = [_model_name(entry) for entry in recipe["models"]]
    method = merge_details.describe_method(recipe)
    name = method.partition(" (")[0]
    sections = [
        Section("What was merged", _what_was_merged(merge)),
        Section("Scores", score_blocks(table) if table else []),
        Section("What was tried", _trials(tuning)),
        Section("Convergence of layers", merge_details.convergence({name: merge})),
        Section(
            "Subspaces",
            [Paragraph(subspaces)] if isinstance(subspaces, str) else studies.subspaces(subspaces),
        ),
        Section("Left to otherwise", merge_details.otherwise({name: merge})),
        Section("Recipe", [merge_details.recipe_code("recipe.yaml", recipe)]),
        Section("Provenance", _provenance(merge, tuning)),
    ]
    base = f" from {merge_details.short_source(recipe['base'])}" if recipe.get("base") else ""
    return Report(
        f"{count(len(models), 'model')} merged by {name}",
        f"{', '.join(models)}: each fine-tuned{base}, now one model, merged by {method}.",
        sections,
        _key_figures(table, merge),
        made_by=f"matsmerge {merge.get('versions', {}).get('matsmerge', '')}".strip(),
    )


def read_merge(folder: Path) -> dict[str, Any]:
    """The merge.json of a folder."""
    return read_merge_file(folder / MERGE)


def read_scores(folders: Sequence[Path]) -> Results:
    """Of one evaluation or several: of other models on the same tasks, or on other tasks."""
    combined: Results | None = None
    for folder in folders:
        path = folder / RESULTS if folder.is_dir() else folder
        found = read_results(path)
        if combined is None:
            combined = found
        elif set(found.tasks) == set(combined.tasks):
            combined = _with_rows(combined, found, path)
        else:
            combined = combined.beside(found)
    if combined is None:
        raise DataError("no scores were given")
    return combined


def _with_rows(first: Results, second: Results, path: Path) -> Results:
    differ = [m for m in second.scores if m in first.scores and m not in (INDIVIDUAL, ENSEMBLE)]
    if differ:
        raise DataError(f"{path}: a model '{differ[0]}' is among other scores too; rename one")
    return Results(
        first.tasks,
        {**first.models, **second.models},
        {**first.scores, **second.scores},
        {
            **first.arguments,
            "models": {**_paths(first), **_paths(second)},
        },
        {**first.versions, **second.versions},
        [*first.notes, *second.notes],
    )


def _paths(results: Results) -> dict[str, str]:
    """Where each row's model is."""
    found = results.arguments.get("models")
    known = found if isinstance(found, dict) else {}
    return {name: path for name, path in known.items() if isinstance(path, str)}


def _score_table(results: Results, folder: Path, merge: Mapping[str, Any]) -> ScoreTable:
    metrics = {name: (t.metric, t.metrics[t.metric]) for name, t in results.tasks.items()}
    how = next(iter(metrics.values()))[1]
    names = {metric for metric, _ in metrics.values()}
    unit = names.pop() if len(names) == 1 else "score"
    factor = 100.0 if how.in_percent else 1.0
    used = {one.get("fingerprint") for one in merge.get("inputs", ()) if "source" in one}
    own = _fingerprint(folder / MODEL if (folder / MODEL).is_dir() else folder)
    rows = []
    for name in results.scores:
        known = results.models.get(name, {}).get("fingerprint")
        tasks = {}
        for task, (_, reading) in metrics.items():
            score = results.score(name, task)
            scale = 100.0 if reading.in_percent else 1.0
            if score and (shown := Score.of(scale * score.value, scale * score.error)):
                tasks[task] = shown
        mean = results.average(name) if len(results.tasks) > 1 else None
        rows.append(
            ScoreRow(
                name,
                tasks,
                Score.of(factor * mean.value, factor * mean.error)
                if mean
                else next(iter(tasks.values()), None)
                if len(results.tasks) == 1
                else None,
                is_reference=name in _NO_MERGES or (known is not None and known in used),
                is_this=known is not None and known == own,
            )
        )
    return ScoreTable(
        list(results.tasks),
        rows,
        f"{unit}, percent" if how.in_percent else unit,
        "over examples",
        how.higher_is_better,
        1 if how.in_percent else 3,
    )


def _fingerprint(folder: Path) -> str | None:
    try:
        return fingerprint(open_checkpoint(folder))
    except CheckpointError:  # the report is of its merge.json all the same
        return None


def _key_figures(table: ScoreTable | None, merge: Mapping[str, Any]) -> list[KeyFigure]:
    if table and (found := key_figures(table, "average", INDIVIDUAL)):
        return found
    parameters = merge["parameters"]
    solved = sum("solved" in p for p in parameters.values())
    left = sum(bool(p.get("otherwise")) for p in parameters.values())
    return [
        KeyFigure("models", str(len(merge["recipe"]["models"]))),
        KeyFigure("tensors", f"{len(parameters):,}"),
        *([KeyFigure("layers solved", f"{solved:,}")] if solved else []),
        *([KeyFigure("left to otherwise", f"{left:,}", "tensors")] if left else []),
    ]


def _what_was_merged(merge: Mapping[str, Any]) -> list[Block]:
    recipe = merge["recipe"]
    examples = {
        one["name"]: sum(one["num_examples"].values())
        for one in merge.get("inputs", ())
        if isinstance(one.get("num_examples"), dict)
    }
    rows = []
    for entry in recipe["models"]:
        name = _model_name(entry)
        num = examples.get(name)
        weight = entry.get("weight", 1.0)
        rows.append(
            [
                name,
                merge_details.short_source(entry["model"]),
                f"{weight:g}" if isinstance(weight, (int, float)) else str(weight),
                NOTHING if num is None else f"{num:,}",
            ]
        )
    heads = ["", "model", "weight", "examples of its statistics"]
    return [Table(heads, rows, "Models"), *_heads(merge)]


def _heads(merge: Mapping[str, Any]) -> list[Block]:
    heads = merge.get("heads") or {}
    if not heads:
        return []
    kept = sorted({name for names in heads.values() for name in names})
    return [Paragraph(f"Each model keeps its own head, which is not merged: {', '.join(kept)}.")]


def _trials(tuning: Mapping[str, Any]) -> list[Block]:
    """What `mats tune` tried, the best first."""
    trials = [t for t in tuning.get("trials", ()) if t.get("score") is not None]
    if not trials:
        return []
    best = tuning["best"]
    chosen = best["choice"]
    tasks = list(trials[0]["scores"])
    in_percent = all(0 <= t["score"] <= 1 for t in trials)
    show: Callable[[float], str] = percent if in_percent else "{:.4f}".format
    near = sorted(trials, key=lambda t: abs(t["score"] - tuning["best"]["score"]))
    rows: list[list[Cell | str]] = [
        [
            ", ".join(f"{key} = {value}" for key, value in t["choice"].items()) or "as given",
            Cell(show(t["score"]), best=t["choice"] == chosen),
            *(NOTHING if (s := t["scores"].get(task)) is None else show(s) for task in tasks),
        ]
        for t in near
    ]
    unit = "percent" if in_percent else "score"
    split = tuning.get("options", {}).get("split", "validation")
    title = f"Tried on {split} data, {unit}; the nearest to the chosen first"
    table = Table(["", "mean", *tasks], rows, title)
    blocks: list[Block] = []
    keys = {key for t in trials for key in t["choice"]}
    key = next(iter(keys), "")
    if len(keys) == 1 and len(trials) > 2 and all(_is_number(t["choice"].get(key)) for t in trials):
        order = sorted(trials, key=lambda t: t["choice"][key])
        best = next(i for i, t in enumerate(order) if t["choice"] == chosen)
        scale = 100 if in_percent else 1
        blocks.append(
            score_figures.line(
                "What was tried",
                f"{key} = {chosen[key]} has the best mean score on {split} data.",
                [t["choice"][key] for t in order],
                [scale * t["score"] for t in order],
                best,
                (key, f"mean {split} {unit}"),
                table,
            )
        )
    failed = [f"{t['choice']}: {t['failure']}" for t in tuning["trials"] if t.get("failure")]
    blocks.append(table)
    return [*blocks, Items("Could not be merged", failed, folded=True)] if failed else blocks


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _provenance(merge: Mapping[str, Any], tuning: Mapping[str, Any]) -> list[Block]:
    rows = [[f"{name} version", str(v)] for name, v in merge.get("versions", {}).items()]
    rows += [[f"tuning, {key}", str(v)] for key, v in tuning.get("options", {}).items() if v]
    inputs = [
        [one["name"], next(k for k in ("source", "statistics", "data") if k in one), _digest(one)]
        for one in merge.get("inputs", ())
        if {"source", "statistics", "data"} & one.keys()
    ]
    blocks: list[Block] = [Table(["", ""], rows, "Versions")]
    if inputs:
        blocks.append(
            Table(
                ["", "kind", "fingerprint"],
                inputs,
                "Fingerprints of the inputs",
                folded=True,
                in_markdown=False,
            )
        )
    notes = list(merge.get("notes", ()))
    return [*blocks, Items("Notes", notes)] if notes else blocks


def _digest(one: Mapping[str, Any]) -> str:
    return str(one.get("fingerprint") or NOTHING)[:16]


def _model_name(entry: Mapping[str, Any]) -> str:
    return str(entry.get("name") or merge_details.short_source(entry["model"]))
