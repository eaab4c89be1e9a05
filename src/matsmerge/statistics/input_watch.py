"""Watches the inputs of linear maps during forward passes, for their second moments."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from matsmerge.statistics.gradients import Examples
from matsmerge.statistics.linear_maps import LinearMap
from matsmerge.statistics.row_masks import RowMasks
from matsmerge.statistics.shared_inputs import SharedInputs
from matsmerge.statistics.structure import Structure
from matsmerge.statistics.totals import RowSum, TokenSum, Totals


@dataclass(frozen=True)
class Pass:
    """A batch on its way through the model, and the totals it counts towards."""

    totals: Totals
    examples: Examples
    masks: RowMasks


class InputWatch:
    """Adds what linear maps receive to the totals of the current pass."""

    current: Pass | None = None

    def __init__(
        self,
        maps: Sequence[LinearMap],
        structure: Structure,
        shared: SharedInputs,
        sets: Sequence[Totals],
        *,
        keep_means: bool,
    ) -> None:
        self._maps = {m.name: m for m in maps if self._has_rows(m, structure)}
        self._sets = sets
        self._keep_means = keep_means
        self.shared = shared
        shared.include({name: structure.leaders[name] for name in self._maps})

    @staticmethod
    def _has_rows(m: LinearMap, structure: Structure) -> bool:
        """Has every input rows for each sequence?"""
        uses = structure.uses.get(m.name, [])
        return bool(uses) and (
            m.name in structure.widened or all(use.split and use.split[0] for use in uses)
        )

    @property
    def maps(self) -> Mapping[str, LinearMap]:
        """The maps whose inputs are watched, by name."""
        return self._maps

    def hooks(self) -> AbstractContextManager[Any]:
        """Watch the model until the context ends."""
        stack = ExitStack()
        for m in self._maps.values():

            def receive(_: nn.Module, args: Any, kwargs: Any, m: LinearMap = m) -> None:
                if self.current is not None:
                    x = first_argument(args, kwargs)
                    leader = self.shared.receive(m.name, x)
                    if leader is not None:
                        self._count(leader, x)

            handle = m.module.register_forward_pre_hook(receive, with_kwargs=True)
            stack.callback(handle.remove)
        return stack

    def end_forward(self) -> None:
        """Settle which maps shared their input in this pass, and look away."""

        def split(leader: str, members: list[str]) -> None:
            assert self.current is not None
            own_sets = {id(t): t for t in (*self._sets, self.current.totals)}
            for totals in own_sets.values():
                if leader in totals.inputs:
                    own = totals.inputs[leader]
                    totals.inputs |= {name: own.clone() for name in members if name != leader}

        self.shared.finish(split, self._count)
        self.current = None

    def _count(self, name: str, x: Tensor) -> None:
        """Add an input to the second moment that goes by this name."""
        assert self.current is not None
        m = self._maps[name]
        totals, masks = self.current.totals, self.current.masks
        x = x.detach()
        if name not in totals.inputs:
            totals.inputs[name] = self._new_sum(m, totals, x.device)
        total = totals.inputs[name]
        if m.layout == "conv2d":
            for rows in m.input_pieces(x):  # (sequences, [groups,] rows, in)
                by_group = rows if rows.ndim == 3 else rows.transpose(0, 1)
                total.add(by_group.flatten(-3, -2))
            return
        is_index = m.layout == "embedding"
        real = masks.real_rows(x.shape if is_index else x.shape[:-1], name)
        rows = x.reshape(-1) if is_index else x.reshape(-1, x.shape[-1])
        total.add(rows, None if real is None else real.to(rows.device))

    def _new_sum(self, m: LinearMap, totals: Totals, device: torch.device) -> RowSum | TokenSum:
        d = m.num_inputs
        if m.layout == "embedding":
            return TokenSum(torch.zeros(d, dtype=torch.long, device=device))
        members = self.shared.members(self.shared.leaders[m.name])
        has_bias = any(self._maps[n].module.bias is not None for n in members)
        shape = (m.num_groups, d) if m.num_groups > 1 else (d,)
        return RowSum(totals.new_sum(shape, device, with_first=has_bias and self._keep_means))


def first_argument(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """What a module of one input was given."""
    x = args[0] if args else next(iter(kwargs.values()))
    assert isinstance(x, Tensor)
    return x
