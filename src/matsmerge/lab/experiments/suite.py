"""A suite in a file: base model, tasks, fine-tuning, statistics, methods, and what to find out."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

from matsmerge.errors import RecipeError, closest
from matsmerge.files.strict_yaml import read_yaml
from matsmerge.lab.experiments.sources import SOURCES
from matsmerge.lab.experiments.studies import Studies
from matsmerge.lab.experiments.studies.study import Names
from matsmerge.lab.experiments.suite_parts import (
    Made,
    MethodOfSuite,
    Part,
    SuiteTask,
    Variant,
    name_of,
)
from matsmerge.lab.experiments.suite_results import REFERENCES, SEQUENTIAL
from matsmerge.lab.training.training_options import make_options as training_options
from matsmerge.lab.tuning.search_space import SearchSpace
from matsmerge.limits import MOST_AT_ONCE, MOST_COUNTED, NUM_SEEDS
from matsmerge.methods import METHODS
from matsmerge.problems import problems_of
from matsmerge.statistics.collection_options import make_options as statistics_options

FOLDER = Path(__file__).parent / "suites"
RESERVED = (*REFERENCES, SEQUENTIAL)


class Suite(Part):
    """A whole suite; `num_validation` examples of each task are scored to choose by."""

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
    """What does not fit together, such as names of one part that no other part has."""
    if len(set(suite.seeds)) < len(suite.seeds) or min(suite.seeds) < 0:
        yield f"seeds: expected different numbers from 0 on, found {suite.seeds}"
    for name, method in suite.methods.items():
        if name in RESERVED:
            yield f"methods: '{name}' is the name of a row that is no merge; choose another"
        if (own := name_of(method.method)) not in METHODS:
            yield f"methods: {name}: there is no method '{own}'{closest(own, METHODS)}"
        else:
            yield from _said_by(f"methods: {name}", _check_method, method, list(suite.tasks))
    for name, variant in suite.variants.items():
        yield from _said_by(f"variants: {name}", _check_variant, variant)
        if others := set(variant.seeds or ()) - set(suite.seeds):
            yield f"variants: {name}: seeds: {min(others)} is none of the suite's, {suite.seeds}"
    for where, names, known in _names(suite):
        there = list(known)
        yield from (
            f"{where}: there is no '{name}'{closest(name, there)}"
            for name in names
            if name not in there
        )


def _names(suite: Suite) -> Iterator[Names]:
    """Names of other parts that each part of a suite uses."""
    made = [suite.base, *(variant.base for variant in suite.variants.values())]
    yield "base", [base.source for base in made if isinstance(base, Made)], SOURCES
    for name, task in suite.tasks.items():
        yield f"tasks: {name}: source", [task.source] if task.source else (), SOURCES
    for name, method in suite.methods.items():
        yield f"methods: {name}: variants", method.variants or (), suite.variants
    for name, variant in suite.variants.items():
        yield f"variants: {name}: models", variant.models or (), suite.tasks
    yield "paper", suite.paper, suite.variants
    for title, study in suite.studies.asked().items():
        for where, names, known in study.names(suite):
            yield f"studies: {title}: {where}", names, known


def _said_by(where: str, check: Callable[..., None], *parts: Any) -> Iterator[str]:
    """The problems that a check raises, each with its place."""
    try:
        check(*parts)
    except RecipeError as error:
        yield from (f"{where}: {problem}" for problem in error.problems)


def _check_method(method: MethodOfSuite, names: Sequence[str]) -> None:
    models = [{"name": name, "model": name} for name in names]
    recipe = {"models": models, "base": "base", "method": method.method}
    SearchSpace.parse(recipe, method.search).check()


def _check_variant(variant: Variant) -> None:
    training_options(**{**variant.training, **(variant.joint or {})})
    statistics_options(statistics=variant.statistics)


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
    """A suite from plain data; everything that is wrong is one error."""
    try:
        return Suite.model_validate(content)
    except ValidationError as error:
        raise RecipeError([f"{where}: {p}" for p in problems_of(error, Suite)]) from error
