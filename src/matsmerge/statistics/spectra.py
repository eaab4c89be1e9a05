"""What the eigenvalues of a second moment say of it."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from matsmerge.errors import StatisticsError
from matsmerge.linalg.truncated import Truncated


@dataclass(frozen=True)
class Spectrum:
    """Of a symmetric positive semi-definite matrix, or of a diagonal."""

    dim: int
    effective_rank: float  # exp of the entropy of the eigenvalues' shares (Roy & Vetterli, 2007)
    condition: float  # largest to smallest eigenvalue; infinite where one is nothing but rounding
    rank: int  # how many directions are known; the others are taken to be alike
    explained: float  # their share of the trace

    @property
    def is_singular(self) -> bool:
        return self.condition == float("inf")


def spectrum(matrix: Tensor) -> Spectrum:  # (d, d), (groups, d, d) or (d,)
    """Effective rank and condition number; of the worst group where there are several."""
    values = matrix.double()
    if not bool(values.isfinite().all()):
        raise StatisticsError(
            "a second moment holds NaN or Inf; the file is damaged, or the model gave NaN on its "
            "data; collect again"
        )
    if values.ndim == 3:
        return max((spectrum(group) for group in values), key=lambda s: s.condition)
    eigenvalues = values if values.ndim == 1 else torch.linalg.eigvalsh(values)
    eigenvalues = eigenvalues.clamp(min=0)
    total, largest = float(eigenvalues.sum()), float(eigenvalues.max())
    if total == 0:
        return Spectrum(len(values), 0.0, float("inf"), len(values), 1.0)
    shares = eigenvalues / total
    entropy = -torch.special.xlogy(shares, shares).sum()
    smallest = float(eigenvalues.min())
    rounding = torch.finfo(matrix.dtype).eps * len(values) * largest
    condition = largest / smallest if smallest > rounding else float("inf")
    return Spectrum(len(values), float(entropy.exp()), condition, len(values), 1.0)


def truncated_spectrum(moment: Truncated) -> Spectrum:
    """The same of a second moment that is known by its leading directions."""
    rest = moment.values.new_full((moment.dim - moment.rank,), moment.rest)
    found = spectrum(torch.cat([moment.values, rest]))
    explained = float(moment.values.sum()) / (moment.trace or 1.0)
    return replace(found, rank=moment.rank, explained=explained)
