"""What a task is: how a row becomes an example, and a model's output a prediction."""

import difflib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

from torch import Tensor, nn

from matsmerge.data.image_files import image_source
from matsmerge.data.labels import Labels
from matsmerge.data.row_problems import ENOUGH, refuse
from matsmerge.data.rows import Data
from matsmerge.data.template import Wordings
from matsmerge.errors import DataError, closest
from matsmerge.models.pretrained import architecture_of
from matsmerge.optional_import import import_optional
from matsmerge.problems import noted
from matsmerge.tasks.batch import Batch
from matsmerge.tasks.prediction import IGNORED, Prediction, Reduction

Turns = Literal["assistant", "all"]


@dataclass(frozen=True)
class TaskOptions:
    """The options of a task, besides its kind."""

    max_length: int | None = None  # in tokens; None: as many as the model takes, at most 512
    labels: Sequence[str] | None = None  # names of the classes, in the order of their numbers
    length_normalize: bool = False  # multiple choice: mean instead of sum of log-probabilities
    need_targets: bool = True  # False: a column of labels is not looked at
    class_prompts: tuple[str, ...] = ()  # images: texts with {label}, from which a head is made
    turns: Turns = "assistant"  # conversations: whose tokens are predicted
    packing: bool = False  # texts of language models: several in one sequence


@dataclass(frozen=True)
class Encoded:
    """An example as the model will see it."""

    number: int  # in its data, from 0
    length: int  # tokens it takes up in a batch

    @property
    def num_choices(self) -> int | None:
        """The number of answers to choose from, where examples differ in it."""
        return None


E = TypeVar("E", bound=Encoded)


class RowReader(ABC, Generic[E]):
    """How rows of data become examples, and these a batch."""

    kind: str  # the name of its kind of task in task files and options
    options: TaskOptions

    required: ClassVar[tuple[str, ...]]  # columns
    optional: ClassVar[tuple[str, ...]] = ()
    targets: ClassVar[str | None] = None  # the required column that may lack if none are needed
    prompt: ClassVar[str | None] = None  # the column that a template fills
    images: ClassVar[tuple[str, ...]] = ()  # columns whose texts are paths of images

    @abstractmethod
    def encode(self, row: Mapping[str, Any], number: int) -> E:
        """Check a row, whose columns have the task's names, and turn it into numbers.

        What is wrong is said without naming the row.
        """

    @abstractmethod
    def collate(self, examples: Sequence[E]) -> Batch:
        """Examples as one batch, padded to the longest."""

    def pack(self, examples: list[E]) -> list[E]:
        """Several examples in one, if that is asked for."""
        if self.options.packing:
            raise DataError(
                f"packing: joins texts of causal_lm, and cannot be done for {self.kind}"
            )
        return examples

    @property
    def notes(self) -> list[str]:
        """What the user should know of how examples are encoded, so far."""
        return []

    def missing_columns(self, found: set[str]) -> list[str]:
        """Which columns of the task are needed but not among those found."""
        unneeded = set() if self.options.need_targets else {self.targets}
        return [name for name in self.required if name not in found | unneeded]

    def prompt_column(self, found: set[str]) -> str | None:  # noqa: ARG002
        """The column that a template fills, given those found in the data."""
        return self.prompt


class Task(RowReader[E]):
    """One kind of task: all that is known of the kind is in its class, an object is for one model.

    A kind is one file with a subclass, and one line in `tasks/kinds.py`.
    """

    # Which models are for it.
    auto_class: ClassVar[str]  # the class of transformers that loads them
    architectures: ClassVar[tuple[str, ...]] = ()  # how the names of their classes end
    peft_type: ClassVar[str | None] = None  # what PEFT calls it (`task_type`)
    main_input: ClassVar[str | None] = None  # of encoders that do it with a linear head from a file
    has_classes: ClassVar[bool] = False  # the model has a head for the classes of the task

    # What its files say.
    files: ClassVar[tuple[str, ...]]  # patterns, one of which is of its tokenizer or processor
    labels_name_choices: ClassVar[bool] = False  # `labels:` is what the data calls the choices
    templates_name_classes: ClassVar[bool] = False  # a template is about classes: they make a head

    # How it is scored.
    metrics: ClassVar[tuple[str, ...]] = ("accuracy", "f1", "mcc", "map", "loss")  # default first
    writes_text: ClassVar[bool] = False  # the answer is text, and not one of some classes
    measure: ClassVar[str] = "accuracy"  # what `validation_values` are

    def __init__(self, model: nn.Module, folder: Path, options: TaskOptions) -> None:  # noqa: ARG002
        """The task as this model does it; its tokenizer or image processor is in the folder."""
        self.options = options
        if self.has_classes:
            self.labels = Labels.of_model(model, options.labels)

    @classmethod
    def is_for(cls, config: Any) -> bool:
        """Does a model's configuration say that it was made for this kind?"""
        return architecture_of(config).endswith(cls.architectures)

    @classmethod
    def model_kind(cls, config: Any) -> "type[Task[Any]]":  # noqa: ARG003
        """The kind that its models were made for; multiple choice compares answers of another."""
        return cls

    @classmethod
    def model_class(cls, label: str, config: Any) -> Any:
        """The class of transformers that loads a model for it; an error where it has none."""
        kind = cls.model_kind(config)
        auto_class = getattr(import_optional("transformers"), kind.auto_class)
        if type(config) not in auto_class._model_mapping:
            raise DataError(
                f"{label}: transformers has no {config.model_type} model for {kind.kind}; "
                "for an encoder of another kind, give a linear head with --head FILE that holds "
                "'weight' (classes, size) and optionally 'bias'"
            )
        return auto_class

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        """Run the model."""
        logits: Tensor = model(**batch.inputs).logits
        return Prediction(logits, on_device_of(logits, batch.targets))

    def validation_values(self, said: Prediction, reduction: Reduction) -> Tensor:  # noqa: ARG002
        """Values whose mean is the score during training, of which more is better."""
        assert said.targets is not None
        return (said.logits.argmax(-1) == said.targets)[said.targets != IGNORED].double()

    @property
    def trained_as(self) -> "Task[Any]":
        """The task whose loss is trained."""
        return self

    def trained_example(self, example: E) -> Encoded:
        """An example of this task as one of `trained_as`."""
        return example


def has_any(folder: Path, patterns: Sequence[str]) -> bool:
    """Is there a file of one of these patterns in the folder?"""
    return any(any(folder.glob(pattern)) for pattern in patterns)


def on_device_of(logits: Tensor, targets: Tensor | None) -> Tensor | None:
    """Targets beside the logits, which a model spread over devices may have put elsewhere."""
    return None if targets is None else targets.to(logits.device)


def encode_all(
    task: RowReader[E],
    data: Data,
    columns: Mapping[str, str] | None = None,
    numbers: Sequence[int] | None = None,
    *,
    wordings: Wordings | None = None,
) -> list[E]:
    """Encode the rows with these numbers, or all; whatever is wrong with any is one error.

    `columns` says which column of the data is the task's, where the names differ. Wordings make the
    text, and perhaps answers, from several columns. Messages count rows from 1, as lines are.
    """
    sources, prompt = _choose_columns(task, data, columns or {}, wordings)
    encoded: list[E] = []
    problems: list[str] = []
    for number in range(len(data)) if numbers is None else numbers:
        if len(problems) >= ENOUGH:
            break
        row = data.rows[number]
        own = {name: row[source] for name, source in sources.items() if source in row}
        with noted(problems, DataError, before=f"{data.name}: row {number + 1}: "):
            if wordings is not None and prompt is not None:
                own |= wordings.fill(row, number, prompt)
            for name in task.images:
                if name in own:
                    own[name] = image_source(own[name], data.folder)
            encoded.append(task.encode(own, number))
    refuse(problems)
    return task.pack(encoded)


def _choose_columns(
    task: RowReader[Any], data: Data, columns: Mapping[str, str], wordings: Wordings | None
) -> tuple[dict[str, str], str | None]:
    """The data's column for each column of the task, and the column that wordings fill."""
    names = (*task.required, *task.optional)
    problems = [
        f"the task {task.kind} has no column '{name}'{closest(name, names)}"
        for name in columns
        if name not in names
    ]
    sources = {name: columns.get(name, name) for name in names}
    found = {name for name, source in sources.items() if source in data.columns}
    prompt = None
    if wordings is not None:
        problems += wordings.problems(data.name, data.columns)
        found |= wordings.answers_filled
        prompt = task.prompt_column(found)
        if prompt is None:
            problems.append(f"the task {task.kind} has no text that a template could make")
        else:
            found.add(prompt)
    mapped = {name for name in columns if name in names}
    for name in dict.fromkeys([*task.missing_columns(found), *sorted(mapped - found)]):
        source = sources[name]
        near = difflib.get_close_matches(source, data.columns, n=1, cutoff=0.5)
        column = near[0] if near else "..."
        meant = f"; did you mean '{near[0]}'?" if near else "."
        problems.append(
            f"{data.name}: has no column '{source}' for the task {task.kind}{meant} "
            f"Its columns are {', '.join(data.columns)}; "
            f"say which one it is with `columns: {{{name}: {column}}}` in a task file or beside "
            f"`path` in a recipe, or with --columns {name}={column} of mats collect"
        )
    refuse(problems)
    return {name: source for name, source in sources.items() if name in found}, prompt
