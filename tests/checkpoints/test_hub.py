"""The real hub client, offline, on a cache laid out by hand as the hub lays it out."""

import os
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import save_file

import matsmerge
from matsmerge import CheckpointError, open_checkpoint

REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "hub"
    for seed, name in enumerate(("models--owner--a", "models--owner--b")):
        repo = root / name
        snapshot = repo / "snapshots" / REVISION
        (repo / "blobs").mkdir(parents=True)
        (repo / "refs").mkdir()
        snapshot.mkdir(parents=True)
        save_file({"w": torch.full((2,), float(seed))}, repo / "blobs" / "aaaa")
        (repo / "blobs" / "bbbb").write_text('{"model_type": "tiny"}')
        (snapshot / "model.safetensors").symlink_to("../../blobs/aaaa")
        (snapshot / "config.json").symlink_to("../../blobs/bbbb")
        (repo / "refs" / "main").write_text(REVISION)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(root))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return root


@pytest.mark.parametrize("source", ["owner/b", f"owner/b@{REVISION}", "owner/b@main"])
def test_hub_id(cache: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(cache)
    checkpoint = open_checkpoint(source)
    assert checkpoint["w"].tolist() == [1.0, 1.0]
    assert checkpoint.label == source


def test_hub_models_merge_with_their_configuration(cache: Path, tmp_path: Path) -> None:
    out = matsmerge.merge(["owner/a", "owner/b"], out=tmp_path / "out").folder
    assert open_checkpoint(out)["w"].tolist() == [0.5, 0.5]
    assert "tiny" in (out / "config.json").read_text()
    card = (out / "README.md").read_text()
    assert "- owner/a\n- owner/b\n" in card


@pytest.mark.parametrize("source", ["owner/gone", "owner/a@other", "no--good/..name.."])
def test_not_there(cache: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(cache)
    assert not os.path.exists(source)  # noqa: PTH110
    with pytest.raises(CheckpointError, match="hub did not provide it"):
        open_checkpoint(source)
