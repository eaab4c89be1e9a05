"""What steps do: one function for each kind, from settings and inputs to a folder.

Each gets its settings (plain data), the paths of what it needs by name, and a folder to write to,
in which an interrupted run may have left something; it returns what it found, as plain data.
"""

import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from matsmerge.checkpoints.public_names import without_paths
from matsmerge.engine.executor import SerialExecutor
from matsmerge.engine.merge_file import read_merge_file
from matsmerge.errors import AnotherRunError, RecipeError
from matsmerge.evaluation.comparing import evaluate
from matsmerge.evaluation.results import Results
from matsmerge.experiments.costing import measure_costs
from matsmerge.experiments.curves import follow
from matsmerge.experiments.inputs import Needs, Settings, base_of, read_tasks, recipe_of
from matsmerge.experiments.landscape import draw_landscape
from matsmerge.experiments.sources import SOURCES
from matsmerge.statistics.collecting import Output
from matsmerge.statistics.data_collecting import Choice, prepare
from matsmerge.statistics.options import make_options
from matsmerge.statistics.statistics_file import open_statistics
from matsmerge.statistics.subspace_view import SubspaceSize, prepare_view
from matsmerge.statistics.subspace_view import Task as TaskInSubspace
from matsmerge.strict_yaml import read_yaml
from matsmerge.tasks.model_loading import load_model
from matsmerge.tasks.splits import read_split
from matsmerge.training.training import train
from matsmerge.tuning.search_space import SearchSpace, parse_values
from matsmerge.tuning.tuning import Options as TuningOptions
from matsmerge.tuning.tuning import tune

T = TypeVar("T")
Found = dict[str, Any]
Action = Callable[[Settings, Needs, Path], Found]

MODEL, STATISTICS, TUNED = "model", "statistics.safetensors", "tuned"


def make(settings: Settings, _: Needs, out: Path) -> Found:
    """Data or a base model from packages."""
    shutil.rmtree(out)
    out.mkdir()
    SOURCES[settings["source"]](out, settings["settings"])
    return {}


def fine_tune(settings: Settings, needs: Needs, out: Path) -> Found:
    """A model trained on one task, or on all of them."""
    tasks = read_tasks(settings, needs)
    shutil.rmtree(out / MODEL, ignore_errors=True)  # complete, but nobody heard of it
    trained = _continued(
        partial(train, base_of(settings, needs), tasks, out / MODEL, **settings["options"])
    )
    return {"validation": trained.score}


def _continued(work: Callable[..., T]) -> T:
    """Go on where a step was interrupted; anew if the run lay elsewhere then."""
    try:
        return work(resume=True)
    except AnotherRunError:
        return work(overwrite=True)


def collect(settings: Settings, needs: Needs, out: Path) -> Found:
    """Statistics of a model on its data."""
    (task,) = read_tasks(settings, needs)
    options = make_options(
        statistics=settings["statistics"], fisher=settings["expectation"], seed=settings["seed"]
    )
    loaded = load_model(
        settings["model"] or str(needs["model"] / MODEL),
        task=task.task,
        head=task.head,
        tokenizer=task.tokenizer,
        options=task.options(need_targets=options.wants_targets),
    )
    choice = Choice(
        settings["num_examples"], columns=task.columns, wordings=task.wordings,
        batch_size=settings["batch_size"],
    )  # fmt: skip
    (out / STATISTICS).unlink(missing_ok=True)
    prepared = prepare(loaded, read_split(task, settings["split"]), options, choice)
    prepared.run(Output(out / STATISTICS, resume=True, overwrite=True))
    return {"num_examples": prepared.num_examples}


def merge(settings: Settings, needs: Needs, out: Path) -> Found:
    """The best of what a method's search tries by validation, scored on the test split."""
    for made in (MODEL, TUNED):  # complete, but nobody heard of it
        shutil.rmtree(out / made, ignore_errors=True)
    recipe = recipe_of(settings, needs)
    if "init" in needs:
        tuned_init = read_yaml(needs["init"] / "recipe.yaml", RecipeError)["method"]
        recipe["method"] = {**recipe["method"], "init": tuned_init}
    space = SearchSpace(recipe, {k: parse_values(k, v) for k, v in settings["search"].items()})
    tasks = read_tasks(settings, needs)
    options = TuningOptions(
        num_examples=settings["num_validation"],
        batch_size=settings["batch_size"],
        allow_overlap=True,  # the suite says which split statistics are from
    )
    tuned = _continued(partial(tune, space, tasks, out / TUNED, options, executor=SerialExecutor()))
    model = tuned.folder / MODEL
    found = _test({"merged": str(model)}, "merged", settings, needs)
    manifest = read_merge_file(model / "merge.json")
    shutil.copyfile(tuned.folder / "recipe.yaml", out / "recipe.yaml")
    if settings["keep_model"]:
        model.rename(out / MODEL)
    shutil.rmtree(tuned.folder)
    return {
        "test": found,
        "validation": tuned.best.score,
        "chosen": dict(tuned.best.choice),
        "num_tried": len(tuned.trials),
        "trials": [trial.to_json() for trial in tuned.trials],
        "recipe": without_paths(read_yaml(out / "recipe.yaml", RecipeError)),
        "merge": manifest,
    }


def test(settings: Settings, needs: Needs, _: Path) -> Found:
    """Models that were not merged: each on its own task, one on all, or all together."""
    models = {
        name.removeprefix("model:"): str(path / MODEL)
        for name, path in needs.items()
        if name.startswith("model:")
    } | dict(settings["models"])
    if settings["row"] == "individual":
        parts = [
            _test({"one": models[task["name"]]}, "one", {**settings, "tasks": [task]}, needs)
            for task in settings["tasks"]
        ]
        return {"test": {key: {t: v for p in parts for t, v in p[key].items()} for key in parts[0]}}
    row = settings["row"] if settings["row"] == "ensemble" else next(iter(models))
    return {"test": _test(models, row, settings, needs)}


def _test(models: Mapping[str, str], row: str, settings: Settings, needs: Needs) -> Found:
    results = evaluate(
        models,
        read_tasks(settings, needs),
        "test",
        ensemble=row == "ensemble",
        num_examples=settings["num_test"],
        batch_size=settings["batch_size"],
    )
    return _scores(results, row)


def _scores(results: Results, row: str) -> Found:
    scores = {task: results.score(row, task) for task in results.tasks}
    return {
        "tasks": {task: score.value for task, score in scores.items() if score is not None},
        "errors": {task: score.error for task, score in scores.items() if score is not None},
    }


def compare_subspaces(settings: Settings, needs: Needs, _: Path) -> Found:
    """How far the tasks' subspaces of inputs overlap."""
    names = [task["name"] for task in settings["tasks"]]
    files = [needs[f"statistics:{name}"] / STATISTICS for name in names]
    tasks = [TaskInSubspace(n, open_statistics(f)) for n, f in zip(names, files, strict=True)]
    view = prepare_view(tasks, size=SubspaceSize(None, settings["energy"])).run()
    indices = range(len(names))
    return {
        "tasks": [{"name": name} for name in names],
        "energy": settings["energy"],
        "overlap": [[view.overlap(a, b) for b in indices] for a in indices],
        "overlap_at_random": [[view.overlap_at_random(a, b) for b in indices] for a in indices],
        "layers": [
            {"name": layer.name, "mean_overlap": layer.mean_overlap, "dim": layer.dim}
            for layer in view.layers
        ],
    }


ACTIONS: dict[str, Action] = {
    "make": make,
    "train": fine_tune,
    "collect": collect,
    "merge": merge,
    "test": test,
    "follow": follow,
    "costs": measure_costs,
    "landscape": draw_landscape,
    "subspaces": compare_subspaces,
}
