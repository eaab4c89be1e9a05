"""What collecting takes, with all of the model in memory or block by block, before it starts."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matsmerge.byte_sizes import format_bytes
from matsmerge.errors import ResourceError
from matsmerge.files.output_place import check_room
from matsmerge.models.streamed_model import is_within
from matsmerge.statistics.collection import Collection
from matsmerge.statistics.cut_model import CutModel
from matsmerge.statistics.linear_maps import LinearMap
from matsmerge.statistics.parameters import Owned
from matsmerge.tasks.task import Encoded

# A second moment is summed up as a full matrix; then there is its triangle, and a copy of that.
# A sketch is in float64 as a sum, as a mean, and as what is kept of it until that is written.
_BYTES_OF_SUM = 16
_BYTES_OF_SKETCH = 8
# What modules give is held for the way back, and gradients come and go beside it.
_COPIES_WITH_GRADIENTS = 3


@dataclass(frozen=True)
class CollectionNeeds:
    """Bytes beyond the interpreter's own; what activations take is an estimate."""

    whole: int  # memory with all of the model in it
    by_blocks: int  # memory at least, block by block
    held: int  # block by block, what is kept from block to block; in memory or on disk
    statistics: int  # block by block, of those that are done; in memory or on disk
    file: int  # of statistics
    num_passes: int  # block by block: how often each block is loaded and run on all data

    def are_by_blocks(self, max_bytes: int | None) -> bool:
        """Does all of the model not fit?"""
        return max_bytes is not None and self.whole > max_bytes

    def room(self, max_bytes: int) -> int:
        """Memory that is left for what is held."""
        return max_bytes - self.by_blocks

    def disk(self, max_bytes: int | None) -> int:
        """Of temporary files."""
        if max_bytes is None or not self.are_by_blocks(max_bytes):
            return 0
        return max(0, self.held + self.statistics - self.room(max_bytes))

    def check(self, max_bytes: int | None) -> None:
        """Refuse what fits neither into memory nor onto the disk of temporary files."""
        if max_bytes is None or not self.are_by_blocks(max_bytes):
            return
        if self.room(max_bytes) < 0:
            raise ResourceError(
                f"collecting takes about {format_bytes(self.whole)} of memory, or block by block "
                f"at least {format_bytes(self.by_blocks)}, and --max-memory allows "
                f"{format_bytes(max_bytes)}; allow more, use a smaller --batch-size or "
                "--max-tokens, or spread the model over devices (--device-map auto)"
            )
        check_room(Path(tempfile.gettempdir()) / "held", self.disk(max_bytes))


def find_needs(
    cut: CutModel,
    collection: Collection,
    batches: Sequence[tuple[str, Sequence[Encoded]]],
    shown: Encoded,
) -> CollectionNeeds:
    """`collection` is of the same model, and `shown` the example it was cut with."""
    blocks = [block.module for block in cut.outline.blocks]
    has_gradients = collection.options.wants_gradients
    sizes = [len(batch) * max(e.length for e in batch) / shown.length for _, batch in batches]
    copies = _COPIES_WITH_GRADIENTS if has_gradients else 1

    def given(modules: Sequence[str]) -> int:
        """What modules give for the largest batch."""
        num = cut.bytes_given(lambda m: any(is_within(m, module) for module in modules))
        return int(num * max(sizes) * copies)

    def summed(module: str | None) -> int:
        """What the sums of a block take, or of all that is outside."""

        def has(target: LinearMap | Owned) -> bool:
            owners = target.modules if isinstance(target, Owned) else {target.name}
            if module is None:
                return not any(cut.is_in_block(owner) for owner in owners)
            return any(is_within(owner, module) for owner in owners)

        num = collection.num_values(cut.leaders, has)
        return _BYTES_OF_SUM * num.summed + _BYTES_OF_SKETCH * num.sketched

    weights = cut.streamed.num_bytes
    tail = [unit for unit in cut.units if unit in cut.tail]
    others = [unit for unit in cut.units if unit not in cut.tail]
    in_turn = [weights(cut.of_blocks[b]) + summed(b) + given([b]) for b in blocks]
    outside = weights(cut.of_tail) + summed(None) + given(tail)
    num = collection.num_values(cut.leaders)
    summed_in_all = _BYTES_OF_SUM * (num.summed - num.other) + _BYTES_OF_SKETCH * num.sketched
    summed_in_all += 12 * num.other  # of which one is copied at once
    passing = given(blocks) if has_gradients else max(given([b]) for b in blocks)
    outputs = [int(cut.output_bytes[b] * sum(sizes)) for b in blocks]
    return CollectionNeeds(
        whole=weights() + summed_in_all + passing + given([*others, *tail]),
        by_blocks=weights(cut.resident) + given(others) + max(*in_turn, outside),
        # On the way back, outputs of all blocks and the gradients at two of them.
        held=sum(outputs) + 2 * max(outputs) if has_gradients else 2 * max(outputs),
        statistics=_BYTES_OF_SKETCH * num.sketched + 4 * num.other,
        file=num.file_bytes(collection.options.sketch_rank),
        num_passes=2 if has_gradients else 1,
    )
