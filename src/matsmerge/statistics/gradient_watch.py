"""Watches gradients at the outputs of modules during backward passes, for Fisher information."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from matsmerge.statistics.gradients import Call, MapCall, NormCall
from matsmerge.statistics.input_watch import WatchedBatch, WatchedModel, first_argument
from matsmerge.statistics.kinds.statistic import GradientStatistic, OutputStatistic, RunningSum
from matsmerge.statistics.parameters import Owned
from matsmerge.statistics.replay import ReplayCall
from matsmerge.statistics.structure import Structure, check_unchanged, is_float


class GradientWatch:
    """Adds gradients to the totals of the current pass.

    For an example that is run alone, gradients of parameters are those that autograd computes; in
    a batch they have a closed form, or are replayed.
    """

    current: WatchedBatch
    is_watching = False

    def __init__(self, subject: WatchedModel, structure: Structure) -> None:
        self._modules = dict(subject.model.named_modules())
        self._parameters = subject.parameters
        self._structure = structure
        kinds = subject.options.collected
        self._of_parameters = [kind for kind in kinds if isinstance(kind, GradientStatistic)]
        of_outputs = [kind for kind in kinds if isinstance(kind, OutputStatistic)]
        self._maps = {m.name: m for m in subject.maps if m.name in structure.uses}
        self._outputs_of: dict[str, list[OutputStatistic]] = {}  # by map
        for name, m in self._maps.items():
            own = [kind for kind in of_outputs if kind.refuses(m) is None]
            if own and (m.routing or structure.is_separate(name)):
                self._outputs_of[name] = own
        self._plan()
        self._calls: dict[str, list[Call]] = {}  # by module, of this forward pass
        self._replay_calls: list[ReplayCall] = []
        self._waiting: dict[str, int] = {}  # of each parameter, calls yet without gradients

    def _plan(self) -> None:
        """Decide which parameters' gradients have a closed form, and what the others replay.

        A parameter with a use that must be replayed is replayed in all of its uses: the module
        that is run again may contain the others.
        """
        self.closed: dict[str, Owned] = {}
        self.replays: dict[str, list[str]] = {}  # modules to run again, by parameter
        self.elsewhere: list[str] = []  # what would have to be replayed, but cannot be
        for name, owned in self._parameters.items():
            owners = [m for m, _ in owned.owners if m in self._structure.uses]
            if not owners or not self._kinds_of(owned):
                continue
            if all(self._has_closed_form(m) for m in owners):
                self.closed[name] = owned
                continue
            if not owned.is_here:
                self.elsewhere.append(name)
                continue
            found = [self._structure.replayed(m) for m in owners]
            if any(modules is None for modules in found):
                continue
            modules = list(dict.fromkeys(m for some in found for m in some or ()))
            self.replays[name] = [
                m
                for m in modules
                if not any(o != m and self._structure.is_within(m, o) for o in modules)
            ]
        self._closed_of = _by_module({name: owned.modules for name, owned in self.closed.items()})
        self._replayed_of = _by_module(self.replays)

    def _kinds_of(self, owned: Owned) -> list[GradientStatistic]:
        return [kind for kind in self._of_parameters if kind.refuses(owned) is None]

    @property
    def handled(self) -> set[str]:
        """The parameters whose gradients are known for single examples."""
        return {*self.closed, *self.replays}

    def _has_closed_form(self, module: str) -> bool:
        known = module in self._maps or type(self._modules[module]) is nn.LayerNorm
        return known and self._structure.is_separate(module)

    def watch(self, hooks: ExitStack) -> None:
        """Watch the model until the context ends."""
        for name in dict.fromkeys([*self._outputs_of, *self._closed_of, *self._replayed_of]):
            if name not in self._structure.uses:
                continue

            def record(
                module: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name
            ) -> Any:
                if not self.is_watching or not torch.is_grad_enabled():
                    return None
                is_alone = self.current.is_alone
                if name in self._replayed_of and not is_alone:
                    output = self._record_replay(name, module, (args, kwargs), output)
                if name in self._outputs_of or (name in self._closed_of and not is_alone):
                    output = self._record(name, module, first_argument(args, kwargs), output)
                return output

            module = self._modules[name]
            hooks.callback(module.register_forward_hook(record, with_kwargs=True).remove)

    def begin_forward(self, current: WatchedBatch) -> None:
        self.current, self.is_watching = current, True
        self._calls, self._replay_calls, self._waiting = defaultdict(list), [], {}

    def backward(self, terms: Iterator[Tensor]) -> None:
        """Send the gradients of per-example scalars back, and add what they give."""
        term = next(terms, None)
        while term is not None:
            following = next(terms, None)
            send = self._send_alone if self.current.is_alone else self._send_batch
            send(term.sum(), following is not None)
            for calls in self._calls.values():
                for call in calls:
                    call.grad = None
            term = following
        self._calls, self._replay_calls = {}, []

    def _send_alone(self, term: Tensor, is_used_again: bool) -> None:
        """Add the gradients of one example, from autograd."""
        if not term.requires_grad:
            return
        parameters = list(self._parameters.values())
        tensors = [owned.parameter for owned in parameters]
        gradients = torch.autograd.grad(
            term, tensors, retain_graph=is_used_again, allow_unused=True
        )
        for owned, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                self._add_gradient(owned, gradient)

    def _send_batch(self, term: Tensor, is_used_again: bool) -> None:
        """Add the gradients of all examples: those of a closed form as soon as they are there."""
        self._waiting = {
            name: sum(len(self._calls.get(m, ())) for m in owned.modules)
            for name, owned in self.closed.items()
        }
        for replay in self._replay_calls:
            replay.grads.clear()
        if term.requires_grad:
            term.backward(retain_graph=is_used_again)
        for name, num_waiting in self._waiting.items():
            if num_waiting > 0:  # some uses have no part in the loss: their gradients are zero
                self._add_closed(self.closed[name])
        self._add_replayed()

    # forward

    def _record(self, name: str, module: nn.Module, x: Tensor, output: Tensor) -> Tensor:
        seen = x.detach(), self.current.sequences, self.current.totals.dtype
        call: Call
        if name in self._maps:
            call = MapCall(*seen, self._maps[name])
        else:
            assert isinstance(module, nn.LayerNorm)
            call = NormCall(*seen, module)
        self._calls[name].append(call)
        if not output.requires_grad:
            # A copy to which gradients flow, and which the model's code may change in place.
            output = output.detach().requires_grad_().clone()
        output.register_hook(lambda grad: self._arrive(name, call, grad.detach()))
        return output

    def _record_replay(
        self, name: str, module: nn.Module, arguments: tuple[Any, Any], output: Any
    ) -> Any:
        uses = self._structure.uses[name]
        index = sum(call.name == name for call in self._replay_calls)
        split = uses[min(index, len(uses) - 1)].split
        call = ReplayCall(name, module, arguments, split, self.current.sequences)
        self._replay_calls.append(call)
        leaves, spec = tree_flatten(output)
        for i, leaf in enumerate(leaves):
            if is_float(leaf):
                leaves[i] = call.watch(leaf)
        return tree_unflatten(leaves, spec)

    # backward

    def _arrive(self, module: str, call: Call, grad: Tensor) -> None:
        """A gradient is here; use it as soon as no other one is missing, and let it go."""
        check_unchanged(module, call.x, call.version)
        call.grad = grad
        if module in self._outputs_of:
            assert isinstance(call, MapCall)
            rows = call.output_rows()
            kinds = [] if call.map.routing and not len(rows) else self._outputs_of[module]
            for kind in kinds:
                self.current.totals.sum_of(kind, call.map, rows.device).add(rows)
        closed = [name for name in self._closed_of.get(module, ()) if name in self._waiting]
        for name in closed:
            self._waiting[name] -= 1
            if self._waiting[name] == 0:
                self._add_closed(self.closed[name])
        if all(self._waiting[name] == 0 for name in closed):
            for done in self._calls[module]:
                done.grad = None

    def _add_closed(self, owned: Owned) -> None:
        calls = [
            (call, attribute)
            for module, attribute in owned.owners
            for call in self._calls.get(module, ())
            if call.grad is not None
        ]
        if not calls:
            return
        if owned.is_vector:
            vectors = torch.stack([call.vectors(attribute) for call, attribute in calls]).sum(0)
            for total in self._sums(owned, vectors.device):
                total.add(vectors)
        else:
            products = [call for call, _ in calls if isinstance(call, MapCall)]
            for total in self._sums(owned, products[0].x.device):
                total.add_calls(products)

    def _add_replayed(self) -> None:
        num_examples = len(self._replay_calls[0].examples.numbers) if self._replay_calls else 0
        for n in range(num_examples):  # one at a time: each has gradients of whole parameters
            gradients: dict[str, Tensor] = {}
            for call in self._replay_calls:
                names = self._replayed_of[call.name]
                parameters = [self._parameters[name].parameter for name in names]
                self.is_watching = False  # while the module is run again
                found = call.gradients(parameters, n)
                self.is_watching = True
                for name, g in zip(names, found, strict=True):
                    gradients[name] = gradients[name] + g if name in gradients else g
            for name, g in gradients.items():
                self._add_gradient(self._parameters[name], g)

    def _add_gradient(self, owned: Owned, gradient: Tensor) -> None:
        """Add the gradient of one example."""
        gradient = gradient.to(self.current.totals.dtype)
        rows = gradient.reshape(1, -1) if owned.is_vector else gradient[None]
        for total in self._sums(owned, gradient.device):
            total.add(rows)

    def _sums(self, owned: Owned, device: torch.device) -> list[RunningSum]:
        return [self.current.totals.sum_of(kind, owned, device) for kind in self._kinds_of(owned)]


def _by_module(modules: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
    """The parameters of each module, from the modules of each parameter."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, own in modules.items():
        for module in own:
            found[module].append(name)
    return dict(found)
