"""Choose by validation score: merge, score, keep the best."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from matsmerge.checkpoints.fingerprint import fingerprint
from matsmerge.engine.executor import Executor, LocalExecutor
from matsmerge.engine.merging import merge_to_folder
from matsmerge.engine.output_folder import MANIFEST, check_target, staging_path
from matsmerge.engine.preparing import PreparedMerge, prepare
from matsmerge.errors import DataError, RecipeError, StatisticsError
from matsmerge.recipes.recipe import Recipe
from matsmerge.tasks.kept_base import KeptBase
from matsmerge.tasks.optional_import import import_optional
from matsmerge.tasks.task_file import TaskFile
from matsmerge.tuning.scoring import Scorer, overlaps, read_validation_tasks
from matsmerge.tuning.search_space import ITERATIONS, Range, SearchSpace
from matsmerge.tuning.trials import Journal, Trial, best, choice_key
from matsmerge.version import __version__

JOURNAL, RECIPE, MODEL, REPORT = "trials.jsonl", "recipe.yaml", "model", "tuning.json"

Told = Callable[[Trial, int, int], None]  # a trial, its number, and how many there are


@dataclass(frozen=True)
class Options:
    """How to search."""

    strategy: str = "grid"  # or optuna
    num_trials: int = 50  # optuna: merges to try
    seed: int = 0
    split: str = "validation"
    num_examples: int | None = None  # of each task, at most
    batch_size: int = 32
    allow_overlap: bool = False


@dataclass(frozen=True)
class Tuned:
    """The best of all trials."""

    best: Trial
    trials: Sequence[Trial]
    folder: Path  # with the chosen recipe, all trials, and the merged model


def tune(
    space: SearchSpace,
    tasks: Sequence[str | Path | TaskFile],
    out: Path,
    options: Options | None = None,
    *,
    executor: Executor | None = None,
    overwrite: bool = False,
    resume: bool = False,
    told: Told = lambda *_: None,
) -> Tuned:
    """Try what a search space holds, and write the recipe and the model that score best."""
    options = options or Options()
    num_models = space.check()
    validation = read_validation_tasks(tasks, options.split)
    if not validation:
        raise DataError("say what to tune for with at least one task")
    first = prepare(space.fill(next(_candidates(space, options, {}))))
    _check_overlap(first, validation, options)
    target = out.absolute()
    check_target(target, 0, _used(first), overwrite=overwrite, resume=resume)
    partial = staging_path(target)
    if partial.exists() and not resume:
        shutil.rmtree(partial)
    partial.mkdir(parents=True, exist_ok=True)
    journal = Journal(partial / JOURNAL, _identify(space, first, validation, options))
    journal.open(resume=resume)
    executor = executor or LocalExecutor()
    scorer = Scorer(validation, options.num_examples, options.batch_size, KeptBase())
    if options.strategy == "optuna":
        num_models = options.num_trials * max(1, len(space.iterations))
    for number, choice in enumerate(_candidates(space, options, journal.trials)):
        for trial in _try(space, choice, partial / f"merge-{number}", journal, scorer, executor):
            told(trial, len(journal.trials), num_models)
    trials = list(journal.trials.values())
    chosen = best(trials)
    recipe = _chosen_recipe(space, chosen)
    merge_to_folder(prepare(recipe), partial / MODEL, executor=executor, overwrite=True)
    _write(partial, recipe, chosen, trials, options)
    if target.exists():
        shutil.rmtree(target)
    partial.rename(target)
    return Tuned(chosen, trials, target)


def _candidates(
    space: SearchSpace, options: Options, seen: dict[str, Trial]
) -> Iterator[dict[str, Any]]:
    """What to merge next; `seen` grows meanwhile."""
    if options.strategy == "grid":
        yield from space.grid()
    elif options.strategy == "optuna":
        yield from _suggested(space, options, seen)
    else:
        raise RecipeError(f"there is no strategy '{options.strategy}'; expected grid or optuna")


def _suggested(
    space: SearchSpace, options: Options, seen: dict[str, Trial]
) -> Iterator[dict[str, Any]]:
    optuna = import_optional("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=options.seed)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    for _ in range(options.num_trials):
        asked = study.ask()
        choice = {}
        for key, values in space.others.items():
            if isinstance(values, Range):
                choice[key] = round(asked.suggest_float(key, values.low, values.high), 6)
            else:
                # Only plain values have names that a sampler can tell apart.
                at = asked.suggest_categorical(key, list(range(len(values))))
                choice[key] = values[at]
        yield choice
        wanted = choice_key(choice)
        found = [t for t in seen.values() if choice_key(_without_iterations(t.choice)) == wanted]
        study.tell(asked, best(found).score)


def _try(
    space: SearchSpace,
    choice: dict[str, Any],
    folder: Path,
    journal: Journal,
    scorer: Scorer,
    executor: Executor,
) -> Iterator[Trial]:
    """Merge, and score the model, or that of every number of iterations."""
    wanted = [{**choice, ITERATIONS: at} for at in space.iterations] or [choice]
    missing = [c for c in wanted if choice_key(c) not in journal.trials]
    if not missing:
        return
    # A kept base is found by its folder's name, so that each merge has a folder of its own.
    merge_to_folder(prepare(space.fill(choice)), folder, executor=executor, overwrite=True)
    try:
        for one in missing:
            at = one.get(ITERATIONS) if space.iterations else None
            scores, errors = scorer.score(folder if at is None else folder / f"iteration-{at}")
            trial = Trial(one, scores, errors)
            journal.add(trial)
            yield trial
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _without_iterations(choice: Any) -> dict[str, Any]:
    return {key: value for key, value in choice.items() if key != ITERATIONS}


def _chosen_recipe(space: SearchSpace, chosen: Trial) -> Recipe:
    at = chosen.choice.get(ITERATIONS) if space.iterations else None
    return space.fill(_without_iterations(chosen.choice), at)


def _check_overlap(prepared: PreparedMerge, validation: Any, options: Options) -> None:
    if options.allow_overlap:
        return
    problems = [
        p for one in prepared.evidence for p in overlaps(one.statistics, one.label, validation)
    ]
    if problems:
        raise StatisticsError(problems)


def _used(prepared: PreparedMerge) -> dict[str, Path]:
    places = {m.checkpoint.label: m.checkpoint.place for m in prepared.alignment.everyone}
    places |= {one.label: one.statistics.arrays.place for one in prepared.evidence}
    return {label: place for label, place in places.items() if place is not None}


def _identify(
    space: SearchSpace, prepared: PreparedMerge, validation: Any, options: Options
) -> str:
    """What must be the same for a search to be continued."""
    return hashlib.sha256(
        json.dumps(
            [
                __version__,
                dict(space.recipe),
                {k: [v.low, v.high] if isinstance(v, Range) else list(v)
                 for k, v in space.values.items()},
                [fingerprint(m.checkpoint) for m in prepared.alignment.everyone],
                [fingerprint(one.statistics.arrays) for one in prepared.evidence],
                [[t.described.model_dump(mode="json"), t.data.fingerprint] for t in validation],
                [options.strategy, options.num_trials, options.seed, options.num_examples],
            ],
            default=str,
        ).encode()
    ).hexdigest()  # fmt: skip


def _write(
    folder: Path,
    recipe: Recipe,
    chosen: Trial,
    trials: Sequence[Trial],
    options: Options,
) -> None:
    plain = recipe.model_dump(mode="json", exclude_defaults=True)
    (folder / RECIPE).write_text(yaml.safe_dump(plain, sort_keys=False))
    content = {
        "version": __version__,
        "options": options.__dict__,
        "best": {"choice": dict(chosen.choice), "score": chosen.score, "scores": chosen.scores},
        "trials": [
            {"choice": dict(t.choice), "score": t.score, "scores": t.scores, "errors": t.errors}
            for t in trials
        ],
    }
    (folder / REPORT).write_text(json.dumps(content, indent=1) + "\n")
    # What makes the folder one of ours, to be replaced with --overwrite.
    shutil.copyfile(folder / MODEL / MANIFEST, folder / MANIFEST)
