"""Remote files read at any place, by blocks that are kept on the disk for a while.

A block is fetched when a byte of it is needed, or before by `prefetch`, several at once. All
threads and processes of the machine share the blocks in `CACHE/blocks`; one of them fetches, and
the others wait for it. The oldest go when there are more than `MATSMERGE_CACHE_SIZE` (20 GB).
"""

import errno
import fcntl
import hashlib
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

from matsmerge.byte_sizes import parse_bytes
from matsmerge.files.remote_names import cache_root
from matsmerge.files.remote_store import RemoteState, read_range

BLOCK_BYTES = 8 * 2**20
_NUM_FETCHED = 8  # at once
_NUM_LOCKS = 32
_NUM_AHEAD = 1  # blocks that are fetched before somebody asked for them


@dataclass(frozen=True)
class RemoteFile:
    """A remote file as it was when it was looked up; a pickled copy reads for itself."""

    url: str
    state: RemoteState

    def read(self, start: int, stop: int) -> bytes:
        """Just these bytes, from blocks that are here or by a request of their own."""
        content = bytearray(stop - start)
        if self._read_kept(memoryview(content), start):
            return bytes(content)
        return self._request(start, stop)

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill a buffer with the bytes from an offset on."""
        if offset + len(view) > self.state.size:
            raise OSError(errno.EIO, f"it has {self.state.size} bytes only")
        while len(view):
            index, skip = divmod(offset, BLOCK_BYTES)
            count = _read_block(self._path(index), view, skip)
            if count is None:
                self._fetch(index)
                count = _read_block(self._path(index), view, skip)
            if count is None:  # it had to make room, in this very moment
                stop = min((index + 1) * BLOCK_BYTES, offset + len(view))
                count = stop - offset
                view[:count] = self._request(offset, stop)
            view, offset = view[count:], offset + count

    def _read_kept(self, view: memoryview, offset: int) -> bool:
        """Fill a buffer if all the blocks for it are here."""
        while len(view):
            index, skip = divmod(offset, BLOCK_BYTES)
            count = _read_block(self._path(index), view, skip)
            if count is None:
                return False
            view, offset = view[count:], offset + count
        return True

    def _request(self, start: int, stop: int) -> bytes:
        return read_range(self.url, self.state.size, start, stop)

    def blocks(self) -> Iterator[bytes]:
        """All bytes, a block at a time."""
        for start in range(0, self.state.size, BLOCK_BYTES):
            stop = min(start + BLOCK_BYTES, self.state.size)
            self.prefetch(start, stop)
            content = bytearray(stop - start)
            self.read_into(memoryview(content), start)
            yield bytes(content)

    def prefetch(self, start: int, stop: int) -> None:
        """Begin to fetch what will be read soon, and a little of what probably comes next."""
        last = min((stop - 1) // BLOCK_BYTES + _NUM_AHEAD, (self.state.size - 1) // BLOCK_BYTES)
        for index in range(start // BLOCK_BYTES, last + 1):
            if not self._path(index).exists():
                fetching().submit(self._fetch, index)  # who reads it will see what went wrong

    def _path(self, index: int) -> Path:
        """The file of a block."""
        return blocks_of(self.url) / _digest(self.state.version) / str(index)

    def _fetch(self, index: int) -> None:
        """Fetch a block if it is not there."""
        path = self._path(index)
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_name(f"lock-{index % _NUM_LOCKS}")):
            if not path.exists():
                start = index * BLOCK_BYTES
                content = self._request(start, min(start + BLOCK_BYTES, self.state.size))
                temporary = path.with_name(f"{index}-{os.getpid()}-{threading.get_ident()}")
                temporary.write_bytes(content)
                temporary.replace(path)
                _room.take(len(content))


def _read_block(path: Path, view: memoryview, offset: int) -> int | None:
    """Read from a block's file into a buffer; returns how much, or None if it is not there."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        return os.preadv(file, [view], offset) or None  # somebody cut it
    finally:
        os.close(file)


def cache_bytes() -> int:
    """What the blocks of all files may take."""
    return parse_bytes(os.environ.get("MATSMERGE_CACHE_SIZE", "20GB"))


def blocks_of(url: str) -> Path:
    """The folder with blocks of all versions of a file."""
    return cache_root() / "blocks" / _digest(url)


def forget_blocks(url: str) -> None:
    """Remove the blocks of a file that has changed."""
    shutil.rmtree(blocks_of(url), ignore_errors=True)


def fetching() -> ThreadPoolExecutor:
    """The threads of this process that fetch; a forked one has others."""
    return _threads(os.getpid())


@cache
def _threads(_process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_NUM_FETCHED, "fetching")


class _Room:
    """Keeps the blocks of all files together below the size that is allowed."""

    def __init__(self) -> None:
        self._taken: int | None = None  # since it was last looked at

    def take(self, num_bytes: int) -> None:
        allowed = cache_bytes()
        if self._taken is not None and self._taken + num_bytes < allowed // 16:
            self._taken += num_bytes
            return
        self._taken = 0
        found = []
        for path in (cache_root() / "blocks").glob("*/*/*"):
            with suppress(FileNotFoundError):
                found.append((path.stat().st_mtime_ns, path.stat().st_size, path))
        excess = sum(size for _, size, _ in found) - allowed
        for _, size, path in sorted(found):
            if excess > 0 and size:  # locks are empty
                path.unlink(missing_ok=True)
                excess -= size


_room = _Room()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)  # by closing alone it would stay with forked processes
        os.close(lock)


@lru_cache
def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]
