import pytest
import torch

from matsmerge.linalg.rounding import without_rounding
from matsmerge.linalg.truncated import Truncated, isotropic, truncate


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


def test_fewer_directions_are_as_if_no_more_had_been_kept() -> None:
    moment = _moment(9, 30)
    fewer, expected = truncate(moment, 6).leading(2), truncate(moment, 2)
    assert fewer.rank == 2
    torch.testing.assert_close(fewer.dense(), expected.dense(), rtol=1e-12, atol=1e-12)
    kept = truncate(moment, 2)
    assert kept.leading(3) is kept


def test_more_directions_than_there_are() -> None:
    assert truncate(_moment(5, 20), 64).rank == 5


@pytest.mark.parametrize("rank", [0, 3, 9])
def test_products_and_numbers_are_those_of_the_dense_matrix(rank: int) -> None:
    kept = truncate(_moment(9, 30), rank)
    dense = kept.dense()
    x = torch.randn(4, 9, dtype=torch.float64, generator=torch.manual_seed(1))
    torch.testing.assert_close(kept.after(x), x @ dense)
    torch.testing.assert_close(kept.before(x.mT), dense @ x.mT)
    assert kept.after(x.float()).dtype == torch.float32
    torch.testing.assert_close(kept.diagonal(), dense.diagonal())
    assert kept.norm == pytest.approx(float(dense.norm()))
    assert kept.mean == pytest.approx(float(dense.diagonal().mean()))
    torch.testing.assert_close(kept.raised(0.3).dense(), dense + 0.3 * torch.eye(9))
    torch.testing.assert_close((kept * 0.3).dense(), 0.3 * dense)
    assert kept.is_whole == (rank == 9)
    torch.testing.assert_close(isotropic(4).dense(), torch.eye(4).double())


@pytest.mark.parametrize("ridge", [0.0, 0.1])
@pytest.mark.parametrize("rank", [3, 5, 7, 9])
def test_without_rounding_is_as_for_the_dense_matrix(rank: int, ridge: float) -> None:
    """Of a moment of rank four, after rounding: other directions are no more than that."""
    kept = truncate(_moment(9, 4).float(), rank)
    cleaned = kept.without_rounding(ridge)
    torch.testing.assert_close(
        cleaned.dense(),
        without_rounding(kept.dense(), torch.float32, ridge).double(),
        rtol=0,
        atol=1e-7 * kept.norm,
    )
    assert cleaned.is_singular == (ridge == 0 and rank > 3)
    assert cleaned.rank == min(rank, 4) or ridge > 0


def test_a_regular_moment_loses_nothing() -> None:
    kept = truncate(_moment(9, 30), 4)
    assert not kept.is_singular
    assert torch.equal(kept.without_rounding().dense(), kept.dense())
    assert Truncated(kept.vectors, kept.values, 0.0).is_singular
