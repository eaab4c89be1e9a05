"""Second moments along a merged prefix: a model whose sections are merged one after the other.

What a layer receives for task m is what the merged layers before it make of task m's data. Beside
it goes what the layer receives in model m itself, on the same example: the merged layer should
output what the model's does (cross moments). Or, as in RegMean++ (Nguyen et al., 2025,
arXiv:2508.03121), the inputs of a block are those of the merged prefix, within the block its layers
are the model's own, and a layer should output what the model's would for the same input.

There is one model in memory, into which weights are put as they are needed. Of each batch the
output of the last block is held, in the merged model and in the task's own; blocks that are done
give it back instead of running, as quantisers do that go block by block. A section thus costs what
is outside of the blocks and one block, not the whole model.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from matsmerge.checkpoints.checkpoint import first_line
from matsmerge.errors import DataError
from matsmerge.statistics.collection import Collection
from matsmerge.statistics.collection_options import CollectionOptions
from matsmerge.statistics.joined_statistics import without_values
from matsmerge.statistics.kinds.gram_matrix import GRAM
from matsmerge.statistics.kinds.paired_moments import PAIRS
from matsmerge.statistics.own_inputs import OwnInputs
from matsmerge.statistics.sections import Outline, Section, Trace, find_sections, trace
from matsmerge.statistics.statistics import Map, Origin, Statistics
from matsmerge.tasks.batch import Batch
from matsmerge.tasks.task import Encoded, Task

# Told of the examples that have gone through a section.
Seen = Callable[[int], None]
Values = Mapping[str, Tensor]
Way = Literal["merged", "own"]  # through the merged blocks, or through those of the task's model


class _EndOfSectionError(Exception):
    """Raised to end a forward pass where a section ends; carries what was reached."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


@dataclass
class TaskData:
    """One task's examples in batches, and how far the merged model has brought them."""

    task: Task[Any]
    batches: Sequence[tuple[str, Sequence[Encoded]]]  # each with the set it goes to
    model: Origin
    data: Origin
    # For each way and batch, by stack: the output of the stack's last block that is done.
    reached: dict[Way, list[dict[str, Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._places = {
            example.number: (number, position)
            for number, (_, batch) in enumerate(self.batches)
            for position, example in enumerate(batch)
        }
        self._starts: dict[int, Sequence[int]] = {}
        self.begin()

    def begin(self) -> None:
        """Go back to before the first block."""
        self.reached = {"merged": [{} for _ in self.batches], "own": [{} for _ in self.batches]}

    @property
    def num_examples(self) -> int:
        return len(self._places)

    @property
    def num_held_bytes(self) -> int:
        return sum(leaf.nbytes for leaf in _tensors(self.reached))

    def first(self, num_examples: int) -> "TaskData":
        """Some examples of the first batch, as one batch."""
        to, batch = self.batches[0]
        return TaskData(self.task, [(to, batch[:num_examples])], self.model, self.data)

    def collated(self) -> Iterator[tuple[str, Batch]]:
        for to, batch in self.batches:
            yield to, self.task.collate(batch)

    def hold(self, way: Way, batch: Batch, stack: str, output: Any) -> None:
        """Keep what a block gave for a whole batch, in the machine's own memory."""
        number, _ = self._places[batch.examples[0]]
        self._starts[number] = batch.first_sequences
        self.reached[way][number][stack] = tree_map(
            lambda leaf: leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf, output
        )

    def held_for(self, way: Way, batch: Batch, device: torch.device) -> dict[str, Any]:
        """What is held for a batch, or for some examples of one; copies, to be done with freely."""
        places = [self._places[number] for number in batch.examples]
        number = places[0][0]
        if not self.reached[way][number]:
            return {}
        starts = self._starts[number]
        positions = [position for _, position in places]
        is_whole = positions == list(range(len(starts) - 1))
        chosen = [s for p in positions for s in range(starts[p], starts[p + 1])]

        def copied(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if not is_whole and leaf.ndim and len(leaf) == starts[-1]:
                leaf = leaf[chosen]
            return leaf.to(device, copy=True)

        held = self.reached[way][number]
        return {stack: tree_map(copied, output) for stack, output in held.items()}


class PrefixModel:
    """A model in the making, replayed section by section; some data shows how it is built."""

    def __init__(self, model: nn.Module, data: TaskData) -> None:
        self.model = model.eval()
        for module in model.modules():  # what a cache holds would be of blocks that do not run
            if getattr(getattr(module, "config", None), "use_cache", False):
                module.config.use_cache = False  # type: ignore[union-attr]
        self._tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        self._held: dict[str, Any] = {}
        self.notes: list[str] = []  # what the user should know of how statistics are collected
        seen = self._trace(data)
        self.outline: Outline = find_sections(model, seen)
        self._calls = [module for module, is_entered in seen.events if is_entered]

    def put(self, tensors: Iterable[str], load: Callable[[str], Tensor]) -> None:
        """Put values in place of a parameter's or buffer's own."""
        with torch.no_grad():
            for name in tensors:
                self._tensors[name].copy_(load(name))

    def values_like(self, tensors: Iterable[str], load: Callable[[str], Tensor]) -> Values:
        """Other values of tensors, as the model would hold them."""
        return {name: load(name).to(self._tensors[name]) for name in tensors}

    def in_order(self, maps: Sequence[Map]) -> list[list[str]]:
        """Linear maps in the order in which they run; those that share an input are together."""
        groups: dict[str, list[str]] = {}
        for m in maps:
            groups.setdefault(m.inputs or m.module, []).append(m.module)
        first = {module: at for at, module in reversed(list(enumerate(self._calls)))}
        for group in groups.values():
            group.sort(key=lambda module: first.get(module, len(self._calls)))
        return sorted(groups.values(), key=lambda group: first.get(group[0], len(self._calls)))

    def collect(
        self,
        section: Section,
        data: TaskData,
        names: Mapping[str, str],
        options: CollectionOptions,
        seen: Seen = lambda _: None,
        *,
        own: Values | None = None,
        group: Sequence[str] = (),
    ) -> Statistics:
        """Second moments of a section on what has been reached, with the values it has now.

        `names` are the names of the model's parameters in the statistics. With a task's `own`
        values, moments of what its maps receive with these are taken as well. A `group` is what
        statistics are wanted of, and nothing after it is run. Weights that several sections use
        are needed before it is known what they will receive in the merged model; theirs is what
        they receive in the model as it is.
        """
        wanted = {
            name: names[name]
            for name in section.tensors
            if name in names and (not group or name.rpartition(".")[0] in group)
        }
        beside = None if own is None else OwnInputs()
        if own is not None:
            options = options.model_copy(update={"statistics": (GRAM.name, PAIRS.name)})

        def run(_: nn.Module, batch: Batch) -> Any:
            if own is not None and beside is not None:
                with beside.recording(), self._with(own):
                    self._run("own", data, batch)
            return self._run("merged", data, batch)

        collection = Collection(self.model, options, run, wanted, beside)
        with self._until(section, self._last_of(group)), collection.running():
            for to, batch in data.collated():
                seen(collection.add(batch, to))
            self.notes += [note for note in collection.notes if note not in self.notes]
            return collection.statistics(data.model, (data.data,))

    def _last_of(self, group: Sequence[str]) -> str | None:
        """The map with whose call a pass may end: the last one, if each is called once."""
        if not group or any(self._calls.count(module) != 1 for module in group):
            return None
        return max(group, key=self._calls.index)

    def advance(
        self,
        section: Section,
        data: TaskData,
        seen: Seen = lambda _: None,
        *,
        own: Values | None = None,
    ) -> None:
        """Run a block on what has been reached, and hold what it gives.

        As it is now, or with a task's own values on what has been reached with these.
        """
        assert section.block is not None
        way: Way = "merged" if own is None else "own"
        with self._until(section), self._with(own or {}), torch.no_grad():
            for _, batch in data.collated():
                output = self._run(way, data, batch.to(self._device))
                data.hold(way, batch, self.outline.blocks[section.start].stack, output)
                seen(len(batch.examples))

    def rehearse(
        self,
        data: TaskData,
        names: Mapping[str, str],
        options: CollectionOptions,
        *,
        are_paired: bool = False,
    ) -> list[Statistics]:
        """Go through all sections once, for little data, with the values that are there.

        Returns what each will have, as statistics whose arrays cannot be read. Refuses a model
        whose blocks, replayed, do not give what they give in a plain forward pass.
        """
        [(_, batch)] = data.collated()
        part = batch.take([len(batch.examples) - 1])
        of_whole, of_part = (self._trace_batch(data, some).values for some in (batch, part))
        found = []
        data.begin()
        for section in self.outline.sections:
            if section.block is not None:
                self._check(section, data, part, of_part[section.block][0])
                self._check(section, data, batch, of_whole[section.block][0])
            own: Values | None = None if section.is_whole or not are_paired else {}
            found.append(without_values(self.collect(section, data, names, options, own=own)))
            if section.block is not None:
                self.advance(section, data)
                if are_paired:
                    self.advance(section, data, own={})
        return found

    def _check(self, section: Section, data: TaskData, batch: Batch, expected: Any) -> None:
        """Refuse a block that replayed gives other than what is expected."""
        try:
            with self._until(section), torch.no_grad():
                output = self._run("merged", data, batch.to(self._device))
            reason = "gives other values"
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            output, reason = None, first_line(error)
        if not _is_close(output, expected):
            raise DataError(
                f"{type(self.model).__name__}: '{section.block}' cannot be run on the output of "
                f"the block before it alone, an example at a time ({reason}); use inputs: own"
            )

    def _trace(self, data: TaskData) -> Trace:
        [(_, batch)] = data.collated()
        return self._trace_batch(data, batch)

    def _trace_batch(self, data: TaskData, batch: Batch) -> Trace:
        try:
            return trace(self.model, lambda: self.model(**batch.to(self._device).inputs))
        except (TypeError, ValueError, IndexError, KeyError, AttributeError, RuntimeError) as error:
            raise DataError(
                f"{data.data.name}: cannot be shown to a {type(self.model).__name__}, the class of "
                f"the first model ({first_line(error)}); models that are merged along their "
                "blocks must take the same kind of input"
            ) from error

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _run(self, way: Way, data: TaskData, batch: Batch) -> Any:
        """Run the model on what has been reached, until the section ends."""
        self._held = data.held_for(way, batch, self._device)
        try:
            return self.model(**batch.inputs)
        except _EndOfSectionError as end:
            return end.value
        finally:
            self._held = {}

    @contextmanager
    def _with(self, values: Values) -> Iterator[None]:
        """Have the model use other values for a while; nothing is copied."""
        kept = {name: self._tensors[name].data for name in values}
        for name, value in values.items():
            self._tensors[name].data = value
        try:
            yield
        finally:
            for name, value in kept.items():
                self._tensors[name].data = value

    @contextmanager
    def _until(self, section: Section, last: str | None = None) -> Iterator[None]:
        """Have blocks before a section give what is held, and forward passes end with it.

        Or end with the call of its `last` module, when that has received its input.
        """
        blocks = self.outline.blocks
        changed: dict[str, Callable[..., Any]] = {
            block.module: self._replay(block.stack) for block in blocks[: section.start]
        }
        if section.block is not None:
            changed[section.block] = _run_and_end(self.model.get_submodule(section.block))
        elif section.start < len(blocks) and not section.is_whole:
            changed[blocks[section.start].module] = _end
        if last is not None:
            changed[last] = _end
        modules = {name: self.model.get_submodule(name) for name in changed}
        for name, forward in changed.items():
            vars(modules[name])["forward"] = forward
        try:
            yield
        finally:
            for module in modules.values():
                del vars(module)["forward"]

    def _replay(self, stack: str) -> Callable[..., Any]:
        def give(*_: Any, **__: Any) -> Any:
            # All merged blocks of a stack give what the last one gave: only that is looked at.
            return self._held[stack]

        return give


def _run_and_end(module: nn.Module) -> Callable[..., Any]:
    own = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        raise _EndOfSectionError(own(*args, **kwargs))

    return forward


def _end(*args: Any, **kwargs: Any) -> Any:
    raise _EndOfSectionError((args, kwargs))


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def _is_close(found: Any, expected: Any) -> bool:
    ours, theirs = _tensors(found), _tensors(expected)
    return len(ours) == len(theirs) and all(
        a.shape == b.shape
        and torch.allclose(a.cpu().double(), b.cpu().double(), 1e-3, 1e-5, equal_nan=True)
        for a, b in zip(ours, theirs, strict=True)
    )
