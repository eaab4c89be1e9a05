"""Choose by validation score: merge, score, keep the best."""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from matsmerge.checkpoints.fingerprint import fingerprint
from matsmerge.engine.executor import Executor
from matsmerge.engine.local_executor import LocalExecutor
from matsmerge.engine.merge_run import merge_to_folder
from matsmerge.engine.output_folder import MANIFEST, is_merge
from matsmerge.engine.prepared_merge import PreparedMerge, prepare
from matsmerge.errors import (
    DataError,
    NonFiniteError,
    OutputError,
    StatisticsError,
)
from matsmerge.files.guarded_files import read_text
from matsmerge.files.output_place import check_folder
from matsmerge.files.whole_outputs import StagedFolder, remove
from matsmerge.lab.tuning.search_space import ITERATIONS, Range, SearchSpace
from matsmerge.lab.tuning.trial_score import (
    Scorer,
    ValidationTask,
    overlaps,
    read_validation_tasks,
)
from matsmerge.lab.tuning.trials import Journal, Trial, best, choice_key
from matsmerge.lab.tuning.tuning_file import Options
from matsmerge.models.kept_base import KeptBase
from matsmerge.optional_import import import_optional
from matsmerge.progress import AnyProgress, listener
from matsmerge.recipes.recipe import Recipe
from matsmerge.tasks.task_file import TaskFile
from matsmerge.version import __version__

JOURNAL, RECIPE, MODEL, REPORT = "trials.jsonl", "recipe.yaml", "model", "tuning.json"
_KEPT = "model.key"  # which trial the model is of


@dataclass(frozen=True)
class Tuned:
    """The best of all trials."""

    best: Trial
    trials: Sequence[Trial]
    folder: Path  # with the chosen recipe, all trials, and the merged model
    metrics: Mapping[str, str]  # of each task
    in_percent: bool


def tune(
    space: SearchSpace,
    tasks: Sequence[str | Path | TaskFile],
    out: Path,
    options: Options | None = None,
    *,
    executor: Executor | None = None,
    overwrite: bool = False,
    resume: bool = False,
    progress: AnyProgress | None = None,
) -> Tuned:
    """Try what a search space holds, and write the recipe and the model that score best."""
    options, told = options or Options(), listener(progress)
    num_models = space.check()
    validation = read_validation_tasks(tasks, options.split)
    if not validation:
        raise DataError("say what to tune for with at least one task")
    prepared = [prepare(space.fill(choice)) for choice in _representatives(space, options)]
    _check_overlap(prepared, validation, options)
    target = out.absolute()
    used = _used(prepared, validation)
    _check_target(target, used, overwrite=overwrite, resume=resume)
    staged = StagedFolder(target, "search")
    folder = staged.output
    journal = Journal(folder / JOURNAL, _identify(space, prepared, validation, options))
    scorer = Scorer(validation, options.num_examples, options.batch_size, KeptBase())
    search = _Search(space, folder, journal, scorer, executor or LocalExecutor())
    if options.strategy == "optuna":
        num_models = options.num_trials * max(1, len(space.iterations))
    staged.open()
    try:
        if not resume:
            staged.clear()
        folder.mkdir(exist_ok=True)
        journal.open(resume=resume)
        told.stage("tuning", num_models, "merges", len(journal.trials))
        for number, choice in enumerate(_candidates(space, options, search)):
            for trial in search.run(choice, number):
                told.advance(1, "failed" if trial.failure else f"last {trial.score:.4g}")
        trials = list(journal.trials.values())
        chosen = best(trials, lowest=scorer.lower_is_better)
        recipe = _chosen_recipe(space, chosen)
        search.put_model(chosen, recipe)
        _write(folder, recipe, chosen, trials, options, search)
        _remove_rest(folder)
        _check_target(target, used, overwrite=overwrite, resume=True)
        staged.put_in_place()
        staged.discard()
    except BaseException:
        # Without a trial there is nothing to continue; a journal of another search is not ours.
        staged.discard() if journal.is_open and not journal.trials else staged.close()
        raise
    metrics = {task.name: task.metric for task in validation}
    return Tuned(chosen, trials, target, metrics, scorer.in_percent)


@dataclass(frozen=True)
class _Search:
    """Merges and scores; the best model so far is kept as it was scored."""

    space: SearchSpace
    folder: Path
    journal: Journal
    scorer: Scorer
    executor: Executor

    def run(self, choice: dict[str, Any], number: int) -> Iterator[Trial]:
        """Merge, and score the model, or that of every number of iterations."""
        iterations = self.space.iterations
        wanted = [{**choice, ITERATIONS: at} for at in iterations] or [choice]
        missing = [c for c in wanted if choice_key(c) not in self.journal.trials]
        if not missing:
            return
        # A kept base is found by its folder's name, so that each merge has a folder of its own.
        folder = self.folder / f"merge-{number}"
        try:
            try:
                prepared = prepare(self.space.fill(choice))
                # Under the name it keeps if it is chosen, which its card has as the title.
                made = folder / MODEL
                merge_to_folder(prepared, made, executor=self.executor, overwrite=True)
            except NonFiniteError as error:
                for one in missing:
                    yield self._note(Trial(choice=one, failure=error.problems[0]))
                return
            for one in missing:
                scored = made / f"iteration-{one[ITERATIONS]}" if iterations else made
                try:
                    scores, errors = self.scorer.score(scored)
                except NonFiniteError as error:
                    yield self._note(Trial(choice=one, failure=error.problems[0]))
                    continue
                trial = self._note(Trial(choice=one, scores=scores, errors=errors))
                if best(self.journal.trials.values(), lowest=self.scorer.lower_is_better) is trial:
                    self._keep(trial, scored)
                yield trial
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _note(self, trial: Trial) -> Trial:
        self.journal.add(trial)
        return trial

    def _keep(self, trial: Trial, scored: Path) -> None:
        """Put the best model so far aside, with a word on which it is."""
        (self.folder / _KEPT).unlink(missing_ok=True)
        shutil.rmtree(self.folder / MODEL, ignore_errors=True)
        scored.rename(self.folder / MODEL)
        (self.folder / _KEPT).write_text(trial.key)

    def put_model(self, chosen: Trial, recipe: Recipe) -> None:
        """The chosen model, as it was scored, or merged again if it is not there any more."""
        kept = self.folder / _KEPT
        try:
            is_there = read_text(kept, OutputError) == chosen.key
        except OutputError:
            is_there = False
        if not is_there:
            merge_to_folder(
                prepare(recipe), self.folder / MODEL, executor=self.executor, overwrite=True
            )
        kept.unlink(missing_ok=True)


def _check_target(target: Path, used: Mapping[str, Path], *, overwrite: bool, resume: bool) -> None:
    # A folder of ours has the manifest of the model that was chosen.
    check_folder(target, "search", is_merge, inputs=used, overwrite=overwrite, resume=resume)


def _representatives(space: SearchSpace, options: Options) -> Iterator[dict[str, Any]]:
    """A choice for every method and other thing that inputs depend on."""
    keys = [key for key in space.others if key in Recipe.model_fields]
    seen: set[str] = set()
    for choice in space.grid() if options.strategy == "grid" else space.corners():
        kind = choice_key({key: choice[key] for key in keys})
        if kind not in seen:
            seen.add(kind)
            yield choice


def _candidates(space: SearchSpace, options: Options, search: _Search) -> Iterator[dict[str, Any]]:
    """The choices to merge, one after the other."""
    if options.strategy == "grid":
        yield from space.grid()
        return
    optuna = import_optional("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=options.seed)
    lowest = search.scorer.lower_is_better
    study = optuna.create_study(direction="minimize" if lowest else "maximize", sampler=sampler)
    for _ in range(options.num_trials):
        asked = study.ask()
        choice = {}
        for key, values in space.others.items():
            if isinstance(values, Range):
                drawn = asked.suggest_float(key, values.low, values.high)
                choice[key] = float(f"{drawn:.6g}")
            else:
                # By number: only plain values have names that a sampler can tell apart.
                choice[key] = values[asked.suggest_categorical(key, list(range(len(values))))]
        yield choice
        wanted = choice_key(choice)
        found = [
            trial
            for trial in search.journal.trials.values()
            if choice_key(_without_iterations(trial.choice)) == wanted and trial.scores
        ]
        if found:
            study.tell(asked, best(found, lowest=lowest).score)
        else:
            study.tell(asked, state=optuna.trial.TrialState.FAIL)


def _without_iterations(choice: Any) -> dict[str, Any]:
    return {key: value for key, value in choice.items() if key != ITERATIONS}


def _chosen_recipe(space: SearchSpace, chosen: Trial) -> Recipe:
    at = chosen.choice.get(ITERATIONS) if space.iterations else None
    return space.fill(_without_iterations(chosen.choice), at)


def _check_overlap(
    prepared: Sequence[PreparedMerge], validation: Sequence[ValidationTask], options: Options
) -> None:
    if options.allow_overlap:
        return
    problems = []
    for merge in prepared:
        for one in merge.evidence:
            problems += overlaps(one.statistics, one.label, validation)
        splits = {task.data.split for task in validation} | {"test"}
        for entry in merge.recipe.models:
            if entry.data is not None and entry.data.task_file.split in splits:
                problems.append(
                    f"{entry.name}: its data is the split '{entry.data.task_file.split}'; use "
                    "another one, or allow it with --allow-overlap"
                )
    if problems:
        raise StatisticsError(list(dict.fromkeys(problems)))


def _used(
    prepared: Sequence[PreparedMerge], validation: Sequence[ValidationTask]
) -> dict[str, Path]:
    """Everything that is read, which the output must not replace."""
    places: dict[str, Path | None] = {}
    for merge in prepared:
        places |= {m.checkpoint.label: m.checkpoint.place for m in merge.alignment.everyone}
        places |= {one.label: one.statistics.arrays.place for one in merge.evidence}
    for task in validation:
        sources = task.described.data
        for source in sources.values() if isinstance(sources, dict) else [sources or ""]:
            places[f"data of {task.name}"] = Path(source) if Path(source).exists() else None
    return {label: place for label, place in places.items() if place is not None}


def _remove_rest(folder: Path) -> None:
    """Remove what killed runs left of their trials."""
    for path in folder.iterdir():
        if path.name not in (JOURNAL, RECIPE, MODEL, REPORT, MANIFEST):
            remove(path)


def _identify(
    space: SearchSpace,
    prepared: Sequence[PreparedMerge],
    validation: Sequence[ValidationTask],
    options: Options,
) -> str:
    """A digest of all that must be the same for a search to be continued."""
    return hashlib.sha256(
        json.dumps(
            [
                __version__,
                dict(space.recipe),
                {k: [v.low, v.high] if isinstance(v, Range) else list(v)
                 for k, v in space.values.items()},
                [fingerprint(m.checkpoint) for p in prepared for m in p.alignment.everyone],
                [fingerprint(one.statistics.arrays) for p in prepared for one in p.evidence],
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
    search: _Search,
) -> None:
    plain = recipe.model_dump(mode="json", exclude_defaults=True)
    (folder / RECIPE).write_text(yaml.safe_dump(plain, sort_keys=False))
    content = {
        "version": __version__,
        "options": options.model_dump(),
        "metrics": {task.name: task.metric for task in search.scorer.tasks},
        "best": chosen.to_json(),
        "trials": [trial.to_json() for trial in trials],
    }
    (folder / REPORT).write_text(json.dumps(content, indent=1) + "\n")
    # What makes the folder one of ours, to be replaced with --overwrite.
    shutil.copyfile(folder / MODEL / MANIFEST, folder / MANIFEST)
