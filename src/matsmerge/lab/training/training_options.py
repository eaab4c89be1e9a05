"""How to train: the paper's settings, unless said otherwise."""

from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from matsmerge.errors import RecipeError, closest
from matsmerge.limits import MOST_AT_ONCE, MOST_COUNTED, MOST_RANK, NUM_SEEDS
from matsmerge.problems import problems_of

if TYPE_CHECKING:
    from matsmerge.adapters.adapter import AdapterKind

FULL = "full"  # no adapter: all parameters of a model
DEFAULT_MAX_STEPS = 5000
LEARNING_RATE = 1e-4

_ADAPTER = "Adapter"
_LENGTH = "Length and validation"
_OPTIMIZER = "Optimizer"
_RUNNING = "Running"
_COUNT: dict[str, Any] = {"ge": 1, "le": MOST_COUNTED}


def _option(default: Any, description: str, panel: str | None = None, **settings: Any) -> Any:
    """A field that is also an option of `mats train`, shown in a panel of its help.

    `flag`, `metavar` and `zero` are as in `cli.field_options.option`, other settings pydantic's.
    """
    shown: dict[str, Any] = {"panel": panel}
    shown |= {key: settings.pop(key) for key in ("flag", "metavar", "zero") if key in settings}
    return Field(default, description=description, json_schema_extra=shown, **settings)


class TrainingOptions(BaseModel):
    """The options of a training run, besides model, tasks and output.

    The paper's batches hold 1,024 examples; `batch_size` times `accumulate` is that number here.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    freeze: list[str] = _option(
        [],
        "Parameters that stay as they are, e.g. 'bert.embeddings.*'. Repeatable.",
        metavar="PATTERN",
    )
    fresh_head: bool = _option(False, "A new head, even where the model's is for the same classes.")
    equal: bool = _option(
        False, "As many examples of each task, instead of in proportion to its size."
    )
    num_examples: int | None = _option(
        None, "Train on so many examples per task, drawn at random; 0: all.", zero=True, **_COUNT
    )

    adapter: str | None = _option(
        None, "full, ia3 or lora. Default: full; if MODEL is an adapter, that one.", _ADAPTER
    )
    target_modules: list[str] | None = _option(
        None,
        "Where the adapter goes, e.g. q_proj,v_proj. Default: as PEFT has it for the "
        "architecture; (IA)^3: keys, values and the feed-forward, as in the paper.",
        _ADAPTER,
        metavar="NAMES",
    )
    feedforward_modules: list[str] | None = _option(
        None,
        "(IA)^3: which of them are scaled at their input. Default: as PEFT has it.",
        _ADAPTER,
        metavar="NAMES",
    )
    rank: int | None = _option(None, "Of LoRA. Default: 8.", _ADAPTER, ge=1, le=MOST_RANK)
    alpha: float | None = _option(None, "Of LoRA. Default: twice the rank.", _ADAPTER, gt=0)

    max_steps: int | None = _option(None, "Batches at most. Default: 5000.", _LENGTH, **_COUNT)
    epochs: float | None = _option(None, "Instead: times through the data, at most.", _LENGTH, gt=0)
    eval_every: int = _option(100, "Batches between checkpoints, each scored.", _LENGTH, **_COUNT)
    patience: int = _option(
        5,
        "Stop after so many checkpoints without improvement; the best one is kept.",
        _LENGTH,
        **_COUNT,
    )
    num_validation: int | None = _option(
        1000,
        "Score on so many examples per task, at most, drawn at random; 0: all.",
        _LENGTH,
        zero=True,
        **_COUNT,
    )
    validate_: bool = _option(
        True,
        "Train to the end and keep the last state.",
        _LENGTH,
        alias="validate",
        flag="--no-validation",
    )

    learning_rate: float | None = _option(
        None, "Learning rate, constant. Default: 1e-4; (IA)^3: 5e-3.", _OPTIMIZER, gt=0, flag="--lr"
    )
    batch_size: int = _option(
        32,
        "Examples at once. The paper's batches have 1024: --accumulate 32.",
        _OPTIMIZER,
        ge=1,
        le=MOST_AT_ONCE,
    )
    accumulate: int = _option(
        1, "Add up the gradients of so many, which then count as one batch.", _OPTIMIZER, **_COUNT
    )
    weight_decay: float = _option(0.0, "Of AdamW.", _OPTIMIZER, ge=0)
    max_grad_norm: float = _option(
        1.0, "Larger gradients are scaled down; 0: never.", _OPTIMIZER, ge=0
    )
    loss: Literal["mean", "sum"] = _option(
        "mean", "-log p(y|x) as the mean or the sum over the tokens of y.", _OPTIMIZER
    )
    seed: int = _option(0, "Of everything random.", _OPTIMIZER, ge=0, lt=NUM_SEEDS)

    bf16: bool = _option(False, "Compute in bfloat16, the weights staying as they are.", _RUNNING)
    dtype: str | None = _option(
        None, "Of the weights. Default: as stored, in a full model at least float32.", _RUNNING
    )
    group_by_length: bool = _option(
        False, "Batches of examples of similar length, with less padding.", _RUNNING
    )

    @model_validator(mode="after")
    def _check(self) -> "TrainingOptions":
        problems = []
        if self.max_steps is not None and self.epochs is not None:
            problems.append("give either max_steps or epochs, not both")
        kinds = [FULL, *_adapter_kinds()]
        if self.adapter is not None and self.adapter not in kinds:
            problems.append(f"there is no adapter '{self.adapter}'{closest(self.adapter, kinds)}")
        for kind in _adapter_kinds().values():
            problems += [
                f"{name} is an option of {kind.title}, and adapter is {self.adapter}"
                for name in kind.options
                if self.adapter not in (None, kind.name) and getattr(self, name) is not None
            ]
        if self.adapter == FULL and self.target_modules is not None:
            problems.append("target_modules are those of an adapter, and adapter is full")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def of_adapters(self) -> dict[str, Any]:
        """Options that only adapters have."""
        own = [name for kind in _adapter_kinds().values() for name in kind.options]
        return {name: getattr(self, name) for name in ("target_modules", *own)}

    @property
    def steps(self) -> int | None:
        """Batches at most; None where epochs are counted."""
        if self.epochs is not None:
            return None
        return self.max_steps or DEFAULT_MAX_STEPS

    def described(self) -> dict[str, Any]:
        """The options as plain values for JSON."""
        return self.model_dump(mode="json", by_alias=True)


def _adapter_kinds() -> "dict[str, AdapterKind]":
    """The table of adapters, imported late: it imports torch, and help should not wait for it."""
    from matsmerge.adapters.adapter_folder import ADAPTER_KINDS

    return ADAPTER_KINDS


def make_training_options(**given: Any) -> TrainingOptions:
    """Check options; everything that is wrong with them is one error."""
    try:
        return TrainingOptions.model_validate(given)
    except ValidationError as error:
        raise RecipeError(problems_of(error, TrainingOptions)) from error
