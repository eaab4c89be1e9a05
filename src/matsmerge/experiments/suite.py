"""A suite in a file: base model, tasks, fine-tuning, statistics, methods, and what to find out."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from matsmerge.errors import RecipeError, closest
from matsmerge.experiments.results import REFERENCES
from matsmerge.experiments.sources import SOURCES
from matsmerge.limits import MOST_AT_ONCE, MOST_COUNTED, MOST_KEPT, NUM_SEEDS
from matsmerge.methods import METHODS
from matsmerge.methods.objectives import OBJECTIVES
from matsmerge.statistics.options import make_options as statistics_options
from matsmerge.strict_yaml import read_yaml
from matsmerge.tasks.task_file import TaskFile
from matsmerge.training.options import make_options as training_options
from matsmerge.tuning.search_space import SearchSpace, parse_values

FOLDER = Path(__file__).parent / "suites"
RESERVED = (*REFERENCES, "sequential")


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
    num_examples: int = Field(default=1000, ge=1, le=MOST_COUNTED)
    expectation: Literal["empirical", "true"] = "empirical"
    heads: str | list[str] | None = None  # patterns of parameters that stay with their task
    base: str | Made | None = None  # instead of the suite's
    seeds: list[int] | None = Field(default=None, min_length=1)  # None: all of the suite's


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
    iterations: list[int] = Field(max_length=MOST_KEPT)


class CostStudy(Study):
    """Operations by formula, seconds by the clock."""

    repeats: int = Field(default=3, ge=1, le=MOST_KEPT)


class LandscapeStudy(Study):
    """Losses in a plane through the base and two models, or through three models."""

    layer: str
    tasks: list[str] = Field(min_length=2, max_length=3)
    size: int = Field(default=25, ge=3, le=MOST_KEPT)  # points on a side
    num_examples: int = Field(default=200, ge=1, le=MOST_COUNTED)


class IntermediateStudy(Study):
    """A target task and those whose models may help."""

    target: str
    donors: list[str]
    sequential: dict[str, Any] | None = None  # training the donor's model further; None: no


class SubspaceStudy(Study):
    """How far the tasks' subspaces overlap."""


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
    seeds: list[Annotated[int, Field(lt=NUM_SEEDS)]] = Field(default=[0], min_length=1)
    variants: dict[str, Variant] = Field(min_length=1)
    methods: dict[str, MethodOfSuite] = Field(min_length=1)
    ensemble: bool = False
    paper: dict[str, str] = Field(default_factory=dict)  # variant -> column of the paper's tables
    num_validation: int | None = Field(default=None, ge=1, le=MOST_COUNTED)
    num_test: int | None = Field(default=None, ge=1, le=MOST_COUNTED)
    batch_size: int = Field(default=32, ge=1, le=MOST_AT_ONCE)
    studies: Studies = Studies()

    @model_validator(mode="after")
    def _check(self) -> "Suite":
        problems = list(_problems(self))
        if problems:
            raise ValueError("\n".join(problems))
        return self


def _problems(suite: Suite) -> Iterator[str]:
    """Names of one part that no other part has."""
    if len(set(suite.seeds)) < len(suite.seeds) or min(suite.seeds) < 0:
        yield f"seeds: expected different numbers from 0 on, found {suite.seeds}"
    for name, method in suite.methods.items():
        if name in RESERVED:
            yield f"methods: '{name}' is the name of a row that is no merge; choose another"
        if method.name not in METHODS:
            hint = closest(method.name, METHODS)
            yield f"methods: {name}: there is no method '{method.name}'{hint}"
        else:
            yield from _said_by(f"methods: {name}", _check_method, method, list(suite.tasks))
    for name, variant in suite.variants.items():
        yield from _said_by(f"variants: {name}", _check_variant, variant)
        if others := set(variant.seeds or ()) - set(suite.seeds):
            yield f"variants: {name}: seeds: {min(others)} is none of the suite's, {suite.seeds}"
    sources = {f"tasks: {name}": task.source for name, task in suite.tasks.items()}
    sources["base"] = suite.base.source if isinstance(suite.base, Made) else None
    for where, source in sources.items():
        if source is not None and source not in SOURCES:
            yield f"{where}: there is no source '{source}'{closest(source, SOURCES)}"
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
    for name, variant in suite.variants.items():
        named.append((f"variants: {name}: models", variant.models or (), suite.tasks))
    named.append(("paper", suite.paper, suite.variants))
    for where, names, there in named:
        there = list(there)
        yield from (
            f"{where}: there is no '{name}'{closest(name, there)}"
            for name in names
            if name not in there
        )


def _said_by(where: str, check: Callable[..., None], *parts: Any) -> Iterator[str]:
    """What is wrong with a part, as those who will read it say."""
    try:
        check(*parts)
    except RecipeError as error:
        yield from (f"{where}: {problem}" for problem in error.problems)


def _check_method(method: MethodOfSuite, names: Sequence[str]) -> None:
    models = [{"name": name, "model": name} for name in names]
    recipe = {"models": models, "base": "base", "method": method.method}
    values = {key: parse_values(key, given) for key, given in method.search.items()}
    SearchSpace(recipe, values).check()


def _check_variant(variant: Variant) -> None:
    training_options(**{**variant.training, **(variant.joint or {})})
    statistics_options(statistics=variant.statistics)


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
    return _resolved(make_suite(path.name, {"name": path.stem, **content}), path)


def _resolved(suite: Suite, path: Path) -> Suite:
    """Files are relative to the suite's own; other names are of the hub."""

    def place(source: Any) -> Any:
        if isinstance(source, Mapping):
            return {key: place(value) for key, value in source.items()}
        if not isinstance(source, str):
            return source
        other = path.absolute().parent / Path(source).expanduser()
        return str(other) if other.exists() else source

    def update(part: Any, *names: str) -> Any:
        found = {name: getattr(part, name) for name in names}
        return part.model_copy(update={n: place(v) for n, v in found.items() if v is not None})

    parts = {
        "tasks": {n: update(task, "data", "head", "tokenizer") for n, task in suite.tasks.items()},
        "variants": {n: update(v, "base", "models") for n, v in suite.variants.items()},
    }
    return update(suite, "base").model_copy(update=parts)  # type: ignore[no-any-return]


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
