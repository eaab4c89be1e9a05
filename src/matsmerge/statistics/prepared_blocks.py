"""A collection within a limit of memory, which can begin: block by block if need be."""

from dataclasses import dataclass, replace

import torch

from matsmerge.checkpoints.filled_checkpoint import Stored
from matsmerge.checkpoints.fused_experts import separate_experts
from matsmerge.errors import DataError, OutputError
from matsmerge.files.output_place import check_room
from matsmerge.models.streamed_model import StreamedModel
from matsmerge.progress import AnyProgress, listener
from matsmerge.statistics.block_collection import BlockCollection
from matsmerge.statistics.block_data import BlockData
from matsmerge.statistics.collection_needs import CollectionNeeds, find_needs
from matsmerge.statistics.collection_run import (
    Output,
    finished_before,
    identity_of,
    put_down,
)
from matsmerge.statistics.cut_model import CutModel, cut
from matsmerge.statistics.held_tensors import Room
from matsmerge.statistics.partial_file import Interruption, PartialFile
from matsmerge.statistics.prepared_collection import PreparedCollection
from matsmerge.statistics.processes import this_process, wait_for_processes
from matsmerge.statistics.statistics import Statistics


@dataclass(frozen=True)
class PreparedBlocks:
    """A collection whose model was loaded without values."""

    prepared: PreparedCollection
    cut: CutModel
    needs: CollectionNeeds
    max_bytes: int | None = None

    def run(self, output: Output | None = None, progress: AnyProgress | None = None) -> Statistics:
        """Collect block by block, and write to an output; what is interrupted begins again."""
        prepared = self.prepared
        process = this_process() if output is None else output.process
        options = prepared.collection.options
        partial = None
        if output is not None:
            identity = identity_of(
                output, options, prepared.model, prepared.data, process, prepared.plan
            )
            partial = PartialFile(output.path, identity, process.suffix)
            if (found := finished_before(output, partial)) is not None:
                return found
            if output.resume and partial.path.exists():
                raise OutputError(
                    f"{partial.path}: was begun with all of the model in memory; continue it "
                    "without --max-memory, or start anew with --overwrite"
                )
            partial.remove()
            check_room(output.path, self.needs.file)
        self.needs.check(self.max_bytes)
        told, interruption = listener(progress), Interruption()
        room = Room(None if self.max_bytes is None else self.needs.room(self.max_bytes))
        data = BlockData(
            prepared.loaded.task, prepared.batches, prepared.model, prepared.data, room
        )
        names, is_whole = dict(prepared.loaded.names), process.num_processes == 1
        collection = BlockCollection(self.cut, data, options, names, is_whole=is_whole)

        def seen(num_examples: int) -> None:
            told.advance(num_examples)
            interruption.check()

        told.stage("collecting", data.num_examples * collection.num_parts, "examples")
        with interruption.watching():
            own = collection.run(seen)
            prepared.collection.notes += collection.notes
            total = put_down(own, output, partial)
        wait_for_processes()
        return total


def prepare_within(
    prepared: PreparedCollection, max_bytes: int, device: str | None = None
) -> PreparedBlocks | None:
    """A collection block by block, checked; None if all of the model fits into memory.

    Of a model that cannot be cut it is not known what running it takes: only that it cannot fit.
    """
    try:
        blocks = prepare_blocks(prepared, device)
    except DataError:
        if least_bytes(prepared) > max_bytes:
            raise
        return None
    if not blocks.needs.are_by_blocks(max_bytes):
        return None
    blocks.needs.check(max_bytes)
    return replace(blocks, max_bytes=max_bytes)


def least_bytes(prepared: PreparedCollection) -> int:
    """Memory that any model and its statistics take."""
    model = prepared.loaded.model
    return sum(p.nbytes for p in model.parameters()) + prepared.collection.expected_bytes()


def prepare_blocks(prepared: PreparedCollection, device: str | None = None) -> PreparedBlocks:
    """See how a model that was loaded without values can be cut, and what it takes."""
    loaded = prepared.loaded
    checkpoint = separate_experts(loaded.checkpoint)
    sources = {name: Stored(checkpoint, stored) for name, stored in loaded.names.items()}
    if loaded.head is not None:
        sources |= {name: Stored(loaded.head, own) for name, own in loaded.head_names.items()}
    examples = [example for _, batch in prepared.batches for example in batch]
    if not examples:
        raise DataError("there is no data: not a single batch to collect from")
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    streamed = StreamedModel(loaded.model, sources, where)
    # Others are known by their length; the shortest is seen soonest.
    shown = min(examples, key=lambda example: example.length)
    batch = loaded.task.collate([shown]).to(where)
    found = cut(streamed, lambda model: loaded.task.predict(model, batch))
    needs = find_needs(found, prepared.collection, prepared.batches, shown)
    return PreparedBlocks(prepared, found, needs)
