"""How pieces of work are read and handed out."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

import matsmerge
from matsmerge.engine import worker
from matsmerge.engine.devices import PROCESSOR
from matsmerge.engine.executor import Piece, SerialExecutor
from matsmerge.methods.site import BLOCK_ELEMENTS


def test_blocks_and_parts_of_blocks_are_read_into_the_same_memory() -> None:
    block = worker._buffer(BLOCK_ELEMENTS, torch.bfloat16, PROCESSOR)
    part = worker._buffer(100, torch.bfloat16, PROCESSOR)
    assert part.tensor.data_ptr() == block.tensor.data_ptr()
    assert (len(part.tensor), len(part.bytes)) == (100, 200)
    assert worker._buffer(BLOCK_ELEMENTS, torch.bfloat16, PROCESSOR) is block
    other = worker._buffer(100, torch.float32, PROCESSOR)
    assert other.tensor.dtype == torch.float32
    assert other.tensor.data_ptr() != block.tensor.data_ptr()


def test_what_is_larger_than_a_block_has_memory_of_its_own() -> None:
    block = worker._buffer(BLOCK_ELEMENTS, torch.bfloat16, PROCESSOR)
    larger = worker._buffer(BLOCK_ELEMENTS + 1, torch.bfloat16, PROCESSOR)
    assert len(larger.tensor) == BLOCK_ELEMENTS + 1
    assert larger.tensor.data_ptr() != block.tensor.data_ptr()


class WatchedExecutor(SerialExecutor):
    """Notes the sizes of the pieces that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def map(self, function: Callable[[Any], Any], jobs: Iterable[Any]) -> Iterator[Any]:
        listed = list(jobs)
        self.sizes += [job.num_bytes for job in listed if isinstance(job, Piece)]
        return super().map(function, listed)


def test_parameters_that_take_longest_are_measured_first() -> None:
    base = {f"w{i}": torch.linspace(-1, 1, size) for i, size in enumerate((10, 700, 30, 400))}
    models = [{n: w + (k + 1) * w.square() for n, w in base.items()} for k in range(2)]
    executor = WatchedExecutor()
    matsmerge.merge(models, base, "ties", trim="parameter", executor=executor)
    assert executor.sizes == [4 * 3 * size for size in (700, 400, 30, 10)]
