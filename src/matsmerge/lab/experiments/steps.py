"""The steps that every suite is made of: make, train, collect, merge, test."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from matsmerge.checkpoints.public_names import public_name, without_paths
from matsmerge.engine.executor import SerialExecutor
from matsmerge.engine.merge_file import read_merge_file
from matsmerge.errors import AnotherRunError, RecipeError
from matsmerge.files.strict_yaml import read_yaml
from matsmerge.lab.evaluation.comparison import evaluate
from matsmerge.lab.evaluation.results import ENSEMBLE, INDIVIDUAL
from matsmerge.lab.experiments.sources import SOURCES, VERSIONS
from matsmerge.lab.experiments.step import Places, Step, StepSource, TaskInput
from matsmerge.lab.experiments.suite_results import ScoredModel, Scores
from matsmerge.lab.training.training_options import TrainingOptions
from matsmerge.lab.training.training_run import train
from matsmerge.lab.tuning.search import tune
from matsmerge.lab.tuning.search_space import SearchSpace
from matsmerge.lab.tuning.trials import MODEL, RECIPE, REPORT
from matsmerge.lab.tuning.tuning_file import TuningOptions
from matsmerge.recipes.method_spec import as_plain
from matsmerge.statistics.collection_options import CollectionOptions
from matsmerge.statistics.collection_run import Output
from matsmerge.statistics.prepared_collection import ExampleChoice, prepare_collection
from matsmerge.tasks.head_record import HEADS
from matsmerge.tasks.loaded_model import load_model
from matsmerge.tasks.splits import read_split

T = TypeVar("T")

TUNED = "tuned"


@dataclass(frozen=True, kw_only=True)
class Make(Step[None], kind="make"):
    """Data or a base model from packages."""

    source: str  # a name in SOURCES
    options: Mapping[str, Any]

    @property
    def settings(self) -> Any:
        """With the version of a source that was changed."""
        version = VERSIONS.get(self.source)
        return super().settings | ({} if version is None else {"version": version})

    def run(self, _: Places, out: Path, /) -> None:
        shutil.rmtree(out)
        out.mkdir()
        SOURCES[self.source](out, **self.options)


@dataclass(frozen=True, kw_only=True)
class Train(Step[float | None], kind="train", output=MODEL):
    """A model trained on one task, or on all of them; the result is its validation score."""

    base: StepSource
    tasks: list[TaskInput]
    options: TrainingOptions

    def run(self, places: Places, out: Path, /) -> float | None:
        tasks = [task.read(places) for task in self.tasks]
        _remove_unrecorded(out / MODEL)
        options = self.options.model_dump(by_alias=True, exclude_unset=True)
        work = partial(train, places.name(self.base), tasks, out / MODEL, **options)
        return continued(work).score


@dataclass(frozen=True, kw_only=True)
class Collect(Step[int], kind="collect", output="statistics.safetensors"):
    """Statistics of a model on its data; the result is the number of examples."""

    model: StepSource
    task: TaskInput
    options: CollectionOptions
    split: str
    num_examples: int
    batch_size: int

    def run(self, places: Places, out: Path, /) -> int:
        task = self.task.read(places)
        loaded = load_model(places.name(self.model), task, need_targets=self.options.wants_targets)
        choice = ExampleChoice(
            self.num_examples,
            columns=task.columns,
            wordings=task.wordings,
            batch_size=self.batch_size,
        )
        file = out / self.output
        file.unlink(missing_ok=True)
        prepared = prepare_collection(loaded, read_split(task, self.split), self.options, choice)
        prepared.run(Output(file, resume=True, overwrite=True))
        return prepared.num_examples


@dataclass(frozen=True)
class Shown:
    """Examples of a task, for methods that run the models while they merge them."""

    task: TaskInput
    split: str
    num_examples: int
    batch_size: int

    def written(self, places: Places) -> dict[str, Any]:
        """As a recipe says it."""
        file = self.task.read(places)
        content = file.model_dump(mode="json", exclude_defaults=True, exclude={"data", "metrics"})
        if isinstance(file.data, Mapping):
            own = {"path": file.data[self.split]}
            content.pop("splits", None)
        else:
            own = {"path": str(file.data), "split": self.split}
        sizes = {"num_examples": self.num_examples, "batch_size": self.batch_size}
        return {**content, **own, **sizes}


@dataclass(frozen=True)
class Merging:
    """Models to merge, and the method; what a recipe says."""

    base: StepSource
    models: Mapping[str, StepSource]
    statistics: Mapping[str, Step[Any]]  # by model; empty if the method reads none
    method: str | Mapping[str, Any]
    with_defaults: Mapping[str, Any]  # the method's parameters, whose defaults may change
    heads: str | list[str] | None  # patterns of parameters that stay with their task
    data: Mapping[str, Shown] = field(default_factory=dict)  # by model, if the method needs it

    def recipe(self, places: Places) -> dict[str, Any]:
        """The recipe as plain data."""
        statistics = self.statistics
        return {
            "base": places.name(self.base),
            "models": [
                {"name": name, "model": places.name(model)}
                | ({"statistics": str(places.path(statistics[name]))} if statistics else {})
                | ({"data": self.data[name].written(places)} if self.data else {})
                for name, model in self.models.items()
            ],
            "method": dict(as_plain(self.method)),
            **({"heads": self.heads} if self.heads else {}),
            # Of adapters, too, methods that run the models write full ones.
            **({"output": "dense"} if self.data else {}),
        }


@dataclass(frozen=True)
class Scoring:
    """How many examples of each task are scored, and how many at once."""

    num_validation: int | None
    num_test: int | None
    batch_size: int

    def test(self, models: Mapping[str, str], tasks: list[TaskInput], places: Places) -> Scores:
        """Test scores of a model, or of the ensemble of several."""
        results = evaluate(
            models,
            [task.read(places) for task in tasks],
            "test",
            ensemble=len(models) > 1,
            num_examples=self.num_test,
            batch_size=self.batch_size,
        )
        row = ENSEMBLE if len(models) > 1 else next(iter(models))
        found = {task: results.score(row, task) for task in results.tasks}
        scores = {task: score for task, score in found.items() if score is not None}
        return Scores(
            tasks={task: score.value for task, score in scores.items()},
            errors={task: score.error for task, score in scores.items()},
            right={task: score.right for task, score in scores.items() if score.right},
        )


@dataclass(frozen=True, kw_only=True)
class Merge(Step[ScoredModel], kind="merge", output=RECIPE):
    """The best of what a method's search tries by validation, scored on the test split."""

    merging: Merging
    tasks: list[TaskInput]
    scoring: Scoring
    search: Mapping[str, Any]
    init: "Merge | None" = None  # whose tuned method is the init, with its weights
    keep_model: bool = False

    is_unlabelled: ClassVar[bool] = False

    def run(self, places: Places, out: Path, /) -> ScoredModel:
        _remove_unrecorded(out / MODEL, out / TUNED)
        recipe = self.merging.recipe(places)
        if self.init is not None:
            start = read_yaml(places.path(self.init), RecipeError)
            recipe["method"]["init"] = start["method"]
            weights = {entry["name"]: entry.get("weight", 1.0) for entry in start["models"]}
            for entry in recipe["models"]:
                entry["weight"] = weights[entry["name"]]
        space = SearchSpace.parse(recipe, self.search)
        options = TuningOptions(
            num_examples=self.scoring.num_validation,
            batch_size=self.scoring.batch_size,
            unlabelled=self.is_unlabelled,
            allow_overlap=True,  # the suite says which split statistics are from
        )
        tasks = [task.read(places) for task in self.tasks]
        work = partial(tune, space, tasks, out / TUNED, options, executor=SerialExecutor())
        tuned = continued(work)
        model = tuned.folder / MODEL
        scores = self.scoring.test({"merged": str(model)}, self.tasks, places)
        manifest = read_merge_file(model / "merge.json")
        for name in (RECIPE, REPORT, *([MODEL] if self.keep_model else [])):
            (tuned.folder / name).rename(out / name)
        shutil.rmtree(tuned.folder)
        recipe = read_yaml(out / RECIPE, RecipeError)
        return ScoredModel(
            test=scores,
            # Without labels what is lowest is best, and is no score.
            validation=None if self.is_unlabelled else tuned.best.score,
            chosen=dict(tuned.best.choice),
            num_tried=len(tuned.trials),
            recipe=without_paths(recipe, partial(_in_run, out.parent)),
            merge=manifest,
        )


def _in_run(steps: Path, source: str) -> str:
    """What steps of a run made, by its path from the run's folder on; all else by its name."""
    path = Path(source)
    if not path.is_relative_to(steps):
        return public_name(source)
    return (Path(steps.name) / path.relative_to(steps)).as_posix()


class UnlabelledMerge(Merge, kind="unlabelled merge", output=RECIPE):
    """The same, chosen by the distance to each task's own model instead of by labels."""

    is_unlabelled = True


@dataclass(frozen=True, kw_only=True)
class ScoreModels(Step[ScoredModel], kind="test"):
    """Test scores of models that were not merged: each on its own task, or one on all."""

    row: str  # INDIVIDUAL, or another name for one model
    models: Mapping[str, StepSource]
    tasks: list[TaskInput]
    scoring: Scoring

    def run(self, places: Places, _: Path, /) -> ScoredModel:
        models = {name: places.name(model) for name, model in self.models.items()}
        if self.row != INDIVIDUAL:
            return ScoredModel(test=self.scoring.test(models, self.tasks, places))
        each = [self.scoring.test({t.name: models[t.name]}, [t], places) for t in self.tasks]
        return ScoredModel(
            test=Scores(
                tasks={task: value for found in each for task, value in found.tasks.items()},
                errors={task: value for found in each for task, value in found.errors.items()},
                right={task: value for found in each for task, value in found.right.items()},
            )
        )


@dataclass(frozen=True, kw_only=True)
class Ensemble(Step[ScoredModel], kind="ensemble"):
    """Test scores of the mean of all models' probabilities.

    Each task is answered by every model with that task's head, which a merge of them has.
    """

    models: Mapping[str, StepSource]
    tasks: list[TaskInput]
    scoring: Scoring
    merged: Merge  # keeps its model

    def run(self, places: Places, _: Path, /) -> ScoredModel:
        heads = places.path(self.merged).parent / MODEL / HEADS
        tasks = []
        for task in self.tasks:
            head = heads / f"{task.name}.safetensors"
            file = task.file.model_copy(update={"head": str(head)}) if head.exists() else task.file
            tasks.append(replace(task, file=file))
        models = {name: places.name(model) for name, model in self.models.items()}
        return ScoredModel(test=self.scoring.test(models, tasks, places))


def continued(work: Callable[..., T]) -> T:
    """Resume interrupted work; begin anew if what is there was begun with other paths."""
    try:
        return work(resume=True)
    except AnotherRunError:
        return work(overwrite=True)


def _remove_unrecorded(*folders: Path) -> None:
    """Remove what a run completed just before it was killed: the step was not recorded."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
