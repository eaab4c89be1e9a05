"""A search space: a recipe, and the values that some of its places may take."""

import copy
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from matsmerge.errors import RecipeError
from matsmerge.files.guarded_files import quoted
from matsmerge.files.strict_yaml import parse_yaml
from matsmerge.limits import MOST_COMBINATIONS, MOST_KEPT
from matsmerge.recipes.method_spec import set_parameter
from matsmerge.recipes.recipe import Recipe, make_recipe
from matsmerge.recipes.recipe_parts import SHARES

ITERATIONS = "iterations"
_OF_MODELS = ("weight", *SHARES)  # keys of a model, whose name follows


class Range(NamedTuple):
    """All numbers between two, for a strategy that draws its own."""

    low: float
    high: float


TriedValues = Sequence[Any] | Range
Choice = Mapping[str, Any]  # a value for every place


def parse_values(key: str, given: Any) -> TriedValues:
    """`0:1:0.1` (both ends included), `0.2:0.8` (anything between), `a,b,c`, or a list."""
    if isinstance(given, list):
        if not given:
            raise RecipeError(f"search: {key} has no values to try")
        return given
    text = str(given)
    parts = text.split(":")
    if len(parts) == 1:
        return list(dict.fromkeys(_value(key, part.strip()) for part in text.split(",")))
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) not in (2, 3) or not all(map(math.isfinite, numbers)):
        raise RecipeError(f"search: {key}: '{text}' is not low:high:step or low:high")
    low, high, *rest = numbers
    if not rest:
        if low >= high:
            raise RecipeError(f"search: {key}: '{text}': the first number must be the smaller one")
        return Range(low, high)
    (step,) = rest
    num_steps = (high - low) / step if step > 0 else -1.0
    if num_steps < 0:
        raise RecipeError(f"search: {key}: '{text}' is not low:high:step")
    if num_steps >= MOST_KEPT:
        raise RecipeError(
            f"search: {key}: '{text}' are {num_steps:.3g} values; at most {MOST_KEPT:,} can be "
            "tried, take larger steps"
        )
    # Multiples of the step, not sums of it: 0.1 + 0.2 is not 0.3.
    values = [round(low + i * step, 10) for i in range(math.floor(num_steps + 1e-9) + 1)]
    are_whole = all("." not in part and "e" not in part.lower() for part in parts)
    return [int(v) for v in values] if are_whole else values


def _value(key: str, text: str) -> Any:
    """A number, or a word."""
    if not text:
        raise RecipeError(f"search: {key}: a value is missing between commas")
    try:
        return int(text) if text.lstrip("+-").isdecimal() else float(text)
    except ValueError:
        pass
    value = parse_yaml(text, f"search: {key}: {quoted(text)}", RecipeError)
    return value if isinstance(value, (str, bool)) else text


@dataclass(frozen=True)
class SearchSpace:
    """A recipe with open places.

    A key is a parameter of the method (`scale`, `init.scale`, `stages`), `method` itself,
    `weight.NAME` or `importance.NAME` of a model, or another key of recipes (`rank`, `align`).
    Iterations of the last solver are taken from one run.
    """

    recipe: Mapping[str, Any]  # as plain data
    values: Mapping[str, TriedValues]

    @classmethod
    def parse(cls, recipe: Mapping[str, Any], search: Mapping[str, Any]) -> "SearchSpace":
        """A space from values as `parse_values` reads them."""
        return cls(recipe, {key: parse_values(key, given) for key, given in search.items()})

    @property
    def iterations(self) -> list[int]:
        """Numbers of iterations to try, all from one run of the solver."""
        found: Sequence[Any] = self.values.get(ITERATIONS, ())
        return list(found)

    @property
    def others(self) -> dict[str, TriedValues]:
        """The places that need a merge for every value."""
        return {key: v for key, v in self.values.items() if key != ITERATIONS}

    def grid(self) -> Iterator[dict[str, Any]]:
        """All combinations of values, with the lowest number of each range; without iterations."""
        lists = [[v.low] if isinstance(v, Range) else v for v in self.others.values()]
        for combination in itertools.product(*lists):
            yield dict(zip(self.others, combination, strict=True))

    def remarks(self, choice: Choice, as_good: Sequence[Choice] = ()) -> list[str]:
        """Which values of a choice are the least or the greatest of those that were tried.

        Nothing is said of a value where choices that are as good have another.
        """
        found = []
        for key, values in self.values.items():
            numbers = [v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)]
            is_open = any(other.get(key) != choice.get(key) for other in as_good)
            if len(numbers) < 2 or len(numbers) < len(values) or is_open:
                continue
            for end, word in ((min(numbers), "smaller"), (max(numbers), "larger")):
                if choice.get(key) == end:
                    found.append(
                        f"{key}: the best value, {end:g}, lies at the edge of what was tried; a "
                        f"{word} one may be better still"
                    )
        return found

    def scored(self, choice: Choice) -> list[dict[str, Any]]:
        """The choices whose models one merge gives: with each number of iterations."""
        at_each = [{**choice, ITERATIONS: number} for number in self.iterations]
        return at_each or [dict(choice)]

    def fill(self, choice: Choice) -> Recipe:
        """The recipe with a value at every place; all numbers of iterations if none is chosen."""
        data = copy.deepcopy(dict(self.recipe))
        data["method"] = _as_mapping(choice.get("method", data.get("method")))
        for key, value in choice.items():
            if key in ("method", ITERATIONS):
                continue
            part, dot, name = key.partition(".")
            if dot and part in _OF_MODELS:
                _set_of_model(data, part, name, value)
            elif key in Recipe.model_fields:
                data[key] = value
            elif dot and part == "method":
                raise RecipeError(f"search: {key}: options of the method have no prefix: {name}")
            else:
                if dot and part not in data["method"]:
                    raise RecipeError(
                        f"search: {key}: the recipe's method names no {part}; say which one it "
                        f"is, as {part}: {{name: ...}}"
                    )
                set_parameter(data["method"], key, value)
        if ITERATIONS in choice:
            _set_iterations(data, choice[ITERATIONS])
        elif self.iterations:
            data["trajectory"] = self.iterations
        return make_recipe(data)

    @property
    def num_choices(self) -> int:
        """How many combinations there are."""
        return math.prod(1 if isinstance(v, Range) else len(v) for v in self.others.values())

    def check(self, *, with_ranges: bool = False) -> None:
        """Refuse a place or a value that no recipe has, and ranges unless they are drawn from."""
        given = self.values.get(ITERATIONS, ())
        if isinstance(given, Range) or not all(type(v) is int and v >= 0 for v in given):
            raise RecipeError("search: iterations: expected whole numbers, as 10:100:10")
        if self.recipe.get("trajectory"):
            raise RecipeError(
                "the recipe has a trajectory of its own; leave it out and search over iterations"
            )
        if self.num_choices > MOST_COMBINATIONS:
            raise RecipeError(
                f"search: {self.num_choices:,} combinations of values; at most "
                f"{MOST_COMBINATIONS:,} can be tried, give fewer values"
            )
        problems: list[str] = []
        for choice in self.grid():
            try:
                self.fill(choice)
                self.fill(self.scored(choice)[0])
            except RecipeError as error:
                problems += [f"with {describe_choice(choice)}: {p}" for p in error.problems]
        if problems:
            raise RecipeError(problems[:10])
        ranges = [key for key, v in self.others.items() if isinstance(v, Range)]
        if ranges and not with_ranges:
            raise RecipeError(
                f"search: {', '.join(ranges)}: a grid needs values to try, as low:high:step; "
                "anything between two numbers is for --strategy optuna"
            )


def describe_choice(choice: Choice) -> str:
    """A choice in a line."""
    parts = (
        f"{key}={value if isinstance(value, (str, int, float)) else json.dumps(value)}"
        for key, value in choice.items()
    )
    return ", ".join(parts) or "nothing chosen"


def _as_mapping(method: Any) -> dict[str, Any]:
    return {"name": method} if isinstance(method, str) else dict(method or {})


def _set_iterations(data: dict[str, Any], iterations: int) -> None:
    """Let the last solver stop there, also where an override has another method."""
    for override in data.get("overrides", ()):
        own = override.get("method")
        if own is not None:
            override["method"] = own = _as_mapping(own)
            whole = make_recipe(data)
            spec = whole.overridden(whole.overrides[data["overrides"].index(override)])
            if spec.at_depth(0).iterates:
                # What it does not say itself it has from the recipe's method.
                combined = copy.deepcopy(spec.parameters)
                _stop_at(combined, iterations)
                own |= {key: combined[key] for key in ("stages", ITERATIONS) if key in combined}
    _stop_at(data["method"], iterations)


def _stop_at(method: dict[str, Any], iterations: int) -> None:
    stages = method.get("stages")
    if not stages:
        method[ITERATIONS] = iterations
        return
    last = {"solver": "cg", **stages[-1]}
    last.pop(ITERATIONS, None)
    set_parameter(last, f"solver.{ITERATIONS}", iterations)
    method["stages"] = [*stages[:-1], last]


def _set_of_model(data: dict[str, Any], key: str, name: str, value: Any) -> None:
    entries = make_recipe(data).model_dump(mode="json", exclude_defaults=True)["models"]
    by_name = {entry["name"]: entry for entry in entries}
    if name not in by_name:
        names = ", ".join(by_name)
        raise RecipeError(f"search: {key}.{name}: there is no model '{name}', only {names}")
    by_name[name][key] = value
    data["models"] = entries
