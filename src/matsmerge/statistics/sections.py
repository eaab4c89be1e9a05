"""A model cut into sections that run one after the other: its blocks, and what is between them.

Blocks are the items of `nn.ModuleList`s that pass on each other's output. Which they are, and in
which order they run, is seen in one forward pass, so that no architecture needs to be known.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from matsmerge.errors import DataError
from matsmerge.statistics.structure import watching_calls


@dataclass(frozen=True)
class Section:
    """A block, or all that runs between two blocks, before the first or after the last.

    Tensors that several of these use are a section of their own, which is the whole model.
    """

    title: str
    start: int  # how many blocks have run before it
    block: str | None  # the block's module
    tensors: tuple[str, ...]  # parameters and buffers
    is_whole: bool = False


@dataclass(frozen=True)
class ModelBlock:
    """A module that is run once, and the list of modules it is in."""

    module: str
    stack: str


@dataclass(frozen=True)
class Sections:
    """All sections in the order in which they run; that of shared tensors comes first."""

    blocks: tuple[ModelBlock, ...]
    sections: tuple[Section, ...]

    @property
    def stacks(self) -> dict[str, int]:
        """The lists of blocks, with the number of blocks in each."""
        names = [block.stack for block in self.blocks]
        return {name: names.count(name) for name in names}


@dataclass
class PassTrace:
    """What happened in a forward pass."""

    events: list[tuple[str, bool]] = field(default_factory=list)  # (module, is it entered?)
    # Of each call of an item of a module list:
    inputs: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    outputs: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    values: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))


def trace(model: nn.Module, run: Callable[[], Any]) -> PassTrace:
    """Watch a forward pass; inputs and outputs are kept of all items of module lists."""
    found = PassTrace()
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    ids = {id(item) for module_list in lists for item in module_list}
    items = {name for name, module in model.named_modules() if id(module) in ids}

    def enter(name: str, given: Any) -> None:
        found.events.append((name, True))
        if name in items:
            found.inputs[name].append(given)

    def leave(name: str, output: Any) -> None:
        found.events.append((name, False))
        if name in items:
            found.outputs[name].append(output)
            # What follows may change the output in place.
            found.values[name].append(tree_map(_clone, output))

    with watching_calls(model, enter, leave), torch.no_grad():
        run()
    return found


def find_sections(model: nn.Module, seen: PassTrace) -> Sections:
    """Cut a model where its blocks begin and end."""
    names = {id(module): name for name, module in model.named_modules()}
    stacks = {
        stack: [names[id(item)] for item in model.get_submodule(stack).children()]
        for stack in _find_stacks(model, names, seen)
    }
    of_stack = {item: stack for stack, items in stacks.items() for item in items}
    entered = [name for name, is_entered in seen.events if is_entered and name in of_stack]
    if not entered:
        raise DataError(
            f"{type(model).__name__}: has no layers that run once and one after the other, "
            "along which it could be merged; use inputs: own"
        )
    blocks = tuple(ModelBlock(name, of_stack[name]) for name in entered)
    uses = _uses(seen, entered)
    own: dict[int, list[str]] = defaultdict(list)
    shared = []
    for name, modules in _owners(model).items():
        where = {at for module in modules for at in _uses_around(module, uses)}
        if len(where) > 1:
            shared.append(name)
        else:
            own[where.pop()].append(name)
    whole = [Section("shared weights", 0, None, tuple(shared), is_whole=True)] if shared else []
    return Sections(blocks, (*whole, *_sections(entered, own)))


def _sections(blocks: Sequence[str], own: Mapping[int, list[str]]) -> Iterator[Section]:
    """Block b is at 2b + 1; what runs before the first is at 0, between b and b + 1 at 2b + 2."""
    for at in range(2 * len(blocks) + 1):
        tensors = tuple(own.get(at, ()))
        number = at // 2
        if at % 2:
            yield Section(blocks[number], number, blocks[number], tensors)
        elif tensors:
            is_last = number == len(blocks)
            title = f"after {blocks[-1]}" if is_last else f"before {blocks[number]}"
            yield Section(title, number, None, tensors)


def _uses(seen: PassTrace, blocks: Sequence[str]) -> dict[str, set[int]]:
    """Where each module is called, as `_sections` numbers places."""
    numbers = {name: number for number, name in enumerate(blocks)}
    uses: dict[str, set[int]] = defaultdict(set)
    at = 0
    for name, is_entered in seen.events:
        if name in numbers:
            at = 2 * numbers[name] + (1 if is_entered else 2)
        if is_entered:
            uses[name].add(at)
    return uses


def _uses_around(module: str, uses: Mapping[str, set[int]]) -> set[int]:
    """Where a module is called or, if it never is, the one around it, which has its tensors."""
    while module and not uses.get(module):
        module = module.rpartition(".")[0]
    return uses.get(module) or {0}


def _owners(model: nn.Module) -> dict[str, list[str]]:
    """The modules that hold each parameter and buffer, which goes by its first name."""
    first: dict[int, str] = {}
    owners: dict[str, list[str]] = defaultdict(list)
    for module_name, module in model.named_modules():
        own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        for attribute, tensor in own:
            name = first.setdefault(id(tensor), f"{module_name}.{attribute}".lstrip("."))
            owners[name].append(module_name)
    return owners


def _find_stacks(model: nn.Module, names: Mapping[int, str], seen: PassTrace) -> list[str]:
    """The lists of blocks: the outermost chains, but where these hold longer ones, those."""
    chains = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and _is_chain([names[id(item)] for item in module], module, seen)
    }
    # A hierarchical model's stages are such lists of lists. Within the block of a transformer,
    # attention and feed-forward may be a list as well, but they are of different kinds.
    uniform = [n for n, m in chains.items() if len(m) > 1 and len({type(item) for item in m}) == 1]
    found: list[str] = []
    for name in chains:
        is_within = any(name.startswith(f"{outer}.") for outer in found)
        holds_others = any(inner.startswith(f"{name}.") for inner in uniform)
        if not is_within and not holds_others:
            found.append(name)
    return found


def _is_chain(items: Sequence[str], modules: nn.ModuleList, seen: PassTrace) -> bool:
    """Is each called once, and given what the one before it gave?"""
    if not items or any(len(seen.outputs.get(name, ())) != 1 for name in items):
        return False
    if any(next(module.parameters(), None) is None for module in modules):
        return False
    return all(
        any(
            _is_same(given, received)
            for given in _tensors(seen.outputs[one][0])
            for received in _tensors(seen.inputs[other][0])
        )
        for one, other in pairwise(items)
    )


def _clone(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def _is_same(a: Tensor, b: Tensor) -> bool:
    """Is it the same tensor? Both are held, so that no memory was used twice."""
    return a is b or (a.data_ptr() == b.data_ptr() != 0 and a.shape == b.shape)
