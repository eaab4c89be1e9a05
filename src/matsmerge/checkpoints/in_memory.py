"""Checkpoints that are already in memory: state dicts, modules, and loaded `.bin`/`.pt` files."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from matsmerge.checkpoints.checkpoint import Buffer, Checkpoint, TensorSpec, check_dtype, first_line
from matsmerge.errors import CheckpointError, machine_gave_out
from matsmerge.files.guarded_files import open_regular, reading
from matsmerge.files.mirror import fetch_whole


class InMemoryCheckpoint(Checkpoint):
    """A state dict or module. Entries that share their storage are one tensor."""

    def __init__(
        self,
        label: str,
        state: Mapping[str, Tensor] | nn.Module,
        folder: Path | None = None,
    ) -> None:
        self.label = label
        self.folder = folder
        if isinstance(state, nn.Module):
            state = state.state_dict()
        self._flat: dict[str, Tensor] = {}
        specs: dict[str, TensorSpec] = {}
        aliases: dict[str, str] = {}
        first_at: dict[tuple[object, ...], str] = {}
        for name, tensor in state.items():
            if not isinstance(name, str):
                raise CheckpointError(f"{label}: the key {name!r} is not a name")
            if not isinstance(tensor, Tensor):
                raise CheckpointError(
                    f"{label}: entry '{name}' is a {type(tensor).__name__}, expected a tensor; "
                    "pass a plain state dict"
                )
            if tensor.is_meta:
                raise CheckpointError(f"{label}: tensor '{name}' is on the meta device, no data")
            check_dtype(tensor.dtype, name, label)
            place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if tensor.numel() and place in first_at:
                aliases[name] = first_at[place]
                continue
            first_at[place] = name
            specs[name] = TensorSpec(tensor.dtype, tuple(tensor.shape))
            self._flat[name] = tensor.detach().reshape(-1)
        self.specs = specs
        self.aliases = aliases

    def read_into(self, buffer: Buffer, name: str, start: int) -> None:
        out = buffer.tensor
        out.copy_(self._flat[name][start : start + len(out)])

    def read_stretches(self, stretches: Sequence[tuple[str, int, int]]) -> Iterable[Tensor]:
        """Without a copy, where they are in the processor's memory."""
        return (self._flat[name][start:stop].cpu() for name, start, stop in stretches)


def load_pickled(path: Path) -> dict[str, Tensor]:
    """The tensors of a `.bin`/`.pt` file, memory-mapped where its format allows it.

    Only tensors are ever unpickled: `weights_only=True` refuses everything that could run code.
    """
    with reading(path, CheckpointError):
        fetch_whole(path)
    open_regular(path, CheckpointError).close()
    try:
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
    except Exception as error:  # torch raises many types for damaged and unsafe pickles
        if machine_gave_out(error):
            raise
        raise CheckpointError(
            f"{path}: refused; it is damaged or holds more than tensors, and unpickling code from "
            "a file is not safe. Save its state dict as safetensors where you trust it. "
            f"({first_line(error)})"
        ) from error
    if isinstance(loaded, Mapping) and isinstance(loaded.get("state_dict"), Mapping):
        loaded = loaded["state_dict"]
    if not isinstance(loaded, Mapping) or not all(isinstance(v, Tensor) for v in loaded.values()):
        found = list(loaded)[:5] if isinstance(loaded, Mapping) else type(loaded).__name__
        raise CheckpointError(
            f"{path}: expected a dict of tensors (or one under 'state_dict'), found {found}"
        )
    return dict(loaded)
