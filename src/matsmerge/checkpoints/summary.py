"""What is in a checkpoint, and what differs between two."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from matsmerge.checkpoints.checkpoint import FLOAT_DTYPES, Checkpoint, TensorSpec, dtype_name
from matsmerge.progress import AnyProgress, listener

_BLOCK_ELEMENTS = 1 << 20

ReadStretch = Callable[[int, int], Tensor]  # elements of a tensor from one place to another


@dataclass
class KindSummary:
    """Tensors of one kind."""

    num_tensors: int = 0
    num_parameters: int = 0
    num_bytes: int = 0
    dtypes: dict[str, int] = field(default_factory=dict)  # dtype -> tensors

    def add(self, spec: TensorSpec) -> None:
        self.num_tensors += 1
        self.num_parameters += spec.num_elements
        self.num_bytes += spec.num_bytes
        name = dtype_name(spec.dtype)
        self.dtypes[name] = self.dtypes.get(name, 0) + 1


def summarize(checkpoint: Checkpoint) -> dict[str, KindSummary]:
    """Tensors by kind, in a fixed order, and all of them under `total`."""
    kinds = ("embedding", "matrix", "vector", "convolution", "other", "buffer", "total")
    summary = {kind: KindSummary() for kind in kinds}
    for name, spec in checkpoint.specs.items():
        summary[tensor_kind(name, spec)].add(spec)
        summary["total"].add(spec)
    return {kind: found for kind, found in summary.items() if found.num_tensors or kind == "total"}


def tensor_kind(name: str, spec: TensorSpec) -> str:
    """A tensor's kind from its shape, and for embeddings from its name."""
    if spec.dtype not in FLOAT_DTYPES:
        return "buffer"
    if len(spec.shape) == 2:
        is_embedding = any(word in name.lower() for word in ("embed", "wte", "wpe", "shared."))
        return "embedding" if is_embedding else "matrix"
    return {1: "vector", 3: "convolution", 4: "convolution"}.get(len(spec.shape), "other")


@dataclass(frozen=True)
class Difference:
    """How two checkpoints differ; `changed` is ||a - b|| / ||a|| by tensor, largest first."""

    only_first: list[str]
    only_second: list[str]
    other_shape: list[str]
    other_dtype: list[str]
    num_equal: int
    changed: dict[str, float]


def compare_checkpoints(
    first: Checkpoint, second: Checkpoint, progress: AnyProgress | None = None
) -> Difference:
    """Compare names, shapes, dtypes and values."""
    both = [name for name in first.specs if name in second.specs]
    a, b = first.specs, second.specs
    same = [name for name in both if a[name].shape == b[name].shape]
    told = listener(progress)
    told.stage("comparing", sum(a[name].num_bytes for name in same))
    changed: dict[str, float] = {}
    for name in same:
        changed[name] = relative_change(
            partial(first.read, name), partial(second.read, name), a[name].num_elements
        )
        told.advance(a[name].num_bytes)
    return Difference(
        only_first=[name for name in a if name not in b],
        only_second=[name for name in b if name not in a],
        other_shape=[name for name in both if a[name].shape != b[name].shape],
        other_dtype=[name for name in both if a[name].dtype != b[name].dtype],
        num_equal=sum(distance == 0 for distance in changed.values()),
        changed={n: d for n, d in sorted(changed.items(), key=lambda item: -item[1]) if d},
    )


def relative_change(first: ReadStretch, second: ReadStretch, num_elements: int) -> float:
    """||a - b|| / ||a||, read in pieces."""
    apart = size = 0.0
    for start in range(0, num_elements, _BLOCK_ELEMENTS):
        stop = min(start + _BLOCK_ELEMENTS, num_elements)
        x, y = (read(start, stop).to(torch.float64) for read in (first, second))
        apart += float((x - y).square().sum())
        size += float(x.square().sum())
    return math.sqrt(apart / size) if size else math.inf if apart else 0.0
