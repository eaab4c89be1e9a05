"""How to train: the paper's settings, unless said otherwise."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from matsmerge.errors import RecipeError, closest
from matsmerge.limits import MOST_AT_ONCE, MOST_COUNTED, MOST_RANK, NUM_SEEDS

AdapterKind = Literal["full", "ia3", "lora"]

_LEARNING_RATES = {"full": 1e-4, "lora": 1e-4, "ia3": 5e-3}
DEFAULT_MAX_STEPS = 5000
DEFAULT_RANK = 8


class TrainingOptions(BaseModel):
    """What can be said of a training run beside model, tasks and output.

    The paper's batches hold 1,024 examples; `batch_size` times `accumulate` is that number here.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    adapter: AdapterKind | None = None  # None: as the model is
    target_modules: list[str] | None = None  # None: as PEFT has it for the architecture
    feedforward_modules: list[str] | None = None  # those whose inputs (IA)^3 scales
    rank: int | None = Field(default=None, ge=1, le=MOST_RANK)
    alpha: float | None = Field(default=None, gt=0, allow_inf_nan=False)

    learning_rate: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    batch_size: int = Field(default=32, ge=1, le=MOST_AT_ONCE)
    accumulate: int = Field(default=1, ge=1, le=MOST_COUNTED)
    max_steps: int | None = Field(default=None, ge=1, le=MOST_COUNTED)
    epochs: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    eval_every: int = Field(default=100, ge=1, le=MOST_COUNTED)
    patience: int = Field(default=5, ge=1, le=MOST_COUNTED)
    validate_: bool = Field(default=True, alias="validate")
    num_validation: int | None = Field(default=1000, ge=1, le=MOST_COUNTED)  # None: all
    num_examples: int | None = Field(default=None, ge=1, le=MOST_COUNTED)  # per task; None: all
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    max_grad_norm: float = Field(default=1.0, ge=0, allow_inf_nan=False)  # 0: not clipped
    loss: Literal["mean", "sum"] = "mean"  # over the tokens of an answer
    seed: int = Field(default=0, ge=0, lt=NUM_SEEDS)

    bf16: bool = False
    dtype: str | None = None
    group_by_length: bool = False
    equal: bool = False  # as many examples of each task, not in proportion to their number
    freeze: list[str] = Field(default_factory=list)
    fresh_head: bool = False

    @model_validator(mode="after")
    def _check(self) -> "TrainingOptions":
        problems = []
        if self.max_steps is not None and self.epochs is not None:
            problems.append("give either max_steps or epochs, not both")
        if self.adapter not in (None, "lora"):
            for name in ("rank", "alpha"):
                if getattr(self, name) is not None:
                    problems.append(f"{name} is an option of LoRA, and adapter is {self.adapter}")
        if self.adapter == "full" and self.target_modules is not None:
            problems.append("target_modules are those of an adapter, and adapter is full")
        if self.adapter in ("full", "lora") and self.feedforward_modules is not None:
            problems.append("feedforward_modules is an option of (IA)^3")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def rate(self, kind: AdapterKind) -> float:
        """The learning rate for a full model or an adapter."""
        return self.learning_rate if self.learning_rate is not None else _LEARNING_RATES[kind]

    @property
    def steps(self) -> int | None:
        """Batches at most; None where epochs are counted."""
        if self.epochs is not None:
            return None
        return self.max_steps or DEFAULT_MAX_STEPS

    def described(self) -> dict[str, Any]:
        """As JSON says it."""
        return self.model_dump(mode="json", by_alias=True)


def make_options(**given: Any) -> TrainingOptions:
    """Options, with everything that is wrong with them in one error."""
    names = {field.alias or name for name, field in TrainingOptions.model_fields.items()}
    problems = [
        f"train: there is no option '{name}'{closest(name, names)}"
        for name in given
        if name not in names
    ]
    try:
        options = TrainingOptions.model_validate({k: v for k, v in given.items() if k in names})
    except ValidationError as error:
        for item in error.errors():
            where = ".".join(map(str, item["loc"]))
            message = item["msg"].removeprefix("Value error, ")
            if where:
                message = f"{where}: {message[0].lower()}{message[1:]}, found {item['input']!r}"
            problems.append(message)
    if problems:
        raise RecipeError(problems)
    return options
