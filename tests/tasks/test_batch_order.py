import pytest
from hypothesis import given
from hypothesis import strategies as st

from matsmerge.errors import DataError
from matsmerge.tasks.batch_order import make_batches


@given(
    st.lists(st.integers(1, 50), max_size=60),
    st.integers(1, 10),
    st.integers(1, 200),
)
def test_batches(lengths: list[int], batch_size: int, max_tokens: int) -> None:
    batches = make_batches(lengths, batch_size, max_tokens)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert 1 <= len(batch) <= batch_size
        longest = max(lengths[i] for i in batch)
        assert len(batch) == 1 or len(batch) * longest <= max_tokens
    if batches:
        assert max(lengths) in [lengths[i] for i in batches[0]]
    assert batches == make_batches(lengths, batch_size, max_tokens)


def test_similar_lengths_go_together_and_the_order_is_mixed() -> None:
    lengths = list(range(1, 101))
    batches = make_batches(lengths, 5, 10_000)
    assert batches[0] == [99, 98, 97, 96, 95]
    assert all(max(batch) - min(batch) == 4 for batch in batches)
    means = [sum(batch) for batch in batches]
    assert means[1:] != sorted(means[1:], reverse=True)


def test_the_batch_with_the_most_tokens_comes_early() -> None:
    batches = make_batches([100, *[30] * 8, *[1] * 40], 8, 100)
    assert batches[0] == [0]
    assert len(make_batches([60, *[50] * 4], 2, 100)[1]) == 2


def test_sizes_must_be_positive() -> None:
    with pytest.raises(DataError, match="at least 1, found 0 and 5"):
        make_batches([1], 0, 5)
