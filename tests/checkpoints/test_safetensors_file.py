"""Small files: the bytes that the same tensors always are."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from matsmerge.checkpoints.safetensors_file import write_tensors
from matsmerge.checkpoints.safetensors_header import read_header


def test_all_is_in_the_order_given(tmp_path: Path) -> None:
    path = tmp_path / "head.safetensors"
    tensors = {"w": torch.randn(3, 2).mT, "b": torch.tensor(2.0, dtype=torch.bfloat16)}
    metadata = {str(number): "x" for number in range(20, 0, -1)}
    write_tensors(path, tensors, metadata)
    header = json.loads(path.read_bytes()[8:].partition(b'{"dtype"')[0] + b"0}")
    assert list(header["__metadata__"]) == list(metadata)
    assert list(read_header(path).specs) == ["w", "b"]
    for name, tensor in load_file(path).items():
        assert torch.equal(tensor, tensors[name])


def test_a_file_may_be_made_of_what_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "head.safetensors"
    values = torch.randn(1000)
    write_tensors(path, {"a": values, "b": values + 1}, {})
    held = load_file(path)
    write_tensors(path, {"b": held["b"], "a": held["a"]}, {})
    assert torch.equal(load_file(path)["a"], values)
    assert [f.name for f in tmp_path.iterdir()] == [path.name]
