"""Watches the inputs of linear maps during forward passes, for their second moments."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from matsmerge.statistics.collection_options import CollectionOptions
from matsmerge.statistics.gradients import Examples
from matsmerge.statistics.kinds.statistic import InputStatistic
from matsmerge.statistics.linear_maps import LinearMap
from matsmerge.statistics.own_inputs import OwnInputs
from matsmerge.statistics.parameters import Owned
from matsmerge.statistics.row_masks import RowMasks
from matsmerge.statistics.shared_inputs import SharedInputs
from matsmerge.statistics.structure import Structure
from matsmerge.statistics.totals import Totals


@dataclass(frozen=True)
class WatchedModel:
    """The model that is watched, what is collected of it, and the totals of all sets."""

    model: nn.Module
    run: Callable[[nn.Module, Any], Any]
    options: CollectionOptions
    parameters: Mapping[str, Owned]
    names: Mapping[str, str]  # of parameters in the checkpoint
    maps: Sequence[LinearMap]
    totals: Mapping[str, Totals]
    shared: SharedInputs
    own_inputs: OwnInputs | None = None  # of a model's own, for statistics of pairs


@dataclass(frozen=True)
class WatchedBatch:
    """A batch on its way through the model, and the totals it counts towards."""

    totals: Totals
    sequences: Examples
    masks: RowMasks
    is_alone: bool  # one example, of which autograd computes the gradients


class InputWatch:
    """Adds what linear maps receive to the totals of the current pass."""

    current: WatchedBatch
    is_watching = False

    def __init__(self, subject: WatchedModel, structure: Structure) -> None:
        self._subject = subject
        collected = subject.options.collected
        self._kinds = [kind for kind in collected if isinstance(kind, InputStatistic)]
        maps = [m for m in subject.maps if self._kinds_of(m) and self._has_rows(m, structure)]
        self._maps = {m.name: m for m in maps}
        subject.shared.include({name: structure.leaders[name] for name in self._maps})

    def _kinds_of(self, m: LinearMap) -> list[InputStatistic]:
        return [kind for kind in self._kinds if kind.refuses(m) is None]

    @staticmethod
    def _has_rows(m: LinearMap, structure: Structure) -> bool:
        """Has every input rows for each sequence?"""
        uses = structure.uses.get(m.name, [])
        return bool(uses) and (
            m.routing is not None
            or m.name in structure.widened
            or all(use.split and use.split[0] for use in uses)
        )

    def watch(self, hooks: ExitStack) -> None:
        """Watch the model until the context ends."""
        for m in self._maps.values():

            def receive(_: nn.Module, args: Any, kwargs: Any, m: LinearMap = m) -> None:
                if not self.is_watching:
                    return
                x = first_argument(args, kwargs)
                leader = self._subject.shared.receive(m.name, x)
                if leader is not None:
                    self._count(leader, x)

            hooks.callback(m.module.register_forward_pre_hook(receive, with_kwargs=True).remove)

    def begin_forward(self, current: WatchedBatch) -> None:
        self.current, self.is_watching = current, True

    def end_forward(self) -> None:
        """Settle which maps shared their input in this pass, and look away."""
        all_totals = {id(t): t for t in (*self._subject.totals.values(), self.current.totals)}
        for leader, members, received in self._subject.shared.finish():
            for totals in all_totals.values():
                totals.share(leader, members)
            for name, x in received:
                self._count(name, x)
        self.is_watching = False

    def _count(self, name: str, x: Tensor) -> None:
        """Add an input to the sums that go by this name."""
        m = self._maps[name]
        x = x.detach()
        if m.routing is not None and not len(x):
            return
        members = [self._maps[n].module for n in self._subject.shared.members(name)]
        keeps_mean = self._subject.options.bias and any(
            getattr(module, "bias", None) is not None for module in members
        )
        sums = {
            kind: self.current.totals.sum_of(kind, m, x.device, keeps_mean=keeps_mean)
            for kind in self._kinds_of(m)
        }
        own = self._subject.own_inputs
        beside: Iterator[Tensor | None] = repeat(None)
        if own is not None and any(kind.is_paired for kind in sums):
            beside = (rows for rows, _ in self._rows_of(m, own.take(name).to(x.device)))
        for (rows, real), others in zip(self._rows_of(m, x), beside, strict=False):
            for kind, total in sums.items():
                if kind.is_paired and others is not None:
                    total.add(torch.cat([rows, others - rows], -1), real)
                else:
                    total.add(rows, real)

    def _rows_of(self, m: LinearMap, x: Tensor) -> Iterator[tuple[Tensor, Tensor | None]]:
        """An input as rows, and which of them are real; of a convolution in several pieces."""
        if m.layout == "conv2d":
            for rows in m.input_pieces(x):  # (sequences, [groups,] rows, in)
                by_group = rows if rows.ndim == 3 else rows.transpose(0, 1)
                yield by_group.flatten(-3, -2), None
            return
        if m.is_elementwise:
            real = self.current.masks.real_rows(x.shape[:-1], m.name)
            rows = m.unscaled(x).flatten(0, -2)
            if m.is_together:
                yield rows, None if real is None else real.to(rows.device)
                return
            rows = rows if real is None else rows[real.to(rows.device)]
            yield rows.mT.unsqueeze(-1), None  # (features, rows, 1)
            return
        if m.routing is not None:
            tokens = m.routing.tokens
            real = self.current.masks.real_rows(torch.Size([m.routing.num_tokens]), m.name)
            is_real = None if real is None else torch.isin(tokens, real.to(tokens.device))
            yield x, None if is_real is None else is_real.nonzero()[:, 0]
            return
        is_index = m.layout == "embedding"
        real = self.current.masks.real_rows(x.shape if is_index else x.shape[:-1], m.name)
        rows = x.reshape(-1) if is_index else x.reshape(-1, x.shape[-1])
        yield rows, None if real is None else real.to(rows.device)


def first_argument(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """What a module of one input was given."""
    x = args[0] if args else next(iter(kwargs.values()))
    assert isinstance(x, Tensor)
    return x
