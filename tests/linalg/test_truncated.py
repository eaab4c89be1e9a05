import pytest
import torch

from matsmerge.linalg.truncated import truncate


def _moment(dim: int, num_rows: int) -> torch.Tensor:
    rows = torch.randn(num_rows, dim, dtype=torch.float64, generator=torch.manual_seed(dim))
    return rows.mT @ rows / num_rows


def test_all_directions_are_the_matrix_itself() -> None:
    moment = _moment(9, 30)
    kept = truncate(moment, 9)
    torch.testing.assert_close(kept.dense(), moment, rtol=1e-12, atol=1e-12)
    assert kept.rest == 0


@pytest.mark.parametrize("rank", [0, 1, 4, 8])
def test_leading_directions_and_trace_are_kept(rank: int) -> None:
    moment = _moment(9, 30)
    kept = truncate(moment, rank)
    assert kept.trace == pytest.approx(float(moment.trace()), rel=1e-12)
    values, vectors = torch.linalg.eigh(moment)
    top = vectors[:, 9 - rank :]
    torch.testing.assert_close(top.mT @ kept.dense() @ top, torch.diag(values[9 - rank :]))
    outside = torch.linalg.eigvalsh(kept.dense())[: 9 - rank]
    torch.testing.assert_close(outside, values[: 9 - rank].mean().expand(9 - rank))


def test_more_directions_than_there_are() -> None:
    assert truncate(_moment(5, 20), 64).rank == 5
