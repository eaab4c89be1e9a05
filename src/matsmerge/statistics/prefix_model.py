"""Second moments along a merged prefix: a model whose sections are merged one after the other.

What a layer receives for task m is what the merged layers before it make of task m's data. Beside
it goes what the layer receives in model m itself, on the same example: the merged layer should
output what the model's does (cross moments). Or, as in RegMean++ (Nguyen et al., 2025,
arXiv:2508.03121), the inputs of a block are those of the merged prefix, within the block its layers
are the model's own, and a layer should output what the model's would for the same input.

There is one model in memory, into which weights are put as they are needed. Of each batch the
output of the last block is held, in the merged model and in the task's own; blocks that are done
give it back instead of running, as quantisers do that go block by block, and so do modules of a
block whose layers are all merged. A section thus costs what is outside of the blocks and one block:
one pass of it with the task's own weights, which notes what every layer receives, and with the
merged ones about one more, a layer at a time.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from matsmerge.checkpoints.checkpoint import first_line
from matsmerge.errors import DataError
from matsmerge.statistics.collection import Collection as StatisticsCollection
from matsmerge.statistics.collection_options import CollectionOptions
from matsmerge.statistics.finished_modules import FinishedModules, find_finished, watch_calls
from matsmerge.statistics.joined_statistics import without_values
from matsmerge.statistics.kinds.gram_matrix import GRAM
from matsmerge.statistics.kinds.paired_moments import PAIRS
from matsmerge.statistics.linear_maps import LinearMap
from matsmerge.statistics.parameters import (
    BESIDE_OWN,
    BESIDE_OWN_WITH_METRIC,
    find_maps,
    find_parameters,
)
from matsmerge.statistics.partial_passes import PartialPasses, Values
from matsmerge.statistics.sections import PassTrace, Section, Sections, find_sections, trace
from matsmerge.statistics.statistics import Map, Statistics
from matsmerge.statistics.task_data import TaskData
from matsmerge.tasks.batch import Batch

# Told of the examples that have gone through a section.
CountSeen = Callable[[int], None]


class PrefixModel:
    """A model in the making, replayed section by section; some data shows how it is built."""

    def __init__(self, model: nn.Module, data: TaskData, *, has_metric: bool = False) -> None:
        self.model = model.eval()
        for module in model.modules():  # what a cache holds would be of blocks that do not run
            if getattr(getattr(module, "config", None), "use_cache", False):
                module.config.use_cache = False  # type: ignore[union-attr]
        seen = self._trace(data)
        self.outline: Sections = find_sections(model, seen)
        self._calls = [module for module, is_entered in seen.events if is_entered]
        self._passes = PartialPasses(model, self.outline, self._find_finished(data))
        self._tensors = self._passes.tensors
        parameters = find_parameters(model, ["*"])
        # Features that errors are weighed together of are seen together.
        self._kinds_of_maps = BESIDE_OWN_WITH_METRIC if has_metric else BESIDE_OWN
        self._maps = {m.name: m for m in find_maps(model, parameters, self._kinds_of_maps)}
        self.notes: list[str] = []  # what the user should know of how statistics are collected

    def _find_finished(self, data: TaskData) -> FinishedModules:
        [(_, several)] = data.collated()
        calls = [
            (watch_calls(self.model, partial(self._run_plain, batch)), batch.first_sequences[-1])
            for batch in (several, several.take([0]))
        ]
        return find_finished(self.model, calls)

    def _run_plain(self, batch: Batch) -> Any:
        return self.model(**batch.to(self._device).inputs)

    def put(self, tensors: Iterable[str], load: Callable[[str], Tensor]) -> None:
        """Put values in place of a parameter's or buffer's own."""
        with torch.no_grad():
            for name in tensors:
                self._tensors[name].copy_(load(name))

    @contextmanager
    def released(self, tensors: Collection[str], load: Callable[[str], Tensor]) -> Iterator[None]:
        """Have no memory for these tensors for a while; afterwards they have the values given."""
        for name in tensors:
            self._tensors[name].data = self._tensors[name].data.new_empty(0)
        yield
        for name in tensors:
            self._tensors[name].data = load(name).to(self._tensors[name])

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
        seen: CountSeen = lambda _: None,
        *,
        are_paired: bool = False,
        group: Sequence[str] = (),
        unsettled: Collection[str] | None = None,
    ) -> Statistics:
        """Second moments of a section on what has been reached, with the values it has now.

        `names` are the names of the model's parameters in the statistics. Where they `are_paired`,
        moments are taken beside what maps received in the task's own model, which `run_own` noted.
        A `group` is what statistics are wanted of, and nothing after it is run. Modules of a block
        that have none of the `unsettled` tensors, which will still change, run once only. Weights
        that several sections use are needed before it is known what they will receive in the
        merged model; theirs is what they receive in the model as it is.
        """
        of_group = tuple(f"{module}." for module in group)
        wanted = {
            name: names[name]
            for name in section.tensors
            if name in names and (not group or name.startswith(of_group))
        }
        if unsettled is not None:
            # What maps of the group give while a pass ends with them is not what they will give.
            unsettled = {
                *unsettled,
                *(name for name in section.tensors if name.startswith(of_group)),
            }
        own = data.own_inputs if are_paired else None
        if are_paired:
            options = options.model_copy(update={"statistics": (GRAM.name, PAIRS.name)})

        def run(_: nn.Module, batch: Batch) -> Any:
            if own is not None:
                own.show(data.part_of(batch))
            return self._passes.run("merged", data, batch)

        kinds_of_maps = self._kinds_of_maps if are_paired else None
        collection = StatisticsCollection(
            self.model, options, run, wanted, own, kinds_of_maps=kinds_of_maps
        )
        shared = self._ending_with(group)
        last = shared[-1].name if shared else None
        with (
            self._passes.until(section, shared),
            self._passes.replaying(section, unsettled, last),
            collection.running(),
        ):
            for to, batch in data.collated():
                seen(collection.add(batch, to))
            self.notes += [note for note in collection.notes if note not in self.notes]
            return collection.statistics(data.model, (data.data,))

    def _ending_with(self, group: Sequence[str]) -> list[LinearMap]:
        """Maps of a group with whose last call a pass may end: if each is called once."""
        if any(self._calls.count(module) != 1 for module in group):
            return []
        return [self._maps[name] for name in sorted(group, key=self._calls.index)]

    def advance(self, section: Section, data: TaskData, seen: CountSeen = lambda _: None) -> None:
        """Run a block as it is now on what has been reached, and hold what it gives."""
        assert section.block is not None
        with self._passes.until(section), self._passes.replaying(section), torch.no_grad():
            for _, batch in data.collated():
                output = self._passes.run("merged", data, batch.to(self._device))
                data.hold("merged", batch, self.outline.blocks[section.start].stack, output)
                seen(len(batch.examples))

    def run_own(
        self,
        section: Section,
        data: TaskData,
        own: Values,
        modules: Iterable[str],
        seen: CountSeen = lambda _: None,
    ) -> None:
        """Run a section with a task's own values on what has been reached with these.

        What linear maps receive, of these modules, is noted beside, and what a block gives is held.
        """
        number = 0

        def note(name: str, x: Tensor) -> None:
            data.own_inputs.note(number, name, x)

        with (
            self._passes.until(section),
            self._passes.using(own),
            self._passes.receiving(modules, note),
            torch.no_grad(),
        ):
            for number, (_, batch) in enumerate(data.collated()):  # noqa: B007 - for `note`
                output = self._passes.run("own", data, batch.to(self._device))
                data.own_inputs.end_batch()
                if section.block is not None:
                    data.hold("own", batch, self.outline.blocks[section.start].stack, output)
                seen(len(batch.examples))

    def maps_of(self, section: Section) -> list[str]:
        """The modules of a section that are linear maps of rows."""
        weights = {id(self._tensors[name]) for name in section.tensors}
        maps = (m for m in self._maps.values() if m.layout != "embedding")
        return [m.name for m in maps if id(m.weight) in weights]

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
                expected = [(part, of_part[section.block][0]), (batch, of_whole[section.block][0])]
                self._try_replaying(section, data, expected)
            is_beside = are_paired and not section.is_whole
            if is_beside:
                self.run_own(section, data, {}, self.maps_of(section))
                self._check_own_inputs(section, data, part)
            statistics = self.collect(section, data, names, options, are_paired=is_beside)
            found.append(without_values(statistics))
            if section.block is not None:
                self.advance(section, data)
            data.end_section()
        return found

    def _try_replaying(
        self, section: Section, data: TaskData, expected: Sequence[tuple[Batch, Any]]
    ) -> None:
        """Have no module of a block give back what it gave if the block then gives other values."""
        assert section.block is not None
        last_batch, of_last = expected[-1]  # all of the data; what modules give for it is held
        try:
            with (
                self._passes.until(section),
                self._passes.replaying(section, ()),
                torch.no_grad(),
            ):
                is_same = all(
                    _is_close(self._passes.run("merged", data, batch.to(self._device)), output)
                    for batch, output in ((last_batch, of_last), *expected)
                )
        except (RuntimeError, ValueError, IndexError, TypeError):
            is_same = False
        data.end_section()
        if not is_same:
            self._passes.finished = self._passes.finished.without(section.block)

    def _check_own_inputs(self, section: Section, data: TaskData, part: Batch) -> None:
        """Refuse maps whose inputs for one example are not a part of those for several.

        The values are the same on both ways here, and so must be what maps receive.
        """
        wrong: list[str] = []

        def compare(name: str, x: Tensor) -> None:
            if not _is_close(x, data.own_inputs.take(name)):
                wrong.append(name)

        data.own_inputs.show(data.part_of(part))
        try:
            modules = self.maps_of(section)
            with (
                self._passes.until(section),
                self._passes.receiving(modules, compare),
                torch.no_grad(),
            ):
                self._passes.run("merged", data, part.to(self._device))
        except (RuntimeError, IndexError) as error:
            wrong.append(f"{section.title} ({first_line(error)})")
        if wrong:
            raise DataError(
                f"{type(self.model).__name__}: what '{wrong[0]}' receives for an example is not a "
                "part of what it receives for several; use inputs: own, or targets: weights"
            )

    def _check(self, section: Section, data: TaskData, batch: Batch, expected: Any) -> None:
        """Refuse a block that replayed gives other than what is expected."""
        try:
            with self._passes.until(section), torch.no_grad():
                output = self._passes.run("merged", data, batch.to(self._device))
            reason = "gives other values"
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            output, reason = None, first_line(error)
        if not _is_close(output, expected):
            raise DataError(
                f"{type(self.model).__name__}: '{section.block}' cannot be run on the output of "
                f"the block before it alone, an example at a time ({reason}); use inputs: own"
            )

    def _trace(self, data: TaskData) -> PassTrace:
        [(_, batch)] = data.collated()
        return self._trace_batch(data, batch)

    def _trace_batch(self, data: TaskData, batch: Batch) -> PassTrace:
        try:
            return trace(self.model, partial(self._run_plain, batch))
        except (TypeError, ValueError, IndexError, KeyError, AttributeError, RuntimeError) as error:
            raise DataError(
                f"{data.data.name}: cannot be shown to a {type(self.model).__name__}, the class of "
                f"the first model ({first_line(error)}); models that are merged along their "
                "blocks must take the same kind of input"
            ) from error

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def _is_close(found: Any, expected: Any) -> bool:
    ours, theirs = _tensors(found), _tensors(expected)
    return len(ours) == len(theirs) and all(
        a.shape == b.shape
        and torch.allclose(a.cpu().double(), b.cpu().double(), 1e-3, 1e-5, equal_nan=True)
        for a, b in zip(ours, theirs, strict=True)
    )
