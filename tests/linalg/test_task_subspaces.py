"""Sums of truncated products: each of the four parts, and all of them, against dense matrices."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from matsmerge.linalg.operators import Diagonal, Gram, Identity, Kronecker, Sum, TruncatedProduct
from matsmerge.linalg.task_subspaces import (
    Apart,
    Coordinates,
    dense_factor,
    fall_apart,
    falls_apart,
    fills_space,
    in_full,
    is_truncated,
    products_of,
)
from matsmerge.linalg.truncated import Factor, Truncated, isotropic, truncate

F64 = torch.float64
SHAPE = torch.Size((9, 11))


def moment(d: int, generator: torch.Generator) -> Tensor:
    rows = torch.randn(3 * d, d, dtype=F64, generator=generator)
    return rows.mT @ rows / (3 * d)


def make_products(
    ranks: list[tuple[int | None, int | None]], seed: int = 0
) -> list[TruncatedProduct]:
    """Products of some ranks; None is a whole matrix."""
    generator = torch.Generator().manual_seed(seed)

    def make(d: int, rank: int | None) -> Factor:
        whole = moment(d, generator)
        return whole if rank is None else truncate(whole, rank)

    return [
        TruncatedProduct(make(SHAPE[0], of_outputs), make(SHAPE[1], of_inputs), 0.5 + m)
        for m, (of_outputs, of_inputs) in enumerate(ranks)
    ]


def dense_sum(products: list[TruncatedProduct]) -> Tensor:
    return torch.stack(
        [p.scale * torch.kron(dense_factor(p.outputs), dense_factor(p.inputs)) for p in products]
    ).sum(0)


CASES = {
    "both": [(2, 3), (1, 2), (3, 1)],
    "whole outputs": [(None, 2), (None, 3)],
    "whole inputs": [(2, None), (3, None)],
    "one whole among others": [(None, 2), (2, 3), (1, 2)],
    "outputs that fill the space": [(5, 2), (4, 3)],
    "a gram": [(0, 2), (0, 3)],
}
cases = pytest.mark.parametrize("ranks", CASES.values(), ids=CASES)


def project(apart: Apart) -> dict[str, tuple[Tensor, Tensor]]:
    """The projections, from the left and the right, onto each of the four parts."""
    inside_o, inside_i = apart.v @ apart.v.mT, apart.u @ apart.u.mT
    outside_o = torch.eye(SHAPE[0], dtype=F64) - inside_o
    outside_i = torch.eye(SHAPE[1], dtype=F64) - inside_i
    return {
        "inner": (inside_o, inside_i),
        "left": (inside_o, outside_i),
        "right": (outside_o, inside_i),
        "rest": (outside_o, outside_i),
    }


@cases
def test_bases_are_orthonormal_and_hold_all_directions(
    ranks: list[tuple[int | None, int | None]],
) -> None:
    products = make_products(ranks)
    apart = fall_apart(products, F64)
    for basis, factors in (
        (apart.v, [p.outputs for p in products]),
        (apart.u, [p.inputs for p in products]),
    ):
        torch.testing.assert_close(basis.mT @ basis, torch.eye(basis.shape[1], dtype=F64))
        for factor in factors:
            if not isinstance(factor, Tensor):
                held = basis @ (basis.mT @ factor.vectors)
                torch.testing.assert_close(held, factor.vectors)


@pytest.mark.parametrize("part", ["inner", "left", "right", "rest"])
@cases
def test_each_part_is_mapped_to_itself_as_the_dense_operator_does(
    ranks: list[tuple[int | None, int | None]], part: str
) -> None:
    products = make_products(ranks)
    apart = fall_apart(products, F64)
    x = torch.randn(*SHAPE, dtype=F64, generator=torch.Generator().manual_seed(1))
    before, after = project(apart)[part]
    x = before @ x @ after
    image = (dense_sum(products) @ x.flatten()).view(SHAPE)
    torch.testing.assert_close(before @ image @ after, image)
    v, u, border = apart.v, apart.u, apart.border
    if part == "inner":
        found = v @ Sum(tuple(apart.inner))(v.mT @ x @ u) @ u.mT if apart.has_inner else x
    elif part == "left":
        found = v @ (border[:-1, -1:] * (v.mT @ x))
    elif part == "right":
        found = ((x @ u) * border[-1, :-1]) @ u.mT
    else:
        found = x * border[-1, -1]
    torch.testing.assert_close(found, image)


@cases
def test_coordinates_are_lengths_along_orthonormal_directions(
    ranks: list[tuple[int | None, int | None]],
) -> None:
    apart = fall_apart(make_products(ranks), F64)
    generator = torch.Generator().manual_seed(2)
    residual = torch.randn(*SHAPE, dtype=F64, generator=generator)
    seen_from = Coordinates(apart, residual)
    torch.testing.assert_close(seen_from.enter(residual), seen_from.residual)
    torch.testing.assert_close(seen_from.leave(seen_from.residual), residual)
    x = torch.where(seen_from.residual != 0, 1.0, 0.0) * torch.randn(
        seen_from.residual.shape, dtype=F64, generator=generator
    )
    y = torch.randn(*SHAPE, dtype=F64, generator=generator)
    torch.testing.assert_close(seen_from.enter(seen_from.leave(x)), x)
    assert float((seen_from.leave(x) * y).sum()) == pytest.approx(
        float((x * seen_from.enter(y)).sum())
    )


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=4),
    st.integers(0, 2**31),
)
def test_the_eigenvalues_are_those_of_the_dense_operator(
    ranks: list[tuple[int, int]], seed: int
) -> None:
    """Each of the border counts as often as there are directions that it stands for."""
    products = make_products(list(ranks), seed)
    apart = fall_apart(products, F64)
    values = []
    if apart.has_inner:
        values.append(torch.linalg.eigvalsh(dense_sum(apart.inner)))
    counts = apart.multiplicity.clone()
    counts[:-1, :-1] = 0
    values.append(apart.border.flatten().repeat_interleave(counts.flatten().long()))
    expected = torch.linalg.eigvalsh(dense_sum(products))
    torch.testing.assert_close(torch.cat(values).sort().values, expected)


def test_directions_that_several_models_share_do_no_harm() -> None:
    one = make_products([(2, 3)])[0]
    products = [one, one * 2.0]
    apart = fall_apart(products, F64)
    residual = torch.randn(*SHAPE, dtype=F64, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(
        Coordinates(apart, residual).leave(Coordinates(apart, residual).residual), residual
    )
    torch.testing.assert_close(apart.border[-1, -1], torch.tensor(3.0 * _rest(one), dtype=F64))


def _rest(product: TruncatedProduct) -> float:
    assert not isinstance(product.outputs, Tensor)
    assert not isinstance(product.inputs, Tensor)
    return product.scale * product.outputs.rest * product.inputs.rest


def test_where_no_model_has_anything_the_border_is_zero() -> None:
    generator = torch.Generator().manual_seed(4)
    rows = torch.randn(2, SHAPE[1], dtype=F64, generator=generator)
    inputs = truncate(rows.mT @ rows, 2)
    assert inputs.rest < 1e-12
    products = [TruncatedProduct(isotropic(SHAPE[0]), inputs)]
    apart = fall_apart(products, torch.float32)
    assert float(apart.border[-1, -1]) == 0
    assert not apart.is_border_full
    assert not apart.is_regular


def test_kinds_of_operators() -> None:
    product = make_products([(2, 3)])[0]
    whole = Kronecker(torch.eye(SHAPE[0]), torch.eye(SHAPE[1]))
    assert is_truncated(product)
    assert falls_apart(product + Identity(0.1))
    assert falls_apart(product + whole)
    assert not falls_apart(product + Diagonal(torch.ones(1, SHAPE[1])))
    assert not is_truncated(whole)
    assert not fills_space(product, SHAPE)
    assert fills_space(product + whole, SHAPE)
    assert fills_space(TruncatedProduct(isotropic(SHAPE[0]), truncate(torch.eye(11), 11)), SHAPE)


def test_in_full_is_the_same_operator() -> None:
    x = torch.randn(*SHAPE, dtype=F64, generator=torch.Generator().manual_seed(5))
    near = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)  # regular ones are in float32
    products = make_products([(2, 3), (None, 4)])
    operator = products[0] + products[1] + Identity(0.2)
    found = in_full(operator, SHAPE)
    assert isinstance(found, Sum)
    assert found.kroneckers() is not None
    near(found(x), operator(x))

    grams = make_products([(0, 3), (0, 4)])
    beside = Diagonal(torch.arange(1.0, 12.0)[None])
    operator = grams[0] + Gram(torch.eye(11)) + beside + Identity(0.2)
    found = in_full(operator, SHAPE)
    assert isinstance(found, Gram)
    torch.testing.assert_close(found(x), operator(x))
    assert len(products_of(operator, SHAPE)) == 3


@pytest.mark.parametrize("angle", [1e-1, 1e-4, 1e-9, 0.0])
def test_bases_of_directions_that_are_nearly_the_same(angle: float) -> None:
    """Whichever way a basis is found, it is orthonormal, holds all, and the parts are apart."""
    generator = torch.Generator().manual_seed(6)
    first = make_products([(2, 3)])[0]
    products = [first]
    for _ in range(2):
        factors = []
        for one in (first.outputs, first.inputs):
            assert isinstance(one, Truncated)
            noise = torch.randn(one.vectors.shape, dtype=F64, generator=generator)
            vectors = torch.linalg.qr(one.vectors + angle * noise).Q
            factors.append(Truncated(vectors, one.values, one.rest))
        products.append(TruncatedProduct(factors[0], factors[1]))
    apart = fall_apart(products, F64)
    for basis, vectors in (
        (apart.v, [p.outputs.vectors for p in products if isinstance(p.outputs, Truncated)]),
        (apart.u, [p.inputs.vectors for p in products if isinstance(p.inputs, Truncated)]),
    ):
        torch.testing.assert_close(basis.mT @ basis, torch.eye(basis.shape[1], dtype=F64))
        for one in vectors:
            torch.testing.assert_close(basis @ (basis.mT @ one), one, rtol=1e-9, atol=1e-10)
    x = torch.randn(*SHAPE, dtype=F64, generator=generator)
    image = (dense_sum(products) @ x.flatten()).view(SHAPE)
    v, u, border = apart.v, apart.u, apart.border
    for part, (before, after) in project(apart).items():
        y = before @ x @ after
        found = {
            "inner": v @ Sum(tuple(apart.inner))(v.mT @ y @ u) @ u.mT,
            "left": v @ (border[:-1, -1:] * (v.mT @ y)),
            "right": ((y @ u) * border[-1, :-1]) @ u.mT,
            "rest": y * border[-1, -1],
        }[part]
        torch.testing.assert_close(found, before @ image @ after, rtol=1e-8, atol=1e-9)


def test_lengths_of_what_is_next_to_nothing_beside_the_rest_of_a_residual() -> None:
    """A difference of square sums has no digits of them; then they are measured."""
    apart = fall_apart(make_products([(2, 3), (1, 2)]), F64)
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(*SHAPE, dtype=F64, generator=generator)
    parts = {part: before @ x @ after for part, (before, after) in project(apart).items()}
    residual = parts["inner"] + 1e-9 * (parts["left"] + parts["right"] + parts["rest"])
    seen_from = Coordinates(apart, residual)
    lengths = seen_from.residual * 1e9
    expected = (apart.v.mT @ parts["left"]).norm(dim=1)
    torch.testing.assert_close(lengths[:-1, -1], expected, rtol=1e-5, atol=0.0)
    expected = (parts["right"] @ apart.u).norm(dim=0)
    torch.testing.assert_close(lengths[-1, :-1], expected, rtol=1e-5, atol=0.0)
    assert float(lengths[-1, -1]) == pytest.approx(float(parts["rest"].norm()), rel=1e-5)
    torch.testing.assert_close(seen_from.leave(seen_from.residual), residual)
