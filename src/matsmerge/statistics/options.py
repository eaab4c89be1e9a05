"""What can be asked of a collection, with the paper's choices as defaults."""

from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from matsmerge.errors import RecipeError
from matsmerge.limits import MOST_SAMPLES, NUM_SEEDS
from matsmerge.tasks.prediction import Expectation, Reduction

Kind = Literal["gram", "kfac", "fisher", "block_fisher"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class Options(BaseModel):
    """How statistics are collected; stored with them, since it is part of their meaning."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    statistics: Annotated[tuple[Kind, ...], Field(min_length=1)] = ("gram",)
    """`gram`: second moment of the inputs of every linear map, the mean of zzᵀ over real rows.
    `kfac`: that, and the second moment of its output gradients, the sum over rows of ooᵀ per
    example. `fisher`: mean over examples of the squared gradient. `block_fisher`: mean over
    examples of the gradient's outer product, for each vector parameter."""

    fisher: Expectation = "empirical"
    """Gradients for the given answers (empirical), or for answers as likely as the model finds
    them (true): all classes, each with its probability, where there are few; else drawn."""

    reduction: Reduction = "sum"
    """log p(y | x) of a sequence y: the sum or the mean over its tokens."""

    num_samples: Annotated[int, Field(ge=1, le=MOST_SAMPLES)] = 1
    """Answers drawn per example, where the true Fisher is sampled."""

    seed: Annotated[int, Field(ge=-NUM_SEEDS, lt=NUM_SEEDS)] = 0
    """Of drawn answers and of what is held out."""

    bias: bool = True
    """Keep the mean of the inputs beside their second moment. With a constant 1 appended to the
    input, a layer's weight and bias are one map; this is what that needs."""

    parameters: tuple[str, ...] = ("*",)
    """Patterns of the parameters to have statistics of; only those that require gradients."""

    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the examples that go into a second, separate set of statistics."""

    @field_validator("statistics", "parameters", mode="before")
    @classmethod
    def _as_tuple(cls, value: object) -> object:
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",")]
        if isinstance(value, (list, tuple, set)) and all(isinstance(part, str) for part in value):
            return tuple(dict.fromkeys(value))
        return value

    @field_validator("statistics")
    @classmethod
    def _in_order(cls, kinds: tuple[Kind, ...]) -> tuple[Kind, ...]:
        return tuple(sorted(kinds, key=KINDS.index))

    @property
    def wants_inputs(self) -> bool:
        return "gram" in self.statistics or "kfac" in self.statistics

    @property
    def wants_gradients(self) -> bool:
        return self.statistics != ("gram",)

    @property
    def wants_targets(self) -> bool:
        """Are the data's answers looked at?"""
        return self.wants_gradients and self.fisher == "empirical"


def make_options(**values: object) -> Options:
    """Check options; all that is wrong with them is in one `RecipeError`."""
    try:
        return Options.model_validate(values)
    except ValidationError as error:
        problems = []
        for e in error.errors():
            what = str(e["loc"][0]) if e["loc"] else "options"
            if what == "statistics":
                problems.append(
                    f"statistics: {e['input']!r} is not a kind of statistic; "
                    f"there are {', '.join(KINDS)}"
                )
            else:
                problems.append(f"{what}: {e['msg'].lower()}, found {e['input']!r}")
        raise RecipeError(problems) from error
