"""Gradients of single examples, from what one backward pass over a batch leaves at each call.

A call is one use of a module in a forward pass: its input, and the gradient that arrives at its
output. Where the module's formula is known, the gradient of example n follows in closed form from
the example's own rows; summed over all calls that use a parameter it is the example's gradient,
exactly, and only then is it squared. Gradients are computed a tile at a time and never stored.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from matsmerge.statistics.linear_maps import LinearMap

# Of a gradient at once: on a processor what stays in its cache, on a device what fills it.
_TILE_ELEMENTS = {"cpu": 1 << 18}
_DEVICE_TILE_ELEMENTS = 1 << 25


@dataclass(frozen=True)
class Examples:
    """Which sequences of a batch belong to which example."""

    numbers: Sequence[int]
    starts: Sequence[int]  # example n is the sequences starts[n] to starts[n + 1]

    @property
    def num_sequences(self) -> int:
        return self.starts[-1]

    def of_sequences(self, values: Tensor) -> Tensor:  # (sequences, ...) -> (examples, ...)
        """Sums over the sequences of each example."""
        if self.num_sequences == len(self.numbers):
            return values
        sums = values.new_zeros(len(self.numbers), *values.shape[1:])
        return sums.index_add(0, self.example_of_sequences(values.device), values)

    def example_of_sequences(self, device: torch.device) -> Tensor:
        starts = torch.tensor(self.starts)
        return torch.arange(len(self.numbers)).repeat_interleave(starts.diff()).to(device)


@dataclass(eq=False)
class Call(ABC):
    """One use of a module in a forward pass."""

    x: Tensor
    examples: Examples
    dtype: torch.dtype
    grad: Tensor | None = field(default=None, init=False)  # at the output, once it has arrived

    def __post_init__(self) -> None:
        self.version = self.x._version

    @abstractmethod
    def vectors(self, attribute: str) -> Tensor:  # (examples, d)
        """Gradients of a vector parameter."""

    def per_sequence(self, values: Tensor) -> Tensor:  # (sequences, rows, d)
        if not values.is_floating_point():  # indices, each of which is a row
            return values.reshape(self.examples.num_sequences, -1, 1)
        return values.reshape(self.examples.num_sequences, -1, values.shape[-1]).to(self.dtype)


@dataclass(eq=False)
class NormCall(Call):
    """A use of `nn.LayerNorm`."""

    module: nn.LayerNorm

    def vectors(self, attribute: str) -> Tensor:
        assert self.grad is not None
        rows = self.per_sequence(self.grad.flatten(-len(self.module.normalized_shape)))
        if attribute == "weight":
            x = self.x.to(self.dtype)
            normal = F.layer_norm(x, self.module.normalized_shape, eps=self.module.eps)
            rows = rows * self.per_sequence(normal.flatten(-len(self.module.normalized_shape)))
        return self.examples.of_sequences(rows.sum(1))


@dataclass(eq=False)
class MapCall(Call):
    """A use of a linear map. The weight's gradient is a product of left and right rows."""

    map: LinearMap

    def output_rows(self) -> Tensor:  # (rows, out) or (groups, rows, out)
        assert self.grad is not None
        rows = self.map.output_rows(self.grad).to(self.dtype)
        if self.map.num_groups > 1:
            return rows.transpose(0, 1).flatten(1, 2)
        return rows.reshape(-1, rows.shape[-1])

    def vectors(self, attribute: str) -> Tensor:
        assert self.grad is not None
        if self.map.is_elementwise and attribute == self.map.attribute:
            scaled = self.per_sequence(self.map.output_rows(self.grad))
            rows = scaled * self.per_sequence(self.map.unscaled(self.x))
            return self.examples.of_sequences(rows.sum(1))
        if attribute == "weight":  # one of a single row or column
            every = slice(0, len(self.map.weight))
            numbers = range(len(self.examples.numbers))
            return torch.stack([self.gradient(n, every).flatten() for n in numbers])
        if self.map.layout == "conv2d":
            return self.examples.of_sequences(self.grad.to(self.dtype).sum((2, 3)))
        return self.examples.of_sequences(self.per_sequence(self.grad).sum(1))

    def left_and_right(self) -> tuple[Tensor, Tensor]:
        """(examples, rows, m) and (examples, rows, n): gradients are leftᵀ right."""
        assert self.grad is not None
        z, o = self.per_sequence(self.x), self.per_sequence(self.grad)
        return (z, o) if self.map.layout == "conv1d" else (o, z)

    def gradient(self, n: int, rows: slice) -> Tensor:
        """Rows of the weight's gradient of one example."""
        assert self.grad is not None
        start, stop = self.examples.starts[n : n + 2]
        if self.map.layout == "conv2d":
            z = self.map.input_rows(self.x[start:stop]).to(self.dtype)
            o = self.map.output_rows(self.grad[start:stop]).to(self.dtype)
            return (o.mT @ z).sum(0).flatten(0, -2)[rows]
        left, right = (t[start:stop].flatten(0, 1) for t in self.left_and_right())
        if self.map.layout == "embedding":
            o, tokens = left, right[:, 0]
            inside = (tokens >= rows.start) & (tokens < rows.stop) & self._is_learnt(tokens)
            gradient = o.new_zeros(rows.stop - rows.start, o.shape[1])
            return gradient.index_add_(0, tokens[inside] - rows.start, o[inside])
        return left[:, rows].mT @ right

    def _is_learnt(self, tokens: Tensor) -> Tensor:
        assert isinstance(self.map.module, nn.Embedding)
        padding = self.map.module.padding_idx  # whose embedding torch gives no gradient
        return tokens != (-1 if padding is None else padding)


def add_squares(total: Tensor, calls: Sequence[MapCall]) -> None:
    """Add the squared gradients of a weight that is used by these calls, over all examples."""
    examples = calls[0].examples
    layouts = {call.map.layout for call in calls}
    total = total.flatten(1)  # a view: of a convolution, the matrix that multiplies patches
    if len(calls) == 1 and layouts == {"embedding"}:
        _add_squares_of_lookup(total, calls[0])
        return
    if len(calls) == 1 and layouts & {"linear", "conv1d"}:
        left, right = calls[0].left_and_right()
        if left.shape[1] == 1 and examples.num_sequences == len(examples.numbers):
            # One row per example: the square of a product is the product of the squares.
            total.addmm_(left[:, 0].square().mT, right[:, 0].square())
        else:
            _add_squares_of_products(total, left, right, examples)
        return
    num_rows = len(total) if "conv2d" in layouts else _tile_rows(total)
    for start in range(0, len(total), num_rows):
        rows = slice(start, min(start + num_rows, len(total)))
        for n in range(len(examples.numbers)):
            gradient = calls[0].gradient(n, rows)
            for call in calls[1:]:
                gradient = gradient + call.gradient(n, rows)
            total[rows].addcmul_(gradient, gradient)


def _tile_rows(total: Tensor) -> int:
    elements = _TILE_ELEMENTS.get(total.device.type, _DEVICE_TILE_ELEMENTS)
    return max(1, elements // total.shape[1])


def _add_squares_of_products(
    total: Tensor, left: Tensor, right: Tensor, examples: Examples
) -> None:
    num_rows = _tile_rows(total)
    scratch = total.new_empty(num_rows, total.shape[1])
    pairs = [
        (left[a:b].flatten(0, 1), right[a:b].flatten(0, 1))
        for a, b in zip(examples.starts, examples.starts[1:], strict=False)
    ]
    for start in range(0, len(total), num_rows):
        tile = total[start : start + num_rows]
        gradient = scratch[: len(tile)]
        for l_rows, r_rows in pairs:
            torch.mm(l_rows[:, start : start + num_rows].mT, r_rows, out=gradient)
            tile.addcmul_(gradient, gradient)


def _add_squares_of_lookup(total: Tensor, call: MapCall) -> None:
    """Only the rows of an example's own tokens have a gradient."""
    o, tokens = call.left_and_right()  # (sequences, rows, d), (sequences, rows, 1)
    example = call.examples.example_of_sequences(tokens.device)[:, None]
    pair = (example * len(total) + tokens[:, :, 0]).flatten()
    learnt = call._is_learnt(tokens[:, :, 0]).flatten()
    pairs, place = pair[learnt].unique(return_inverse=True)
    gradients = o.new_zeros(len(pairs), o.shape[2])
    gradients.index_add_(0, place, o.flatten(0, 1)[learnt])
    total.index_add_(0, pairs % len(total), gradients.square_())
