"""Tensors in memory while there is room, and in a file beyond it."""

import gc

import pytest
import torch

from matsmerge.statistics.held_tensors import Room, Shelf
from matsmerge.statistics.own_inputs import OwnInputs
from matsmerge.statistics.sequence_part import SequencePart

TENSORS = [
    torch.randn(3, 4, 5),
    torch.randn(4, 6, dtype=torch.float64).mT,
    torch.randn(7).bfloat16(),
    torch.arange(5),
    torch.tensor([True, False]),
    torch.tensor(2.5),
    torch.zeros(0, 3),
]


@pytest.mark.parametrize("max_bytes", [None, 0, 300])
def test_what_is_kept_comes_back(max_bytes: int | None) -> None:
    shelf = Shelf(Room(max_bytes))
    kept = [shelf.keep(values) for values in TENSORS]
    for values, one in reversed([*zip(TENSORS, kept, strict=True)]):
        found = one.load()
        assert found.dtype == values.dtype
        assert torch.equal(found, values)
        assert one.nbytes == values.nbytes


@pytest.mark.parametrize("max_bytes", [None, 0])
def test_what_is_kept_does_not_change(max_bytes: int | None) -> None:
    values = torch.ones(4)
    kept = Shelf(Room(max_bytes)).keep(values)
    values.zero_()
    assert torch.equal(kept.load(), torch.ones(4))


def test_room_is_given_back() -> None:
    room = Room(40)
    shelf = Shelf(room)
    first, second = shelf.keep(torch.ones(6)), shelf.keep(torch.ones(6))
    assert room.num_bytes == 24  # the second is in a file
    del first
    gc.collect()
    assert room.num_bytes == 0
    third = shelf.keep(torch.zeros(10))
    assert room.num_bytes == 40
    assert torch.equal(second.load(), torch.ones(6))
    assert torch.equal(third.load(), torch.zeros(10))


def test_inputs_of_some_sequences() -> None:
    room = Room()
    own = OwnInputs(room)
    shared, windows = torch.randn(3, 2, 4), torch.randn(6, 4)  # two windows for each sequence
    own.note(0, "query", shared)
    own.note(0, "key", shared)
    own.note(0, "windows", windows)
    own.note(0, "windows", -windows)
    own.end_batch()
    assert room.num_bytes == shared.nbytes + 2 * windows.nbytes
    for chosen, rows in ((None, range(3)), ((2, 0), (2, 0)), ((1, 1), (1, 1))):
        own.show(SequencePart(0, 3, chosen))
        assert torch.equal(own.take("query"), shared[[*rows]])
        assert torch.equal(own.take("key"), shared[[*rows]])
        of_windows = [w for row in rows for w in (2 * row, 2 * row + 1)]
        assert torch.equal(own.take("windows"), windows[of_windows])
        assert torch.equal(own.take("windows"), -windows[of_windows])
    own.forget(["query", "windows"])
    assert room.num_bytes == shared.nbytes
    own.forget(["key"])
    assert room.num_bytes == 0
