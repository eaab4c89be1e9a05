"""Random numbers of places: the same whoever draws them, others for other places."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from matsmerge.methods.draws import _CHUNK_ELEMENTS, LEVELS, draw
from matsmerge.methods.site import Shares, Site, SiteTask

NUM = 3 * _CHUNK_ELEMENTS + 100


def read(start: int, stop: int, out: Tensor | None = None) -> Tensor:
    return torch.zeros(stop - start)


def drawn(
    start: int = 0, stop: int = NUM, seed: int = 0, model: str = "a", parameter: str = "w"
) -> NDArray[np.uint16]:
    task = SiteTask(model, 1.0, Shares(), start, stop, read)
    return draw(seed, Site(parameter, (NUM,), start, stop, (task,), read), task)


WHOLE = drawn()


@given(st.integers(0, NUM - 1), st.integers(0, NUM))
def test_a_stretch_has_the_numbers_of_its_place(start: int, length: int) -> None:
    """So that blocks of any size, done anywhere, are the same merge."""
    stop = min(NUM, start + length + 1)
    assert np.array_equal(drawn(start, stop), WHOLE[start:stop])


@pytest.mark.parametrize("other", [{"seed": 1}, {"model": "b"}, {"parameter": "v"}])
def test_other_places_have_other_numbers(other: dict[str, int | str]) -> None:
    found = drawn(**other)  # type: ignore[arg-type]
    assert found.shape == WHOLE.shape
    # Of independent numbers one in 65,536 is the same.
    assert (found == WHOLE).mean() < 0.001


def test_chunks_differ_from_each_other() -> None:
    first, second = WHOLE[:_CHUNK_ELEMENTS], WHOLE[_CHUNK_ELEMENTS : 2 * _CHUNK_ELEMENTS]
    assert (first == second).mean() < 0.001


def test_they_are_uniform() -> None:
    assert WHOLE.dtype == np.uint16
    assert int(WHOLE.max()) < LEVELS
    shares = np.bincount(WHOLE // (LEVELS // 16), minlength=16) / NUM
    # The standard deviation of a share of 1/16 over so many numbers is 0.0005.
    assert np.abs(shares - 1 / 16).max() < 0.004
    assert abs(WHOLE.mean() / (LEVELS - 1) - 0.5) < 0.005


@pytest.mark.parametrize("names", [("a\0b", "c"), ("a", "b\0c"), ("ä", "w"), ("", "")])
def test_any_names(names: tuple[str, str]) -> None:
    model, parameter = names
    assert len(drawn(0, 10, model=model, parameter=parameter)) == 10
