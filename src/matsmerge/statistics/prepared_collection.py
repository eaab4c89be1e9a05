"""Statistics of a model on a file of data: which examples, in which batches."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from matsmerge.checkpoints.fingerprint import fingerprint
from matsmerge.checkpoints.public_names import public_name
from matsmerge.data.rows import Data, fingerprint_rows
from matsmerge.data.template import Wordings
from matsmerge.errors import RecipeError
from matsmerge.progress import AnyProgress
from matsmerge.statistics.collection import Collection
from matsmerge.statistics.collection_options import CollectionOptions
from matsmerge.statistics.collection_run import Output, run_collection
from matsmerge.statistics.processes import Process, this_process
from matsmerge.statistics.statistics import HELD_OUT, MAIN, Origin, Statistics
from matsmerge.tasks.batch_order import make_batches
from matsmerge.tasks.loaded_model import LoadedModel
from matsmerge.tasks.task import Encoded, encode_all


@dataclass(frozen=True)
class ExampleChoice:
    """Which examples to use, and how to show them."""

    num_examples: int | None = 1000  # as in the paper; None: all
    shuffle: bool = False  # at random instead of the first ones
    columns: Mapping[str, str] = field(default_factory=dict)
    wordings: Wordings | None = None
    batch_size: int = 32
    max_tokens: int = 4096  # of a batch, with padding


@dataclass(frozen=True)
class PreparedCollection:
    """A collection that can begin: everything was read and checked."""

    collection: Collection
    loaded: LoadedModel
    batches: list[tuple[str, list[Encoded]]]  # this process's
    model: Origin
    data: Origin
    plan: str  # how the batches were made
    notes: list[str]

    @property
    def num_examples(self) -> int:
        return sum(len(batch) for _, batch in self.batches)

    def run(self, output: Output | None = None, progress: AnyProgress | None = None) -> Statistics:
        """Collect, and write to an output."""
        collated = ((to, self.loaded.task.collate(batch)) for to, batch in self.batches)
        return run_collection(
            self.collection,
            collated,
            self.model,
            self.data,
            output,
            progress,
            self.plan,
            self.num_examples,
        )


def prepare_collection(
    loaded: LoadedModel,
    data: Data,
    options: CollectionOptions,
    choice: ExampleChoice,
    part: Process | None = None,
) -> PreparedCollection:
    """Choose and encode examples; all that is wrong with them is said before anything runs.

    The batches are those of this process, or of a part of the data.
    """
    numbers = row_numbers(len(data), choice, options.seed)
    notes = list(loaded.notes)
    if left_out := data.labels_left_out(choice.columns.get("label", "label"), numbers):
        notes.append(
            f"{data.name}: the {len(numbers)} examples used {left_out} --shuffle draws examples at "
            "random"
        )
    encoded = encode_all(loaded.task, data, choice.columns, numbers, wordings=choice.wordings)
    notes += loaded.task.notes
    order = list(range(len(encoded)))
    random.Random(options.seed).shuffle(order)
    num_held_out = round(options.held_out * len(order))
    if options.held_out and not 0 < num_held_out < len(order):
        raise RecipeError(
            f"held_out: {options.held_out} of {len(order)} examples is {num_held_out}; both sets "
            "need at least one"
        )
    sets = {MAIN: sorted(order[num_held_out:]), HELD_OUT: sorted(order[:num_held_out])}
    batches = []
    for of, chosen in sets.items():
        lengths = [encoded[i].length for i in chosen]
        for batch in make_batches(lengths, choice.batch_size, choice.max_tokens):
            batches.append((of, [encoded[chosen[i]] for i in batch]))
    process = part or this_process()
    model, rows = loaded.checkpoint, [data.rows[n] for n in numbers]
    of_rows = fingerprint_rows(rows, data.folder)
    return PreparedCollection(
        Collection(loaded.model, options, loaded.task.predict, loaded.names),
        loaded,
        batches[process.rank :: process.num_processes],
        Origin(name=public_name(model.label), fingerprint=fingerprint(model)),
        Origin(name=public_name(data.name), fingerprint=of_rows, split=data.split),
        _describe_plan(loaded, batches),
        notes,
    )


def _describe_plan(loaded: LoadedModel, batches: list[tuple[str, list[Encoded]]]) -> str:
    """What must be the same for the same batches to come up again."""
    numbers = [(to, [(e.number, e.length) for e in batch]) for to, batch in batches]
    dtypes = sorted({str(p.dtype) for p in loaded.model.parameters()})
    return f"{loaded.task.kind} {loaded.task.options} {dtypes} {numbers}"


def row_numbers(num_rows: int, choice: ExampleChoice, seed: int) -> list[int]:
    """The numbers of the rows that are used."""
    num = num_rows if choice.num_examples is None else min(choice.num_examples, num_rows)
    if choice.shuffle:
        return sorted(random.Random(seed).sample(range(num_rows), num))
    return list(range(num))
