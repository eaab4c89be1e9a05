"""Experts of a mixture run one by one, each with its tokens known.

Transformers 5 keeps most experts fused in 3-D parameters and multiplies by slices of these, which
no hook sees. While a model is watched, its experts are replaced by modules that do the same, one
linear map after the other, on the same memory. A model that is loaded without values, to be filled
a block at a time, keeps these modules: each part of an expert is a parameter of its own then.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from matsmerge.checkpoints.fused_experts import ExpertPart, pieces_of

_NUM_TRIED = 8  # experts
_ROW_BYTES = 16  # of grouped products


@dataclass(eq=False)
class Routing:
    """Which of all tokens an expert was given last."""

    tokens: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))  # (rows,)
    num_tokens: int = 0  # of all


class ExpertLinear(nn.Module):
    """A linear map whose weight is (in, out) if it `is_transposed`."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, transposed: bool) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.is_transposed = transposed

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.mT if self.is_transposed else self.weight
        return F.linear(x, weight, self.bias)


class _Expert(nn.ModuleDict):
    """One of fused experts: its linear maps, the last of which is `down_proj`."""

    def __init__(self, fused: nn.Module) -> None:
        super().__init__()
        self._fused = (fused,)  # not a module of this one

    def forward(self, x: Tensor) -> Tensor:
        fused: Any = self._fused[0]
        *first, last = self.values()
        inner = torch.cat([linear(x) for linear in first], -1)
        found = last(fused._apply_gate(inner) if fused.has_gate else fused.act_fn(inner))
        assert isinstance(found, Tensor)
        return found


class RoutedExperts(nn.Module):
    """What an experts module does, by calling each expert, perhaps with no token."""

    def __init__(self, experts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.routing = {name: Routing() for name in experts}
        for name, expert in experts.items():
            self.add_module(name, expert)

    def forward(self, hidden_states: Tensor, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """The sum of experts' outputs by token, (tokens, hidden), each with its weight (tokens, k).

        The experts of a token are numbers (tokens, k), or marked (tokens, k, experts).
        """
        chosen, weights = sorted((*args, *kwargs.values()), key=torch.is_floating_point)
        outputs = torch.zeros_like(hidden_states)
        for number, (name, expert) in enumerate(self.named_children()):
            is_its = chosen[..., number] > 0 if chosen.ndim == 3 else chosen == number
            tokens, places = torch.where(is_its)
            self.routing[name].tokens = tokens
            self.routing[name].num_tokens = len(hidden_states)
            y = expert(hidden_states[tokens]) * weights[tokens, places, None]
            outputs.index_add_(0, tokens, y.to(outputs.dtype))
        return outputs


def _put_apart(fused: nn.Module, pieces: Mapping[str, ExpertPart]) -> RoutedExperts:
    """Fused experts, on the same memory."""
    own = dict(fused.named_parameters())
    parameters = {}
    for name, piece in pieces.items():
        whole = own[piece.tensor]
        part = whole.data.view(-1)[piece.start : piece.start + prod(piece.shape)]
        parameters[name] = nn.Parameter(part.view(piece.shape), whole.requires_grad)
    experts: dict[str, _Expert] = {}
    for name, weight in parameters.items():
        expert, part_name, attribute = name.split(".")
        if attribute == "weight":
            bias = parameters.get(f"{expert}.{part_name}.bias")
            linear = ExpertLinear(weight, bias, bool(fused.is_transposed))
            experts.setdefault(expert, _Expert(fused))[part_name] = linear
    return RoutedExperts(experts)


def find_fused(model: nn.Module) -> Iterator[tuple[str, nn.Module, dict[str, ExpertPart]]]:
    """The experts modules of a model that are known, and the parts of their parameters by name."""
    for name, module in model.named_modules():
        # Attributes that transformers gives to such modules, and to no others.
        if {"is_transposed", "is_concatenated", "has_gate"} <= vars(module).keys():
            pieces = pieces_of({n: tuple(p.shape) for n, p in module.named_parameters()})
            is_joint = "0.gate_proj.weight" not in pieces
            if pieces and (is_joint if module.is_transposed else module.is_concatenated):
                yield name, module, pieces


def avoid_grouped_products(model: nn.Module) -> None:
    """Have a model multiply by one expert after the other where torch's grouped products cannot.

    They need rows of a multiple of 16 bytes, which usual widths have.
    """
    parameters = (p for _, experts, _ in find_fused(model) for p in experts.parameters())
    sizes = (size * p.element_size() for p in parameters if p.ndim == 3 for size in p.shape[1:])
    if any(num_bytes % _ROW_BYTES for num_bytes in sizes):
        model.set_experts_implementation("eager")  # type: ignore[operator]


def parameter_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of all parameters, with experts one by one, by their names then."""
    found = {name: tuple(p.shape) for name, p in model.named_parameters()}
    for module, _, pieces in find_fused(model):
        for name, piece in pieces.items():
            found.pop(f"{module}.{piece.tensor}", None)
            found[f"{module}.{name}"] = piece.shape
    return found


def keep_apart(model: nn.Module) -> None:
    """Have a model without values run its experts one by one from now on.

    What does something else then, as seen with other values, stays as it is.
    """
    same: dict[Any, bool] = {}  # by class and shapes
    for name, experts, pieces in list(find_fused(model)):
        kind = (type(experts), *(p.shape for p in experts.parameters()))
        if kind not in same:
            few = _few_with_values(experts)
            parts = pieces_of({n: tuple(p.shape) for n, p in few.named_parameters()})
            same[kind] = _do_the_same(few, _put_apart(few, parts))
        if same[kind]:
            model.set_submodule(name, _put_apart(experts, pieces))


def _few_with_values(experts: nn.Module) -> nn.Module:
    """Two such experts, which are enough to see what a module does, with values at random."""
    few: Any = copy.deepcopy(experts)
    few.num_experts = 2
    generator = torch.Generator().manual_seed(0)
    for name, p in experts.named_parameters():
        bound = p.shape[-1] ** -0.5
        values = torch.empty(2, *p.shape[1:]).uniform_(-bound, bound, generator=generator)
        few._parameters[name] = nn.Parameter(values.to(p.dtype))
    assert isinstance(few, nn.Module)
    return few


class ExpertsApart:
    """A model whose experts can be run one by one, for a while."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._replaced: dict[str, tuple[nn.Module, nn.Module]] = {}
        found = {
            name: (m, _put_apart(m, pieces)) for name, m, pieces in find_fused(model) if _is_here(m)
        }
        for name, module in model.named_modules():
            # Modules of their own in a dictionary that calls them, as in Switch Transformers.
            if isinstance(module, nn.ModuleDict) and "num_experts" in vars(module):
                found[name] = module, RoutedExperts(dict(module))
        for name, (experts, routed) in found.items():
            is_wanted = any(p.requires_grad for p in experts.parameters())
            if is_wanted and _is_here(experts) and _do_the_same(experts, routed):
                self._replaced[name] = experts, routed

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


def _is_here(experts: nn.Module) -> bool:
    return all(p.is_contiguous() and not p.is_meta for p in experts.parameters())


def _do_the_same(experts: nn.Module, routed: RoutedExperts) -> bool:
    """Whether both give the same, but for rounding, for a few tokens and experts."""
    num_experts = len(routed.routing)
    linears = [m for m in routed.modules() if isinstance(m, (nn.Linear, ExpertLinear))]
    if not linears:
        return False
    linear, weight = linears[0], linears[0].weight
    num_inputs = weight.shape[0 if getattr(linear, "is_transposed", False) else 1]
    num = min(_NUM_TRIED, num_experts)
    x = torch.linspace(-1, 2, num * num_inputs).square().view(num, num_inputs).to(weight)
    first = torch.arange(num, device=weight.device)
    numbers = torch.stack([first, (first + 1) % num_experts], 1)
    weights = torch.linspace(0.2, 0.9, 2 * num).view(num, 2).to(weight)
    # As the model's own code says, whichever kernels it would choose.
    forward = getattr(type(experts).forward, "__wrapped__", type(experts).forward)
    precision = 10 * torch.finfo(weight.dtype).eps
    for chosen in (numbers, F.one_hot(numbers, num_experts)):
        try:
            with torch.no_grad():
                expected = forward(experts, x, chosen, weights)
                found = routed(x, chosen, weights)
        except (RuntimeError, TypeError, ValueError, IndexError):  # it has other arguments
            continue
        return bool((found - expected).norm() <= precision * expected.norm())
    return False
