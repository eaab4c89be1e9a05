"""A base with an adapter folded in, as a checkpoint: rows are computed as they are read."""

import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from matsmerge.adapters.adapter import Adapter, Change
from matsmerge.adapters.adapter_folder import Fitted, fit
from matsmerge.checkpoints.checkpoint import Buffer, Checkpoint, TensorSpec
from matsmerge.checkpoints.companions import read_json
from matsmerge.errors import CheckpointError

_OUTPUTS = ("lm_head.weight", "embed_out.weight", "predictions.decoder.weight")
_NORM_ELEMENTS = 1 << 22  # of rows whose norms are computed at once


class AdaptedCheckpoint(Checkpoint):
    """The full model that an adapter makes of its base.

    Its names are those of the base; `names` are these by the adapter's, where they are not alike.
    Only the adapter's own tensors of one layer are held.
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
        self._recent = _Recent()

    @property
    def origin(self) -> Checkpoint:
        return self.adapter.checkpoint

    @property
    def changed(self) -> set[str]:
        """The tensors that are not the base's own."""
        return {*self.fitted.changes, *self.fitted.values}

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

    def _read_changed(self, name: str, start: int, stop: int) -> Tensor:
        shape = self.specs[name].shape
        num_columns = self.specs[name].num_elements // shape[0]
        first, last = start // num_columns, -(-stop // num_columns)
        weight = self._tensors(name)
        rows = self._added(name, weight, first, last)
        if weight.factors is not None:
            factors = weight.factors
            rows *= factors[first:last, None] if weight.along == 0 else factors
        return rows.view(-1)[start - first * num_columns : stop - first * num_columns]

    def _added(self, name: str, weight: "_Tensors", first: int, last: int) -> Tensor:
        """Rows of W + s B A."""
        num_columns = self.specs[name].num_elements // self.specs[name].shape[0]
        rows = self._read_source(name, first * num_columns, last * num_columns)
        rows = rows.to(weight.dtype).view(last - first, num_columns)
        if weight.left is not None:
            assert weight.right is not None
            rows = torch.addmm(rows, weight.left[first:last], weight.right)
        return rows

    def _tensors(self, name: str) -> "_Tensors":
        """What the change of a tensor is made of, held until another tensor is asked for."""
        if self._recent.name != name:
            change = self.fitted.changes[name]
            tensors = _Tensors(self.adapter, change, self.read_dtype(name))
            if change.factors is not None:
                self._set_factors(name, tensors, change)
            self._recent.name, self._recent.tensors = name, tensors
        assert self._recent.tensors is not None
        return self._recent.tensors

    def _set_factors(self, name: str, tensors: "_Tensors", change: Change) -> None:
        assert change.factors is not None
        factors = self.adapter.checkpoint[change.factors].flatten().to(tensors.dtype)
        shape = self.specs[name].shape
        num_columns = self.specs[name].num_elements // shape[0]
        if change.is_normalized:
            squares = torch.zeros_like(factors)
            step = max(1, _NORM_ELEMENTS // num_columns)
            for first in range(0, shape[0], step):
                last = min(first + step, shape[0])
                square = self._added(name, tensors, first, last).square()
                if change.along == 0:
                    squares[first:last] = square.sum(1)
                else:
                    squares += square.sum(0)
            factors /= squares.sqrt()
        if change.along == 1 and len(shape) > 2:
            factors = factors.repeat_interleave(num_columns // len(factors))  # over the kernel
        tensors.factors = factors
        tensors.along = change.along

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_recent"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _recent=_Recent())


class _Tensors:
    """An adapter's tensors for one weight as it is stored: W + left @ right, times factors."""

    def __init__(self, adapter: Adapter, change: Change, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.left: Tensor | None = None
        self.right: Tensor | None = None
        self.factors: Tensor | None = None
        self.along = 0
        if change.low_rank is not None:
            b, a = adapter.kind.factors(adapter.checkpoint, change.low_rank, dtype)
            is_turned = change.is_transposed
            self.left = a.mT.contiguous() if is_turned else b
            self.right = b.mT.contiguous() if is_turned else a
        elif change.added is not None:
            self.left = adapter.checkpoint[change.added].to(dtype)[:, None] * change.added_scaling
            self.right = torch.ones(1, 1, dtype=dtype)


class _Recent(threading.local):
    name: str | None = None
    tensors: _Tensors | None = None


def check_ties(adapted: AdaptedCheckpoint) -> None:
    """Refuse a change of one of two weights that a full model has as one."""
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
    if apart:
        raise CheckpointError(
            [
                f"{adapted.label}: changes '{name}', and {base.label} has its embedding and its "
                "output layer as one (tied weights). No full model can have both; merge adapters "
                "that leave them alone, or write an adapter"
                for name in sorted(apart)
            ]
        )


def weights_of_another_base(adapted: AdaptedCheckpoint) -> list[str]:
    """Weights it changes that it also saved as its base had them, where ours has others.

    Embeddings with new tokens, say.
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
    config = read_json(path) if path.is_file() else {}
    classes = str(config.get("architectures"))
    has_output = re.search("CausalLM|LMHead|ConditionalGeneration|MaskedLM", classes)
    if not config.get("tie_word_embeddings") or not has_output:
        return []
    ends = ("embed_tokens.weight", "wte.weight", "shared.weight", "word_embeddings.weight")
    return [name for name in base.specs if name.endswith(ends)]
