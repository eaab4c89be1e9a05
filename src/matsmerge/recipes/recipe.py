"""The recipe: models, base, method, and what is different for some parameters."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_serializer,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from matsmerge.checkpoints.opening import local_path
from matsmerge.errors import RecipeError, closest
from matsmerge.limits import MOST_ITERATIONS, MOST_KEPT, MOST_RANK
from matsmerge.methods import METHODS
from matsmerge.methods.mats import Mats, tables
from matsmerge.methods.method import Method
from matsmerge.methods.objectives.gram import Gram
from matsmerge.recipes.model_data import ModelData, as_model_data

# A number, or numbers spread evenly over the depth of the network.
Number = Annotated[float, Field(allow_inf_nan=False)]
Depthwise = Number | Annotated[list[Number], Field(min_length=1)]
DtypeName = Literal["float64", "float32", "bfloat16", "float16"]


def at_depth(value: Any, depth: float) -> Any:
    """Interpolate a list of numbers at a depth between 0 and 1; anything else is itself."""
    if not isinstance(value, list):
        return value
    position = depth * (len(value) - 1)
    lower = int(position)
    upper = min(lower + 1, len(value) - 1)
    return value[lower] + (position - lower) * (value[upper] - value[lower])


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MethodSpec(_Strict):
    """A method's name and its parameters; a number may be a list over depth."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str

    @property
    def parameters(self) -> dict[str, Any]:
        return dict(self.__pydantic_extra__ or {})

    @property
    def method_class(self) -> type[Method]:
        return METHODS[self.name]

    def at_depth(self, depth: float) -> Method:
        """The method with the values its parameters have at a depth between 0 and 1."""
        pick: Callable[[list[Any]], Any] = lambda v: at_depth([float(x) for x in v], depth)  # noqa: E731
        return self.method_class(**_with_numbers(self.method_class, self.parameters, pick))

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _known(self) -> "MethodSpec":
        if self.name not in METHODS:
            raise PydanticCustomError(
                "unknown_method",
                "unknown method '{name}'{hint}",
                {"name": self.name, "hint": closest(self.name, METHODS)},
            )
        known = self.method_class.known_parameters(self.parameters)
        problems = []
        for key in self.parameters.keys() - known.keys():
            problems.append(f"unknown parameter '{key}'{_parameter_hint(self.name, key, known)}")
        for key, value in self.parameters.items():
            is_number = known.get(key) in (int, bool, str) or get_origin(known.get(key)) is Literal
            if isinstance(value, list) and is_number:
                problems.append(f"{key}: only a number may be a list over depth, found {value!r}")
        if not problems:
            # A list is right if the method accepts each of its values.
            lengths = [len(v) for v in _lists_over_depth(self.method_class, self.parameters)]
            for i in range(max([1, *lengths])):
                pick: Callable[[list[Any]], Any] = lambda v, i=i: v[i % len(v)]  # type: ignore[misc]  # noqa: E731
                try:
                    self.method_class(**_with_numbers(self.method_class, self.parameters, pick))
                except ValidationError as error:
                    problems += [p for p in describe(error) if p not in problems]
        if problems:
            raise PydanticCustomError(
                "method_parameters",
                "{problems}",
                {"problems": "; ".join(f"{self.name}: {p}" for p in sorted(problems))},
            )
        return self


def _with_numbers(
    cls: type[Method], parameters: Mapping[str, Any], pick: Callable[[list[Any]], Any]
) -> dict[str, Any]:
    """Parameters with one number picked from each list over depth, also those of an init."""
    known = cls.known_parameters(parameters)
    values: dict[str, Any] = {}
    for key, value in parameters.items():
        if isinstance(value, list) and value and known.get(key) is float:
            values[key] = pick(value)
        elif key == "init" and isinstance(value, Mapping) and value.get("name") in METHODS:
            values[key] = _with_numbers(METHODS[value["name"]], value, pick)
        else:
            values[key] = value
    return values


def _lists_over_depth(cls: type[Method], parameters: Mapping[str, Any]) -> list[list[Any]]:
    found: list[list[Any]] = []
    _with_numbers(cls, parameters, lambda v: found.append(v) or v[0])  # type: ignore[func-returns-value]
    return found


def _parameter_hint(method: str, key: str, known: Iterable[str]) -> str:
    if method == "slerp" and key == "t":
        return ": the models' weights say where to stop (t = 0.3 is weights 0.7 and 0.3)"
    if key in ("weight", "weights"):
        return ": weights belong to the models"
    if key == "statistics":
        return ": statistics belong to the models"
    if issubclass(METHODS[method], Mats):
        for part in ("objective", "solver"):
            owners = [n for n, cls in tables()[part].items() if key in cls.model_fields]
            if owners:
                return f": it belongs to the {part} {' or '.join(owners)}"
    return closest(key, known)


class ModelEntry(_Strict):
    """One model: where it is, what to call it, and how much it counts."""

    model: str = Field(description="a file, a folder, or a hub id with an optional @revision")
    name: str | None = Field(
        None, pattern=r"^[\w.-]+$", description="a short name; by default from the path"
    )
    weight: Depthwise = Field(1.0, description="how much this model counts")
    density: Depthwise | None = Field(
        None, description="this model's own density, for methods that have one"
    )
    statistics: str | None = Field(
        None,
        description="what `mats collect` wrote of this model; by default statistics.safetensors "
        "beside it, for methods that need it",
    )
    data: Annotated[
        ModelData | None,
        BeforeValidator(as_model_data, json_schema_input_type=str | ModelData | None),
    ] = Field(
        None,
        description="this model's data, or a task file, for methods with inputs: merged; a path, "
        "or a path with options",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, value: Any) -> Any:
        return {"model": str(value)} if isinstance(value, (str, Path)) else value


class ModelOverride(_Strict):
    """What is different for one model."""

    weight: Depthwise | None = None
    density: Depthwise | None = None


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Patterns = Annotated[
    list[str],
    BeforeValidator(_as_list, json_schema_input_type=str | list[str]),
]


class Override(_Strict):
    """What is different for the parameters whose names match. Later overrides win."""

    match: Patterns = Field(min_length=1, description="patterns of parameter names, e.g. '*.mlp.*'")
    method: dict[str, Any] | None = Field(
        None, description="parameters to change, or another method by its name"
    )
    models: dict[str, ModelOverride] = Field(
        default_factory=dict, description="other weights or densities, by model name"
    )

    @field_validator("method", mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _changes_something(self) -> "Override":
        if not self.method and not self.models:
            raise PydanticCustomError("recipe", "changes nothing; give it a method or models")
        return self


def _as_rank(value: Any) -> Any:
    is_rank = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_RANK
    if value is None or is_rank or value == "concatenate":
        return value
    raise PydanticCustomError(
        "rank",
        "expected a number from 1 to {most}, or concatenate, found {value}",
        {"most": MOST_RANK, "value": repr(value)},
    )


class Recipe(_Strict):
    """A merge, written down."""

    models: list[ModelEntry] = Field(min_length=1, description="the models to merge")
    base: str | None = Field(None, description="the model they were all fine-tuned from")
    method: MethodSpec = Field(description="how to merge: a name, or a name with parameters")
    overrides: list[Override] = Field(
        default_factory=list, description="what is different for some parameters"
    )
    heads: Patterns = Field(
        default_factory=list,
        description="patterns of parameters that belong to one task alone and are kept, not merged",
    )
    dtype: DtypeName | None = Field(
        None, description="dtype of the output; by default that of the inputs"
    )
    trajectory: list[Annotated[int, Field(ge=0, le=MOST_ITERATIONS)]] = Field(
        default_factory=list,
        max_length=MOST_KEPT,
        description="iterations of the last solver to write a model of each; one run gives all",
    )

    output: Literal["dense", "adapter"] | None = Field(
        None,
        description="of adapters: a full model, or an adapter; by default an adapter if all models "
        "are adapters of one kind",
    )
    rank: Annotated[
        int | str | None,
        BeforeValidator(_as_rank, json_schema_input_type=int | Literal["concatenate"] | None),
    ] = Field(
        None,
        description="of a LoRA to write: a number, or concatenate for the exact sum of average and "
        "task_arithmetic; by default the sum of the adapters' ranks",
    )
    align: Literal["knots"] | None = Field(
        None,
        description="knots: merge LoRA adapters in the space their outputs share, for ties and "
        "dare_*",
    )

    ignore_tokenizers: bool = Field(
        False, description="merge models whose tokenizers give tokens different ids all the same"
    )

    @field_serializer("method")
    def _plain_method(self, method: MethodSpec) -> dict[str, Any]:
        return {"name": method.name, **method.parameters}

    @field_validator("models")
    @classmethod
    def _named(cls, entries: list[ModelEntry]) -> list[ModelEntry]:
        given = [entry.name for entry in entries if entry.name]
        for name in given:
            if given.count(name) > 1 or name == "base":
                raise PydanticCustomError(
                    "name_taken", "the model name '{name}' is taken", {"name": name}
                )
        made = iter(short_names([entry.model for entry in entries if not entry.name], given))
        return [e if e.name else e.model_copy(update={"name": next(made)}) for e in entries]

    @model_validator(mode="after")
    def _makes_sense(self) -> "Recipe":
        problems = [*self._duplicate_models(), *self._data_problems()]
        for where, spec in self.method_specs():
            problems += [f"{where}{p}" for p in self._method_problems(spec)]
        names = [entry.name for entry in self.models]
        for override in self.overrides:
            problems += [
                f"override {override.match}: there is no model '{name}'{closest(name, names)}"
                for name in override.models.keys() - set(names)
            ]
        if problems:
            raise PydanticCustomError(
                "recipe", "{problems}", {"problems": "\n".join(dict.fromkeys(problems))}
            )
        return self

    def method_specs(self) -> list[tuple[str, MethodSpec]]:
        """The method, and the method of every override that changes it."""
        specs = [("", self.method)]
        for override in self.overrides:
            if override.method is not None:
                specs.append((f"override {override.match}: ", self.overridden(override)))
        return specs

    def overridden(self, override: Override) -> MethodSpec:
        """The recipe's method with an override's changes."""
        changes = override.method or {}
        if changes.get("name", self.method.name) != self.method.name:
            return MethodSpec.model_validate(changes)
        return MethodSpec(**{"name": self.method.name, **self.method.parameters, **changes})

    def _duplicate_models(self) -> Iterable[str]:
        places = [_place(entry.model) for entry in self.models]
        for i, entry in enumerate(self.models):
            if places[i] in places[:i]:
                yield f"the model {entry.model} is given twice; change its weight instead"
        if self.base and any(spec.at_depth(0).reads_base for _, spec in self.method_specs()):
            for entry, place in zip(self.models, places, strict=True):
                if place == _place(self.base):
                    yield f"{entry.model} is both a model and the base; list it as the base only"

    def _data_problems(self) -> Iterable[str]:
        """Data is given for all models where inputs are merged, and for none where they are not."""
        methods = [spec.at_depth(0) for _, spec in self.method_specs()]
        solving = [m for m in methods if isinstance(m, Mats)]
        if not any(m.uses_merged_inputs for m in solving):
            for entry in self.models:
                if entry.data is not None:
                    yield (
                        f"the model {entry.name} has data, which only methods with inputs: merged "
                        f"use, such as regmean++, and {self.method.name} does not; leave it out"
                    )
            return
        for entry in self.models:
            if entry.data is None:
                yield (
                    f"inputs: merged runs the models on their data while it merges them, and the "
                    f"model {entry.name} has none; give it with data: / --data FILE"
                )
        held_out = any(s.solver.uses_held_out for m in solving for s in m.rounds)
        for entry in self.models:
            if entry.data is not None and held_out != (entry.data.held_out > 0):
                yield (
                    f"the model {entry.name}: stop: held_out needs a share of its data, say data: "
                    "{path: FILE, held_out: 0.2}"
                    if held_out
                    else f"the model {entry.name}: held_out is for solvers with stop: held_out"
                )
        with_inputs = [m for m in solving if any(isinstance(s.objective, Gram) for s in m.rounds)]
        if not all(m.uses_merged_inputs for m in with_inputs):
            yield "inputs: merged must be said for all parameters with objective gram or kfac"
        if self.trajectory:
            yield (
                "trajectory: with inputs: merged each number of iterations is a merge of its own, "
                "since blocks see what those before them have become; leave out either"
            )

    def _method_problems(self, spec: MethodSpec) -> Iterable[str]:
        method = spec.at_depth(0)
        if method.needed_models not in (None, len(self.models)):
            yield (
                f"method {spec.name} merges exactly {method.needed_models} models, "
                f"{len(self.models)} given"
            )
        if isinstance(method, Mats):
            yield from (f"method {spec.name}: {r}" for r in method.refusals(len(self.models)))
        if self.trajectory and spec is self.method:
            if not isinstance(method, Mats) or not method.rounds[-1].solver.iterates:
                yield f"trajectory: method {spec.name} has no iterations to write models of"
            elif method.rounds[-1].solver.uses_held_out:
                yield "trajectory: a held-out objective chooses one iteration; leave out either"
        names = [entry.name for entry in self.models]
        taken = spec.parameters.get("model")
        if taken is not None and taken not in (*names, "base"):
            yield f"method {spec.name}: there is no model '{taken}'{closest(str(taken), names)}"
        if method.own_density is None and spec is self.method:
            for entry in self.models:
                if entry.density is not None:
                    yield f"method {spec.name} has no density, but the model {entry.name} sets one"
            for override in self.overrides:
                if not override.method and any(m.density for m in override.models.values()):
                    yield f"method {spec.name} has no density, the override {override.match} does"


def short_names(paths: Sequence[str], taken: Sequence[str] = ()) -> list[str]:
    """A short, distinct name for each path: as few of its last parts as tell them apart."""
    parts = [[p for p in re.split(r"[/\\]", path) if p not in ("", ".", "..")] for path in paths]
    for depth in range(1, max([1, *map(len, parts)]) + 1):
        names = [re.sub(r"[^\w.-]+", "-", "-".join(p[-depth:])).strip("-.") for p in parts]
        if len({*names, *taken, "base", ""}) == len(names) + len(taken) + 2:
            return names
    return [f"model_{i}" for i in range(len(paths))]


def _place(source: str) -> str:
    path = local_path(source)
    try:
        return str(path.resolve()) if path.exists() else source
    except OSError:  # opening it will say what is wrong
        return source


_OWN_ERRORS = ("recipe", "unknown_method", "method_parameters", "name_taken", "rank")


def describe(error: ValidationError) -> list[str]:
    """Pydantic's errors as sentences that say where, what, and what was meant."""
    problems = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"] if not str(part).startswith("list["))
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            key = str(item["loc"][-1])
            known = _fields_at(item["loc"][:-1])
            message = f"unknown key '{key}'{closest(key, known)}"
            where = ".".join(str(part) for part in item["loc"][:-1])
        elif item["type"] == "missing":
            message = "is required"
        elif item["type"] == "too_long":  # its content would fill the screen
            message = f"{message[0].lower()}{message[1:]}"
        elif item["type"] not in _OWN_ERRORS:
            message = f"{message[0].lower()}{message[1:]}, found {item['input']!r}"
        for line in message.splitlines():
            problems.append(f"{where}: {line}" if where else line)
    return list(dict.fromkeys(problems))


def _fields_at(location: Sequence[int | str]) -> list[str]:
    classes: Mapping[str, type[BaseModel]] = {"models": ModelEntry, "overrides": Override}
    names = [part for part in location if isinstance(part, str)]
    if not names:
        return list(Recipe.model_fields)
    if names[:2] == ["models", "data"]:
        return ["path", *(name for name in ModelData.model_fields if name != "data")]
    if names[0] == "overrides" and "models" in names:
        return list(ModelOverride.model_fields)
    return list(classes.get(names[0], Recipe).model_fields)


def make_recipe(data: Mapping[str, Any]) -> Recipe:
    """A checked recipe from plain data, or a `RecipeError` with all that is wrong."""
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        raise RecipeError(describe(error)) from error
