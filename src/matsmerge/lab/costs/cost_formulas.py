"""Floating-point operations of merging methods, as the paper counts them (section 6.5, appendix).

With M models of p parameters, linear layers of d inputs and k outputs, statistics from N examples
with T tokens in all, and I iterations of conjugate gradients. A multiplication and an addition
count as one; a forward pass takes p T, forward and backward 3 p T.

The paper's own table takes T = 1,385, which is 10 examples of 138.5 tokens and not the 1,000 it
says: with its T everything but three entries comes out. Training is in its table as p T instead of
3 p T, and MaTS for (IA)^3 with the layers and parameters of the full model.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """A model's size; `layers` are (inputs, outputs), or (length, 1) of (IA)^3 vectors."""

    num_parameters: int  # that are merged
    layers: Sequence[tuple[int, int]]
    num_run: int  # parameters of the model that runs
    are_vectors: bool = False


@dataclass(frozen=True)
class Setting:
    """The quantities in the formulas."""

    model: ModelShape
    num_models: int
    num_examples: int  # of each model's statistics
    num_tokens: int  # in all of these examples
    num_iterations: int = 100

    @property
    def forward(self) -> float:
        """Operations of all models run once over all tokens."""
        return self.num_models * self.model.num_run * self.num_tokens

    @property
    def formulas(self) -> "Mapping[str, Callable[[Setting], Cost]]":
        """The formulas by the names of methods."""
        return VECTOR_FORMULAS if self.model.are_vectors else FORMULAS


@dataclass(frozen=True)
class Cost:
    """Operations for statistics, and for merging with them."""

    statistics: float
    merging: float

    @property
    def total(self) -> float:
        return self.statistics + self.merging


def average(s: Setting) -> Cost:
    return Cost(0.0, s.num_models * s.model.num_parameters)


def task_arithmetic(s: Setting) -> Cost:
    return Cost(0.0, (2 * s.num_models + 1) * s.model.num_parameters)


def ties(s: Setting) -> Cost:
    """Trimming sorts: M p log p, with the natural logarithm the paper's table has."""
    m, p = s.num_models, s.model.num_parameters
    return Cost(0.0, 9.8 * m * p + m * p * math.log(p) - 2 * p)


def diagonal_fisher(s: Setting) -> Cost:
    m, p = s.num_models, s.model.num_parameters
    return Cost(3 * s.forward + m * s.num_examples * p, (3 * m - 1) * p)


def regmean(s: Setting) -> Cost:
    m = s.num_models
    grams = sum(s.num_examples * d * d for d, _ in s.model.layers)
    solving = sum(
        (m - 1) * d * d + 2 / 3 * d**3 + m * d * d * k + (m - 1) * d * k + d * d * k
        for d, k in s.model.layers
    )
    return Cost(s.forward + grams, solving)


def mats(s: Setting) -> Cost:
    """Gram matrices and conjugate gradients, for full models."""
    grams = sum(s.num_tokens * d * d for d, _ in s.model.layers)
    return Cost(s.forward + grams, _conjugate_gradients(s))


def mats_vectors(s: Setting) -> Cost:
    """Exact blocks of the Fisher information and conjugate gradients, for (IA)^3."""
    blocks = sum(s.num_examples * d * d for d, _ in s.model.layers)
    return Cost(3 * s.forward + blocks, _conjugate_gradients(s))


def mats_kfac(s: Setting) -> Cost:
    """Two factors, and A X B of every model in each iteration; not in the paper's table."""
    m = s.num_models
    factors = m * sum(s.num_tokens * (d * d + k * k) for d, k in s.model.layers)
    product = sum(m * (d * d * k + d * k * k) for d, k in s.model.layers)
    # The preconditioner's eigenvectors of both sides, about 9 n^3 each.
    setting_up = product + sum(9 * (d**3 + k**3) for d, k in s.model.layers)
    iterations = s.num_iterations * (product + sum(12 * d * k for d, k in s.model.layers))
    return Cost(3 * s.forward + factors, setting_up + iterations)


def _conjugate_gradients(s: Setting) -> float:
    m, i = s.num_models, s.num_iterations
    return sum(
        (m - 1) * d * d + m * d * d * k + (m - 1) * d * k + i * (d * d * k + 12 * d * k)
        for d, k in s.model.layers
    )


def training(num_parameters: int, num_tokens: float) -> float:
    """Training a model on so many tokens: forward and backward."""
    return 3 * num_parameters * num_tokens


_OF_ALL: Mapping[str, Callable[[Setting], Cost]] = {
    "average": average,
    "task_arithmetic": task_arithmetic,
    "ties": ties,
    "diagonal_fisher": diagonal_fisher,
}
FORMULAS = {**_OF_ALL, "regmean": regmean, "mats": mats, "mats_kfac": mats_kfac}
VECTOR_FORMULAS = {**_OF_ALL, "mats": mats_vectors}
