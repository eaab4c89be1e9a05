"""A suite in a file: base model, tasks, fine-tuning, statistics, methods, and what to find out."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

from matsmerge.errors import RecipeError, closest
from matsmerge.files.strict_yaml import read_yaml
from matsmerge.lab.experiments.sources import SOURCES, setting_problems
from matsmerge.lab.experiments.studies import Studies
from matsmerge.lab.experiments.studies.study import Names
from matsmerge.lab.experiments.suite_parts import (
    Made,
    MethodOfSuite,
    SuitePart,
    SuiteTask,
    VariantOfSuite,
)
from matsmerge.lab.experiments.suite_results import NO_MERGES
from matsmerge.lab.training.training_options import make_training_options as training_options
from matsmerge.lab.tuning.search_space import SearchSpace
from matsmerge.limits import MOST_AT_ONCE, MOST_COUNTED, NUM_SEEDS
from matsmerge.problems import noted, problems_of
from matsmerge.statistics.collection_options import make_collection_options as statistics_options
from matsmerge.tasks.task_file import beside

FOLDER = Path(__file__).parent / "suites"


class Suite(SuitePart):
    """A whole suite; `num_validation` examples of each task are scored to choose by."""

    name: str = ""  # the file's
    title: str
    about: str
    offline: bool = False  # needs packages alone, nothing from the hub
    base: str | Made
    tasks: dict[str, SuiteTask] = Field(min_length=2)
    seeds: list[Annotated[int, Field(lt=NUM_SEEDS)]] = Field(default=[0], min_length=1)
    variants: dict[str, VariantOfSuite] = Field(min_length=1)
    methods: dict[str, MethodOfSuite] = Field(min_length=1)
    ensemble: bool = False
    paper: dict[str, str] = Field(default_factory=dict)  # variant -> column of the paper's tables
    num_validation: int | None = Field(default=None, ge=1, le=MOST_COUNTED)
    num_test: int | None = Field(default=None, ge=1, le=MOST_COUNTED)
    batch_size: int = Field(default=32, ge=1, le=MOST_AT_ONCE)
    studies: Studies = Studies()

    @model_validator(mode="after")
    def _check(self) -> "Suite":
        if problems := _problems(self):
            raise ValueError("\n".join(problems))
        return self


def _problems(suite: Suite) -> list[str]:
    """What does not fit together, such as names of one part that no other part has."""
    problems = []
    if len(set(suite.seeds)) < len(suite.seeds) or min(suite.seeds) < 0:
        problems.append(f"seeds: expected different numbers from 0 on, found {suite.seeds}")
    for name, method in suite.methods.items():
        data = {"data": "data"} if method.needs_data else {}
        models = [{"name": task, "model": task, **data} for task in suite.tasks]
        if name in NO_MERGES:
            problems.append(
                f"methods: '{name}' is the name of a row that is no merge; choose another"
            )
        with noted(problems, RecipeError, before=f"methods: {name}: "):
            recipe = {"models": models, "base": "base", "method": method.method}
            SearchSpace.parse(recipe, method.search).check()
    for name, variant in suite.variants.items():
        with noted(problems, RecipeError, before=f"variants: {name}: "):
            training_options(**{**variant.training, **(variant.joint or {})})
            statistics_options(statistics=variant.statistics)
    for where, names, known in _names(suite):
        there = list(known)
        problems += [
            f"{where}: there is no '{name}'{closest(name, there)}"
            for name in names
            if name not in there
        ]
    for where, made in _made(suite):
        if made.source in SOURCES:
            found = setting_problems(made.source, made.settings)
            problems += [f"{where}: settings: {problem}" for problem in found]
    return problems


def _made(suite: Suite) -> Iterator[tuple[str, Made | SuiteTask]]:
    """What is made from packages."""
    for base in (suite.base, *(variant.base for variant in suite.variants.values())):
        if isinstance(base, Made):
            yield "base", base
    for name, task in suite.tasks.items():
        if task.source is not None:
            yield f"tasks: {name}", task


def _names(suite: Suite) -> Iterator[Names]:
    """Names of other parts that each part of a suite uses."""
    for where, made in _made(suite):
        yield f"{where}: source", [str(made.source)], SOURCES
    for name, method in suite.methods.items():
        yield f"methods: {name}: variants", method.variants or (), suite.variants
        yield f"methods: {name}: starts_from", filter(None, [method.starts_from]), suite.methods
    for name, variant in suite.variants.items():
        yield f"variants: {name}: models", variant.models or (), suite.tasks
        yield f"variants: {name}: seeds", map(str, variant.seeds or ()), map(str, suite.seeds)
    yield "paper", suite.paper, suite.variants
    for title, study in suite.studies.asked().items():
        yield f"studies: {title}: variants", study.variants or (), suite.variants
        yield f"studies: {title}: seeds", map(str, study.seeds or ()), map(str, suite.seeds)
        for where, names, known in study.names(suite):
            yield f"studies: {title}: {where}", names, known


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
    """Read and check; everything that is wrong is one error.

    Files are relative to the suite's own; other names are of the hub.
    """
    suite = make_suite(path.name, read_yaml(path, RecipeError))
    here = path.absolute()
    tasks = {n: beside(here, t, "data", "head", "tokenizer") for n, t in suite.tasks.items()}
    variants = {n: beside(here, v, "base", "models") for n, v in suite.variants.items()}
    own = {"name": suite.name or path.stem, "tasks": tasks, "variants": variants}
    return beside(here, suite.model_copy(update=own), "base")


def make_suite(where: str, content: Any) -> Suite:
    """A suite from plain data; everything that is wrong is one error."""
    if not isinstance(content, Mapping):
        raise RecipeError(f"{where}: expected a mapping with keys such as 'base' and 'tasks'")
    try:
        return Suite.model_validate(content)
    except ValidationError as error:
        raise RecipeError([f"{where}: {p}" for p in problems_of(error, Suite)]) from error
