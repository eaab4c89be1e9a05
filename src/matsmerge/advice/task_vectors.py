"""How far models moved from their base and in which directions, from one pass over all weights.

Of every parameter the inner products of base and task vectors are kept, a few numbers. They add up,
so that norms and cosines of layers and of whole models come from sums of them.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

import torch
from torch import Tensor

from matsmerge.checkpoints.alignment import AlignedModel, Alignment
from matsmerge.checkpoints.checkpoint import FLOAT_DTYPES
from matsmerge.errors import NonFiniteError
from matsmerge.progress import AnyProgress, listener

_BLOCK_ELEMENTS = 1 << 18  # of every model at once, in float64
_LAYER = re.compile(r"^(.*?(?:^|\.)\d+)(?:\.|$)")
OUTSIDE = "outside of layers"


@dataclass(frozen=True)
class TaskVectors:
    """Inner products of the base (first) and the task vectors (in the order of the models)."""

    models: tuple[str, ...]
    products: Mapping[str, Tensor]  # parameter -> (1 + models, 1 + models), float64
    matrices: frozenset[str]  # parameters of two or more dimensions

    def without(self, names: Iterable[str]) -> "TaskVectors":
        """The same for fewer parameters."""
        left_out = set(names)
        kept = {name: p for name, p in self.products.items() if name not in left_out}
        return TaskVectors(self.models, kept, self.matrices & kept.keys())

    def of(self, names: Iterable[str]) -> "Geometry":
        """Parameters taken together as one vector."""
        size = 1 + len(self.models)
        empty = torch.zeros(size, size, dtype=torch.float64)
        return Geometry(sum((self.products[name] for name in names), empty))

    @cached_property
    def whole(self) -> "Geometry":
        """All parameters as one vector."""
        return self.of(self.products)

    @cached_property
    def of_matrices(self) -> "Geometry":
        """All matrices as one vector; scales of norms are about 1 in any model."""
        return self.of(self.matrices) if self.matrices else self.whole

    @cached_property
    def layers(self) -> "dict[str, Geometry]":
        """By layer, that is by the first number in a name; the rest together."""
        names: dict[str, list[str]] = {}
        for name in self.products:
            found = _LAYER.match(name)
            names.setdefault(found[1] if found else OUTSIDE, []).append(name)
        return {layer: self.of(own) for layer, own in names.items()}

    @cached_property
    def typical_changes(self) -> list[float]:
        """Of each model the median over matrices of how far they moved, relative to the base.

        Matrices that a model leaves alone, as a LoRA does most, are not counted.
        """
        moved = [self.of([name]).changes for name in sorted(self.matrices)]
        if not moved:
            return self.whole.changes
        each = ([change for change in own if change] for own in zip(*moved, strict=True))
        return [median(own) if own else 0.0 for own in each]


@dataclass(frozen=True)
class Geometry:
    """Norms and angles of task vectors, from their inner products with each other and the base."""

    products: Tensor  # (1 + models, 1 + models)

    @property
    def norms(self) -> list[float]:
        """Of the task vectors."""
        return [float(v) for v in self.products.diagonal()[1:].clamp(min=0).sqrt()]

    @property
    def changes(self) -> list[float]:
        """Norms of task vectors relative to that of the base; infinite where that is zero."""
        size = float(self.products[0, 0]) ** 0.5
        return [n / size if size else float("inf") if n else 0.0 for n in self.norms]

    @property
    def cosines(self) -> Tensor:  # (models, models)
        """Of the angles between task vectors; 0 for one that is zero."""
        inner, norms = self.products[1:, 1:], torch.tensor(self.norms, dtype=torch.float64)
        sizes = norms[:, None] * norms
        return torch.where(sizes > 0, inner / sizes.where(sizes > 0, 1.0), 0.0)

    @property
    def cosines_with_base(self) -> list[float]:
        """Of the angles between each model's weights (not its task vector) and the base's."""
        square, inner = self.products[0, 0], self.products[0, 1:]
        models = square + 2 * inner + self.products.diagonal()[1:]
        sizes = (square * models).clamp(min=0).sqrt()
        found = torch.where(sizes > 0, (square + inner) / sizes.where(sizes > 0, 1.0), 0.0)
        return [float(v) for v in found]


def measure_task_vectors(alignment: Alignment, progress: AnyProgress | None = None) -> TaskVectors:
    """Read all weights once, a block of every model at a time."""
    base = alignment.base
    assert base is not None, "task vectors are taken from a base"
    told = listener(progress)
    names = [n for n in alignment.names if base.spec(n).dtype in FLOAT_DTYPES]
    everyone = (base, *alignment.models)
    told.stage("reading weights", sum(m.spec(n).num_bytes for n in names for m in everyone))
    products: dict[str, Tensor] = {}
    for name in names:
        products[name] = _products(name, everyone)
        _refuse_nonfinite(name, products[name], everyone)
        told.advance(sum(m.spec(name).num_bytes for m in everyone))
    matrices = frozenset(n for n in names if len(base.spec(n).shape) > 1)
    return TaskVectors(tuple(m.name for m in alignment.models), products, matrices)


def _products(name: str, everyone: Sequence[AlignedModel]) -> Tensor:
    """Inner products of the first model, the base, and of what the others differ from it by."""
    total = torch.zeros(len(everyone), len(everyone), dtype=torch.float64)
    num_elements = everyone[0].spec(name).num_elements
    for start in range(0, num_elements, _BLOCK_ELEMENTS):
        size = min(_BLOCK_ELEMENTS, num_elements - start)
        rows = torch.empty(len(everyone), size, dtype=torch.float64)
        for row, model in zip(rows, everyone, strict=True):
            row.copy_(model.read(name, start, start + size))
        rows[1:] -= rows[0]
        total += rows @ rows.mT
    return total


def _refuse_nonfinite(name: str, products: Tensor, everyone: Sequence[AlignedModel]) -> None:
    own = products.diagonal().isfinite().tolist()
    # A base that is not finite spoils all differences from it.
    wrong = [m for m, is_finite in zip(everyone, own, strict=True) if not is_finite]
    if wrong:
        raise NonFiniteError(
            f"{wrong[0].checkpoint.label}: tensor '{name}' holds NaN or Inf, or numbers too large "
            "to be squared; such a model cannot be merged"
        )
