"""`merge.json`, which `mats merge` writes beside a model, as it is read again."""

from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from matsmerge.errors import CheckpointError, DataError, MatsError
from matsmerge.files.guarded_files import Content, Count, Numbers, parse_as, read_json

# Most are residuals, one for each layer and iteration; a value is at most a line of 30 bytes.
MAX_VALUES, MAX_BYTES = 8_000_000, 256 * 2**20
_MAX_STAGES = 1000


class _Entry(Content):
    model: str
    name: str | None = None
    weight: float | list[float] = 1.0
    statistics: str | None = None


class _Recipe(Content):
    models: list[_Entry] = Field(min_length=1)
    base: str | None = None
    method: str | dict[str, Any] | None = None


class _Input(Content):
    name: str
    source: str | None = None
    statistics: str | None = None
    data: str | None = None
    fingerprint: str | None = None
    num_examples: Count | dict[str, Count] | None = None


class _Rule(Content):
    otherwise: str = ""


class _LayerContent(Content):
    rank: Count
    energy: float


class _Solved(Content):
    """How a layer's system was solved; what was measured may not be finite."""

    stage: Count
    objective: str
    solver: str
    status: str
    iterations: Count
    residual: float | None = Field(default=None, allow_inf_nan=True)
    objective_value: float | None = Field(default=None, allow_inf_nan=True)
    objective_of_start: float | None = Field(default=None, allow_inf_nan=True)
    residuals: Numbers = Field(default_factory=list)
    objective_values: Numbers = Field(default_factory=list)

    @model_validator(mode="after")
    def _check_lengths(self) -> "_Solved":
        if self.objective_values and len(self.objective_values) != len(self.residuals):
            raise ValueError("residuals and objective_values differ in number")
        return self


class _Parameter(Content):
    shape: list[Count] = Field(max_length=100)
    dtype: str | None = None
    solved: list[_Solved] = Field(default_factory=list, max_length=_MAX_STAGES)
    otherwise: bool = False


class _RecipeContent(Content):
    recipe: _Recipe


class MergeContent(_RecipeContent):
    """What readers of a merge.json look at."""

    versions: dict[str, str] = Field(default_factory=dict)
    inputs: list[_Input] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)
    heads: dict[str, list[str]] = Field(default_factory=dict)
    lora: dict[str, _LayerContent] = Field(default_factory=dict)
    rules: list[_Rule] = Field(default_factory=list)
    parameters: dict[str, _Parameter]


def read_merge_file(path: Path) -> dict[str, Any]:
    """What a merge.json says. Parts that are of another type than they should be are an error."""
    return _read(path, MergeContent, DataError)


def read_merged_recipe(path: Path) -> dict[str, Any]:
    """The recipe in a merge.json, whatever else is in it."""
    recipe: dict[str, Any] = _read(path, _RecipeContent, CheckpointError)["recipe"]
    return recipe


def _read(path: Path, expected: type[Content], error_type: type[MatsError]) -> dict[str, Any]:
    content = read_json(path, error_type, MAX_BYTES, most_values=MAX_VALUES)
    try:
        parse_as(content, expected, str(path), error_type)
    except error_type as error:
        advice = f"{path}: is not that of a merge, or it was damaged or edited; merge again"
        raise error_type([*error.problems, advice]) from error
    assert isinstance(content, dict)
    return content
