"""The results of a suite, as `results.json` in its folder holds them.

Scores are shares from 0 to 1. Everything that is drawn or tabulated is made from this file alone.
"""

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from matsmerge.engine.merge_file import MergeContent
from matsmerge.errors import DataError
from matsmerge.files.guarded_files import Content, Count, read_json_as
from matsmerge.lab.evaluation.results import ENSEMBLE, INDIVIDUAL, Right

RESULTS, STEPS = "results.json", "steps"  # in the folder of a run
_MAX_BYTES = 128 * 2**20
_MAX_VALUES = 5_000_000  # most are residuals in what is kept of every merge.json

JOINT, BASE = "joint", "base"
REFERENCES = (BASE, INDIVIDUAL, JOINT, ENSEMBLE)  # rows of a comparison that are no merges
SEQUENTIAL = "sequential"  # the row of a model that was trained on two tasks, one after the other
NO_MERGES = (*REFERENCES, SEQUENTIAL)


class _ResultsPart(BaseModel):
    # A score may be no number, and is read again as it was written.
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, ser_json_inf_nan="constants"
    )


class _Method(Content):
    label: str | None = None
    search: dict[str, Any] | None = None


class _SuiteContent(Content):
    """The parts of a suite's file that reports look at."""

    tasks: dict[str, Any] | None = None
    base: str | dict[str, Any] | None = None
    methods: dict[str, _Method] | None = None
    studies: dict[str, Any] | None = None
    paper: dict[str, str] | None = None


class _Named(Content):
    name: str


_Overlaps = list[Annotated[float, Field(allow_inf_nan=True)] | None]


class _Subspaces(Content):
    """As `mats inspect --subspace --json` says it."""

    tasks: list[_Named]
    rank: Count | None = None
    energy: float | None = None
    overlap: list[_Overlaps]
    overlap_at_random: list[_Overlaps]
    relative_to: str | None = None
    distances: dict[str, dict[str, float | None]] | None = None

    @model_validator(mode="after")
    def _check_sizes(self) -> "_Subspaces":
        num = len(self.tasks)
        for table in (self.overlap, self.overlap_at_random):
            if len(table) != num or any(len(row) != num for row in table):
                raise ValueError(f"expected the overlaps of {num} tasks")
        if self.rank is None and self.energy is None:
            raise ValueError("expected a rank or an energy")
        return self


def _fits(expected: type[Content]) -> AfterValidator:
    """Check plain data against a type, and keep it as plain data."""

    def check(value: Any) -> Any:
        expected.model_validate(value)
        return value

    return AfterValidator(check)


Plain = dict[str, Any]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Subspaces = Annotated[Plain, _fits(_Subspaces)]


class Scores(_ResultsPart):
    """One model's scores by task, with the standard errors over the task's examples."""

    tasks: dict[str, float] = Field(min_length=1)
    errors: dict[str, float]
    # Of each example 1 if it was right, else 0, where that is what a task's score is a mean of.
    right: dict[str, Right] = Field(default_factory=dict)

    @property
    def mean(self) -> float:
        return sum(self.tasks.values()) / len(self.tasks)


class ScoredModel(_ResultsPart):
    """The test scores of a model; of a merge that was tuned, also what was chosen."""

    test: Scores
    validation: float | None = None  # the mean over tasks by which it was chosen
    chosen: dict[str, Any] = Field(default_factory=dict)  # values of what was tuned
    num_tried: int = 1
    recipe: Plain | None = None  # the one that was chosen
    merge: Annotated[Plain, _fits(MergeContent)] | None = None  # its merge.json


class MethodRow(ScoredModel):
    """The outcome of one method, or of one of `REFERENCES`, with one seed."""

    method: str
    seed: int


class HeatMapCell(_ResultsPart):
    """An objective solved from an init."""

    init: str
    objective: str
    seed: int
    score: float  # the mean over tasks, test split
    of_init: float
    chosen: dict[str, Any] = Field(default_factory=dict)


class FisherScore(_ResultsPart):
    """A method with the Fisher information taken one of four ways."""

    method: str
    expectation: str  # empirical or true
    split: str  # what it was collected from
    seed: int
    score: float  # the mean over tasks, validation split


class RankScore(_ResultsPart):
    """A method with second moments kept by a rank."""

    method: str
    rank: int | None  # None: whole ones
    seed: int
    score: float  # the mean over tasks, test split
    num_bytes: Annotated[int, Field(ge=0)]  # that the statistics it reads take, of all models


class CurvePoint(_ResultsPart):
    """A model on the way of the solver."""

    iterations: int
    score: float  # the mean over tasks, validation split
    residual: float  # of the linear system, by that of the start; the median over layers
    objective: float  # by that of the start; the median over layers


class Curve(_ResultsPart):
    """Conjugate gradients, from the start on."""

    name: str
    seed: int
    points: list[CurvePoint]


class MergeCost(_ResultsPart):
    """Operations and seconds of a merge."""

    method: str
    operations: Amount | None = None  # by the paper's formulas, statistics included
    seconds: list[Amount] = Field(default_factory=list)  # of merges, repeated
    statistics_seconds: Amount | None = None  # of collecting what it needs, all models together


class Point(_ResultsPart):
    """A model in a plane of parameters."""

    name: str
    x: float
    y: float


class Landscape(_ResultsPart):
    """Losses of tasks in a plane through three models, and where merges fall on it.

    The plane is that of one layer; coordinates are in units of the distance between models.
    """

    layer: str
    xs: list[float]
    ys: list[float]
    losses: dict[str, list[list[float]]]  # by task, row by row of ys
    models: list[Point]  # what was merged
    merges: list[Point]
    paths: dict[str, list[Point]] = Field(default_factory=dict)  # of solvers, by iteration

    @model_validator(mode="after")
    def _check_sizes(self) -> "Landscape":
        for task, rows in self.losses.items():
            whole = len(rows) == len(self.ys) and all(len(row) == len(self.xs) for row in rows)
            if not whole or not rows or not rows[0]:
                raise ValueError(f"{task}: expected a loss for each of ys and xs")
        return self


class Intermediate(_ResultsPart):
    """A target task's model merged with one that was trained on another task."""

    donor: str
    method: str
    seed: int
    score: float  # of the target task, test split
    error: float
    validation: float | None = None
    chosen: dict[str, Any] = Field(default_factory=dict)


class VariantResults(_ResultsPart):
    """The results of one way to fine-tune; what a suite does not ask for is empty."""

    tasks: list[str] = Field(default_factory=list)
    comparison: list[MethodRow] = Field(default_factory=list)
    heat_map: list[HeatMapCell] = Field(default_factory=list)
    fisher: list[FisherScore] = Field(default_factory=list)
    curves: list[Curve] = Field(default_factory=list)
    ranks: list[RankScore] = Field(default_factory=list)
    costs: list[MergeCost] = Field(default_factory=list)
    landscape: Landscape | None = None
    target: str | None = None
    intermediate: list[Intermediate] = Field(default_factory=list)
    subspaces: Subspaces | None = None


class StepRecord(_ResultsPart):
    """Something that was done on the way, or found done."""

    name: str
    kind: str
    key: str
    seconds: Amount


class SuiteResults(_ResultsPart):
    """Everything a report needs."""

    format: int = 1
    name: str
    title: str
    about: str
    suite: Annotated[Plain, _fits(_SuiteContent)]  # the file, as it was run
    seeds: list[int]
    variants: dict[str, VariantResults]
    missing: list[str] = Field(default_factory=list)  # steps that are not done yet
    steps: list[StepRecord] = Field(default_factory=list)
    versions: dict[str, str] = Field(default_factory=dict)
    commit: str | None = None  # of matsmerge, where it runs from a repository
    replaced: list[str] = Field(default_factory=list)  # by local files: not what the suite says
    machine: dict[str, Any] = Field(default_factory=dict)
    notes: list[str] = Field(default_factory=list)

    def __repr__(self) -> str:
        missing = f", {len(self.missing)} to do" if self.missing else ""
        variants = ", ".join(self.variants)
        return f"<SuiteResults {self.name}: {variants}, {len(self.steps)} steps{missing}>"


def read_results(folder: Path) -> SuiteResults:
    """Read the results in a suite's folder, or in a file."""
    path = folder / RESULTS if folder.is_dir() else folder
    if not path.exists():
        raise DataError(f"{path}: no such file; `mats experiment run SUITE` writes one")
    try:
        return read_json_as(path, SuiteResults, DataError, _MAX_BYTES, _MAX_VALUES)
    except DataError as error:
        advice = f"{path}: not the results of a suite, or damaged; run the suite again"
        raise DataError([*error.problems, advice]) from error
