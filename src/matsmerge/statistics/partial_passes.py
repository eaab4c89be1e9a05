"""Forward passes through a part of a model: from the last block that is done to where it matters.

Blocks that are done give back what is held of them, and so do finished modules of the block that is
being merged; a pass ends with its section, or with the call of the last module of interest.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from matsmerge.statistics.finished_modules import FinishedModules
from matsmerge.statistics.input_watch import first_argument
from matsmerge.statistics.linear_maps import LinearMap
from matsmerge.statistics.sections import Section, Sections
from matsmerge.statistics.task_data import TaskData, Way
from matsmerge.tasks.batch import Batch

Values = Mapping[str, Tensor]


class _EndOfSectionError(Exception):
    """Raised to end a forward pass where a section ends; carries what was reached."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


class PartialPasses:
    """Runs parts of a model."""

    def __init__(
        self,
        model: nn.Module,
        outline: Sections,
        finished: FinishedModules,
        call: Callable[[nn.Module, Batch], Any] = lambda model, batch: model(**batch.inputs),
    ) -> None:
        self._model, self._outline, self._call = model, outline, call
        self.finished = finished
        self.tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        self._held: dict[str, Any] = {}  # of the pass at hand, by stack
        self._running: tuple[TaskData, Batch] | None = None
        self._last: nn.Module | None = None  # a pass ends when it is done

    @property
    def device(self) -> torch.device:
        return next(self._model.parameters()).device

    def run(self, way: Way, data: TaskData, batch: Batch) -> Any:
        """Run the model on what has been reached, until the section ends."""
        self._held, self._running = data.held_for(way, batch, self.device), (data, batch)
        with ExitStack() as hooks:
            if self._last is not None:
                # Registered last, so that all who watch the module have seen what it gives.
                hooks.callback(self._last.register_forward_hook(_end_after).remove)
            try:
                return self._call(self._model, batch)
            except _EndOfSectionError as end:
                return end.value
            finally:
                self._held, self._running = {}, None

    @contextmanager
    def using(self, values: Values) -> Iterator[None]:
        """Have the model use other values for a while; nothing is copied."""
        kept = {name: self.tensors[name].data for name in values}
        for name, value in values.items():
            self.tensors[name].data = value
        try:
            yield
        finally:
            for name, value in kept.items():
                self.tensors[name].data = value

    @contextmanager
    def until(self, section: Section, group: Sequence[LinearMap] = ()) -> Iterator[None]:
        """Have blocks before a section give what is held, and forward passes end with it.

        Or end with the call of the last of a `group` of maps that share their input. What the
        others of it give is not looked at, and not computed.
        """
        blocks = self._outline.blocks
        changed: dict[str, Callable[..., Any]] = {
            block.module: self._replay(block.stack) for block in blocks[: section.start]
        }
        if section.block is not None:
            self._last = self._model.get_submodule(section.block)
        elif section.start < len(blocks) and not section.is_whole:
            changed[blocks[section.start].module] = _end
        for m in group:
            changed[m.name] = _end if m is group[-1] else partial(_give_zeros, m.num_outputs)
        try:
            with self._changed(changed):
                yield
        finally:
            self._last = None

    @contextmanager
    def replaying(
        self, section: Section, unsettled: Collection[str] | None = None, last: str | None = None
    ) -> Iterator[None]:
        """Have modules of a block give what is held of them.

        Those that have none of the `unsettled` tensors and end before `last` is called are held;
        with None, nothing is.
        """
        block = section.block
        names = self.finished.within(block) if block is not None else []
        kept: list[str] = []
        if block is not None and unsettled is not None:
            kept = self.finished.outermost(block, unsettled, last)
        with self._changed({name: self._give_or_hold(name, name in kept) for name in names}):
            yield

    def _give_or_hold(self, name: str, holds: bool) -> Callable[..., Any]:
        own = self._model.get_submodule(name).forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            assert self._running is not None
            data, batch = self._running
            held = data.held_within(batch, name, self.device)
            if held is not None:
                return held
            output = own(*args, **kwargs)
            if holds:
                data.hold_within(batch, name, output)
            return output

        return forward

    @contextmanager
    def _changed(self, forwards: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
        """Have modules do something else for a while."""
        modules = {name: self._model.get_submodule(name) for name in forwards}
        before = {name: vars(module).get("forward") for name, module in modules.items()}
        for name, forward in forwards.items():
            vars(modules[name])["forward"] = forward
        try:
            yield
        finally:
            for name, module in modules.items():
                del vars(module)["forward"]
                if before[name] is not None:
                    vars(module)["forward"] = before[name]

    @contextmanager
    def receiving(
        self, modules: Iterable[str], receive: Callable[[str, Tensor], None]
    ) -> Iterator[None]:
        """Be told of what modules are given."""
        with ExitStack() as hooks:
            for name in modules:

                def hook(_: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                    receive(name, first_argument(args, kwargs))

                module = self._model.get_submodule(name)
                hooks.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
            yield

    def _replay(self, stack: str) -> Callable[..., Any]:
        def give(*_: Any, **__: Any) -> Any:
            # All merged blocks of a stack give what the last one gave: only that is looked at.
            return self._held[stack]

        return give


def _end_after(_: nn.Module, _args: Any, output: Any) -> None:
    raise _EndOfSectionError(output)


def _give_zeros(num_outputs: int, x: Tensor) -> Tensor:
    return x.new_zeros(*x.shape[:-1], num_outputs)


def _end(*args: Any, **kwargs: Any) -> Any:
    raise _EndOfSectionError((args, kwargs))
