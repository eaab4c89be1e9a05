"""Every operator is its dense matrix, made by hand, on the parameter flattened row by row."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from matsmerge.linalg.operators import (
    Diagonal,
    Gram,
    Identity,
    Kronecker,
    LowRank,
    Operator,
    Sum,
    TruncatedProduct,
)
from matsmerge.linalg.truncated import Truncated, isotropic, truncate

few = settings(max_examples=20, deadline=None)
seeds = st.integers(0, 2**31)
widths = st.integers(1, 6)
dtypes = st.sampled_from([torch.float32, torch.float64])
KINDS = (
    "identity",
    "diagonal",
    "one diagonal for all outputs",
    "gram",
    "low rank",
    "kronecker",
    "kronecker with diagonal inputs",
    "truncated",
    "truncated inputs alone",
    "truncated outputs alone",
    "truncated gram",
)
GROUPED_KINDS = ("identity", "diagonal", "gram", "kronecker")


@dataclass
class Draw:
    """Random operators on parameters of one shape, each beside its dense float64 matrix."""

    shape: tuple[int, ...]  # (out, in) or (groups, out, in)
    dtype: torch.dtype
    generator: torch.Generator

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def factor(self, d: int) -> Tensor:
        """Positive semi-definite, and singular now and then: d rows or fewer."""
        num_rows = int(torch.randint(1, d + 1, (), generator=self.generator))
        rows = self.normal(*self.shape[:-2], num_rows, d)
        return rows.mT @ rows

    def truncated(self, d: int) -> Truncated:
        rank = int(torch.randint(0, d + 1, (), generator=self.generator))
        return truncate(self.factor(d), rank)

    def __call__(self, kind: str) -> tuple[Operator, Tensor]:
        *groups, num_out, num_in = self.shape
        num_groups = groups[0] if groups else 1
        eye = torch.eye(num_out, dtype=torch.float64)
        match kind:
            case "identity":
                scale = float(self.normal(1).abs())
                size = num_groups * num_out * num_in
                return Identity(scale), scale * torch.eye(size, dtype=torch.float64)
            case "diagonal":
                values = self.normal(*self.shape).square()
                return Diagonal(values), torch.diag(values.double().flatten())
            case "one diagonal for all outputs":
                values = self.normal(num_in).square()
                return Diagonal(values), torch.kron(eye, torch.diag(values.double()))
            case "gram":
                matrix = self.factor(num_in)
                blocks = matrix.double().reshape(num_groups, num_in, num_in)
                return Gram(matrix), torch.block_diag(*(torch.kron(eye, g) for g in blocks))
            case "low rank":
                rows = self.normal(3, num_in)
                z = rows.double()
                return LowRank(rows, 0.7), torch.kron(eye, 0.7 * z.T @ z)
            case "kronecker":
                outputs, inputs = self.factor(num_out), self.factor(num_in)
                pairs = zip(
                    outputs.double().reshape(num_groups, num_out, num_out),
                    inputs.double().reshape(num_groups, num_in, num_in),
                    strict=True,
                )
                dense = torch.block_diag(*(torch.kron(o, g) for o, g in pairs))
                return Kronecker(outputs, inputs, 0.5, 3.0), 1.5 * dense
            case "kronecker with diagonal inputs":
                outputs, inputs = self.factor(num_out), self.normal(num_in).square()
                dense = torch.kron(outputs.double(), torch.diag(inputs.double()))
                return Kronecker(outputs, inputs), dense
            case "truncated":
                o, g = self.truncated(num_out), self.truncated(num_in)
                return TruncatedProduct(o, g, 0.3), 0.3 * torch.kron(o.dense(), g.dense())
            case "truncated inputs alone":
                whole, g = self.factor(num_out), self.truncated(num_in)
                return TruncatedProduct(whole, g), torch.kron(whole.double(), g.dense())
            case "truncated outputs alone":
                o, whole = self.truncated(num_out), self.factor(num_in)
                return TruncatedProduct(o, whole), torch.kron(o.dense(), whole.double())
            case "truncated gram":
                g = self.truncated(num_in)
                return TruncatedProduct(isotropic(num_out), g), torch.kron(eye, g.dense())
        raise AssertionError(kind)


@st.composite
def draws(draw: st.DrawFn, num_kinds: int) -> tuple[Draw, list[str]]:
    """A shape, and kinds that go with it."""
    num_groups = draw(st.integers(0, 3))
    out_in = draw(widths), draw(widths)
    kinds = draw(
        st.lists(
            st.sampled_from(GROUPED_KINDS if num_groups else KINDS),
            min_size=num_kinds,
            max_size=num_kinds,
        )
    )
    generator = torch.Generator().manual_seed(draw(seeds))
    shape = (num_groups, *out_in) if num_groups else out_in
    return Draw(shape, draw(dtypes), generator), kinds


def apply_dense(matrix: Tensor, x: Tensor) -> Tensor:
    return (matrix @ x.double().flatten()).view(x.shape)


def assert_is(operator: Operator, matrix: Tensor, draw: Draw, digits: float = 1e-13) -> None:
    """It multiplies like the matrix, in the precision of what it is given, and has its diagonal."""
    for dtype, error in ((torch.float64, digits), (torch.float32, 1e-5)):
        x = draw.normal(*draw.shape).to(dtype)
        before = x.clone()
        result = operator(x)
        assert result.dtype == dtype
        assert torch.equal(x, before)
        atol = error * float(matrix.norm() * x.double().norm())
        torch.testing.assert_close(result.double(), apply_dense(matrix, x), rtol=0, atol=atol)
    diagonal = operator.diagonal().double().expand(draw.shape).flatten()
    torch.testing.assert_close(diagonal, matrix.diagonal(), rtol=10 * digits, atol=0)


@few
@given(st.data())
@pytest.mark.parametrize("kind", KINDS)
def test_is_its_dense_matrix(kind: str, data: st.DataObject) -> None:
    shape = data.draw(widths), data.draw(widths)
    generator = torch.Generator().manual_seed(data.draw(seeds))
    draw = Draw(shape, data.draw(dtypes), generator)
    assert_is(*draw(kind), draw)


@few
@given(st.data())
@pytest.mark.parametrize("kind", GROUPED_KINDS)
def test_groups_are_blocks(kind: str, data: st.DataObject) -> None:
    shape = data.draw(st.integers(1, 3)), data.draw(widths), data.draw(widths)
    generator = torch.Generator().manual_seed(data.draw(seeds))
    draw = Draw(shape, data.draw(dtypes), generator)
    assert_is(*draw(kind), draw)


@settings(max_examples=100, deadline=None)
@given(draws(num_kinds=3), st.lists(st.floats(1e-12, 1e3), min_size=3, max_size=3))
def test_weighted_sums_are_the_dense_sums(
    drawn: tuple[Draw, list[str]], weights: list[float]
) -> None:
    draw, kinds = drawn
    # Scaling and adding float32 statistics rounds them.
    digits = 1e-13 if draw.dtype == torch.float64 else 1e-6
    terms = [draw(kind) for kind in kinds]
    a, b, c = (operator * weight for (operator, _), weight in zip(terms, weights, strict=True))
    dense = [matrix * weight for (_, matrix), weight in zip(terms, weights, strict=True)]
    for total in ((a + b) + c, a + (b + c), (c + a) + b):
        assert_is(total, dense[0] + dense[1] + dense[2], draw, digits)
    for operator, matrix in zip((a, b, c), dense, strict=True):
        assert_is(operator, matrix, draw, digits)  # adding leaves the terms as they were


@settings(max_examples=100, deadline=None)
@given(draws(num_kinds=2), st.floats(-5, 5))
def test_symmetric_linear_and_positive(drawn: tuple[Draw, list[str]], number: float) -> None:
    draw, kinds = drawn
    operators = [draw(kind)[0] for kind in kinds]
    for operator in (*operators, operators[0] + operators[1]):
        x, y = (draw.normal(*draw.shape).double() for _ in range(2))
        ax, ay = operator(x), operator(y)
        size = float(ax.norm() + ay.norm()) * float(x.norm() + y.norm()) + 1e-300
        assert float((y * ax).sum()) == pytest.approx(float((x * ay).sum()), abs=1e-12 * size)
        assert float((x * ax).sum()) >= -1e-12 * size
        linear = operator(x + number * y)
        torch.testing.assert_close(linear, ax + number * ay, rtol=0, atol=1e-12 * 10 * size)


SAME_KIND: dict[str, tuple[str, str, type[Operator]]] = {
    "identities": ("identity", "identity", Identity),
    "diagonals": ("diagonal", "diagonal", Diagonal),
    "a diagonal of fewer values": ("one diagonal for all outputs", "diagonal", Diagonal),
    "diagonal and identity": ("diagonal", "identity", Diagonal),
    "Grams": ("gram", "gram", Gram),
    "Gram and identity": ("gram", "identity", Gram),
    "low ranks": ("low rank", "low rank", Sum),
    "Gram and low rank": ("gram", "low rank", Sum),
    "Gram and diagonal": ("gram", "diagonal", Sum),
    "Kroneckers": ("kronecker", "kronecker", Sum),
    "Kronecker and identity": ("kronecker", "identity", Sum),
}


@few
@given(seeds, widths, widths)
@pytest.mark.parametrize("case", list(SAME_KIND))
def test_sums_stay_of_their_kind(case: str, seed: int, num_out: int, num_in: int) -> None:
    first, second, expected = SAME_KIND[case]
    draw = Draw((num_out, num_in), torch.float64, torch.Generator().manual_seed(seed))
    (a, dense_a), (b, dense_b) = draw(first), draw(second)
    for total in (a + b, b + a):
        assert type(total) is expected
        assert_is(total, dense_a + dense_b, draw)
        assert type(total * 2.0) is expected
        assert_is(total * 2.0, 2 * (dense_a + dense_b), draw)


def test_sums_of_sums_are_flat_and_know_their_kroneckers() -> None:
    draw = Draw((2, 3), torch.float64, torch.Generator().manual_seed(0))
    a, b, c = (draw("kronecker")[0] for _ in range(3))
    total = (a + b) + (c + a)
    assert isinstance(total, Sum)
    assert total.kroneckers() == [a, b, c, a]
    assert Sum((a, draw("gram")[0])).kroneckers() is None
    with_identity = Identity(0.5) + total
    assert isinstance(with_identity, Sum)
    assert len(with_identity.terms) == 5


ADDABLE: list[Callable[[Tensor], Operator]] = [Diagonal, lambda values: Gram(torch.diag(values))]


@pytest.mark.parametrize("make", ADDABLE, ids=["diagonal", "gram"])
def test_sums_keep_the_finer_precision_in_either_order(make: Callable[[Tensor], Operator]) -> None:
    coarse = make(torch.ones(2))
    fine = make(torch.full((2,), 1e-9, dtype=torch.float64))
    one = torch.ones(1, 2, dtype=torch.float64)
    for total in (coarse + fine, fine + coarse):
        torch.testing.assert_close(total(one), torch.full_like(one, 1 + 1e-9), rtol=1e-15, atol=0)


@few
@given(seeds, widths, st.integers(1, 9))
def test_low_rank_is_the_gram_of_its_rows(seed: int, num_in: int, num_rows: int) -> None:
    rows = torch.randn(num_rows, num_in, generator=torch.Generator().manual_seed(seed))
    expected = 0.3 * rows.double().T @ rows.double()
    dense = LowRank(rows, 0.3).dense()
    torch.testing.assert_close(dense.matrix, expected, rtol=1e-12, atol=1e-14)
    x = torch.ones(4, num_in, dtype=torch.float64)
    torch.testing.assert_close(LowRank(rows, 0.3)(x), dense(x), rtol=1e-10, atol=1e-12)
