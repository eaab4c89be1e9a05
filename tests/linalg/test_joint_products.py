"""Sums of truncated products taken together, against dense float64 matrices."""

import pytest
import torch
from torch import Tensor

from matsmerge.linalg.joint_products import Gathered, JointProducts, is_joinable, join_products
from matsmerge.linalg.operators import Identity, Sum, TruncatedProduct
from matsmerge.linalg.system import make_system
from matsmerge.linalg.task_subspaces import dense_factor
from matsmerge.linalg.truncated import Truncated, isotropic, truncate

F64 = torch.float64
OUT, IN = 7, 10
RANKS = {
    "three models": [(2, 3), (1, 4), (3, 1)],
    "one model": [(2, 3)],
    "a gram": [(0, 2), (0, 3)],
    "no directions": [(0, 0), (0, 0)],
    "one without directions": [(2, 2), (0, 0), (1, 0)],
}
ranks_of_models = pytest.mark.parametrize("ranks", RANKS.values(), ids=RANKS)


def make_truncated(d: int, rank: int, generator: torch.Generator) -> Truncated:
    rows = torch.randn(2 * d, d, dtype=F64, generator=generator)
    return truncate(rows.mT @ rows / d, rank)


def make_joinable(ranks: list[tuple[int, int]], seed: int = 0) -> list[TruncatedProduct]:
    generator = torch.Generator().manual_seed(seed)
    return [
        TruncatedProduct(
            make_truncated(OUT, of_outputs, generator),
            make_truncated(IN, of_inputs, generator),
            0.3 + m,
        )
        for m, (of_outputs, of_inputs) in enumerate(ranks)
    ]


def dense_image(product: TruncatedProduct, x: Tensor) -> Tensor:
    return product.scale * dense_factor(product.outputs) @ x @ dense_factor(product.inputs)


def matrices(num: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(OUT, IN, dtype=F64, generator=generator) for _ in range(num)]


@ranks_of_models
def test_all_at_once_is_the_sum_of_dense_images(ranks: list[tuple[int, int]]) -> None:
    products = make_joinable(ranks)
    x = matrices(1)[0]
    expected = torch.stack([dense_image(p, x) for p in products]).sum(0)
    joint = join_products(products)
    torch.testing.assert_close(joint(x), expected)
    torch.testing.assert_close((joint * 0.25)(x), 0.25 * expected)
    found = joint(x.float())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


@ranks_of_models
def test_its_diagonal_is_that_of_the_dense_operator(ranks: list[tuple[int, int]]) -> None:
    products = make_joinable(ranks)
    expected = torch.zeros(OUT, IN, dtype=F64)
    for p in products:
        o, g = dense_factor(p.outputs).diagonal(), dense_factor(p.inputs).diagonal()
        expected += p.scale * o[:, None] * g
    torch.testing.assert_close(join_products(products).diagonal(), expected)


@ranks_of_models
def test_each_model_has_a_matrix_of_its_own(ranks: list[tuple[int, int]]) -> None:
    products = make_joinable(ranks)
    own = matrices(len(products))
    gathered = Gathered(own[0])
    for product, matrix in zip(products, own, strict=True):
        gathered.add(product, matrix)
    joined = gathered.join()
    assert joined is not None
    joint, image, energy = joined
    images = [dense_image(p, x) for p, x in zip(products, own, strict=True)]
    torch.testing.assert_close(image, torch.stack(images).sum(0))
    expected = sum(float((x * y).sum()) for x, y in zip(own, images, strict=True))
    assert energy == pytest.approx(expected)
    x = matrices(1)[0]
    torch.testing.assert_close(joint(x), Sum(tuple(products))(x))


def test_nothing_gathered_is_nothing_to_join() -> None:
    assert Gathered(torch.zeros(OUT, IN)).join() is None


def test_directions_that_have_less_than_the_rest() -> None:
    """Values below the rest are as good as others: a sketch's last ones may be."""
    product = make_joinable([(2, 3)])[0]
    o, g = product.outputs, product.inputs
    assert isinstance(o, Truncated)
    assert isinstance(g, Truncated)
    low = TruncatedProduct(
        Truncated(o.vectors, o.values * 0, 0.5), Truncated(g.vectors, g.values * 0.01, 2.0)
    )
    x = matrices(1)[0]
    torch.testing.assert_close(join_products([low, product])(x), low(x) + product(x))


@ranks_of_models
def test_a_system_is_the_same_as_with_matrices_written_out(ranks: list[tuple[int, int]]) -> None:
    products = make_joinable(ranks)
    start, *weights = matrices(1 + len(products))
    system = make_system(zip(products, weights, strict=True), start)
    residual, right = torch.zeros(OUT, IN, dtype=F64), torch.zeros(OUT, IN, dtype=F64)
    objective = 0.0
    for p, w in zip(products, weights, strict=True):
        image = dense_image(p, w - start)
        residual += image
        right += dense_image(p, w)
        objective += 0.5 * float(((w - start) * image).sum())
    torch.testing.assert_close(system.residual, residual)
    assert system.objective == pytest.approx(objective)
    assert system.size == pytest.approx(float(right.norm()), rel=1e-5)
    x = matrices(1)[0]
    torch.testing.assert_close(system.operator(x), join_products(products)(x))


def test_a_system_of_which_some_terms_are_not_truncated() -> None:
    product = make_joinable([(2, 3)])[0]
    whole = TruncatedProduct(product.outputs, dense_factor(product.inputs))
    start, *weights = matrices(4)
    terms = [(product, weights[0]), (whole, weights[1]), (Identity(0.4), weights[2])]
    system = make_system(terms, start)
    residual = torch.stack([c(w - start) for c, w in terms]).sum(0)
    torch.testing.assert_close(system.residual, residual)
    right = torch.stack([c(w) for c, w in terms]).sum(0)
    assert system.size == pytest.approx(float(right.norm()), rel=1e-5)


@pytest.mark.parametrize("scale", [1e-60, 1e50])
def test_sizes_that_float32_does_not_have(scale: float) -> None:
    """As second moments of small gradients are."""
    products = make_joinable([(2, 3), (1, 2)])
    start, *weights = matrices(3)
    system = make_system(zip(products, weights, strict=True), start)
    scaled = make_system([(p * scale, w) for p, w in zip(products, weights, strict=True)], start)
    assert scaled.size == pytest.approx(system.size * scale, rel=1e-5)
    assert scaled.objective == pytest.approx(system.objective * scale)


def test_models_that_are_the_start_leave_exactly_nothing() -> None:
    products = make_joinable([(2, 3), (1, 2)])
    start = matrices(1)[0]
    system = make_system([(p, start) for p in products], start)
    assert not bool(system.residual.any())
    assert system.objective == 0


def test_what_can_be_joined() -> None:
    product = make_joinable([(2, 3)])[0]
    assert is_joinable(product)
    assert is_joinable(TruncatedProduct(isotropic(OUT), product.inputs))
    assert not is_joinable(TruncatedProduct(product.outputs, torch.eye(IN)))
    assert not is_joinable(Identity(1.0))
    assert isinstance(join_products([product]), JointProducts)
    with pytest.raises(AssertionError, match="whole matrix"):
        join_products([TruncatedProduct(product.outputs, torch.eye(IN))])
