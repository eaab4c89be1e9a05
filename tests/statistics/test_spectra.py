"""Effective rank and condition number of known matrices."""

from dataclasses import replace

import pytest
import torch

from matsmerge.errors import StatisticsError
from matsmerge.linalg.truncated import Truncated
from matsmerge.statistics.spectra import spectrum, truncated_spectrum


def test_equal_eigenvalues() -> None:
    found = spectrum(3 * torch.eye(5))
    assert found.dim == 5
    assert found.effective_rank == pytest.approx(5)
    assert found.condition == pytest.approx(1)


def test_a_rotation_changes_nothing() -> None:
    values = torch.tensor([8.0, 4.0, 2.0, 1.0], dtype=torch.float64)
    q = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64)).Q
    for matrix in (values, torch.diag(values), q @ torch.diag(values) @ q.T):
        found = spectrum(matrix)
        shares = values / 15
        assert found.effective_rank == pytest.approx(float((-(shares * shares.log()).sum()).exp()))
        assert found.condition == pytest.approx(8)


def test_what_is_lost_to_rounding_is_singular() -> None:
    assert spectrum(torch.diag(torch.tensor([1.0, 1e-9]))).is_singular
    assert not spectrum(torch.diag(torch.tensor([1.0, 1e-9], dtype=torch.float64))).is_singular
    assert spectrum(torch.zeros(3, 3)).effective_rank == 0
    groups = torch.stack([torch.eye(2), torch.diag(torch.tensor([4.0, 1.0]))])
    assert spectrum(groups).condition == pytest.approx(4)


def test_of_leading_directions() -> None:
    values = torch.tensor([8.0, 4.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    found = truncated_spectrum(Truncated(torch.eye(5, dtype=torch.float64)[:, :2], values[:2], 1.0))
    whole = spectrum(torch.diag(values))
    assert (whole.rank, whole.explained) == (5, 1.0)
    assert found == replace(whole, rank=2, explained=12 / 15)


def test_a_damaged_moment_is_refused() -> None:
    with pytest.raises(StatisticsError, match="NaN or Inf"):
        spectrum(torch.full((3, 3), float("nan")))
