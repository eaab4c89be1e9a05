"""The recipe: models, base, method, and what is different for some parameters."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from matsmerge.checkpoints.public_names import path_names, without_paths
from matsmerge.checkpoints.source import resolved
from matsmerge.errors import RecipeError, closest
from matsmerge.limits import MOST_ITERATIONS, MOST_KEPT, MOST_RANK
from matsmerge.methods.method import Method
from matsmerge.problems import problems_of
from matsmerge.recipes.method_spec import MethodSpec, WrittenMethod, as_plain
from matsmerge.recipes.recipe_parts import SHARES, ModelEntry, Override
from matsmerge.recipes.stack import Layers, Patterns, Stack, as_stacks
from matsmerge.recipes.tokenizer_spec import TokenizerSpec, as_tokenizer_spec

FP8: Literal["fp8"] = "fp8"
WIDEST: Literal["widest"] = "widest"
DtypeName = Literal["float64", "float32", "bfloat16", "float16", "fp8", "widest"]
DeviceName = Annotated[str, Field(pattern=r"^(auto|cpu|mps|cuda(:[0-9]{1,3})?)$")]


def _from_path(value: Any) -> Any:
    return {"model": str(value)} if isinstance(value, (str, Path)) else value


def _as_rank(value: Any) -> Any:
    is_rank = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_RANK
    if value is None or is_rank or value == "concatenate":
        return value
    raise ValueError(f"expected a number from 1 to {MOST_RANK}, or concatenate, found {value!r}")


class Recipe(BaseModel, extra="forbid", frozen=True):
    """A merge, written down."""

    name: str | None = Field(
        None,
        pattern=r"^[\w. -]+$",
        description="what the result is called, and how later documents of the file name it",
    )
    models: list[
        Annotated[ModelEntry, BeforeValidator(_from_path, json_schema_input_type=str | ModelEntry)]
    ] = Field(min_length=1, description="the models to merge")
    base: str | None = Field(None, description="the model they were all fine-tuned from")
    method: Annotated[MethodSpec, BeforeValidator(as_plain), WrittenMethod()] = Field(
        description="how to merge: a name, or a name with parameters",
        json_schema_extra={"required": ["name"]},
    )
    overrides: list[Override] = Field(
        default_factory=list, description="what is different for some parameters"
    )
    stack: Annotated[
        list[Stack],
        BeforeValidator(as_stacks, json_schema_input_type=list[Stack] | Layers),
    ] = Field(
        default_factory=list,
        description="the layers of the result, as ranges of layers of the models; by default each "
        "layer is merged with the same layers of the others",
    )
    heads: Patterns = Field(
        default_factory=list,
        description="patterns of parameters that belong to one task alone and are kept, not merged",
    )
    match_heads: bool | None = Field(
        None,
        description="match each model's head to the merged model, on its data without labels; by "
        "default with mats_cross",
    )
    dtype: DtypeName | None = Field(
        None,
        description="dtype of the output; by default that of the inputs, bfloat16 for those in "
        "FP8; fp8 writes what the base or a model has in FP8 in the same form; widest is one that "
        "holds the values of all inputs, whose dtypes may differ",
    )
    device: DeviceName | None = Field(
        None,
        description="what to merge on: cpu (default), cuda (all GPUs), cuda:1, mps, or auto, which "
        "is a GPU if there is one",
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
    align: Literal["knots", "core_space"] | None = Field(
        None,
        description="merge LoRA adapters in a space they share, before methods that look at single "
        "entries: knots, that of their outputs; core_space, that of their outputs and inputs, also "
        "for methods of singular vectors",
    )

    chat_template: str | None = Field(
        None,
        description="of the tokenizer: auto (what most models have), the name of a known one, or a "
        "template; by default that of the base, or of the first model",
    )
    tokenizer: Annotated[
        TokenizerSpec | None,
        BeforeValidator(as_tokenizer_spec, json_schema_input_type=str | TokenizerSpec | None),
    ] = Field(
        None,
        description="bring embeddings of different vocabularies together: union, base or a model "
        "whose tokenizer to take, or one of these with options; by default they must be the same",
    )
    ignore_tokenizers: bool = Field(
        False, description="merge models whose tokenizers give tokens different ids all the same"
    )
    # Not written anywhere: what is merged is the same.
    executor: Literal["local", "ray"] | None = Field(
        None,
        exclude=True,
        description="where the work is done: local, on this machine, or ray, on a Ray cluster",
    )

    @field_validator("models")
    @classmethod
    def _named(cls, entries: list[ModelEntry]) -> list[ModelEntry]:
        given = [entry.name for entry in entries if entry.name]
        for name in given:
            if given.count(name) > 1 or name == "base":
                raise ValueError(f"the model name '{name}' is taken")
        made = iter(short_names([entry.model for entry in entries if not entry.name], given))
        return [e if e.name else e.model_copy(update={"name": next(made)}) for e in entries]

    @model_validator(mode="after")
    def _makes_sense(self) -> "Recipe":
        problems = [*self._duplicate_models(), *self._data_problems()]
        if self.dtype in (FP8, WIDEST) and self.output == "adapter":
            problems.append(
                f"dtype: {self.dtype} is for full models; choose another one for adapters"
            )
        if self.tokenizer is not None and self.ignore_tokenizers:
            problems.append("tokenizer and ignore_tokenizers exclude each other; leave out either")
        for where, spec in self.method_specs():
            problems += [f"{where}{p}" for p in self._method_problems(spec)]
        names = [entry.name for entry in self.models]
        for override in self.overrides:
            problems += [
                f"{override}: there is no model '{name}'{closest(name, names)}"
                for name in {*override.models, *(override.only or ())} - set(names)
            ]
        problems += [
            f"stack: there is no model '{name}'{closest(name, names)}"
            for stack in self.stack
            for name in stack.names - set(names)
        ]
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """The dtype of the output, if it is one for all parameters."""
        return None if self.dtype in (None, FP8, WIDEST) else getattr(torch, str(self.dtype))

    @property
    def published(self) -> dict[str, Any]:
        """The recipe as plain data, without defaults and without local paths."""
        data: dict[str, Any] = without_paths(self.model_dump(mode="json", exclude_defaults=True))
        return data

    def method_specs(self) -> list[tuple[str, MethodSpec]]:
        """The method, and the method of every override that changes it."""
        specs = [("", self.method)]
        for override in self.overrides:
            if override.method is not None:
                specs.append((f"{override}: ", self.overridden(override)))
        return specs

    def overridden(self, override: Override) -> MethodSpec:
        """The recipe's method with an override's changes."""
        changes = override.method or {}
        if changes.get("name", self.method.name) != self.method.name:
            return MethodSpec.model_validate(changes)
        return MethodSpec.model_validate(self.method.written | changes)

    def _duplicate_models(self) -> Iterable[str]:
        places = [resolved(entry.model) for entry in self.models]
        for i, entry in enumerate(self.models):
            if places[i] in places[:i]:
                yield f"the model {entry.model} is given twice; change its weight instead"
        reads_base = any(spec.at_depth(0).reads_base for _, spec in self.method_specs())
        if self.base and reads_base and not self.chooses_models:
            for entry, place in zip(self.models, places, strict=True):
                if place == resolved(self.base):
                    yield f"{entry.model} is both a model and the base; list it as the base only"

    @property
    def chooses_models(self) -> bool:
        """Whether some parameters are merged of some models only."""
        return bool(self.stack) or any(o.only is not None for o in self.overrides)

    @property
    def matches_heads(self) -> bool:
        """Whether heads are matched to the merged model."""
        if self.match_heads is None:
            return any(spec.at_depth(0).matches_heads for _, spec in self.method_specs())
        return self.match_heads

    def _data_problems(self) -> Iterable[str]:
        """Data is given for all models where it is used, and for none where it is not."""
        methods = [spec.at_depth(0) for _, spec in self.method_specs()]
        is_along = any(m.uses_merged_inputs for m in methods)
        for entry in self.models:
            if not is_along and not self.matches_heads and entry.data is not None:
                yield (
                    f"the model {entry.name} has data, which only methods with inputs: merged "
                    f"use, such as mats_cross, and {self.method.name} does not; leave it out, or "
                    "say match_heads: true / --match-heads"
                )
            elif (is_along or self.matches_heads) and entry.data is None:
                user = "inputs: merged" if is_along else "match_heads"
                yield (
                    f"{user} runs the models on their data, and the model {entry.name} has none; "
                    "give it with data: / --data FILE"
                )
        if not is_along:
            return
        held_out = any(m.uses_held_out for m in methods)
        for entry in self.models:
            if entry.data is not None and held_out != (entry.data.held_out > 0):
                yield (
                    f"the model {entry.name}: stop: held_out needs a share of its data, say data: "
                    "{path: FILE, held_out: 0.2}"
                    if held_out
                    else f"the model {entry.name}: held_out is for solvers with stop: held_out"
                )
        if not all(m.uses_merged_inputs for m in methods if m.uses_inputs):
            yield "inputs: merged must be said for all parameters with objective gram or kfac"
        if self.trajectory:
            yield (
                "trajectory: with inputs: merged each number of iterations is a merge of its own, "
                "since blocks see what those before them have become; leave out either"
            )

    def _method_problems(self, spec: MethodSpec) -> Iterable[str]:
        method = spec.at_depth(0)
        if not self.chooses_models:
            yield from method_refusals(method, len(self.models))
        if self.trajectory and spec is self.method:
            if not method.iterates:
                yield f"trajectory: method {spec.name} has no iterations to write models of"
            elif method.uses_held_out:
                yield "trajectory: a held-out objective chooses one iteration; leave out either"
        names = [entry.name for entry in self.models]
        taken = spec.parameters.get("model")
        if taken is not None and taken not in (*names, "base"):
            yield f"method {spec.name}: there is no model '{taken}'{closest(str(taken), names)}"
        for key in SHARES:
            if spec is not self.method or method.own_share(key) is not None:
                continue
            for entry in self.models:
                if getattr(entry, key) is not None:
                    yield f"method {spec.name} has no {key}, but the model {entry.name} sets one"
            for override in self.overrides:
                if not override.method and any(getattr(m, key) for m in override.models.values()):
                    yield f"method {spec.name} has no {key}, the {override} does"


def method_refusals(method: Method, num_models: int) -> Iterator[str]:
    """Why a method cannot merge so many models."""
    if method.needed_models not in (None, num_models):
        one = f"{method.needed_models} model{'' if method.needed_models == 1 else 's'}"
        besides = " besides the base" if method.needs_base else ""
        yield f"method {method.name} merges exactly {one}{besides}, {num_models} given"
    yield from (f"method {method.name}: {r}" for r in method.refusals(num_models))


def short_names(paths: Sequence[str], taken: Sequence[str] = ()) -> list[str]:
    """A short, distinct name for each path: as few of its last parts as tell them apart."""
    for names in path_names(paths):
        if len({*names, *taken, "base", ""}) == len(names) + len(taken) + 2:
            return names
    return [f"model_{i}" for i in range(len(paths))]


def make_recipe(data: Mapping[str, Any]) -> Recipe:
    """A checked recipe from plain data, or a `RecipeError` with all that is wrong."""
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        raise RecipeError(problems_of(error, Recipe)) from error


def recipe_schema() -> dict[str, Any]:
    """The JSON Schema of recipes, with every option of every method, objective and solver."""
    schema = Recipe.model_json_schema(mode="validation")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
