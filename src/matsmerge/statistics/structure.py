"""How a model uses its modules, seen in two small forward passes.

With three examples and then with two: what grows with the number of examples has a part for each
of them, and what does not (tables of positions, relative biases) is shared. Found from the
modules themselves, so that no architecture needs to be known in advance.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from matsmerge.errors import DataError
from matsmerge.models.experts import RoutedExperts
from matsmerge.statistics.linear_maps import LinearMap
from matsmerge.tasks.prediction import Prediction


@dataclass
class _Seen:
    """One call of a module in one small pass."""

    module: str
    outer: "_Seen | None"  # the call it happened in
    inputs: list[Any]  # held, so that no memory is used twice
    version: int  # of the first input, when it came
    input_sizes: list[int]
    output_sizes: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Use:
    """One call of a module in every forward pass."""

    module: str
    split: tuple[bool, ...]  # which leaves of its arguments have a part for each sequence
    is_separate: bool  # every output has a part for each sequence
    is_spreadable: bool  # or one that all sequences share
    outer: "Use | None"

    def nearest(self, fits: "Callable[[Use], bool]") -> "Use | None":
        """The innermost call that fits, from this one outwards."""
        around: Use | None = self
        while around is not None and not fits(around):
            around = around.outer
        return around


@dataclass(frozen=True)
class Structure:
    """What the small passes showed."""

    uses: dict[str, list[Use]]  # by module
    leaders: dict[str, str]  # of each linear map, the first that receives the same input
    widened: frozenset[str] = frozenset()  # embeddings of positions that all sequences share
    spread: frozenset[str] = frozenset()  # modules of which all sequences share some output

    def replayed(self, module: str) -> list[str] | None:
        """The modules to run again for the gradients of a module's parameters; None if none do."""
        found = []
        for use in self.uses[module]:
            around = use.nearest(lambda u: u.is_separate or u.module in self.spread)
            if around is None:
                return None
            found.append(around.module)
        return found

    def is_within(self, inner: str, outer: str) -> bool:
        """Is every call of `inner` made by a call of `outer`?"""
        return all(
            use.outer is not None and use.outer.nearest(lambda u: u.module == outer)
            for use in self.uses[inner]
        )

    def is_separate(self, module: str) -> bool:
        """Does every call of a module have a part for each sequence?"""
        return module in self.widened or all(u.is_separate for u in self.uses[module])


def find_structure(
    model: nn.Module, maps: Sequence[LinearMap], run: Callable[[int], tuple[Any, int]]
) -> Structure:
    """Watch how a model uses its modules.

    `run(n)` runs it on n examples, and returns its result and the number of sequences these are.
    """
    first, result, num_first = _watch(model, lambda: run(3))
    second, _, num_second = _watch(model, lambda: run(2))
    routed = {
        f"{name}.{inner}"
        for name, module in model.named_modules()
        if isinstance(module, RoutedExperts)
        for inner, _ in module.named_modules()
        if inner
    }
    uses = _uses(first, second, num_first, num_second, routed)
    leaders = _leaders(first, maps)
    shared = [
        m
        for m in maps
        if m.layout == "embedding"
        and any(
            call.module == m.name and call.inputs[0].ndim > 1 and len(call.inputs[0]) == 1
            for call in first
        )
    ]
    spread = _shared_outputs(model, uses)
    for widened, spreading in ((shared, spread), (shared, set()), ([], spread)):
        # Whether that changes nothing is tried out; most models have at most one of the two.
        if (widened or spreading) and _same_when_spread(
            model, widened, spreading, lambda: run(3)[0], result, num_first
        ):
            names = frozenset(m.name for m in widened)
            return Structure(uses, leaders, names, frozenset(spreading))
    return Structure(uses, leaders)


def _shared_outputs(model: nn.Module, uses: dict[str, list[Use]]) -> set[str]:
    """Modules whose outputs would show gradients of shared parameters, if they were spread."""
    found = set()
    for name, own_uses in uses.items():
        if next(model.get_submodule(name).parameters(recurse=False), None) is not None:
            for use in own_uses:
                around = use.nearest(lambda u: u.is_separate or u.is_spreadable)
                if around is not None and not around.is_separate:
                    found.add(around.module)
    return found


def spread_output(output: Tensor, num_sequences: int) -> Tensor:
    """An output that all sequences share, with a part for each."""
    if output.ndim and len(output) == 1:
        return output.expand(num_sequences, *output.shape[1:])
    return output


def widen(maps: Sequence[LinearMap], num_sequences: Callable[[], int], hooks: ExitStack) -> None:
    """Give embeddings that look up one row for all sequences a row for each.

    Nothing changes for the model, since what was spread out after is spread out before; but
    each sequence then has a gradient of its own.
    """

    def widened(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return spread_output(args[0], num_sequences()), *args[1:]

    for m in maps:
        hooks.callback(m.module.register_forward_pre_hook(widened).remove)


def _same_when_spread(
    model: nn.Module,
    widened: Sequence[LinearMap],
    spreading: set[str],
    run: Callable[[], Any],
    expected: list[Tensor],
    num_sequences: int,
) -> bool:
    """Does the model give the same when what its sequences share is spread out early?"""

    def spread_all(_: nn.Module, _args: Any, output: Any) -> Any:
        return tree_map(lambda t: spread_output(t, num_sequences) if is_float(t) else t, output)

    with torch.no_grad(), ExitStack() as hooks:
        widen(widened, lambda: num_sequences, hooks)
        for name in spreading:
            hooks.callback(model.get_submodule(name).register_forward_hook(spread_all).remove)
        try:
            again = result_tensors(run())
        except (RuntimeError, ValueError, IndexError, TypeError):
            return False
    return len(again) == len(expected) and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-5)
        for a, b in zip(again, expected, strict=True)
    )


def place_of(x: Tensor) -> tuple[Any, ...]:
    """Where a tensor's values lie in memory; tensors held at once in one place are the same."""
    return x.data_ptr(), x.shape, x.stride(), x.dtype, x.device


def check_unchanged(module: str, x: Tensor, version: int) -> None:
    """Refuse an input that is no longer what the module was given."""
    if x._version != version:
        raise DataError(
            f"module '{module}': its input was changed in place after it was used, by the model's "
            "own code; its statistics cannot be collected"
        )


def is_float(leaf: Any) -> bool:
    """Is it a tensor through which gradients flow?"""
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def result_tensors(result: Any) -> list[Tensor]:
    """The floating point tensors in what running a model gave."""
    if isinstance(result, Prediction):
        result = result.logits
    return [leaf for leaf in tree_flatten(result)[0] if is_float(leaf)]


def _watch(
    model: nn.Module, run: Callable[[], tuple[Any, int]]
) -> tuple[list[_Seen], list[Tensor], int]:
    calls: list[_Seen] = []
    stack: list[_Seen] = []

    def enter(name: str, given: Any) -> None:
        inputs = tree_flatten(given)[0]
        version = inputs[0]._version if inputs and isinstance(inputs[0], Tensor) else 0
        outer = stack[-1] if stack else None
        call = _Seen(name, outer, inputs, version, [_size(t) for t in inputs])
        calls.append(call)
        stack.append(call)

    def leave(_: str, output: Any) -> None:
        leaves = tree_flatten(output)[0]
        stack.pop().output_sizes = [_size(leaf) for leaf in leaves if is_float(leaf)]

    with watching_calls(model, enter, leave), torch.no_grad():
        result, num_sequences = run()
    return calls, result_tensors(result), num_sequences


@contextmanager
def watching_calls(
    model: nn.Module, enter: Callable[[str, Any], None], leave: Callable[[str, Any], None]
) -> Iterator[None]:
    """Call `enter(module, (args, kwargs))` and `leave(module, output)` around every module."""
    with ExitStack() as hooks:
        for name, module in model.named_modules():

            def before(_: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                enter(name, (args, kwargs))

            def after(_: nn.Module, _args: Any, output: Any, name: str = name) -> None:
                leave(name, output)

            hooks.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(after).remove)
        yield


def _size(leaf: Any) -> int:
    return len(leaf) if isinstance(leaf, Tensor) and leaf.ndim else -1


def _uses(
    first: list[_Seen],
    second: list[_Seen],
    num_first: int,
    num_second: int,
    routed: set[str],
) -> dict[str, list[Use]]:
    """Match the calls of the two passes, and see what grows with the number of sequences.

    What modules of experts receive does not, even where it seems so.
    """
    by_module = defaultdict(list)
    for call in second:
        by_module[call.module].append(call)
    others = {module: iter(calls) for module, calls in by_module.items()}

    def grows(a: Sequence[int], b: Sequence[int]) -> tuple[bool, ...]:
        if len(a) != len(b):
            return (False,) * len(a)
        return tuple(x > 0 and x * num_second == y * num_first for x, y in zip(a, b, strict=True))

    uses: dict[str, list[Use]] = defaultdict(list)
    made: dict[int, Use] = {}
    for call in first:  # in the order in which they began, so outer calls come first
        other = next(others.get(call.module, iter(())), None)
        other = None if call.module in routed else other
        sizes = call.output_sizes if other is not None else []
        parts = grows(sizes, other.output_sizes if other is not None else [])
        spreadable = [is_part or size == 1 for is_part, size in zip(parts, sizes, strict=True)]
        made[id(call)] = Use(
            call.module,
            grows(call.input_sizes, other.input_sizes if other is not None else []),
            bool(parts) and all(parts),
            bool(parts) and all(spreadable),
            made[id(call.outer)] if call.outer is not None else None,
        )
        uses[call.module].append(made[id(call)])
    return dict(uses)


def _leaders(calls: list[_Seen], maps: Sequence[LinearMap]) -> dict[str, str]:
    """Group linear maps whose calls received the very same tensors."""
    received: dict[str, list[tuple[Any, ...]]] = {m.name: [] for m in maps}
    # An expert without tokens receives nothing, as the others do: only its own maps can share.
    around = {m.name: m.name.rpartition(".")[0] if m.routing else "" for m in maps}
    for call in calls:
        if call.module in received:
            x = call.inputs[0]
            received[call.module].append((*place_of(x), call.version, around[call.module]))
    leaders: dict[tuple[Any, ...], str] = {}
    return {
        m.name: leaders.setdefault(tuple(received[m.name]), m.name)
        if m.layout in ("linear", "conv1d") and received[m.name]
        else m.name
        for m in maps
    }
