"""Modules seen as linear maps: rows of inputs, a weight, rows of outputs.

A convolution is a linear map of the patches it slides over; an embedding is one of one-hot
inputs; the scale of a norm is one of a single input for each feature, that which is normalised, and
so is a vector of (IA)^3, whose inputs are what it scales. Z stands for input rows, O for gradients
at output rows. Where the features of a vector are seen together, its second moments are of whole
rows, as those of a linear layer are.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from matsmerge.models.experts import ExpertLinear, Routing

MapLayout = Literal["linear", "conv1d", "conv2d", "embedding", "norm", "scale"]
_PIECE_ELEMENTS = 1 << 24  # of unfolded patches at once
_VECTORS = "ia3_l."  # where PEFT keeps vectors of (IA)^3, by the adapter's name


@dataclass(frozen=True)
class LinearMap:
    """One module as a linear map; `num_groups` blocks map apart, where elementwise all features."""

    name: str  # of the module
    module: nn.Module
    layout: MapLayout
    routing: Routing | None = None  # of an expert's maps, which receive some of the tokens only
    is_together: bool = False  # are all features of an elementwise map seen at once?

    @property
    def is_elementwise(self) -> bool:
        """Is every feature scaled by itself?"""
        return self.layout in ("norm", "scale")

    @property
    def attribute(self) -> str:
        """What the module calls its weight."""
        if self.layout != "scale":
            return "weight"
        return next(name for name, _ in self.module.named_parameters() if name.startswith(_VECTORS))

    @property
    def num_groups(self) -> int:
        if self.is_elementwise:
            return 1 if self.is_together else self.weight.numel()
        return int(self.module.groups) if isinstance(self.module, nn.Conv2d) else 1

    @property
    def weight(self) -> Tensor:
        if self.layout == "scale":
            return self.module.get_parameter(self.attribute)
        weight = self.module.weight
        assert isinstance(weight, Tensor)
        return weight

    @property
    def num_inputs(self) -> int:  # of each group
        weight = self.weight
        if self.is_elementwise:
            return weight.numel() // self.num_groups
        if self.layout == "conv2d":
            return weight[0].numel()
        return int(weight.shape[1] if self.layout == "linear" else weight.shape[0])

    @property
    def num_outputs(self) -> int:  # of each group
        weight = self.weight
        if self.is_elementwise:
            return weight.numel() // self.num_groups
        if self.layout in ("linear", "conv2d"):
            return int(weight.shape[0]) // self.num_groups
        return int(weight.shape[1])

    def input_rows(self, x: Tensor) -> Tensor:
        """(sequences, rows, in), or (sequences, groups, rows, in) for groups, from an input."""
        if not isinstance(self.module, nn.Conv2d):
            return x
        conv = self.module
        mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
        x = F.pad(x, conv._reversed_padding_repeated_twice, mode=mode)
        patches = F.unfold(x, conv.kernel_size, conv.dilation, stride=conv.stride)
        if conv.groups == 1:
            return patches.mT
        return patches.view(len(x), conv.groups, -1, patches.shape[-1]).mT

    def output_rows(self, y: Tensor) -> Tensor:
        """(sequences, rows, out), or (sequences, groups, rows, out), of a gradient at an output.

        What a feed-forward's vector scales goes through a layer before it is the module's output.
        """
        if self.layout == "scale" and self._module.is_feedforward:
            return y @ _matrix_of(self._module.base_layer).to(y.dtype)
        if not isinstance(self.module, nn.Conv2d):
            return y
        flat = y.flatten(2)
        if self.module.groups == 1:
            return flat.mT
        return flat.view(len(y), self.module.groups, -1, flat.shape[-1]).mT

    def input_pieces(self, x: Tensor) -> Iterator[Tensor]:
        """`input_rows`, for as many sequences at once as memory should be spent on."""
        if not isinstance(self.module, nn.Conv2d):
            yield x
            return
        kernel = self.module.kernel_size[0] * self.module.kernel_size[1]
        num = max(1, _PIECE_ELEMENTS // max(1, x[0].numel() * kernel))
        for piece in x.split(num):
            yield self.input_rows(piece)

    @property
    def _module(self) -> Any:
        return self.module

    def unscaled(self, x: Tensor) -> Tensor:
        """What an elementwise map makes of an input before it is scaled and shifted."""
        module = self._module
        if self.layout == "scale":
            if module.is_feedforward:
                return x
            # Not by calling it: while blocks are replayed, it may give what it gave before.
            module = module.base_layer
            found = type(module).forward(module, x)
        else:
            with _as_if_new(module):
                found = type(module).forward(module, x)
        assert isinstance(found, Tensor)
        return found


def find_linear_map(name: str, module: nn.Module) -> LinearMap | None:
    """A module as a linear map, if it is one whose forward we know."""
    forward = type(module).forward
    if isinstance(module, nn.Linear) and forward is nn.Linear.forward:
        return LinearMap(name, module, "linear")
    if isinstance(module, ExpertLinear):
        return LinearMap(name, module, "conv1d" if module.is_transposed else "linear")
    if isinstance(module, nn.Conv2d) and forward is nn.Conv2d.forward:
        return LinearMap(name, module, "conv2d")
    if isinstance(module, nn.Embedding) and forward is nn.Embedding.forward:
        plain = module.max_norm is None and not module.scale_grad_by_freq
        return LinearMap(name, module, "embedding") if plain else None
    # transformers' own, for GPT-2 and its kin; recognised without importing transformers.
    if type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers."):
        return LinearMap(name, module, "conv1d")
    return None


def find_norm(name: str, module: nn.Module) -> LinearMap | None:
    """A norm over the last dimension as linear maps, if its weight is a scale, as is tried out."""
    own = dict(module.named_parameters())
    weight = own.get("weight")
    has_state = next(module.buffers(), None) is not None
    is_norm = type(module).__name__.lower().endswith("norm") and not has_state
    if not is_norm or weight is None or weight.ndim != 1 or own.keys() - {"weight", "bias"}:
        return None
    m = LinearMap(name, module, "norm")
    x = torch.linspace(-1, 2, 6 * len(weight), device=weight.device).view(2, 3, -1).square()
    try:
        with torch.no_grad():
            found = type(module).forward(module, x.to(weight.dtype))
            expected = weight * m.unscaled(x.to(weight.dtype))
    except (RuntimeError, TypeError, ValueError):  # it is about other dimensions
        return None
    expected = expected + own["bias"] if "bias" in own else expected
    precision = 10 * torch.finfo(weight.dtype).eps
    is_scale = torch.allclose(found.double(), expected.double(), precision, precision)
    return m if is_scale else None


def find_scale(name: str, module: nn.Module) -> LinearMap | None:
    """A linear layer with a vector of (IA)^3 as linear maps; PEFT's, which is not imported."""
    cls = type(module)
    is_scaled = cls.__module__ == "peft.tuners.ia3.layer" and cls.__name__ == "Linear"
    return LinearMap(name, module, "scale") if is_scaled else None


def find_whole_scale(name: str, module: nn.Module) -> LinearMap | None:
    """The same, with all features seen together."""
    found = find_scale(name, module)
    return None if found is None else replace(found, is_together=True)


def _matrix_of(layer: nn.Module) -> Tensor:  # (out, in)
    """The weight of a linear layer, whichever way it stores it."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight if isinstance(layer, nn.Linear) else weight.mT


@contextmanager
def _as_if_new(norm: nn.Module) -> Iterator[None]:
    """Have a norm scale by one and shift by nothing."""
    kept = {name: parameter.data for name, parameter in norm.named_parameters()}
    for name, parameter in norm.named_parameters():
        parameter.data = torch.full_like(kept[name], 1.0 if name == "weight" else 0.0)
    try:
        yield
    finally:
        for name, parameter in norm.named_parameters():
            parameter.data = kept[name]
