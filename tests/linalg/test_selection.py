import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from matsmerge.linalg import selection
from matsmerge.linalg.selection import (
    Bracket,
    add_tallies,
    bracket_quantile,
    kth_largest,
    tally,
)


def select(values: NDArray[np.float32], k: int, start: Bracket, num_parts: int = 7) -> float:
    """Run passes over parts of the values until the k-th largest is found."""
    bracket = start
    for _ in range(8):
        tallies = [tally(part, bracket) for part in np.array_split(values, num_parts)]
        found = kth_largest(k, add_tallies(tallies), bracket)
        if isinstance(found, float):
            return found
        bracket = found
    raise AssertionError("did not end")


@settings(max_examples=200, deadline=None)
@given(
    values=st.lists(
        st.floats(0, 10, width=32) | st.sampled_from([0.0, 1.0, 2.0]), min_size=1, max_size=60
    ),
    data=st.data(),
)
def test_any_bracket_leads_to_the_kth_largest(values: list[float], data: st.DataObject) -> None:
    array = np.array(values, dtype=np.float32)
    k = data.draw(st.integers(1, len(values)))
    low, high = sorted(data.draw(st.tuples(st.floats(0, 11), st.floats(0, 11))))
    assert select(array, k, Bracket(low, high)) == np.sort(array)[::-1][k - 1]


def test_a_sampled_bracket_holds_the_value_and_is_narrow() -> None:
    rng = np.random.default_rng(0)
    values = np.abs(rng.standard_normal(1 << 20)).astype(np.float32)
    blocks = [values[start : start + 512] for start in range(0, len(values), 1 << 13)]
    bracket = bracket_quantile(blocks, 0.2)
    k = int(0.2 * len(values))
    seen = add_tallies([tally(values, bracket)])
    assert kth_largest(k, seen, bracket) == np.partition(values, -k)[-k]
    assert seen.counts.sum() < 0.05 * len(values)


def test_equal_values_are_counted_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "MAX_REPEATED", 10)
    values = np.repeat(np.array([1.0, 2.0, 3.0], dtype=np.float32), 100)
    seen = add_tallies([tally(values, Bracket()), tally(values, Bracket())])
    assert len(seen.inside) <= 10
    assert seen.counts.sum() == 600
    assert kth_largest(201, seen, Bracket()) == 2.0


@settings(max_examples=100, deadline=None)
@given(parts=st.lists(st.lists(st.sampled_from([0.5, 1.0, 2.5, 7.0]), max_size=40), min_size=1))
def test_counts_are_those_of_single_values(parts: list[list[float]]) -> None:
    """However often tallies of tallies are added up, of values seen once or many times."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(selection, "MAX_REPEATED", 5)
        tallies = [tally(np.array(part, dtype=np.float32), Bracket(0.6, 5)) for part in parts]
        seen = add_tallies([add_tallies(tallies[:1]), *tallies[1:]])
    everything = [value for part in parts for value in part]
    found: dict[float, int] = {}
    for value, count in zip(seen.inside.tolist(), seen.counts.tolist(), strict=True):
        found[value] = found.get(value, 0) + count
    assert found == {v: everything.count(v) for v in (1.0, 2.5) if v in everything}
    assert seen.num_above == everything.count(7.0)
    assert seen.counts.dtype == np.int64
