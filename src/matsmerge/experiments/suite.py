"""A suite in a file: base model, tasks, fine-tuning, statistics, methods, and what to find out."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from matsmerge.errors import RecipeError, closest
from matsmerge.methods import METHODS
from matsmerge.methods.objectives import OBJECTIVES
from matsmerge.strict_yaml import read_yaml
from matsmerge.tasks.task_file import TaskFile
from matsmerge.tuning.search_space import parse_values

FOLDER = Path(__file__).parent / "suites"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Made(_Part):
    """Something that is made from packages by a function of `sources`."""

    source: str
    settings: dict[str, Any] = Field(default_factory=dict)


class SuiteTask(TaskFile):
    """A task file, whose data may also come from a source."""

    source: str | None = None
    settings: dict[str, Any] = Field(default_factory=dict)  # of the source

    def as_task_file(self) -> dict[str, Any]:
        """What a task file says, without where the data come from."""
        return self.model_dump(mode="json", exclude_unset=True, exclude={"source", "settings"})


class Variant(_Part):
    """One way to fine-tune, and what is collected of the models."""

    training: dict[str, Any] = Field(default_factory=dict)  # TrainingOptions
    models: dict[str, str] | None = None  # of each task, where they need no training
    joint: dict[str, Any] | None = None  # what is different for one model of all tasks; None: no
    statistics: list[str] = ["gram"]
    split: str = "validation"  # that statistics are collected from
    num_examples: int = Field(default=1000, ge=1)
    expectation: Literal["empirical", "true"] = "empirical"
    heads: str | list[str] | None = None  # patterns of parameters that stay with their task
    base: str | Made | None = None  # instead of the suite's


class MethodOfSuite(_Part):
    """A method, and the values to try of its parameters."""

    method: str | dict[str, Any]
    search: dict[str, Any] = Field(default_factory=dict)
    label: str | None = None
    variants: list[str] | None = None  # those it makes sense for; None: all

    @property
    def name(self) -> str:
        return self.method if isinstance(self.method, str) else str(self.method.get("name"))


class Study(_Part):
    """What studies share: for which variants and seeds they are done; None: all."""

    variants: list[str] | None = None
    seeds: list[int] | None = None


class HeatMap(Study):
    """Every objective from every init, iterations chosen by validation."""

    inits: list[str]  # names of the suite's methods, each as it was tuned
    objectives: dict[str, str | dict[str, Any]]
    iterations: Any = "10:100:10"


class FisherStudy(Study):
    """Empirical or true Fisher, from which split."""

    methods: list[str]  # of the suite's, as they are given, iterations searched
    splits: list[str] = ["train", "validation"]


class CurveStudy(Study):
    """Score and error against iterations."""

    curves: dict[str, str | dict[str, Any]]  # methods by the name of their curve
    iterations: list[int]


class CostStudy(Study):
    """Operations by formula, seconds by the clock."""

    repeats: int = Field(default=3, ge=1)


class LandscapeStudy(Study):
    """Losses in a plane through three models."""

    layer: str
    tasks: list[str] = Field(min_length=2, max_length=3)
    methods: list[str]
    size: int = Field(default=25, ge=3)  # points on a side
    num_examples: int = Field(default=200, ge=1)


class IntermediateStudy(Study):
    """A target task and those whose models may help."""

    target: str
    donors: list[str]
    sequential: dict[str, Any] | None = None  # training the donor's model further; None: no


class SubspaceStudy(Study):
    """How far the tasks' subspaces overlap."""

    method: str  # whose merged model is placed in them


class Studies(_Part):
    """What to find out beside the comparison of all methods on all tasks."""

    heat_map: HeatMap | None = None
    fisher: FisherStudy | None = None
    curves: CurveStudy | None = None
    costs: CostStudy | None = None
    landscape: LandscapeStudy | None = None
    intermediate: IntermediateStudy | None = None
    subspaces: SubspaceStudy | None = None


class Suite(_Part):
    """All of it. `num_validation` examples of each task are scored to choose by."""

    name: str = ""  # the file's
    title: str
    about: str
    offline: bool = False  # needs packages alone, nothing from the hub
    base: str | Made
    tasks: dict[str, SuiteTask] = Field(min_length=2)
    seeds: list[int] = Field(default=[0], min_length=1)
    variants: dict[str, Variant] = Field(min_length=1)
    methods: dict[str, MethodOfSuite] = Field(min_length=1)
    ensemble: bool = False
    paper: dict[str, str] = Field(default_factory=dict)  # variant -> column of the paper's tables
    num_validation: int | None = Field(default=None, ge=1)
    num_test: int | None = Field(default=None, ge=1)
    batch_size: int = Field(default=32, ge=1)
    studies: Studies = Studies()

    @model_validator(mode="after")
    def _check(self) -> "Suite":
        problems = list(_problems(self))
        if problems:
            raise ValueError("\n".join(problems))
        return self


def _problems(suite: Suite) -> Iterator[str]:
    """Names of one part that no other part has."""
    for name, method in suite.methods.items():
        if method.name not in METHODS:
            yield (
                f"methods: {name}: there is no method '{method.name}'"
                f"{closest(method.name, METHODS)}"
            )
        for key, values in method.search.items():
            try:
                parse_values(key, values)
            except RecipeError as error:
                yield from (f"methods: {name}: {problem}" for problem in error.problems)
    named: list[tuple[str, Iterable[str], Iterable[str]]] = [
        (f"methods: {name}: variants", method.variants or (), suite.variants)
        for name, method in suite.methods.items()
    ]
    studies = suite.studies
    for title in Studies.model_fields:
        study = getattr(studies, title)
        if study is not None:
            named.append((f"studies: {title}: variants", study.variants or (), suite.variants))
            unknown = [str(seed) for seed in study.seeds or () if seed not in suite.seeds]
            named.append((f"studies: {title}: seeds", unknown, map(str, suite.seeds)))
    if studies.heat_map:
        named.append(("studies: heat_map: inits", studies.heat_map.inits, suite.methods))
        objectives = [_name(o) for o in studies.heat_map.objectives.values()]
        named.append(("studies: heat_map: objectives", objectives, OBJECTIVES))
    if studies.fisher:
        named.append(("studies: fisher: methods", studies.fisher.methods, suite.methods))
    if studies.curves:
        curves = [_name(c) for c in studies.curves.curves.values()]
        named.append(("studies: curves", curves, METHODS))
    if studies.landscape:
        named.append(("studies: landscape: tasks", studies.landscape.tasks, suite.tasks))
    if studies.intermediate:
        wanted = [studies.intermediate.target, *studies.intermediate.donors]
        named.append(("studies: intermediate", wanted, suite.tasks))
    named.append(("paper", suite.paper, suite.variants))
    for where, names, there in named:
        there = list(there)
        yield from (
            f"{where}: there is no '{name}'{closest(name, there)}"
            for name in names
            if name not in there
        )


def _name(part: str | dict[str, Any]) -> str:
    return part if isinstance(part, str) else str(part.get("name"))


def suite_files() -> dict[str, Path]:
    """The suites that come with the package."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}


def find_suite(name: str) -> Suite:
    """A suite by its name, or by its file."""
    known = suite_files()
    if name in known:
        return read_suite(known[name])
    path = Path(name).expanduser()
    if path.suffix in (".yaml", ".yml", ".json") and path.exists():
        return read_suite(path)
    raise RecipeError(
        f"there is no suite '{name}'{closest(name, known)}; `mats experiment list` names those "
        "there are, and a file of your own is given by its path"
    )


def read_suite(path: Path) -> Suite:
    """Read and check; everything that is wrong is one error."""
    content = read_yaml(path, RecipeError)
    if not isinstance(content, Mapping):
        raise RecipeError(f"{path}: expected a mapping with keys such as 'base' and 'tasks'")
    suite = make_suite(path.name, {"name": path.stem, **content})
    tasks = {
        name: task if task.data is None else task.model_copy(update=_beside(path, task.data))
        for name, task in suite.tasks.items()
    }
    return suite.model_copy(update={"tasks": tasks})


def _beside(path: Path, data: str | Mapping[str, str]) -> dict[str, Any]:
    """Data in files are relative to the suite's file; other names are of the hub."""

    def place(source: str) -> str:
        other = path.absolute().parent / Path(source).expanduser()
        return str(other) if other.exists() else source

    if isinstance(data, str):
        return {"data": place(data)}
    return {"data": {split: place(source) for split, source in data.items()}}


def make_suite(where: str, content: Mapping[str, Any]) -> Suite:
    try:
        return Suite.model_validate(content)
    except ValidationError as error:
        problems = []
        for item in error.errors():
            place = ".".join(str(p) for p in item["loc"] if p not in ("str", "Made"))
            if item["type"] == "value_error":
                lines = item["msg"].removeprefix("Value error, ").splitlines()
                problems += [f"{where}: {place + ': ' if place else ''}{line}" for line in lines]
            elif item["type"] == "extra_forbidden":
                problems.append(f"{where}: unknown key '{place}'")
            else:
                found = json.dumps(item["input"], default=str)
                message = item["msg"][0].lower() + item["msg"][1:]
                problems.append(f"{where}: {place}: {message}, found {found[:80]}")
        raise RecipeError(problems) from error
