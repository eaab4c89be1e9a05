"""Choose by validation score: merge, score, keep the best."""

import hashlib
import json
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from matsmerge.checkpoints.fingerprint import fingerprint
from matsmerge.checkpoints.source import local_path
from matsmerge.engine.executor import Executor
from matsmerge.engine.local_executor import LocalExecutor
from matsmerge.engine.merge_run import RunOptions, merge_to_folder
from matsmerge.engine.output_folder import MANIFEST, is_merge
from matsmerge.engine.prepared_merge import PreparedMerge, prepare
from matsmerge.errors import DataError, NonFiniteError, RecipeError, StatisticsError
from matsmerge.files.output_place import check_folder
from matsmerge.files.whole_outputs import StagedFolder, remove
from matsmerge.lab.tuning.search_space import ITERATIONS, Range, SearchSpace
from matsmerge.lab.tuning.teacher_score import DIVERGENCE, TeacherScorer, find_teachers
from matsmerge.lab.tuning.trial_score import (
    LabelScorer,
    Scorer,
    ValidationTask,
    overlaps,
    read_validation_tasks,
)
from matsmerge.lab.tuning.trials import Journal, Trial, best, choice_key
from matsmerge.lab.tuning.tuning_file import Options, read_tuning_file
from matsmerge.notebook_table import notebook_table
from matsmerge.optional_import import import_optional
from matsmerge.progress import AnyProgress, listener
from matsmerge.recipes.recipe import Recipe, make_recipe
from matsmerge.tasks.task_file import TaskFile
from matsmerge.version import __version__

JOURNAL, RECIPE, MODEL, REPORT = "trials.jsonl", "recipe.yaml", "model", "tuning.json"
_KEPT = "model.key"  # which trial the model is of
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
    options: Options | None = None,
    *,
    search: Mapping[str, Any] | None = None,
    executor: Executor | None = None,
    overwrite: bool = False,
    resume: bool = False,
    progress: AnyProgress | None = None,
) -> Tuned:
    """Try what a recipe leaves open, and write the recipe and the model that score best.

    `recipe` is one, or a file with it (and maybe with tasks and search), or a whole search space;
    `search` says what to try, as on the command line: `{"scale": "0:1:0.1"}`.
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
    space, options = recipe, options or Options()
    is_grid = options.strategy == "grid"
    space.check(with_ranges=not is_grid)
    metric = DIVERGENCE if options.unlabelled else None
    validation = read_validation_tasks(tasks, options.split, metric)
    if not validation:
        raise DataError("say what to tune for with at least one task")
    prepared = [prepare(space.fill(choice)) for choice in _representatives(space)]
    _check_overlap(prepared, validation, options)
    target = local_path(out).absolute()
    used = _used(prepared, validation)
    # A folder of ours has the manifest of the model that was chosen.
    check = partial(check_folder, target, "search", is_merge, inputs=used, overwrite=overwrite)
    check(resume=resume)
    identity = _identify(space, prepared, validation, options)
    own = {str(entry.name): entry.model for entry in prepared[0].recipe.models}
    teachers = find_teachers(validation, own) if options.unlabelled else {}
    num_merges = space.num_choices if is_grid else options.num_trials
    staged = StagedFolder(target, "search")
    journal: Journal | None = None
    staged.open()
    try:
        if not resume:
            staged.clear()
        staged.output.mkdir(exist_ok=True)
        journal = Journal(staged.output / JOURNAL, identity, resume=resume)
        scorer = _scorer(validation, options, teachers, staged.output / ANSWERS)
        running = _Search(space, staged.output, journal, scorer, executor or LocalExecutor())
        num_models = num_merges * max(1, len(space.iterations))
        told.stage("tuning", num_models, "merges", len(journal.trials))
        for number, choice in enumerate(space.grid() if is_grid else running.draw(options)):
            for trial in running.run(choice, number):
                told.advance(1, "failed" if trial.failure else f"last {trial.score:.4g}")
        chosen = running.best()
        running.write(chosen, options)
        check(resume=True)
        staged.put_in_place()
        staged.discard()
    except BaseException:
        # Without a trial there is nothing to continue; a journal of another search is not ours.
        staged.discard() if journal is not None and not journal.trials else staged.close()
        raise
    trials = list(journal.trials.values())
    remarks = space.remarks(chosen.choice)
    return Tuned(chosen, trials, target, scorer.metrics, scorer.in_percent, remarks)


@dataclass(frozen=True)
class _Search:
    """Merges and scores; the best model so far is kept as it was scored."""

    space: SearchSpace
    folder: Path
    journal: Journal
    scorer: Scorer
    executor: Executor

    def best(self) -> Trial:
        return best(self.journal.trials.values(), lowest=self.scorer.lower_is_better)

    def draw(self, options: Options) -> Iterator[dict[str, Any]]:
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

    def run(self, choice: dict[str, Any], number: int) -> Iterator[Trial]:
        """Merge, and score the model, or that of every number of iterations."""
        scored = self.space.scored(choice)
        missing = [one for one in scored if choice_key(one) not in self.journal.trials]
        if not missing:
            return
        # A kept base is found by its folder's name, so that each merge has a folder of its own.
        folder = self.folder / f"merge-{number}"
        # Under the name it keeps if it is chosen, which its card has as the title.
        made = folder / MODEL
        failure = None
        try:
            try:
                self._merge(self.space.fill(choice), made)
            except NonFiniteError as error:
                failure = error.problems[0]
            for one in missing:
                model = made / f"iteration-{one[ITERATIONS]}" if self.space.iterations else made
                trial = Trial(choice=one, failure=failure) if failure else self._score(one, model)
                self.journal.add(trial)
                if math.isfinite(trial.score) and self.best() is trial:
                    self._keep(trial, model)
                yield trial
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _merge(self, recipe: Recipe, out: Path) -> None:
        merge_to_folder(prepare(recipe), out, RunOptions(self.executor, overwrite=True))

    def _score(self, choice: dict[str, Any], model: Path) -> Trial:
        try:
            scores, errors = self.scorer.score(model)
        except NonFiniteError as error:
            return Trial(choice=choice, failure=error.problems[0])
        return Trial(choice=choice, scores=scores, errors=errors)

    def _keep(self, trial: Trial, model: Path) -> None:
        """Put the best model so far aside, with a word on which it is."""
        (self.folder / _KEPT).unlink(missing_ok=True)
        shutil.rmtree(self.folder / MODEL, ignore_errors=True)
        model.rename(self.folder / MODEL)
        (self.folder / _KEPT).write_text(trial.key)

    def write(self, chosen: Trial, options: Options) -> None:
        """The chosen recipe, its model as it was scored, and all trials; nothing else."""
        recipe, kept = self.space.fill(chosen.choice), self.folder / _KEPT
        if not kept.is_file() or kept.read_bytes() != chosen.key.encode():
            self._merge(recipe, self.folder / MODEL)
        plain = recipe.model_dump(mode="json", exclude_defaults=True)
        (self.folder / RECIPE).write_text(yaml.safe_dump(plain, sort_keys=False))
        content = {
            "version": __version__,
            "options": options.model_dump(),
            "metrics": self.scorer.metrics,
            "best": chosen.to_json(),
            "trials": [trial.to_json() for trial in self.journal.trials.values()],
        }
        (self.folder / REPORT).write_text(json.dumps(content, indent=1) + "\n")
        # What makes the folder one of ours, to be replaced with --overwrite.
        shutil.copyfile(self.folder / MODEL / MANIFEST, self.folder / MANIFEST)
        for path in self.folder.iterdir():  # also what killed runs left of their trials
            if path.name not in (JOURNAL, RECIPE, MODEL, REPORT, MANIFEST):
                remove(path)


def _scorer(
    validation: Sequence[ValidationTask],
    options: Options,
    teachers: Mapping[str, str],
    answers: Path,
) -> Scorer:
    num, size = options.num_examples, options.batch_size
    if not options.unlabelled:
        return LabelScorer(tasks=validation, num_examples=num, batch_size=size)
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
    StatisticsError.raise_all(dict.fromkeys(problems))


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


def _identify(
    space: SearchSpace,
    prepared: Sequence[PreparedMerge],
    validation: Sequence[ValidationTask],
    options: Options,
) -> str:
    """A digest of all that must be the same for a search to be continued."""
    content = [
        __version__,
        dict(space.recipe),
        {key: list(values) for key, values in space.values.items()},
        [fingerprint(m.checkpoint) for p in prepared for m in p.alignment.everyone],
        [fingerprint(one.statistics.arrays) for p in prepared for one in p.evidence],
        [[t.described.model_dump(mode="json"), t.data.fingerprint] for t in validation],
        [options.strategy, options.num_trials, options.seed, options.num_examples],
        options.unlabelled,
    ]
    return hashlib.sha256(json.dumps(content, default=str).encode()).hexdigest()
