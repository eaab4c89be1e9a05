"""Modules within a block that can give back what they gave, once all of their weights are merged.

A block's layers are merged one group after the other, each on a pass through what is before it.
Attention that is done need not run again for the layers after it. Which modules that is possible
for is seen in two forward passes, of several examples and of one.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from matsmerge.statistics.structure import watching_calls


@dataclass
class CallSpan:
    """A call of a module: when it began and ended, and what came of it."""

    began: int
    versions: list[tuple[Tensor, int]]  # of its inputs, held so that no memory is used twice
    ended: int = 0
    sizes: list[int] = field(default_factory=list)  # how long its outputs are; -1: no tensor
    is_pure: bool = True  # were its inputs left as they were?


def watch_calls(model: nn.Module, run: Callable[[], Any]) -> dict[str, list[CallSpan]]:
    """All calls of a model's modules in a forward pass, by module."""
    calls: dict[str, list[CallSpan]] = defaultdict(list)
    num_events = 0

    def enter(name: str, given: Any) -> None:
        nonlocal num_events
        inputs = [x for x in tree_flatten(given)[0] if isinstance(x, Tensor)]
        calls[name].append(CallSpan(num_events, [(x, x._version) for x in inputs]))
        num_events += 1

    def leave(name: str, output: Any) -> None:
        nonlocal num_events
        call = calls[name][-1]
        call.ended = num_events
        call.sizes = [
            len(x) if isinstance(x, Tensor) and x.ndim else -1
            for x in tree_flatten(output)[0]
            if x is not None
        ]
        call.is_pure = all(x._version == version for x, version in call.versions)
        num_events += 1

    with watching_calls(model, enter, leave), torch.no_grad():
        run()
    for own in calls.values():
        for call in own:
            call.versions.clear()
    return dict(calls)


@dataclass(frozen=True)
class FinishedModules:
    """The modules that may give back what they gave."""

    tensors: Mapping[str, frozenset[str]]  # the parameters and buffers of each
    spans: Mapping[str, tuple[int, int]]  # when the only call of each module began and ended

    def within(self, block: str) -> list[str]:
        """All of a block."""
        return [name for name in self.tensors if name.startswith(f"{block}.")]

    def without(self, block: str) -> "FinishedModules":
        """None of a block."""
        within = set(self.within(block))
        kept = {name: own for name, own in self.tensors.items() if name not in within}
        return FinishedModules(kept, self.spans)

    def outermost(self, block: str, unsettled: Collection[str], last: str | None) -> list[str]:
        """Those of a block with no unsettled tensors that end before `last` is called."""
        changing = frozenset(unsettled)
        end = None if last is None else self.spans[last][0]
        found = [
            name
            for name in self.within(block)
            if not self.tensors[name] & changing and (end is None or self.spans[name][1] < end)
        ]
        return [n for n in found if not any(n.startswith(f"{outer}.") for outer in found)]


def find_finished(
    model: nn.Module, passes: Sequence[tuple[Mapping[str, Sequence[CallSpan]], int]]
) -> FinishedModules:
    """Modules with weights that are called once, and whose outputs have a part for each sequence.

    Of each of some passes there are the calls and the number of sequences, which differs if it can.
    A module that changes its inputs does more than to give an output.
    """
    tensors, spans = {}, {}
    first: dict[int, str] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        first.setdefault(id(tensor), name)
    for name, module in model.named_modules():
        calls = [own.get(name, ()) for own, _ in passes]
        if any(len(own) != 1 for own in calls):
            continue
        spans[name] = calls[0][0].began, calls[0][0].ended
        fits = all(
            call.is_pure and set(call.sizes) == {num_sequences}
            for [call], (_, num_sequences) in zip(calls, passes, strict=True)
        )
        # Norms and activations cost less to run than to keep.
        if fits and any(parameter.ndim > 1 for parameter in module.parameters()):
            own_tensors = (*module.parameters(), *module.buffers())
            tensors[name] = frozenset(first[id(tensor)] for tensor in own_tensors)
    return FinishedModules(tensors, spans)
