"""A base with an adapter folded in, as a checkpoint: rows are computed as they are read."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from matsmerge.adapters.adapter import Adapter
from matsmerge.adapters.adapter_folder import Fitted, fit
from matsmerge.checkpoints.checkpoint import Buffer, Checkpoint, TensorSpec
from matsmerge.checkpoints.companions import read_object
from matsmerge.checkpoints.recent_value import RecentValue
from matsmerge.checkpoints.scaled_floats import Scaled
from matsmerge.errors import CheckpointError

_OUTPUTS = ("lm_head.weight", "embed_out.weight", "predictions.decoder.weight")
_NORM_ELEMENTS = 1 << 22  # of rows whose norms are computed at once


class AdaptedCheckpoint(Checkpoint):
    """The full model that an adapter makes of its base.

    Tensors have the base's names; `names` says what these are for names of the adapter that the
    base does not have. Only the adapter's own tensors of one layer are held.
    """

    def __init__(
        self, base: Checkpoint, adapter: Adapter, names: Mapping[str, str] | None = None
    ) -> None:
        self.base = base
        self.adapter = adapter
        self.label = adapter.label
        self.folder = adapter.checkpoint.folder
        self.place = adapter.checkpoint.place
        self.files = [*base.files, *adapter.checkpoint.files]
        self.fitted: Fitted = fit(adapter, base, names)
        specs = dict(base.specs)
        for name, tensor in self.fitted.values.items():
            spec = adapter.checkpoint.specs[tensor]
            # What a base and its adapter both have keeps the base's dtype, as other parameters do.
            dtype = base.specs[name].dtype if name in base.specs else spec.dtype
            specs[name] = TensorSpec(dtype, spec.shape)
        self.specs = specs
        self.aliases = base.aliases
        self._recent: RecentValue[_Tensors] = RecentValue()

    @property
    def origin(self) -> Checkpoint:
        return self.adapter.checkpoint

    @property
    def changed(self) -> set[str]:
        """The tensors that are not the base's own."""
        return {*self.fitted.changes, *self.fitted.values}

    def scaled_as(self, name: str) -> Scaled | None:
        return self.base.scaled_as(name)

    def read_dtype(self, name: str) -> torch.dtype:
        stored = self.specs[name].dtype
        if name not in self.changed:
            return stored
        return torch.float64 if stored.itemsize > 2 else torch.float32

    def read_into(self, buffer: Buffer, name: str, start: int) -> None:
        if name not in self.changed:
            self.base.read_into(buffer, name, start)
            return
        stop = start + len(buffer.tensor)
        if name in self.fitted.changes:
            buffer.tensor.copy_(self._read_changed(name, start, stop))
        else:
            buffer.tensor.copy_(self._read_source(name, start, stop))

    def prefetch(self, name: str, start: int, stop: int) -> None:
        if name not in self.fitted.values:
            self.base.prefetch(name, start, stop)

    def _read_source(self, name: str, start: int, stop: int) -> Tensor:
        """Values before the change: the adapter's own, or the base's."""
        tensor = self.fitted.values.get(name)
        if tensor is not None:
            return self.adapter.checkpoint.read(tensor, start, stop)
        return self.base.read(name, start, stop)

    def _num_columns(self, name: str) -> int:
        return self.specs[name].num_elements // self.specs[name].shape[0]

    def _read_changed(self, name: str, start: int, stop: int) -> Tensor:
        num_columns = self._num_columns(name)
        first, last = start // num_columns, -(-stop // num_columns)
        tensors = self._recent.get(name, self._tensors)
        rows = self._added(name, tensors, first, last)
        if tensors.factors is not None:
            along_rows = self.fitted.changes[name].along == 0
            rows *= tensors.factors[first:last, None] if along_rows else tensors.factors
        return rows.view(-1)[start - first * num_columns : stop - first * num_columns]

    def _added(self, name: str, tensors: "_Tensors", first: int, last: int) -> Tensor:
        """Rows of W + s B A."""
        num_columns = self._num_columns(name)
        rows = self._read_source(name, first * num_columns, last * num_columns)
        rows = rows.to(tensors.dtype).view(last - first, num_columns)
        if tensors.product is not None:
            left, right = tensors.product
            rows = torch.addmm(rows, left[first:last], right)
        return rows

    def _tensors(self, name: str) -> "_Tensors":
        change, adapter = self.fitted.changes[name], self.adapter
        tensors = _Tensors(self.read_dtype(name))
        if change.low_rank is not None:
            b, a = adapter.kind.factors(adapter.checkpoint, change.low_rank, tensors.dtype)
            is_turned = change.is_transposed
            tensors.product = (a.mT.contiguous(), b.mT.contiguous()) if is_turned else (b, a)
        elif change.added is not None:
            added = adapter.checkpoint[change.added].to(tensors.dtype)
            left = added[:, None] * change.added_scaling
            tensors.product = left, torch.ones(1, 1, dtype=tensors.dtype)
        if change.factors is not None:
            factors = adapter.checkpoint[change.factors].flatten().to(tensors.dtype)
            if change.is_normalized:
                factors /= self._norms(name, tensors, torch.zeros_like(factors))
            if change.along == 1 and len(self.specs[name].shape) > 2:
                # Each is that of a whole kernel.
                factors = factors.repeat_interleave(self._num_columns(name) // len(factors))
            tensors.factors = factors
        return tensors

    def _norms(self, name: str, tensors: "_Tensors", squares: Tensor) -> Tensor:
        """The norms of the rows, or columns, of W + s B A."""
        num_rows = self.specs[name].shape[0]
        step = max(1, _NORM_ELEMENTS // self._num_columns(name))
        for first in range(0, num_rows, step):
            last = min(first + step, num_rows)
            square = self._added(name, tensors, first, last).square()
            if self.fitted.changes[name].along == 0:
                squares[first:last] = square.sum(1)
            else:
                squares += square.sum(0)
        return squares.sqrt()


@dataclass
class _Tensors:
    """An adapter's tensors for one weight as it is stored: W + left @ right, times factors."""

    dtype: torch.dtype
    product: tuple[Tensor, Tensor] | None = None
    factors: Tensor | None = None


def check_ties(adapted: AdaptedCheckpoint) -> None:
    """Refuse an adapter that changes one of two weights that are tied in the full model."""
    base, fitted = adapted.base, adapted.fitted
    by_config = _tied_by_config(base)
    tied = {*base.aliases.values(), *by_config}
    apart = [
        name
        for name in adapted.changed & tied
        if name not in fitted.changes or fitted.changes[name].low_rank is not None
    ]
    if by_config:
        apart += [n for n in fitted.values if n not in base.specs and n.endswith(_OUTPUTS)]
    CheckpointError.raise_all(
        f"{adapted.label}: changes '{name}', and {base.label} has its embedding and its output "
        "layer as one (tied weights). No full model can have both; merge adapters that leave them "
        "alone, or write an adapter"
        for name in sorted(apart)
    )


def weights_of_another_base(adapted: AdaptedCheckpoint) -> list[str]:
    """Weights that an adapter changes, and that in its own base had other values than in ours.

    PEFT saves those of the base along with some adapters: embeddings with new tokens, say.
    """
    found = []
    for name in adapted.fitted.values.keys() & adapted.fitted.changes.keys():
        tensor = adapted.adapter.checkpoint[adapted.fitted.values[name]]
        base = adapted.base[name]
        if tensor.shape != base.shape or not torch.equal(tensor, base.to(tensor.dtype)):
            found.append(name)
    return sorted(found)


def _tied_by_config(base: Checkpoint) -> list[str]:
    path = base.folder / "config.json" if base.folder else Path()
    config = read_object(path) if path.is_file() else {}
    classes = str(config.get("architectures"))
    has_output = re.search("CausalLM|LMHead|ConditionalGeneration|MaskedLM", classes)
    if not config.get("tie_word_embeddings") or not has_output:
        return []
    ends = ("embed_tokens.weight", "wte.weight", "shared.weight", "word_embeddings.weight")
    return [name for name in base.specs if name.endswith(ends)]
