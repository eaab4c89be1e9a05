"""Statistics of a model of which one block is in memory at a time.

Forward, each block is loaded, run on all batches, and let go; of each batch its output is held, in
memory or in a file, and given back when the next block runs. That is all that statistics of inputs
need. For gradients the outputs of all blocks are held. The loss is computed once, after the last
block; then blocks are loaded again from the last to the first. Each is run on what it was given,
and what is sent back through it is the gradient that arrived at its output.

What is outside of blocks and used before the last of them (embeddings) stays in memory and runs in
every pass; gradients that arrive at its outputs are added up, and sent back through it last. So
each sum receives what it receives when all of the model is in memory, in the same order.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from matsmerge.errors import DataError, RecipeError
from matsmerge.models.streamed_model import is_within
from matsmerge.statistics.block_data import BlockData, Capture
from matsmerge.statistics.collection import Collection as StatisticsCollection
from matsmerge.statistics.collection_options import CollectionOptions
from matsmerge.statistics.compression import finish
from matsmerge.statistics.cut_model import CutModel
from matsmerge.statistics.finished_modules import FinishedModules
from matsmerge.statistics.joined_statistics import kept_in, put_together, share_equal_inputs
from matsmerge.statistics.kinds.statistic import GradientStatistic
from matsmerge.statistics.linear_maps import LinearMap, find_linear_map
from matsmerge.statistics.loss_terms import Terms, loss_terms
from matsmerge.statistics.marks import marks_of
from matsmerge.statistics.parameters import find_parameters
from matsmerge.statistics.partial_passes import PartialPasses
from matsmerge.statistics.sections import Section
from matsmerge.statistics.statistics import Statistics
from matsmerge.statistics.structure import is_float, spread_output
from matsmerge.tasks.batch import Batch

Run = Callable[[nn.Module, Any], Any]


class BlockCollection:
    """Collects statistics of a model's blocks one after the other.

    `names` are the names of the model's parameters in the statistics.
    """

    def __init__(
        self,
        cut: CutModel,
        data: BlockData,
        options: CollectionOptions,
        names: dict[str, str],
        *,
        is_whole: bool,  # nothing of other processes or parts of the data is to be added
    ) -> None:
        self._is_whole = is_whole
        self._cut, self._data, self._options = cut, data, options
        self._streamed, self._model = cut.streamed, cut.streamed.model
        wanted = find_parameters(self._model, options.parameters)
        self._names = {name: names[name] for name in wanted if name in names}
        self._blocks = cut.outline.blocks
        self._sections = [s for s in cut.outline.sections if s.block is not None]
        self._passes = PartialPasses(
            self._model, cut.outline, FinishedModules({}, {}), data.task.predict
        )
        of_parameters = [k for k in options.collected if isinstance(k, GradientStatistic)]
        # A parameter's gradient is known when all that uses it has got its own.
        tail = cut.of_tail if of_parameters else self._names.keys()
        self._tail = {m for m in cut.tail if self._names_of([m]).keys() <= tail}
        self._before = [
            name
            for name, _ in self._model.named_modules()
            if not cut.is_in_block(name) and name not in self._tail
        ]
        self._check_alone(of_parameters)
        self.notes: list[str] = []  # what the user should know of how it went
        # Those whose outputs get gradients from passes through several parts.
        self._units = [u for u in cut.units if any(is_within(m, u) for m in self._before)]
        self._last: Any = None  # what the last pass gave
        self._captured = Capture()  # what it caught

    def _names_of(self, modules: Collection[str]) -> dict[str, str]:
        owners = self._streamed.owners
        return {n: s for n, s in self._names.items() if any(m in modules for m in owners[n])}

    def _check_alone(self, kinds: Sequence[GradientStatistic]) -> None:
        """Refuse gradients of parameters that are used in a block and elsewhere, or by no unit."""
        if not kinds:
            return
        parts = [*self._cut.of_blocks.values()]
        outside = {n for unit in self._cut.units for n in self._streamed.within(unit)}
        uncalled = self._cut.tail - set(self._cut.calls)
        within = {n for b in self._blocks for n in self._streamed.within(b.module)}
        known = {name for part in parts for name in part} | (outside - within)
        found = find_parameters(self._model, ["*"])
        RecipeError.raise_all(
            f"parameter '{name}': is used in several parts of the model, so that its Fisher "
            "information cannot be taken block by block; leave it out with --parameters, collect "
            "gram or kfac, or allow more memory"
            for name in self._names
            if name not in known
            and not uncalled.issuperset(self._streamed.owners[name])
            and any(kind.refuses(found[name]) is None for kind in kinds)
        )

    @property
    def num_parts(self) -> int:
        """How often all of the data is run through a part of the model."""
        num_blocks = len(self._blocks)
        if not self._options.wants_gradients:
            return num_blocks + 1
        return 2 * num_blocks + 1 + bool(self._names_of(self._before))

    def run(self, seen: Callable[[int], None] = lambda _: None) -> Statistics:
        """Collect; `seen` is told of examples that have gone through a block or what is outside."""
        with self._streamed.loaded(self._cut.resident):
            if self._options.wants_gradients:
                parts = list(self._back_and_forth(seen))
            else:
                parts = list(self._forth(seen))
        self._data.begin()
        joined = put_together([part for part in parts if part is not None])
        order = {name: n for n, (name, _) in enumerate(self._model.named_modules())}
        maps = tuple(sorted(joined.header.maps, key=lambda m: order[m.module]))
        header = joined.header.model_copy(update={"maps": maps})
        return share_equal_inputs(Statistics(header, joined.arrays))

    # without gradients

    def _forth(self, seen: Callable[[int], None]) -> Iterator[Statistics | None]:
        for section in self._sections:
            with self._at(section):
                yield self._collect(section, self._inside(section), self._run_part, seen)
            for block in self._blocks[: section.start]:
                if block.stack == self._blocks[section.start].stack:
                    self._data.release(block.module)
        section = Section("outside of blocks", len(self._blocks), None, ())
        end = self._last_map()
        needed = self._cut.of_tail - (set() if end is None else self._streamed.within(end.name))
        with self._at(section, needed):
            group = [] if end is None else [end]
            outside = [*self._before, *self._tail]
            yield self._collect(section, outside, self._run_part, seen, group)

    def _last_map(self) -> LinearMap | None:
        """The linear map that ends the model, whose output nobody needs."""
        leaves = [c for c in self._cut.calls if not [*self._model.get_submodule(c).children()]]
        weighty = [c for c in leaves if c in {m for o in self._streamed.owners.values() for m in o}]
        name = weighty[-1]
        if self._cut.calls.count(name) > 1 or self._cut.is_in_block(name):
            return None
        return find_linear_map(name, self._model.get_submodule(name))

    def _run_part(self, _: nn.Module, batch: Batch) -> Any:
        self._last = self._passes.run("own", self._data, batch)
        return _spread_out(self._last, batch)

    # with gradients

    def _back_and_forth(self, seen: Callable[[int], None]) -> Iterator[Statistics | None]:
        for section in self._sections:
            with self._at(section), self._passes.until(section), torch.no_grad():
                for _, batch in self._data.collated():
                    self._advance(section, batch)
                    seen(len(batch.examples))
        lasts = {block.stack: block.module for block in self._blocks}.values()
        tail = Section("after the blocks", len(self._blocks), None, ())
        with self._at(tail, self._cut.of_tail):
            yield self._collect(tail, self._tail, self._run_loss, seen)
        for section in reversed(self._sections):
            with self._at(section):
                block = self._blocks[section.start].module
                run = partial(self._run_back, block)
                yield self._collect(section, self._inside(section), run, seen)
            self._data.release_gradients(block)
            if block not in lasts:  # else what is outside is run on it
                self._data.release(block)
        if self._names_of(self._before):
            yield self._collect_outside(self._before, seen)

    def _run_loss(self, _: nn.Module, batch: Batch) -> Any:
        with self._capturing(batch) as capture:
            result = self._passes.run("own", self._data, batch)
        if not torch.is_grad_enabled():
            return result
        terms = capture.marked(loss_terms(result, batch.examples, self._options))
        return Terms(terms, marks_of(result))

    def _run_back(self, block: str, _: nn.Module, batch: Batch) -> Any:
        with self._capturing(batch) as capture:
            output = self._passes.run("own", self._data, batch)
        if not torch.is_grad_enabled():
            return _spread_out(output, batch)
        return Terms(capture.marked(self._data.terms(batch, [(block, output)])))

    @contextmanager
    def _capturing(self, batch: Batch) -> Iterator[Capture]:
        """Catch the gradients at outputs that are held, and at those of units in memory."""
        capture = self._captured = self._data.capture = Capture()
        num_sequences = batch.first_sequences[-1]
        try:
            with self._at_units(lambda key, y: capture.watch(key, y, num_sequences)):
                yield self._captured
        finally:
            self._data.capture = None

    @contextmanager
    def _at_units(self, change: Callable[[str, Any], Any]) -> Iterator[None]:
        """Change the outputs of modules outside, each call by a name of its own."""
        num_calls = dict.fromkeys(self._units, 0)
        with ExitStack() as hooks:
            for unit in self._units:

                def hook(_: nn.Module, _args: Any, output: Any, unit: str = unit) -> Any:
                    num_calls[unit] += 1
                    key = f"{unit} {num_calls[unit]}"
                    return change(key, output) if torch.is_grad_enabled() else None

                module = self._model.get_submodule(unit)
                hooks.callback(module.register_forward_hook(hook).remove)
            yield

    def _send_back(self, run: Run, batch: Batch) -> None:
        """Send gradients back through a part that examples are run through with others' help."""
        with torch.enable_grad():
            result = run(self._model, batch.to(self._streamed.device))
            for term in result.values:
                if term.requires_grad:
                    term.sum().backward(retain_graph=True)

    def _collect_outside(
        self, modules: list[str], seen: Callable[[int], None]
    ) -> Statistics | None:
        """Statistics of what is outside, once all gradients at its outputs are there."""
        last = self._cut.calls.index(self._blocks[-1].module)
        is_to_the_end = any(unit in self._cut.calls[last:] for unit in self._units)
        start = len(self._blocks) - (0 if is_to_the_end else 1)
        section = Section("outside of blocks", start, None, ())

        def run(_: nn.Module, batch: Batch) -> Any:
            outputs: list[tuple[str, Any]] = []

            def cut_off(key: str, output: Any) -> Any:
                outputs.append((key, output))
                return tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, output)

            with self._at_units(cut_off):
                result = self._passes.run("own", self._data, batch)
            return Terms(self._data.terms(batch, outputs)) if torch.is_grad_enabled() else result

        with self._at(section, self._cut.of_tail if is_to_the_end else ()):
            self._data.shown = {block.stack: block.module for block in self._blocks}
            return self._collect(section, modules, run, seen, is_last=True)

    # both

    @contextmanager
    def _at(self, section: Section, needed: Collection[str] | None = None) -> Iterator[None]:
        """Have the weights of a section in memory, and what was reached before it at hand."""
        if needed is None:
            needed = self._cut.of_blocks[section.title]
        self._data.shown = {b.stack: b.module for b in self._blocks[: section.start]}
        with self._streamed.loaded(needed):
            yield
        self._data.end_section()

    def _inside(self, section: Section) -> list[str]:
        block = section.block or ""
        return [name for name, _ in self._model.named_modules() if is_within(name, block)]

    def _advance(self, section: Section, batch: Batch) -> None:
        assert section.block is not None
        output = self._passes.run("own", self._data, batch.to(self._streamed.device))
        self._data.hold_block(batch, section.block, output)

    def _pass_by(self, section: Section, run: Run, seen: Callable[[int], None]) -> None:
        """Keep what the next part needs of each batch."""
        for _, batch in self._data.collated():
            if self._options.wants_gradients:
                self._send_back(run, batch)
                self._data.add_gradients(batch, self._captured)
            elif section.block is not None:
                with torch.no_grad():
                    self._advance(section, batch)
            seen(len(batch.examples))

    def _collect(
        self,
        section: Section,
        modules: Collection[str],
        run: Run,
        seen: Callable[[int], None],
        group: Sequence[LinearMap] = (),
        *,
        is_last: bool = False,
    ) -> Statistics | None:
        """Statistics of a part's modules, None if none are wanted.

        What the next part needs of each batch is kept.
        """
        names = self._names_of(modules)
        collection = StatisticsCollection(self._model, self._options, run, names, modules=modules)
        with self._passes.until(section, group), collection.running():
            if not names:
                self._pass_by(section, run, seen)
                return None
            for to, batch in self._data.collated():
                num_examples = collection.add(batch, to)
                if collection.is_one_by_one and num_examples > 1:
                    raise DataError(
                        f"{section.title}: gives other values in a batch than for single examples, "
                        "so that it cannot be collected block by block in batches; use "
                        "--batch-size 1, or allow more memory"
                    )
                if self._options.wants_gradients and not is_last:
                    if collection.is_one_by_one:
                        self._send_back(run, batch)
                    self._data.add_gradients(batch, self._captured)
                elif section.block is not None:
                    self._data.hold_block(batch, section.block, self._last)
                seen(num_examples)
            self.notes += [note for note in collection.notes if note not in self.notes]
            found = collection.statistics(self._data.model, (self._data.data,))
            if self._is_whole:
                found = finish(found)
            return kept_in(found, self._data.room)


def _spread_out(output: Any, batch: Batch) -> list[Tensor]:
    """The tensors of an output; whether all sequences share one is seen in none of them."""
    num_sequences = batch.first_sequences[-1]
    return [spread_output(x, num_sequences) for x in tree_flatten(output)[0] if is_float(x)]
