"""Parts of a suite's file: tasks, variants and methods."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from matsmerge.limits import MOST_COUNTED
from matsmerge.methods.method import Method
from matsmerge.recipes.method_spec import MethodSpec, as_plain
from matsmerge.tasks.task_file import TaskFile


class SuitePart(BaseModel):
    """A part of a suite; keys that it does not have are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Made(SuitePart):
    """Something that is made from packages by a function of `sources`."""

    source: str
    settings: dict[str, Any] = Field(default_factory=dict)


class SuiteTask(TaskFile):
    """A task file, whose data may also come from a source."""

    source: str | None = None
    settings: dict[str, Any] = Field(default_factory=dict)  # of the source


class VariantOfSuite(SuitePart):
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


class MethodOfSuite(SuitePart):
    """A method, and the values to try of its parameters."""

    method: str | dict[str, Any]
    search: dict[str, Any] = Field(default_factory=dict)
    starts_from: str | None = None  # another method of the suite, which as it was tuned is the init
    unlabelled: bool = False  # choose by the distance to each task's own model
    expectation: Literal["empirical", "true"] | None = None  # None: the variant's
    label: str | None = None
    variants: list[str] | None = None  # those it makes sense for; None: all

    def parsed(self) -> Method:
        return MethodSpec.model_validate(as_plain(self.method)).at_depth(0)

    @property
    def needs_data(self) -> bool:
        """Whether a merge by this method runs the models on their data."""
        if True in self.search.get("match_heads", ()):
            return True
        try:
            return self.parsed().uses_merged_inputs
        except ValidationError:
            return False  # a recipe with it says what is wrong


def name_of(part: str | dict[str, Any]) -> str:
    """The name of a method or an objective, given by its name or with parameters."""
    return part if isinstance(part, str) else str(part.get("name"))
