"""Remote files are read by blocks, each fetched once and kept for a while."""

import multiprocessing
import os
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from faulty_store import FaultyStore, failing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from matsmerge.files import remote_file
from matsmerge.files.remote_file import RemoteFile, blocks_of, forget_blocks
from matsmerge.files.remote_store import RemoteState, look

URL = "memory://bucket/file"
CONTENT = bytes(i * 7 % 251 for i in range(1000))


@pytest.fixture
def remote(store: FaultyStore, monkeypatch: pytest.MonkeyPatch) -> RemoteFile:
    monkeypatch.setattr(remote_file, "BLOCK_BYTES", 64)
    monkeypatch.setattr(remote_file, "_room", remote_file._Room())
    store.put("/bucket/file", CONTENT)
    state = look(URL)
    assert isinstance(state, RemoteState)
    FaultyStore.requests.clear()
    return RemoteFile(URL, state)


def read(remote: RemoteFile, start: int, stop: int) -> bytes:
    buffer = bytearray(stop - start)
    remote.read_into(memoryview(buffer), start)
    return bytes(buffer)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(st.integers(0, 1000), st.integers(0, 1000))
def test_any_stretch(remote: RemoteFile, a: int, b: int) -> None:
    start, stop = sorted((a, b))
    assert read(remote, start, stop) == CONTENT[start:stop]


def test_blocks_are_fetched_once_by_whoever_comes_first(remote: RemoteFile) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: read(remote, i, 1000 - i), range(100)))
    assert all(f == CONTENT[i : 1000 - i] for i, f in enumerate(found))
    assert FaultyStore.requests["read"] == 16
    copy = pickle.loads(pickle.dumps(remote))
    assert read(copy, 0, 1000) == CONTENT
    assert b"".join(copy.blocks()) == CONTENT
    assert FaultyStore.requests["read"] == 16


def test_just_some_bytes_come_from_blocks_that_are_here(remote: RemoteFile) -> None:
    read(remote, 100, 250)  # blocks 1 to 3
    FaultyStore.ranges.clear()
    for start, stop in ((64, 256), (70, 70), (70, 200), (255, 256)):
        assert remote.read(start, stop) == CONTENT[start:stop]
    assert not FaultyStore.ranges
    for start, stop in ((0, 65), (200, 257), (900, 1000)):
        assert remote.read(start, stop) == CONTENT[start:stop]
    assert [found[1:] for found in FaultyStore.ranges] == [(0, 65), (200, 257), (900, 1000)]
    assert sorted(int(path.name) for path in kept()) == [1, 2, 3]  # and no more blocks for that


def test_forked_processes_share_them(remote: RemoteFile) -> None:
    list(remote_file.fetching().map(lambda i: read(remote, i, i + 1), range(0, 500, 64)))
    context = multiprocessing.get_context("fork")
    queue = context.Queue()

    def work() -> None:
        remote.prefetch(0, 1000)
        queue.put((read(remote, 0, 1000), FaultyStore.requests["read"]))

    process = context.Process(target=work)
    process.start()
    found, num_requests = queue.get(timeout=60)
    process.join()
    assert found == CONTENT
    assert num_requests == 16
    read(remote, 0, 1000)
    assert FaultyStore.requests["read"] == 8


def test_prefetching_takes_what_comes_next(remote: RemoteFile) -> None:
    remote.prefetch(10, 100)
    remote.prefetch(990, 1000)
    deadline = time.monotonic() + 60
    while FaultyStore.requests["read"] < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    asked = {start for _, start, _ in FaultyStore.ranges}
    assert asked == {0, 64, 128, 960}
    assert read(remote, 0, 192) == CONTENT[:192]
    assert FaultyStore.requests["read"] == 4


def test_failing_to_prefetch_is_said_when_it_is_read(remote: RemoteFile) -> None:
    FaultyStore.fault = failing(1000, OSError("500"))
    remote.prefetch(0, 10)
    with pytest.raises(OSError, match="bytes 0 to 64"):
        read(remote, 0, 10)
    FaultyStore.fault = None
    assert read(remote, 0, 10) == CONTENT[:10]


def test_a_file_that_is_gone(remote: RemoteFile) -> None:
    FaultyStore.store.clear()
    with pytest.raises(FileNotFoundError, match="not there"):
        read(remote, 0, 10)


def test_beyond_the_end(remote: RemoteFile) -> None:
    with pytest.raises(OSError, match="1000 bytes only"):
        read(remote, 990, 1001)


def test_the_oldest_make_room(remote: RemoteFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MATSMERGE_CACHE_SIZE", "256")
    for start in range(0, 1000, 64):
        stop = min(start + 64, 1000)
        assert read(remote, start, stop) == CONTENT[start:stop]
        for block in kept():  # in order of their numbers, whatever the clock's steps
            os.utime(block, (int(block.name), int(block.name)))
        assert sum(block.stat().st_size for block in kept()) <= 256 + 64
    assert max(int(block.name) for block in kept()) == 15
    assert read(remote, 0, 1000) == CONTENT


def test_a_block_that_somebody_cut_is_read_anew(remote: RemoteFile) -> None:
    read(remote, 0, 1000)
    for block, length in zip(sorted(kept()), (0, 10), strict=False):
        os.truncate(block, length)
    assert read(remote, 0, 1000) == CONTENT


def test_blocks_of_another_version_are_others(remote: RemoteFile, store: FaultyStore) -> None:
    read(remote, 0, 1000)
    store.put("/bucket/file", CONTENT[::-1])
    state = look(URL)
    assert isinstance(state, RemoteState)
    assert read(RemoteFile(URL, state), 0, 1000) == CONTENT[::-1]
    assert read(remote, 0, 1000) == CONTENT
    forget_blocks(URL)
    assert not kept()


def kept() -> list[Path]:
    return [path for path in blocks_of(URL).glob("*/*") if path.name.isdecimal()]
