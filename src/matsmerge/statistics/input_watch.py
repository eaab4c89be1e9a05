"""Watches the inputs of linear maps during forward passes, for their second moments."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from matsmerge.statistics.collection_options import CollectionOptions
from matsmerge.statistics.gradients import Examples
from matsmerge.statistics.kinds.statistic import InputStatistic
from matsmerge.statistics.linear_maps import LinearMap
from matsmerge.statistics.parameters import Owned
from matsmerge.statistics.row_masks import RowMasks
from matsmerge.statistics.shared_inputs import SharedInputs
from matsmerge.statistics.structure import Structure
from matsmerge.statistics.totals import Totals


@dataclass(frozen=True)
class Subject:
    """The model that is watched, what is collected of it, and the totals of all sets."""

    model: nn.Module
    run: Callable[[nn.Module, Any], Any]
    options: CollectionOptions
    parameters: Mapping[str, Owned]
    maps: Sequence[LinearMap]
    shared: SharedInputs
    sets: Sequence[Totals]


@dataclass(frozen=True)
class Pass:
    """A batch on its way through the model, and the totals it counts towards."""

    totals: Totals
    examples: Examples
    masks: RowMasks


class InputWatch:
    """Adds what linear maps receive to the totals of the current pass."""

    current: Pass | None = None

    def __init__(self, subject: Subject, structure: Structure) -> None:
        self._subject = subject
        collected = subject.options.collected
        self._kinds = [kind for kind in collected if isinstance(kind, InputStatistic)]
        maps = [m for m in subject.maps if self._kinds_of(m) and self._has_rows(m, structure)]
        self._maps = {m.name: m for m in maps}
        self._shared = subject.shared
        self._shared.include({name: structure.leaders[name] for name in self._maps})

    def _kinds_of(self, m: LinearMap) -> list[InputStatistic]:
        return [kind for kind in self._kinds if kind.refuses(m) is None]

    @staticmethod
    def _has_rows(m: LinearMap, structure: Structure) -> bool:
        """Has every input rows for each sequence?"""
        uses = structure.uses.get(m.name, [])
        return bool(uses) and (
            m.name in structure.widened or all(use.split and use.split[0] for use in uses)
        )

    def hooks(self) -> AbstractContextManager[Any]:
        """Watch the model until the context ends."""
        stack = ExitStack()
        for m in self._maps.values():

            def receive(_: nn.Module, args: Any, kwargs: Any, m: LinearMap = m) -> None:
                if self.current is not None:
                    x = first_argument(args, kwargs)
                    leader = self._shared.receive(m.name, x)
                    if leader is not None:
                        self._count(leader, x)

            handle = m.module.register_forward_pre_hook(receive, with_kwargs=True)
            stack.callback(handle.remove)
        return stack

    def end_forward(self) -> None:
        """Settle which maps shared their input in this pass, and look away."""

        def split(leader: str, members: list[str]) -> None:
            assert self.current is not None
            own_sets = {id(t): t for t in (*self._subject.sets, self.current.totals)}
            for totals in own_sets.values():
                totals.share(leader, members)

        self._shared.finish(split, self._count)
        self.current = None

    def _count(self, name: str, x: Tensor) -> None:
        """Add an input to the sums that go by this name."""
        assert self.current is not None
        m = self._maps[name]
        totals, masks = self.current.totals, self.current.masks
        x = x.detach()
        members = [self._maps[n].module for n in self._shared.members(self._shared.leaders[name])]
        keeps_mean = self._subject.options.bias and any(
            getattr(module, "bias", None) is not None for module in members
        )
        sums = [
            totals.sum_of(kind, m, x.device, keeps_mean=keeps_mean) for kind in self._kinds_of(m)
        ]
        if m.layout == "conv2d":
            for rows in m.input_pieces(x):  # (sequences, [groups,] rows, in)
                by_group = rows if rows.ndim == 3 else rows.transpose(0, 1)
                for total in sums:
                    total.add(by_group.flatten(-3, -2))
            return
        is_index = m.layout == "embedding"
        real = masks.real_rows(x.shape if is_index else x.shape[:-1], name)
        rows = x.reshape(-1) if is_index else x.reshape(-1, x.shape[-1])
        for total in sums:
            total.add(rows, None if real is None else real.to(rows.device))


def first_argument(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """What a module of one input was given."""
    x = args[0] if args else next(iter(kwargs.values()))
    assert isinstance(x, Tensor)
    return x
