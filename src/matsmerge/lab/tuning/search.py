"""Choose by validation score: merge, score, keep the best."""

import json
import math
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from matsmerge.checkpoints.source import local_path
from matsmerge.engine.executor import Executor, Piece, SerialExecutor
from matsmerge.engine.local_executor import LocalExecutor
from matsmerge.engine.merge_run import RunOptions, merge_to_folder
from matsmerge.engine.output_folder import MANIFEST, is_merge
from matsmerge.engine.prepared_merge import PreparedMerge, prepare_merge
from matsmerge.errors import NonFiniteError, RecipeError
from matsmerge.files.output_place import check_folder
from matsmerge.files.whole_outputs import StagedFolder, remove
from matsmerge.lab.run_logs import open_log
from matsmerge.lab.tuning.harness_score import HarnessTasks, harness_of
from matsmerge.lab.tuning.search_inputs import check_overlap, identify_search, places_of
from matsmerge.lab.tuning.search_space import ITERATIONS, Range, SearchSpace
from matsmerge.lab.tuning.teacher_score import DIVERGENCE, TeacherScorer, find_teachers
from matsmerge.lab.tuning.trial_score import (
    LabelScorer,
    Scorer,
    ValidationTask,
    check_together,
    read_validation_tasks,
)
from matsmerge.lab.tuning.trials import (
    JOURNAL,
    MODEL,
    RECIPE,
    REPORT,
    Journal,
    Trial,
    best,
    choice_key,
    trial_table,
)
from matsmerge.lab.tuning.tuning_file import TuningOptions, read_tuning_file
from matsmerge.models.kept_base import KeptBase
from matsmerge.notebook_table import notebook_table
from matsmerge.optional_import import import_optional
from matsmerge.problems import problems_of
from matsmerge.progress import AnyProgress, listener
from matsmerge.recipes.recipe import Recipe, make_recipe
from matsmerge.tasks.task_file import TaskFile
from matsmerge.version import __version__

_KEPT = "model.key"  # which trial the model is of
_Numbered = tuple[int, list[dict[str, Any]]]  # a merge, and what is to be scored of it
ANSWERS = "answers"  # of the tasks' own models, while the search goes on


@dataclass(frozen=True)
class Tuned:
    """The best of all trials."""

    best: Trial
    trials: Sequence[Trial]
    folder: Path  # with the chosen recipe, all trials, and the merged model
    metrics: Mapping[str, str]  # of each task
    in_percent: bool
    remarks: Sequence[str] = ()  # on values that lie at the end of what was tried

    def __repr__(self) -> str:
        best = self.best
        return (
            f"<Tuned {best.choice}: {best.score:.4g}, {len(self.trials)} trials in {self.folder}>"
        )

    def _repr_html_(self) -> str:
        return notebook_table(
            "Tuned",
            {"best": self.best.choice, "score": f"{self.best.score:.4g}"}
            | {task: f"{score:.4g}" for task, score in self.best.scores.items()}
            | {"trials": len(self.trials), "folder": self.folder},
        )


def tune(
    recipe: SearchSpace | Recipe | str | Path,
    tasks: Sequence[str | Path | TaskFile] = (),
    out: str | Path = "tuned",
    options: TuningOptions | None = None,
    *,
    search: Mapping[str, Any] | None = None,
    executor: Executor | None = None,
    of_trials: Executor | None = None,
    overwrite: bool = False,
    resume: bool = False,
    log_to: str | None = None,
    progress: AnyProgress | None = None,
    **given: Any,
) -> Tuned:
    """Try what a recipe leaves open, and write the recipe and the model that score best.

    `recipe` is one, or a file with it (and maybe with tasks and search), or a whole search space;
    `search` says what to try, as on the command line: `{"scale": "0:1:0.1"}`. What is `given`
    besides are options by their names there, such as `num_examples=100`, `lm_eval=["arc_easy"]`.

    The `executor` merges. With one `of_trials`, such as `RayExecutor`, whole trials of a grid are
    its jobs, each a merge and its score; what optuna tries depends on the trials before.
    `log_to` names a log of TensorBoard or Weights & Biases: `tensorboard:FOLDER`, `wandb:PROJECT`.
    """
    told = listener(progress)
    if isinstance(recipe, (str, Path)):
        described = read_tuning_file(local_path(recipe))
        tasks, options = [*described.tasks, *tasks], options or described.options()
        search = {**described.search, **(search or {})}
        recipe = make_recipe(described.plain_recipe())
    if isinstance(recipe, Recipe):
        plain = recipe.model_dump(mode="json", exclude_defaults=True)
        recipe = SearchSpace.parse(plain, search or {})
    elif search:
        raise RecipeError("a search space says what to try itself; leave out search=")
    space, options = recipe, _with(options or TuningOptions(), given)
    is_grid = options.strategy == "grid"
    space.check(with_ranges=not is_grid)
    metric = DIVERGENCE if options.unlabelled else None
    validation = read_validation_tasks(tasks, options.split, metric)
    harness = harness_of(options)
    check_together(validation, harness, metric)
    prepared = [prepare_merge(space.fill(choice)) for choice in _representatives(space)]
    check_overlap(prepared, validation, options)
    target = local_path(out).absolute()
    used = places_of(prepared, validation)
    # A folder of ours has the manifest of the model that was chosen.
    check = partial(check_folder, target, "search", is_merge, inputs=used, overwrite=overwrite)
    check(resume=resume)
    identity = identify_search(space, prepared, validation, options, harness)
    own = {str(entry.name): entry.model for entry in prepared[0].recipe.models}
    teachers = find_teachers(validation, own) if options.unlabelled else {}
    num_merges = space.num_choices if is_grid else options.num_trials
    staged = StagedFolder(target, "search")
    journal: Journal | None = None
    log = open_log(log_to)
    staged.open()
    try:
        if not resume:
            staged.clear()
        staged.output.mkdir(exist_ok=True)
        journal = Journal(staged.output / JOURNAL, identity, resume=resume)
        scorer = _scorer(validation, options, teachers, staged.output / ANSWERS, harness)
        merging = executor or (of_trials if of_trials and not is_grid else LocalExecutor())
        attempts = _Attempts(space, staged.output, scorer, merging)
        running = _Search(attempts, journal, _places(space) if is_grid else {})
        num_models = num_merges * max(1, len(space.iterations))
        told.stage("tuning", num_models, "merges", len(journal.trials))
        if is_grid and of_trials is not None:
            trials = running.run_at_once(of_trials, max(map(_trial_bytes, prepared)))
        else:
            trials = running.run(space.grid() if is_grid else running.draw(options))
        for trial in running.trials:  # of a run that was interrupted
            log.trial(trial.choice, {**trial.scores, "mean": trial.score})
        began = time.monotonic()
        for trial in trials:
            told.advance(1, "failed" if trial.failure else f"last score {trial.score:.4g}")
            log.trial(trial.choice, {**trial.scores, "mean": trial.score})
            log.seconds("trial", time.monotonic() - began)
            began = time.monotonic()
        chosen = running.best()
        running.write(chosen, options)
        header, rows = trial_table(running.trials)
        log.table("trials", header, rows)
        check(resume=True)
        staged.put_in_place()
        staged.discard()
    except BaseException:
        # Without a trial there is nothing to continue; a journal of another search is not ours.
        staged.discard() if journal is not None and not journal.trials else staged.close()
        raise
    finally:
        log.close()
    as_good = [t.choice for t in running.trials if not t.failure and t.score == chosen.score]
    remarks = space.remarks(chosen.choice, as_good)
    return Tuned(chosen, running.trials, target, scorer.metrics, scorer.in_percent, remarks)


def _with(options: TuningOptions, given: Mapping[str, Any]) -> TuningOptions:
    """Options of which some are others."""
    set_before = options.model_dump(exclude_unset=True)
    try:
        return TuningOptions.model_validate({**set_before, **given})
    except ValidationError as error:
        raise RecipeError(problems_of(error, TuningOptions)) from error


@dataclass(frozen=True)
class _Attempts:
    """Merges and scores, here or in another process."""

    space: SearchSpace
    folder: Path
    scorer: Scorer
    executor: Executor

    def place(self, number: int) -> Path:
        """A folder for each merge: a kept base is found by its folder's name."""
        return self.folder / f"merge-{number}"

    def run(self, number: int, missing: Sequence[dict[str, Any]]) -> Iterator[tuple[Trial, Path]]:
        """Merge, and score the model, or that of every number of iterations; with their places."""
        # Under the name it keeps if it is chosen, which its card has as the title.
        made = self.place(number) / MODEL
        failure = None
        try:
            self.merge({k: v for k, v in missing[0].items() if k != ITERATIONS}, made)
        except NonFiniteError as error:
            failure = error.problems[0]
        for one in missing:
            model = made / f"iteration-{one[ITERATIONS]}" if self.space.iterations else made
            yield Trial(choice=one, failure=failure) if failure else self._score(one, model), model

    def run_all(self, piece: Piece[_Numbered]) -> tuple[int, list[tuple[Trial, Path]]]:
        """A job: all trials of a merge, which is left for the search to keep."""
        number, missing = piece.content
        return number, list(self.run(number, missing))

    def merge(self, choice: dict[str, Any], out: Path) -> None:
        recipe = self.space.fill(choice)
        merge_to_folder(prepare_merge(recipe), out, RunOptions(self.executor, overwrite=True))

    def _score(self, choice: dict[str, Any], model: Path) -> Trial:
        try:
            scores, errors = self.scorer.score(model)
        except NonFiniteError as error:
            return Trial(choice=choice, failure=error.problems[0])
        return Trial(choice=choice, scores=scores, errors=errors)


@dataclass(frozen=True)
class _Search:
    """Tries choices; the best model so far is kept as it was scored."""

    attempts: _Attempts
    journal: Journal
    places: Mapping[str, int]  # of a grid's choices in it, whichever is scored first

    @property
    def space(self) -> SearchSpace:
        return self.attempts.space

    @property
    def folder(self) -> Path:
        return self.attempts.folder

    @property
    def scorer(self) -> Scorer:
        return self.attempts.scorer

    @property
    def trials(self) -> list[Trial]:
        found = self.journal.trials.values()
        return sorted(found, key=lambda trial: self.places.get(trial.key, 0))

    def best(self) -> Trial:
        return best(self.trials, lowest=self.scorer.lower_is_better)

    def draw(self, options: TuningOptions) -> Iterator[dict[str, Any]]:
        """Choices by optuna, each after the one before has been scored."""
        optuna = import_optional("optuna")
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = optuna.samplers.TPESampler(seed=options.seed)
        lowest = self.scorer.lower_is_better
        study = optuna.create_study(direction="minimize" if lowest else "maximize", sampler=sampler)
        for _ in range(options.num_trials):
            asked = study.ask()
            choice = {}
            for key, values in self.space.others.items():
                if isinstance(values, Range):
                    drawn = asked.suggest_float(key, values.low, values.high)
                    choice[key] = float(f"{drawn:.6g}")
                else:
                    # By number: only plain values have names that a sampler can tell apart.
                    choice[key] = values[asked.suggest_categorical(key, list(range(len(values))))]
            yield choice
            trials = [self.journal.trials[choice_key(c)] for c in self.space.scored(choice)]
            if any(trial.scores for trial in trials):
                study.tell(asked, best(trials, lowest=lowest).score)
            else:
                study.tell(asked, state=optuna.trial.TrialState.FAIL)

    def _missing(self, choices: Iterable[dict[str, Any]]) -> Iterator[_Numbered]:
        """What has not been scored yet, by merges."""
        for number, choice in enumerate(choices):
            scored = self.space.scored(choice)
            if left := [one for one in scored if choice_key(one) not in self.journal.trials]:
                yield number, left

    def run(self, choices: Iterable[dict[str, Any]]) -> Iterator[Trial]:
        """Merge and score one after the other."""
        for number, missing in self._missing(choices):
            try:
                for trial, model in self.attempts.run(number, missing):
                    self._note(trial, model)
                    yield trial
            finally:
                shutil.rmtree(self.attempts.place(number), ignore_errors=True)

    def run_at_once(self, executor: Executor, peak_bytes: int) -> Iterator[Trial]:
        """Merge and score all of a grid, a merge with its scores being a job."""
        self.scorer.prepare()
        away = replace(self.scorer, kept=KeptBase())
        attempts = replace(self.attempts, executor=SerialExecutor(), scorer=away)
        jobs = (Piece(one, 0, peak_bytes) for one in self._missing(self.space.grid()))
        for number, made in executor.map(attempts.run_all, jobs):
            for trial, model in made:
                self._note(trial, model)
                yield trial
            shutil.rmtree(self.attempts.place(number), ignore_errors=True)

    def _note(self, trial: Trial, model: Path) -> None:
        self.journal.add(trial)
        if math.isfinite(trial.score) and self.best() is trial:
            self._keep(trial, model)

    def _keep(self, trial: Trial, model: Path) -> None:
        """Put the best model so far aside, with a word on which it is."""
        (self.folder / _KEPT).unlink(missing_ok=True)
        shutil.rmtree(self.folder / MODEL, ignore_errors=True)
        model.rename(self.folder / MODEL)
        (self.folder / _KEPT).write_text(trial.key)

    def write(self, chosen: Trial, options: TuningOptions) -> None:
        """The chosen recipe, its model as it was scored, and all trials; nothing else."""
        recipe, kept = self.space.fill(chosen.choice), self.folder / _KEPT
        if not kept.is_file() or kept.read_bytes() != chosen.key.encode():
            self.attempts.merge(chosen.choice, self.folder / MODEL)
        plain = recipe.model_dump(mode="json", exclude_defaults=True)
        (self.folder / RECIPE).write_text(yaml.safe_dump(plain, sort_keys=False))
        content = {
            "version": __version__,
            "options": options.model_dump(),
            "metrics": self.scorer.metrics,
            "best": chosen.to_json(),
            "trials": [trial.to_json() for trial in self.trials],
        }
        (self.folder / REPORT).write_text(json.dumps(content, indent=1) + "\n")
        # What makes the folder one of ours, to be replaced with --overwrite.
        shutil.copyfile(self.folder / MODEL / MANIFEST, self.folder / MANIFEST)
        for path in self.folder.iterdir():  # also what killed runs left of their trials
            if path.name not in (JOURNAL, RECIPE, MODEL, REPORT, MANIFEST):
                remove(path)


def _places(space: SearchSpace) -> dict[str, int]:
    scored = (one for choice in space.grid() for one in space.scored(choice))
    return {choice_key(one): place for place, one in enumerate(scored)}


def _trial_bytes(prepared: PreparedMerge) -> int:
    """Memory of a job that merges and then loads what it has merged."""
    num_bytes = sum(spec.num_bytes for spec in prepared.written.values())
    return prepared.plan.peak_bytes(1) + num_bytes


def _scorer(
    validation: Sequence[ValidationTask],
    options: TuningOptions,
    teachers: Mapping[str, str],
    answers: Path,
    harness: HarnessTasks | None,
) -> Scorer:
    num, size = options.num_examples, options.batch_size
    if not options.unlabelled:
        return LabelScorer(tasks=validation, num_examples=num, batch_size=size, harness=harness)
    return TeacherScorer(
        tasks=validation, num_examples=num, batch_size=size, teachers=teachers, folder=answers
    )


def _representatives(space: SearchSpace) -> Iterable[dict[str, Any]]:
    """A choice for every method and other thing that inputs depend on."""
    keys = [key for key in space.others if key in Recipe.model_fields]
    kinds: dict[str, dict[str, Any]] = {}
    for choice in space.grid():
        kinds.setdefault(choice_key({key: choice[key] for key in keys}), choice)
    return kinds.values()
