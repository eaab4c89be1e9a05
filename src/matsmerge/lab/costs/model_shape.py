"""The parts of a checkpoint that costs depend on: parameters and linear layers, from its header."""

from matsmerge.adapters.adapter_folder import open_base, read_adapter
from matsmerge.checkpoints.checkpoint import FLOAT_DTYPES, Checkpoint
from matsmerge.checkpoints.summary import tensor_kind
from matsmerge.lab.costs.cost_formulas import ModelShape


def shape_of(checkpoint: Checkpoint) -> ModelShape:
    """The shape of a full model, or of what an adapter changes in its base."""
    adapter = read_adapter(checkpoint)
    full = checkpoint if adapter is None else open_base(adapter)
    specs = {name: spec for name, spec in full.specs.items() if spec.dtype in FLOAT_DTYPES}
    num_run = sum(spec.num_elements for spec in specs.values())
    if adapter is None or adapter.kind.is_folded:
        matrices = [spec for name, spec in specs.items() if tensor_kind(name, spec) == "matrix"]
        layers = tuple((spec.shape[1], spec.shape[0]) for spec in matrices)
        return ModelShape(num_run, layers, num_run)
    tensors = [tensor for parts in adapter.modules.values() for tensor in parts.values()]
    sizes = [adapter.checkpoint.specs[tensor].num_elements for tensor in tensors]
    return ModelShape(sum(sizes), tuple((size, 1) for size in sizes), num_run, are_vectors=True)
