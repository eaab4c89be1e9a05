from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from matsmerge.checkpoints.fingerprint import fingerprint
from matsmerge.checkpoints.source import open_checkpoint
from matsmerge.checkpoints.stored import StoredCheckpoint


def test_the_same_however_it_is_stored(
    make_state: Callable[..., dict[str, Tensor]], tmp_path: Path
) -> None:
    state = make_state(1)
    save_file(state, tmp_path / "a.safetensors")
    torch.save(dict(reversed(state.items())), tmp_path / "a.bin")
    prints = {
        fingerprint(open_checkpoint(source))
        for source in (state, tmp_path / "a.safetensors", tmp_path / "a.bin")
    }
    assert len(prints) == 1


def test_differs_with_values_names_and_dtypes(
    make_state: Callable[..., dict[str, Tensor]],
) -> None:
    state = make_state(1)
    changed = {n: t.clone() for n, t in state.items()}
    changed["layers.1.w"][3, 3] += 1
    others = [
        make_state(2),
        changed,
        make_state(1, torch.bfloat16),
        {f"x.{n}": t for n, t in state.items()},
        {n: t.reshape(-1) for n, t in state.items()},
    ]
    prints = [fingerprint(open_checkpoint(s)) for s in (state, *others)]
    assert len(set(prints)) == len(prints)


def test_empty_tensors_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({str(i): torch.empty(0, i) for i in range(9)}, tmp_path / "a.safetensors")
    checkpoint = open_checkpoint(tmp_path / "a.safetensors")
    before = fingerprint(open_checkpoint({str(i): torch.empty(0, i) for i in range(9)}))
    monkeypatch.setattr(StoredCheckpoint, "read", None)
    assert fingerprint(checkpoint) == before
