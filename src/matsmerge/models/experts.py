"""Experts that a model keeps fused in 3-D parameters, run as linear maps of their own.

Transformers 5 multiplies by slices of a parameter, which no hook sees. While a model is watched,
its experts are replaced by modules that do the same, one linear map after the other, on the same
memory. Each map notes which tokens it was given.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from matsmerge.checkpoints.fused_experts import Piece, pieces_of

_NUM_TRIED = 8  # experts


class RoutedLinear(nn.Module):
    """A linear map of one expert. All experts are called, perhaps with no token."""

    tokens: Tensor  # (rows,), which of all tokens it was given last
    num_tokens: int  # of all

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, transposed: bool) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.is_transposed = transposed  # (in, out)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.mT if self.is_transposed else self.weight
        return F.linear(x, weight, self.bias)


class SeparateExperts(nn.Module):
    """What an experts module does, by a linear map for each part of each expert."""

    def __init__(self, fused: nn.Module, pieces: Mapping[str, Piece]) -> None:
        super().__init__()
        self._fused = (fused,)  # not a module of this one
        own = dict(fused.named_parameters())
        parameters = {}
        for name, piece in pieces.items():
            whole = own[piece.tensor]
            part = whole.data.view(-1)[piece.start : piece.start + prod(piece.shape)]
            parameters[name] = nn.Parameter(part.view(piece.shape), whole.requires_grad)
        for name, weight in parameters.items():
            expert, part, attribute = name.split(".")
            if attribute == "weight":
                if expert not in self._modules:
                    self.add_module(expert, nn.ModuleDict())
                bias = parameters.get(f"{expert}.{part}.bias")
                linear = RoutedLinear(weight, bias, bool(fused.is_transposed))
                self.get_submodule(expert).add_module(part, linear)

    def forward(self, hidden_states: Tensor, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """The experts' outputs by token; the others are choices (tokens, k) and their weights."""
        choices, weights = sorted((*args, *kwargs.values()), key=torch.is_floating_point)
        fused: Any = self._fused[0]
        outputs = torch.zeros_like(hidden_states)
        for number, expert in enumerate(self.children()):
            tokens, places = torch.where(choices == number)
            *first, last = (module for module in expert.children())
            for linear in (*first, last):
                linear.tokens, linear.num_tokens = tokens, len(hidden_states)
            x = hidden_states[tokens]
            inner = torch.cat([linear(x) for linear in first], -1)
            y = last(fused._apply_gate(inner) if fused.has_gate else fused.act_fn(inner))
            outputs.index_add_(0, tokens, (y * weights[tokens, places, None]).to(outputs.dtype))
        return outputs


def find_fused(model: nn.Module) -> Iterator[tuple[str, nn.Module, dict[str, Piece]]]:
    """The experts modules of a model that are known, and the parts of their parameters by name."""
    for name, module in model.named_modules():
        # Attributes that transformers gives to such modules, and to no others.
        if {"is_transposed", "is_concatenated", "has_gate"} <= vars(module).keys():
            pieces = pieces_of({n: tuple(p.shape) for n, p in module.named_parameters()})
            is_joint = "0.gate_proj.weight" not in pieces
            if pieces and (is_joint if module.is_transposed else module.is_concatenated):
                yield name, module, pieces


def parameter_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of all parameters, with experts one by one, by their names then."""
    found = {name: tuple(p.shape) for name, p in model.named_parameters()}
    for module, _, pieces in find_fused(model):
        for name, piece in pieces.items():
            found.pop(f"{module}.{piece.tensor}", None)
            found[f"{module}.{name}"] = piece.shape
    return found


class ExpertsApart:
    """A model whose fused experts can be put apart, for a while."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._replaced: dict[str, tuple[nn.Module, nn.Module]] = {}
        for name, fused, pieces in find_fused(model):
            own = list(fused.parameters())
            if any(p.requires_grad for p in own) and not any(p.is_meta for p in own):
                separate = SeparateExperts(fused, pieces)
                if _do_the_same(fused, separate):
                    self._replaced[name] = fused, separate

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Have the model run its experts one by one."""
        self._put(1)
        try:
            yield
        finally:
            self._put(0)

    def _put(self, which: int) -> None:
        for name, modules in self._replaced.items():
            self._model.set_submodule(name, modules[which])


def _do_the_same(fused: nn.Module, separate: SeparateExperts) -> bool:
    """Whether both give the same, but for rounding, for a few tokens and experts."""
    experts = list(separate.children())
    weight = next(experts[0].parameters())
    linear: Any = next(experts[0].children())
    num_inputs = weight.shape[0 if linear.is_transposed else 1]
    num = min(_NUM_TRIED, len(experts))
    x = torch.linspace(-1, 2, num * num_inputs).square().view(num, num_inputs).to(weight)
    first = torch.arange(num, device=weight.device)
    choices = torch.stack([first, (first + 1) % len(experts)], 1)
    weights = torch.linspace(0.2, 0.9, 2 * num).view(num, 2).to(weight)
    # As the model's own code says, whichever kernels it would choose.
    forward = getattr(type(fused).forward, "__wrapped__", type(fused).forward)
    with torch.no_grad():
        expected = forward(fused, x, choices, weights)
        found = separate(x, choices, weights)
    precision = 10 * torch.finfo(weight.dtype).eps
    return bool((found - expected).norm() <= precision * expected.norm())
