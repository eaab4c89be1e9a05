"""The paper's equations as they stand there, and that ours are their transposes.

The paper (Tam, Bansal & Raffel, 2024) writes a layer's weight W as (d, k) = (in, out), its inputs
as the rows of Z (N, d), the gradients of its outputs as the rows of O' (N, k), and the output as
Z W. Torch, and so this library, has Wᵀ. Where the paper flattens W, a Kronecker product G ⊗ O
acts as G W O when W is flattened row by row.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from matsmerge.linalg.closed_form import solve_diagonal, solve_gram
from matsmerge.linalg.conjugate_gradients import conjugate_gradients, solve_kronecker_sum
from matsmerge.linalg.eigenbasis import decompose, follow_trajectory
from matsmerge.linalg.kronecker_sums import solve_pair
from matsmerge.linalg.operators import Diagonal, Gram, Identity, Kronecker, LowRank, Operator
from matsmerge.linalg.system import Limits, Solution, System, make_system

F64 = torch.float64
D, K = 5, 4


@dataclass
class Model:
    """One of the models, in the paper's layout."""

    z: Tensor  # Z_m (N_m, d)
    o_prime: Tensor  # O'_m (N_m, k)
    w: Tensor  # W_m (d, k)

    @property
    def n(self) -> int:
        return len(self.z)

    @property
    def o(self) -> Tensor:
        """O_m = Z_m W_m."""
        return self.z @ self.w

    @property
    def gradients(self) -> Tensor:
        """The gradient of each example with respect to W, z o'ᵀ: (N_m, d, k)."""
        return torch.stack([torch.outer(z, g) for z, g in zip(self.z, self.o_prime, strict=True)])


def plus(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).sum(0)


def inv(matrix: Tensor) -> Tensor:
    inverse: Tensor = torch.linalg.inv(matrix)
    return inverse


def vec(w: Tensor) -> Tensor:
    return w.reshape(-1)


@pytest.fixture(params=[1, 2, 4], ids="{} models".format)
def models(request: pytest.FixtureRequest) -> list[Model]:
    generator = torch.Generator().manual_seed(request.param)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=F64)

    sizes = [20 + 10 * m for m in range(request.param)]
    return [Model(normal(n, D) + 0.5, 0.1 * normal(n, K), normal(D, K)) for n in sizes]


@pytest.fixture
def start() -> Tensor:
    """Where to start from, in the paper's layout; the solutions do not depend on it."""
    return torch.randn(D, K, generator=torch.Generator().manual_seed(99), dtype=F64)


def system_of(
    models: list[Model], covariance: Callable[[Model], Operator], start: Tensor
) -> System:
    """Ours: every weight transposed."""
    return make_system([(covariance(m), m.w.T) for m in models], start.T)


def assert_transposed(solution: Solution, start: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(start.T + solution.correction, expected.T, rtol=1e-7, atol=1e-8)


def gram(m: Model) -> Gram:
    return Gram(m.z.T @ m.z / m.n)


def kfac(m: Model) -> Kronecker:
    return Kronecker(m.o_prime.T @ m.o_prime / m.n, m.z.T @ m.z / m.n)


# Section 2: the methods there were


def test_simple_averaging(models: list[Model], start: Tensor) -> None:
    """θ* = 1/M Σ_m θ_m"""
    expected = plus([m.w for m in models]) / len(models)
    solution = solve_diagonal(system_of(models, lambda m: Identity(), start))
    assert_transposed(solution, start, expected)


def test_diagonal_fisher_merging(models: list[Model], start: Tensor) -> None:
    """θ* = (1 / Σ_m F̂_m) Σ_m F̂_m θ_m, F̂ the average of the per-example gradients squared"""

    def fisher(m: Model) -> Tensor:
        return m.gradients.square().sum(0) / m.n

    expected = (1 / plus([fisher(m) for m in models])) * plus([fisher(m) * m.w for m in models])
    solution = solve_diagonal(system_of(models, lambda m: Diagonal(fisher(m).T), start))
    assert_transposed(solution, start, expected)


def test_regmean(models: list[Model], start: Tensor) -> None:
    """W* = (Σ_m 1/N_m Z_mᵀ Z_m)⁻¹ (Σ_m 1/N_m (Z_mᵀ Z_m) W_m)"""
    expected = inv(plus([m.z.T @ m.z / m.n for m in models])) @ plus(
        [(m.z.T @ m.z / m.n) @ m.w for m in models]
    )
    system = system_of(models, gram, start)
    assert_transposed(solve_gram(system), start, expected)
    basis = decompose(plus([gram(m).matrix for m in models]))
    assert_transposed(follow_trajectory(system, basis, Limits(D)), start, expected)
    assert_transposed(conjugate_gradients(system, Limits(100)), start, expected)


def test_regmean_is_least_squares(models: list[Model], start: Tensor) -> None:
    """min_W Σ_m 1/N_m ‖O_m - Z_m W‖²: our objective is half of it, at the start and elsewhere."""
    stacked_z = torch.cat([m.z / m.n**0.5 for m in models])
    stacked_o = torch.cat([m.o / m.n**0.5 for m in models])
    expected = torch.linalg.lstsq(stacked_z, stacked_o).solution
    system = system_of(models, gram, start)
    solution = solve_gram(system)
    assert_transposed(solution, start, expected)

    def loss(w: Tensor) -> float:
        return float(sum((m.o - m.z @ w).square().sum() / m.n for m in models))

    assert system.objective == pytest.approx(0.5 * loss(start))
    assert solution.objective == pytest.approx(0.5 * loss(expected), abs=1e-12)


# Section 3: all of them at once


def dense_covariances(models: list[Model]) -> list[Tensor]:
    """C_m: the Fisher information of the whole layer, dk by dk, from per-example gradients."""
    per_example = [m.gradients.reshape(m.n, D * K) for m in models]
    # A little of the identity, since there are not always as many examples as parameters.
    eye = 0.01 * torch.eye(D * K, dtype=F64)
    return [g.T @ g / len(g) + eye for g in per_example]


def test_generic_closed_form(models: list[Model], start: Tensor) -> None:
    """θ* = (Σ_m C_m)⁻¹ (Σ_m C_m θ_m), for any covariances: ours is a Gram of a single row."""
    covariances = dense_covariances(models)
    expected = inv(plus(covariances)) @ plus(
        [c @ vec(m.w) for c, m in zip(covariances, models, strict=True)]
    )
    terms = [(Gram(c), vec(m.w)[None]) for c, m in zip(covariances, models, strict=True)]
    system = make_system(terms, vec(start)[None])
    for solution in (solve_gram(system), conjugate_gradients(system, Limits(200))):
        torch.testing.assert_close(vec(start) + solution.correction[0], expected)


def test_generic_closed_form_by_eigenvectors(models: list[Model]) -> None:
    """θ* = (Σ_m Q_m Λ_m Q_mᵀ)⁻¹ (Σ_m Q_m Λ_m Q_mᵀ θ_m), C_m = Q_m Λ_m Q_mᵀ"""
    covariances = dense_covariances(models)
    bases = [decompose(c, F64) for c in covariances]
    rebuilt = [b.vectors @ torch.diag(b.values) @ b.vectors.T for b in bases]
    expected = inv(plus(rebuilt)) @ plus(
        [c @ vec(m.w) for c, m in zip(rebuilt, models, strict=True)]
    )
    terms = [(Gram(c), vec(m.w)[None]) for c, m in zip(covariances, models, strict=True)]
    solution = solve_gram(make_system(terms, torch.zeros(1, D * K, dtype=F64)))
    torch.testing.assert_close(solution.correction[0], expected)


def test_the_subspace_is_that_of_the_data(models: list[Model]) -> None:
    """C = PᵀP with P = U Σ Vᵀ: then Q = V, and Λ = Σ²"""
    for m in models:
        p = m.z
        basis = decompose(p.T @ p, F64)
        _, sigma, v_t = torch.linalg.svd(p, full_matrices=False)
        torch.testing.assert_close(basis.values.flip(0), sigma.square())
        overlap = (v_t @ basis.vectors.flip(1)).abs()  # up to signs
        torch.testing.assert_close(overlap, torch.eye(D, dtype=F64), rtol=0, atol=1e-9)


# Section 4: conjugate gradients


def test_conjugate_gradients_minimise_the_quadratic(models: list[Model], start: Tensor) -> None:
    """1/2 xᵀ A x - xᵀ b has the gradient A x - b; our objective is that and a constant."""
    covariances = dense_covariances(models)
    a = plus(covariances)
    b = plus([c @ vec(m.w) for c, m in zip(covariances, models, strict=True)])
    constant = sum(
        0.5 * float(vec(m.w) @ c @ vec(m.w)) for c, m in zip(covariances, models, strict=True)
    )
    x = vec(start)
    terms = [(Gram(c), vec(m.w)[None]) for c, m in zip(covariances, models, strict=True)]
    system = make_system(terms, x[None])
    torch.testing.assert_close(system.residual[0], b - a @ x)
    assert system.objective == pytest.approx(float(0.5 * x @ a @ x - x @ b) + constant)
    solution = conjugate_gradients(system, Limits(3))
    x = x + solution.correction[0]
    assert solution.objective == pytest.approx(float(0.5 * x @ a @ x - x @ b) + constant)


def test_merging_of_vectors(models: list[Model]) -> None:
    """The algorithm for (IA)³: F_m = Σ ∇ ∇ᵀ / |D_m|, from task arithmetic, by A x = Σ_m F_m θ."""
    generator = torch.Generator().manual_seed(0)
    pretrained = torch.randn(D, generator=generator, dtype=F64)
    thetas = [pretrained + m.w[:, 0] for m in models]
    gradients = [m.gradients[:, :, 0] for m in models]  # one for every example
    fishers = []
    for per_example in gradients:
        fisher = torch.zeros(D, D, dtype=F64)
        for gradient in per_example:
            fisher += torch.outer(gradient, gradient)
        fishers.append(fisher / len(per_example))
    b = plus([f @ theta for f, theta in zip(fishers, thetas, strict=True)])
    expected = torch.linalg.solve(plus(fishers), b)
    task_arithmetic = pretrained + 0.3 * plus([theta - pretrained for theta in thetas])
    terms = [
        (LowRank(g, 1 / len(g)), theta[None]) for g, theta in zip(gradients, thetas, strict=True)
    ]
    system = make_system(terms, task_arithmetic[None])
    x = torch.randn(1, D, generator=generator, dtype=F64)
    torch.testing.assert_close(system.operator(x)[0], plus(fishers) @ x[0])
    for solution in (conjugate_gradients(system, Limits(100)), solve_gram(system, stored=F64)):
        found = task_arithmetic + solution.correction[0]
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


# Section 5: block-diagonal Fisher merging


def test_regmean_is_fisher_merging_with_constant_gradients(models: list[Model]) -> None:
    """F_ii = 1/N Σ_n z_n z_nᵀ for each column i of W, and nothing between columns.

    (The paper prints the sum of outer products as Z Zᵀ; with examples as rows it is ZᵀZ.)
    """
    for m in models:
        block = plus([torch.outer(z, z) for z in m.z]) / m.n
        # Columns of W are rows of ours, so flattening ours row by row puts the blocks in order.
        fisher = torch.block_diag(*[block] * K)
        x = torch.randn(D, K, generator=torch.Generator().manual_seed(0), dtype=F64)
        torch.testing.assert_close(gram(m)(x.T).flatten(), fisher @ x.T.flatten())


def test_kfac_system(models: list[Model], start: Tensor) -> None:
    """A x = Σ_m (1/N Zᵀ Z) W (1/N O'ᵀ O'), b = Σ_m (1/N Zᵀ Z) W_m (1/N O'ᵀ O'), x = vec(W)"""
    g = [m.z.T @ m.z / m.n for m in models]
    o = [m.o_prime.T @ m.o_prime / m.n for m in models]
    fishers = [torch.kron(g_m, o_m) for g_m, o_m in zip(g, o, strict=True)]
    w = start
    a_x = plus([g_m @ w @ o_m for g_m, o_m in zip(g, o, strict=True)])
    b = plus([g_m @ m.w @ o_m for g_m, o_m, m in zip(g, o, models, strict=True)])
    torch.testing.assert_close(vec(a_x), plus(fishers) @ vec(w))
    torch.testing.assert_close(
        vec(b), plus([f @ vec(m.w) for f, m in zip(fishers, models, strict=True)])
    )
    system = system_of(models, kfac, start)
    torch.testing.assert_close(system.operator(w.T), a_x.T)
    torch.testing.assert_close(system.residual, (b - a_x).T)
    assert system.size == pytest.approx(float(b.norm()), rel=1e-5)


def test_kfac_merging(models: list[Model], start: Tensor) -> None:
    """W* = [Σ_m (1/N Zᵀ Z) ⊗ (1/N O'ᵀ O')]⁻¹ [Σ_m (1/N Zᵀ Z) W_m (1/N O'ᵀ O')]"""
    g = [m.z.T @ m.z / m.n for m in models]
    o = [m.o_prime.T @ m.o_prime / m.n for m in models]
    first = plus([torch.kron(g_m, o_m) for g_m, o_m in zip(g, o, strict=True)])
    second = plus([g_m @ m.w @ o_m for g_m, o_m, m in zip(g, o, models, strict=True)])
    expected = (inv(first) @ vec(second)).view(D, K)
    system = system_of(models, kfac, start)
    solution = conjugate_gradients(system, Limits(500))
    torch.testing.assert_close(start.T + solution.correction, expected.T, rtol=0, atol=1e-6)
    # Products in float32: half the digits.
    solution = solve_kronecker_sum(system, Limits(100))
    torch.testing.assert_close(start.T + solution.correction, expected.T, rtol=0, atol=1e-5)
    if len(models) <= 2:
        assert_transposed(solve_pair(system), start, expected)
