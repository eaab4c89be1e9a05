"""The order of examples: random, repeatable, and with the shares asked for."""

from collections import Counter

from matsmerge.lab.training.example_order import ExampleOrder


def test_every_example_once_in_an_order_of_the_epoch() -> None:
    order = ExampleOrder(100, seed=3)
    first = list(order)
    assert sorted(first) == list(range(100)) != first
    assert list(order) == first == list(ExampleOrder(100, seed=3))
    order.set_epoch(1)
    assert sorted(order) == list(range(100))
    assert list(order) != first
    assert list(ExampleOrder(100, seed=4)) != first


def test_examples_of_similar_length_are_together() -> None:
    lengths = [(7 * i) % 101 for i in range(103)]
    order = ExampleOrder(103, seed=0, batch_size=10, lengths=lengths)
    indices = list(order)
    assert sorted(indices) == list(range(103))
    batches = [indices[i : i + 10] for i in range(0, 103, 10)]
    spreads = [max(lengths[i] for i in b) - min(lengths[i] for i in b) for b in batches]
    assert max(spreads) <= 12
    longest = [max(lengths[i] for i in b) for b in batches]
    assert longest != sorted(longest, reverse=True)
    assert list(order) == indices


def test_equal_shares() -> None:
    groups = [0] * 70 + [1] * 4 + [2] * 16
    indices = list(ExampleOrder(90, seed=0, groups=groups))
    assert Counter(groups[i] for i in indices) == {0: 30, 1: 30, 2: 30}
    times = Counter(indices)
    assert max(times[i] for i in range(70)) == 1
    assert {times[i] for i in range(70, 74)} == {7, 8}
    assert {times[i] for i in range(74, 90)} == {1, 2}
    assert len(indices) == len(ExampleOrder(90, seed=0, groups=groups)) == 90
