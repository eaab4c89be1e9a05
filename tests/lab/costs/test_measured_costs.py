"""Operations as torch counts them, against counting by hand."""

from collections.abc import Callable

import torch

from matsmerge.lab.costs.run_cost import count_operations, measure_command

Run = Callable[..., tuple[int, str, str]]


def test_products_and_decompositions() -> None:
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    assert count_operations(lambda: a @ b) == 3 * 4 * 5
    symmetric = torch.eye(6)
    assert count_operations(lambda: torch.linalg.eigh(symmetric)) == 9 * 6**3
    assert count_operations(lambda: torch.linalg.cholesky(symmetric)) == 6**3 / 6
    assert count_operations(lambda: a + a) == 0


def test_a_command() -> None:
    found = measure_command(["--version"])
    assert found.seconds > 0
    assert found.peak_bytes > 1_000_000
