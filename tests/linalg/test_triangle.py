"""Triangles of symmetric matrices."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from matsmerge.linalg.triangle import UpperSum, pack_upper, triangle_dim, unpack_upper


@given(st.integers(1, 20), st.integers(0, 3))
def test_packing_is_undone(d: int, num_groups: int) -> None:
    shape = (num_groups, d, d) if num_groups else (d, d)
    a = torch.randn(shape, dtype=torch.float64)
    a = a + a.mT
    packed = pack_upper(a)
    assert packed.shape[-1] == d * (d + 1) // 2
    assert torch.equal(unpack_upper(packed), a)
    assert torch.equal(pack_upper(a.triu()), packed)


def test_not_every_number_is_a_triangle() -> None:
    with pytest.raises(ValueError, match="4 values"):
        triangle_dim(4)


@given(
    st.integers(1, 300),
    st.lists(st.integers(0, 400), max_size=4),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_sums_of_rows_in_any_pieces(d: int, sizes: list[int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(d)
    rows = torch.randn(sum(sizes), d, generator=generator, dtype=dtype)
    total = UpperSum(torch.zeros(d, d, dtype=torch.float64))
    for piece in rows.split(sizes) if sizes else ():
        total.add(piece)
    expected = (rows.double().T @ rows.double()).triu()
    torch.testing.assert_close(total.upper.triu(), expected)
    torch.testing.assert_close(total.upper.triu(), expected)  # asking changes nothing


def test_groups_are_apart() -> None:
    rows = torch.randn(3, 50, 4, dtype=torch.float64)
    total = UpperSum(torch.zeros(3, 4, 4, dtype=torch.float64))
    total.add(rows[:, :20])
    total.add(rows[:, 20:])
    torch.testing.assert_close(total.upper.triu(), (rows.mT @ rows).triu())
