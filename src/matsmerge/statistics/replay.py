"""Gradients of single examples for modules whose formula is not known to us.

The module is run once more for each example alone, on the input it had, and the gradient that
arrived at its output is sent back through it to its parameters. That is exact for any module that
treats examples apart, and costs little for norms, scales and embeddings of positions.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from matsmerge.statistics.gradients import Examples
from matsmerge.statistics.structure import check_unchanged, result_tensors, spread_output


@dataclass(eq=False)
class ReplayCall:
    """One use of a module, with all it was given and all it gave."""

    name: str
    module: nn.Module
    arguments: tuple[Any, Any]  # positional, and by name
    split: Sequence[bool]  # which leaves of the arguments have a part for each sequence
    examples: Examples
    grads: dict[int, Tensor] = field(default_factory=dict)  # at float outputs, as they arrive

    def __post_init__(self) -> None:
        self._leaves, self._spec = tree_flatten(self.arguments)
        self._versions = [t._version if isinstance(t, Tensor) else 0 for t in self._leaves]
        self._num_outputs = 0

    def watch(self, output: Tensor) -> Tensor:
        """A copy of an output for others to use; the gradient that arrives at it is kept.

        A copy, so that gradients of uses within the module do not arrive with those from
        outside, and so that the model's code may change it in place. An output that all
        sequences share gets a part for each.
        """
        index = self._num_outputs
        self._num_outputs += 1
        output = spread_output(output, self.examples.num_sequences)
        copy = output.clone() if output.requires_grad else output.detach().requires_grad_().clone()
        copy.register_hook(lambda grad: self.grads.__setitem__(index, grad.detach()))
        return copy

    def gradients(self, parameters: Sequence[Tensor], n: int) -> list[Tensor]:
        """The gradients of one example."""
        start, stop = self.examples.starts[n : n + 2]
        for leaf, version in zip(self._leaves, self._versions, strict=True):
            if isinstance(leaf, Tensor):
                check_unchanged(self.name, leaf, version)

        def part(leaf: Any, is_split: bool = True) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if not is_split:
                return leaf.detach()
            each = len(leaf) // self.examples.num_sequences
            return leaf.detach()[start * each : stop * each]

        arguments = [part(*leaf) for leaf in zip(self._leaves, self.split, strict=True)]
        args, kwargs = tree_unflatten(arguments, self._spec)
        with requiring_gradients(parameters):
            with torch.enable_grad():
                result = result_tensors(self.module(*args, **kwargs))
                outputs = [spread_output(output, stop - start) for output in result]
            reached = [i for i, o in enumerate(outputs) if i in self.grads and o.requires_grad]
            if not reached:
                return [torch.zeros_like(parameter) for parameter in parameters]
            return list(
                torch.autograd.grad(
                    [outputs[i] for i in reached],
                    parameters,
                    [part(self.grads[i]) for i in reached],
                    materialize_grads=True,
                )
            )


@contextmanager
def requiring_gradients(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Let gradients of parameters be taken, until the context ends."""
    for parameter in parameters:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(False)
