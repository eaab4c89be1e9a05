"""Small safetensors files, such as heads, written at once.

The safetensors library writes metadata in an order that differs from run to run; here equal tensors
make equal bytes.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from matsmerge.checkpoints.checkpoint import TensorSpec
from matsmerge.checkpoints.safetensors_header import encode_header


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a file with these tensors in this order; they may be views of what it holds now."""
    specs = {name: TensorSpec(t.dtype, tuple(t.shape)) for name, t in tensors.items()}
    written = path.with_name(f"{path.name}.part")
    with written.open("wb") as file:
        file.write(encode_header(specs, metadata)[0])
        for tensor in tensors.values():
            values = tensor.detach().cpu().contiguous()
            file.write(values.view(-1).view(torch.uint8).numpy().data)
    written.replace(path)
