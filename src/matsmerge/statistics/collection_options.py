"""What can be asked of a collection, with the paper's choices as defaults."""

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
)

from matsmerge.errors import RecipeError, closest
from matsmerge.limits import MOST_RANK, MOST_SAMPLES, NUM_SEEDS
from matsmerge.problems import problems_of
from matsmerge.statistics.kinds import KINDS, collected_for
from matsmerge.statistics.kinds.statistic import Statistic
from matsmerge.statistics.ranks import AUTO_RANK
from matsmerge.tasks.prediction import Expectation, Reduction

Rank = Annotated[int, Field(ge=1, le=MOST_RANK)]


class CollectionOptions(BaseModel):
    """How statistics are collected; stored with them, since it is part of their meaning."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    statistics: Annotated[tuple[str, ...], Field(min_length=1)] = ("gram",)
    """Kinds of statistics, names in `KINDS`."""

    fisher: Expectation = "empirical"
    """Gradients for the given answers (empirical), or for answers as likely as the model finds
    them (true): exactly for `num_samples` + 1 classes or fewer, else all at once with random
    signs."""

    reduction: Reduction = "sum"
    """log p(y | x) of a sequence y: the sum or the mean over its tokens."""

    num_samples: Annotated[int, Field(ge=1, le=MOST_SAMPLES)] = 1
    """Passes back for the true Fisher of an example. For one class more it is exact; otherwise each
    pass draws random signs anew."""

    seed: Annotated[int, Field(ge=-NUM_SEEDS, lt=NUM_SEEDS)] = 0
    """Of random signs and of what is held out."""

    bias: bool = True
    """Keep the mean of the inputs beside their second moment. With a constant 1 appended to the
    input, a layer's weight and bias are one map; this is what that needs."""

    rank: Rank | Literal["auto", "full"] = "full"
    """Leading directions that second moments of linear maps are kept by, as sketches; all of them
    (full); or AUTO_RANK where a layer is wide enough for that to be smaller (auto)."""

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

    @field_validator("rank", mode="before")
    @classmethod
    def _as_rank(cls, value: object) -> object:
        if value in ("auto", "full"):
            return value
        given = int(value) if isinstance(value, str) and value.isdecimal() else value
        if type(given) is not int or not 1 <= given <= MOST_RANK:
            raise ValueError(f"expected a number of at least 1, full or auto, found {value!r}")
        return given

    @model_serializer(mode="wrap")
    def _without_full(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """What is kept in full is described as it was before there were sketches."""
        content: dict[str, Any] = handler(self)
        return {key: value for key, value in content.items() if (key, value) != ("rank", "full")}

    @field_validator("statistics")
    @classmethod
    def _in_order(cls, kinds: tuple[str, ...]) -> tuple[str, ...]:
        unknown = next((kind for kind in kinds if kind not in KINDS), None)
        if unknown is not None:
            raise ValueError(f"'{unknown}' is not a kind of statistic{closest(unknown, KINDS)}")
        return tuple(sorted(kinds, key=list(KINDS).index))

    @property
    def collected(self) -> list[Statistic[Any]]:
        """All statistics to collect."""
        return collected_for(self.statistics)

    @property
    def sketch_rank(self) -> int | None:
        """The rank of sketches; None if there are none."""
        if self.rank == "full":
            return None
        return AUTO_RANK if self.rank == "auto" else self.rank

    @property
    def wants_gradients(self) -> bool:
        return any(kind.needs_loss for kind in self.collected)

    @property
    def wants_targets(self) -> bool:
        """Are the data's answers looked at?"""
        return self.wants_gradients and self.fisher == "empirical"


def make_collection_options(**values: object) -> CollectionOptions:
    """Check options; all that is wrong with them is in one `RecipeError`."""
    try:
        return CollectionOptions.model_validate(values)
    except ValidationError as error:
        raise RecipeError(problems_of(error, CollectionOptions)) from error
