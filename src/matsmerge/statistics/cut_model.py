"""A model's blocks, what is outside of them, and how much they give, seen in one small pass."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from matsmerge.checkpoints.checkpoint import first_line
from matsmerge.errors import DataError
from matsmerge.models.streamed_model import StreamedModel, is_within
from matsmerge.statistics.sections import Sections, find_sections, trace
from matsmerge.statistics.structure import place_of, watching_calls

_INSTEAD = "allow more memory (--max-memory), or spread the model over devices (--device-map auto)"


@dataclass(frozen=True)
class CutModel:
    """Blocks that run one after the other, and modules outside of them.

    Outside, what is used before the last block has run stays in memory throughout; the rest is
    the model's `tail`.
    """

    streamed: StreamedModel
    outline: Sections
    calls: tuple[str, ...]  # modules as they are entered
    leaders: dict[
        str, str
    ]  # of modules without others in them, the first that receives the same input
    output_bytes: dict[str, int]  # of modules, for the example that was shown

    def is_in_block(self, module: str) -> bool:
        return any(is_within(module, block.module) for block in self.outline.blocks)

    @cached_property
    def tail(self) -> set[str]:
        """Modules outside of blocks that run after the last block, or not at all."""
        last = self.calls.index(self.outline.blocks[-1].module)
        before = set(self.calls[:last])
        modules = dict(self.streamed.model.named_modules())
        return {m for m in modules if m not in before and not self.is_in_block(m)}

    @cached_property
    def units(self) -> list[str]:
        """Outside of blocks, the largest modules with weights that are called and hold no block."""
        return list(self._units(self.streamed.model, ""))

    def _units(self, module: nn.Module, name: str) -> Iterator[str]:
        if any(is_within(block.module, name) or not name for block in self.outline.blocks):
            for child_name, child in module.named_children():
                yield from self._units(child, f"{name}.{child_name}".lstrip("."))
        elif next(module.parameters(), None) is None or self.is_in_block(name):
            return
        elif name in self.calls:
            yield name
        else:
            for child_name, child in module.named_children():
                yield from self._units(child, f"{name}.{child_name}")

    @cached_property
    def of_blocks(self) -> dict[str, set[str]]:
        """The parameters of each block that nothing else uses."""
        owners = self.streamed.owners
        return {
            block.module: {
                name
                for name in self.streamed.within(block.module)
                if all(is_within(m, block.module) for m in owners[name])
            }
            for block in self.outline.blocks
        }

    @cached_property
    def of_tail(self) -> set[str]:
        """The parameters that only the tail uses."""
        return {n for n, held in self.streamed.owners.items() if self.tail.issuperset(held)}

    @cached_property
    def resident(self) -> set[str]:
        """The parameters that stay in memory."""
        apart = {name for own in self.of_blocks.values() for name in own}
        return self.streamed.parameters.keys() - apart - self.of_tail

    def bytes_given(self, has: Callable[[str], bool]) -> int:
        """What modules that have no others in them gave for the example that was shown."""
        modules = dict(self.streamed.model.named_modules())
        found = [
            name for name in self.output_bytes if has(name) and not [*modules[name].children()]
        ]
        return sum(self.output_bytes[name] for name in found)


def cut(streamed: StreamedModel, run: Callable[[nn.Module], Any]) -> CutModel:
    """Run a model on one example, its weights loaded as they are used, and cut it into blocks."""
    model = streamed.model
    sizes: dict[str, int] = defaultdict(int)
    leaves = {name for name, module in model.named_modules() if not [*module.children()]}
    received: dict[Any, tuple[str, Tensor]] = {}  # held, so that no memory is used twice
    leaders: dict[str, str] = {}

    def enter(name: str, given: Any) -> None:
        tensors = [x for x in tree_flatten(given)[0] if isinstance(x, Tensor)]
        if tensors and name in leaves and not tensors[0].numel():
            leaders.setdefault(name, name)  # of an expert without tokens
        elif tensors and name in leaves:
            place = (*place_of(tensors[0]), tensors[0]._version)
            leaders.setdefault(name, received.setdefault(place, (name, tensors[0]))[0])

    def leave(name: str, output: Any) -> None:
        tensors = [x for x in tree_flatten(output)[0] if isinstance(x, Tensor)]
        sizes[name] += sum(x.nbytes for x in tensors)

    try:
        with streamed.streaming(), watching_calls(model, enter, leave):
            seen = trace(model, lambda: run(model))
        outline = find_sections(model, seen)
    except (DataError, RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        raise DataError(
            f"{type(model).__name__}: cannot be run block by block ({first_line(error)}); "
            f"{_INSTEAD}"
        ) from error
    calls = tuple(name for name, is_entered in seen.events if is_entered)
    return CutModel(streamed, outline, calls, leaders, dict(sizes))
