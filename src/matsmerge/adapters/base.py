"""The base that an adapter was made for."""

from matsmerge.adapters.adapter import Adapter
from matsmerge.checkpoints.checkpoint import Checkpoint
from matsmerge.checkpoints.opening import open_checkpoint
from matsmerge.errors import CheckpointError


def open_base(adapter: Adapter) -> Checkpoint:
    """Open the base that an adapter's configuration names."""
    path, name = adapter.config.path, adapter.config.base
    if name is None:
        raise CheckpointError(
            f"{path}: does not name its base in 'base_model_name_or_path'; give it with --base"
        )
    try:
        base = open_checkpoint(name)
    except CheckpointError as error:
        raise CheckpointError([f"{path}: its base: {p}" for p in error.problems]) from error
    if base.folder is None:
        raise CheckpointError(f"{path}: its base '{name}' is not a model's folder")
    return base
