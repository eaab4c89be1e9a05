import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from matsmerge import CheckpointError, open_checkpoint
from matsmerge.checkpoints.checkpoint import Buffer, Checkpoint
from matsmerge.errors import ResourceError

VALUES = torch.arange(1000, dtype=torch.float32)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    save_file({"w": VALUES}, tmp_path / "model.safetensors")
    return open_checkpoint(tmp_path / "model.safetensors")


def failing(code: int) -> Callable[..., int]:
    def fail(*_: Any) -> int:
        raise OSError(code, os.strerror(code))

    return fail


def test_elements_are_read_from_any_place(checkpoint: Checkpoint) -> None:
    assert torch.equal(checkpoint.read("w", 17, 900), VALUES[17:900])


def test_a_part_of_a_buffer_is_filled_and_the_rest_stays(checkpoint: Checkpoint) -> None:
    whole = Buffer(8, torch.float32)
    whole.tensor.fill_(-1)
    part = whole.first(3)
    checkpoint.read_into(part, "w", 5)
    assert part.on_device().tolist() == [5, 6, 7]
    assert whole.tensor.tolist() == [5, 6, 7, -1, -1, -1, -1, -1]
    assert whole.first(8) is whole


def test_a_short_read_is_continued(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    read = os.preadv

    def read_little(file: int, views: Sequence[memoryview], offset: int) -> int:
        return read(file, [views[0][:12]], offset)

    monkeypatch.setattr(os, "preadv", read_little)
    assert torch.equal(checkpoint.read("w", 3, 40), VALUES[3:40])


def test_a_file_that_was_cut_is_named(checkpoint: Checkpoint, tmp_path: Path) -> None:
    os.truncate(tmp_path / "model.safetensors", 500)
    with pytest.raises(CheckpointError, match=r"model.safetensors: ended while reading tensor 'w'"):
        checkpoint.read("w", 0, 1000)


def test_a_file_that_cannot_be_read_any_more_is_named(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "preadv", failing(errno.EIO))
    with pytest.raises(ResourceError, match="model.safetensors: cannot be read any more"):
        checkpoint.read("w", 0, 10)


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="this system does not say what it has")
@pytest.mark.parametrize(
    ("look", "is_asked_for"),
    [
        (lambda *_: 1, False),
        (failing(errno.EAGAIN), True),  # it would have to be waited for
        (failing(errno.EOPNOTSUPP), True),
    ],
)
def test_only_what_is_not_in_memory_is_asked_for(
    checkpoint: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    look: Callable[..., int],
    is_asked_for: bool,
) -> None:
    checkpoint.read("w", 0, 1)
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "preadv", look)
    monkeypatch.setattr(os, "posix_fadvise", lambda _, start, size, __: asked.append((start, size)))
    checkpoint.prefetch("w", 100, 300)
    assert [size for _, size in asked] == ([800] if is_asked_for else [])


def test_nothing_is_prefetched_without_harm(checkpoint: Checkpoint) -> None:
    checkpoint.prefetch("w", 7, 7)
    checkpoint.prefetch("w", 7, 8)
    assert checkpoint.read("w", 7, 8).item() == 7
