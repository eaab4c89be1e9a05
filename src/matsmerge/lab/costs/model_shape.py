"""The parts of a checkpoint that costs depend on: parameters and linear layers, from its header."""

from matsmerge.adapters.adapter import Adapter
from matsmerge.adapters.adapter_folder import open_base, read_adapter
from matsmerge.checkpoints.checkpoint import FLOAT_DTYPES, Checkpoint
from matsmerge.checkpoints.summary import kind_of
from matsmerge.lab.costs.cost_formulas import ModelShape


def shape_of(checkpoint: Checkpoint) -> ModelShape:
    """The shape of a full model, or of what an adapter changes in its base."""
    adapter = read_adapter(checkpoint)
    if adapter is None:
        return _full(checkpoint)
    base = _full(open_base(adapter))
    if not adapter.kind.is_folded:
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
