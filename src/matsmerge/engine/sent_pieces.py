"""Merged values on their way to a remote store, where workers do not see the disk of the driver.

A store has whole objects only. So each job uploads what it has merged, every run of bytes as an
object `SHARD/OFFSET` under a hidden prefix beside the output, and when all are there, some worker
puts those of a shard together on its disk and uploads the shard under its name.
"""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from matsmerge.engine.executor import Distant, Piece
from matsmerge.engine.layout import Shard, bytes_at
from matsmerge.errors import OutputError
from matsmerge.files.remote_file import BLOCK_BYTES, fetching
from matsmerge.files.remote_names import cache_root
from matsmerge.files.remote_store import RemoteState, delete, look, put, read_range
from matsmerge.files.upload import Put

_NUM_AT_ONCE = 8  # blocks in memory
_PEAK_BYTES = 2 * _NUM_AT_ONCE * BLOCK_BYTES  # of a worker that makes a shard


class SentPieces:
    """A sink that uploads what a job has written when the job is done."""

    def __init__(self, url: str, shards: Mapping[str, Shard]) -> None:
        self.url = url
        self._shards = shards  # by tensor
        self._written: dict[str, dict[int, bytes]] = {}  # shard -> offset -> bytes

    def __reduce__(self) -> tuple[type["SentPieces"], tuple[str, Mapping[str, Shard]]]:
        return SentPieces, (self.url, self._shards)

    def write(self, name: str, start: int, values: Tensor) -> None:
        shard = self._shards[name]
        offset, view = bytes_at(shard, name, start, values)
        self._written.setdefault(shard.file_name, {})[offset] = bytes(view)

    def flush(self) -> None:
        """Upload; a job that is done again replaces what it had uploaded by the same."""
        written, self._written = self._written, {}
        runs = [(shard, *run) for shard, found in written.items() for run in _joined(found)]
        list(fetching().map(self._send, runs))

    def _send(self, run: tuple[str, int, bytearray]) -> None:
        shard, offset, content = run
        with _scratch_file() as file:
            file.write(content)
            file.flush()
            put(Path(file.name), f"{self.url}/{shard}/{offset}")


def _joined(found: Mapping[int, bytes]) -> list[tuple[int, bytearray]]:
    """Runs of bytes without a gap, from what was written at each offset."""
    runs: list[tuple[int, bytearray]] = []
    for offset in sorted(found):
        if runs and runs[-1][0] + len(runs[-1][1]) == offset:
            runs[-1][1].extend(found[offset])
        else:
            runs.append((offset, bytearray(found[offset])))
    return runs


@dataclass(frozen=True)
class _Shipment:
    """A shard, where its pieces are, and its URL."""

    shard: Shard
    pieces: str
    url: str


def _ship(piece: Piece[_Shipment]) -> RemoteState:
    """Put a shard together and upload it."""
    asked = piece.content
    shard, found = asked.shard, look(asked.pieces)
    states = found if isinstance(found, dict) else {}
    runs = sorted((int(name), state.size) for name, state in states.items())
    ends = [len(shard.header), *(offset + size for offset, size in runs)]
    if [offset for offset, _ in runs] != ends[:-1] or ends[-1] != shard.num_bytes:
        raise OutputError(
            f"{asked.pieces}: what jobs have uploaded of {shard.file_name} does not make the whole "
            f"of it, {shard.num_bytes} bytes; start anew with --overwrite"
        )
    blocks = [
        (f"{asked.pieces}/{offset}", size, start, min(start + BLOCK_BYTES, size))
        for offset, size in runs
        for start in range(0, size, BLOCK_BYTES)
    ]
    with _scratch_file() as file:
        file.write(shard.header)
        for i in range(0, len(blocks), _NUM_AT_ONCE):
            own = blocks[i : i + _NUM_AT_ONCE]
            for content in fetching().map(lambda block: read_range(*block), own):
                file.write(content)
        file.flush()
        return put(Path(file.name), asked.url)


def _scratch_file() -> Any:
    """A file on the disk of the cache: a folder for temporary ones may be in memory."""
    cache_root().mkdir(parents=True, exist_ok=True)
    return tempfile.NamedTemporaryFile(prefix="piece-", dir=cache_root())


@contextmanager
def shipping(executor: Distant, files: Mapping[Path, tuple[Shard, str]]) -> Iterator[Put]:
    """What uploads a file: the executor if it is a shard, of which there are only pieces."""
    with executor.opened(_ship) as submit:

        def put_or_ship(file: Path, url: str) -> RemoteState:
            if file not in files:
                return put(file, url)
            shard, pieces = files[file]
            shipment = _Shipment(shard, pieces, url)
            return submit(Piece(shipment, shard.num_bytes, _PEAK_BYTES)).result()

        yield put_or_ship


def forget_pieces(url: str) -> None:
    """Remove all that jobs have uploaded."""
    found = look(url)
    if isinstance(found, dict):
        list(fetching().map(lambda name: delete(f"{url}/{name}"), found))
