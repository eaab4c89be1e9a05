"""What of a checkpoint costs depend on: parameters and linear layers, from its header."""

from dataclasses import dataclass

from matsmerge.adapters.adapter import Adapter, read_adapter
from matsmerge.adapters.base import open_base
from matsmerge.checkpoints.checkpoint import FLOAT_DTYPES, Checkpoint
from matsmerge.checkpoints.summary import kind_of


@dataclass(frozen=True)
class ModelShape:
    """A model's size; `layers` are (inputs, outputs), or (length, 1) of (IA)^3 vectors."""

    num_parameters: int
    layers: tuple[tuple[int, int], ...]
    num_run: int  # parameters of the model that runs
    are_vectors: bool = False


def shape_of(checkpoint: Checkpoint) -> ModelShape:
    """Of a full model, or of what an adapter changes in its base."""
    adapter = read_adapter(checkpoint)
    if adapter is None:
        return _full(checkpoint)
    base = _full(open_base(adapter))
    if adapter.config.kind == "ia3":
        return _vectors(adapter, base.num_run)
    return base


def _full(checkpoint: Checkpoint) -> ModelShape:
    specs = {n: s for n, s in checkpoint.specs.items() if s.dtype in FLOAT_DTYPES}
    num = sum(spec.num_elements for spec in specs.values())
    layers = tuple(
        (spec.shape[1], spec.shape[0])
        for name, spec in specs.items()
        if kind_of(name, spec) == "matrix"
    )
    return ModelShape(num, layers, num)


def _vectors(adapter: Adapter, num_run: int) -> ModelShape:
    specs = adapter.checkpoint.specs
    sizes = [specs[t].num_elements for parts in adapter.modules.values() for t in parts.values()]
    return ModelShape(sum(sizes), tuple((size, 1) for size in sizes), num_run, are_vectors=True)
