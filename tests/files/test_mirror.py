"""Paths that stand for remote files: small ones whole, weights empty."""

import threading
from pathlib import Path

import pytest
from faulty_store import FaultyStore, failing

from matsmerge.files import mirror, remote_file
from matsmerge.files.mirror import each_at_once, fetch_path, fetch_whole
from matsmerge.files.remote_names import mirror_path

URL = "memory://bucket/model"


@pytest.fixture
def folder(store: FaultyStore) -> Path:
    store.put("/bucket/model/config.json", b"{}")
    store.put("/bucket/model/model.safetensors", b"weights")
    store.put("/bucket/model/heads/a.safetensors", b"head")
    store.put("/bucket/model/onnx/graph.bin", b"never used")
    store.put("/bucket/model/.hidden", b"private")
    return mirror_path(URL)


def names(folder: Path) -> set[str]:
    return {
        str(p.relative_to(folder))
        for p in folder.rglob("*")
        if p.is_file() and not p.name.startswith(".")
    }


def test_a_model(folder: Path) -> None:
    assert fetch_path(folder) == folder
    assert names(folder) == {"config.json", "model.safetensors", "heads/a.safetensors"}
    assert (folder / "config.json").read_bytes() == b"{}"
    assert (folder / "model.safetensors").read_bytes() == b""
    assert FaultyStore.requests["read"] == 1
    remote = mirror.remote_file(folder / "model.safetensors")
    assert remote is not None
    assert remote.url == f"{URL}/model.safetensors"
    assert remote.read(0, 7) == b"weights"
    assert mirror.remote_file(folder / "config.json") is None


def test_a_local_path_is_left_alone(store: FaultyStore, tmp_path: Path) -> None:
    assert fetch_path(tmp_path / "x", whole=True) == tmp_path / "x"
    assert not FaultyStore.requests


def test_whole(folder: Path) -> None:
    fetch_path(folder, whole=True)
    assert "onnx/graph.bin" in names(folder)
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert mirror.remote_file(folder / "model.safetensors") is None
    FaultyStore.requests.clear()
    fetch_path(folder, whole=True)
    assert FaultyStore.requests["read"] == 0


@pytest.mark.parametrize("size", [0, 63, 64, 65, 2000])
def test_a_large_file_comes_in_order(
    store: FaultyStore, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(mirror, "BLOCK_BYTES", 64)
    content = bytes(i * 7 % 251 for i in range(size))
    store.put("/bucket/rows.jsonl", content)
    FaultyStore.fault = failing(2, OSError("500"))
    assert fetch_path(mirror_path("memory://bucket/rows.jsonl")).read_bytes() == content


def test_large_files_of_a_model_stay_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "_MAX_SMALL_BYTES", 1)
    fetch_path(folder)
    assert (folder / "config.json").read_bytes() == b""
    assert fetch_whole(folder / "config.json").read_bytes() == b"{}"


def test_changes_arrive(folder: Path, store: FaultyStore) -> None:
    fetch_path(folder)
    fetch_whole(folder / "model.safetensors")
    before = (folder / "config.json").stat()
    fetch_path(folder)
    assert (folder / "config.json").stat().st_ino == before.st_ino
    store.put("/bucket/model/config.json", b"[]")
    store.put("/bucket/model/model.safetensors", b"WEIGHTS")
    fetch_path(folder)
    assert (folder / "config.json").read_bytes() == b"[]"
    remote = mirror.remote_file(folder / "model.safetensors")
    assert remote is not None
    assert remote.read(0, 7) == b"WEIGHTS"


def test_blocks_of_what_has_changed_are_forgotten(folder: Path, store: FaultyStore) -> None:
    fetch_path(folder)
    remote = mirror.remote_file(folder / "model.safetensors")
    assert remote is not None
    remote.read_into(memoryview(bytearray(7)), 0)
    assert remote_file.blocks_of(remote.url).exists()
    store.put("/bucket/model/model.safetensors", b"WEIGHTS")
    fetch_path(folder)
    assert not remote_file.blocks_of(remote.url).exists()


def test_what_is_gone_is_gone_here(folder: Path, store: FaultyStore) -> None:
    fetch_path(folder)
    partial = folder.with_name(".model.partial")
    partial.mkdir()
    store.rm_file("/bucket/model/heads/a.safetensors")
    fetch_path(folder)
    assert names(folder) == {"config.json", "model.safetensors"}
    store.rm("/bucket/model", recursive=True)
    fetch_path(folder)
    assert not folder.exists()
    assert partial.exists()


def test_a_file_that_becomes_a_folder(store: FaultyStore) -> None:
    path = mirror_path("memory://bucket/thing")
    store.put("/bucket/thing", b"file")
    assert fetch_path(path).read_bytes() == b"file"
    store.rm_file("/bucket/thing")
    store.put("/bucket/thing/x.json", b"{}")
    assert (fetch_path(path) / "x.json").read_bytes() == b"{}"


def test_a_failed_fetch_leaves_no_half_file(store: FaultyStore) -> None:
    store.put("/bucket/rows.jsonl", b"content")
    path = mirror_path("memory://bucket/rows.jsonl")
    FaultyStore.fault = failing(3, OSError("500"))
    with pytest.raises(OSError, match="bytes 0 to 7"):
        fetch_path(path)
    assert path.read_bytes() == b""
    assert fetch_path(path).read_bytes() == b"content"
    assert sorted(p.name for p in path.parent.iterdir()) == [".rows.jsonl.remote", "rows.jsonl"]


def test_a_folder_that_becomes_a_file(folder: Path, store: FaultyStore) -> None:
    """Of stores both may be there; what is looked up decides."""
    fetch_path(folder)
    assert folder.is_dir()
    store.rm("/bucket/model", recursive=True)
    store.put("/bucket/model", b"now a file")
    assert fetch_path(folder).read_bytes() == b"now a file"


def test_a_note_that_is_damaged_is_made_again(folder: Path, store: FaultyStore) -> None:
    fetch_path(folder)
    note = folder / ".config.json.remote"
    before = note.read_bytes()
    for damaged in (b"", b"{", b"[]", b'{"size": -1}', b'{"size": "x", "version": 3}'):
        note.write_bytes(damaged)
        fetch_path(folder)
        assert note.read_bytes() == before
        assert (folder / "config.json").read_bytes() == b"{}"


def test_hidden_files_of_the_store_are_not_mirrored(folder: Path, store: FaultyStore) -> None:
    store.put("/bucket/model/.gitattributes", b"x")
    store.put("/bucket/model/.cache/model.safetensors", b"x")
    fetch_path(folder, whole=True)
    assert not (folder / ".gitattributes").exists()
    assert not (folder / ".cache").exists()


def test_what_is_not_in_the_store_is_not_here(store: FaultyStore) -> None:
    path = mirror_path("memory://bucket/nothing")
    assert fetch_path(path) == path
    assert not path.exists()
    assert mirror.remote_file(path) is None


def test_a_stand_in_is_nothing_to_fetch_twice(folder: Path, store: FaultyStore) -> None:
    fetch_path(folder)
    weights = folder / "model.safetensors"
    assert weights.stat().st_size == 0
    fetch_whole(weights)
    content = weights.read_bytes()
    assert content
    store.requests.clear()
    fetch_whole(weights)
    assert store.requests["read"] == 0
    assert mirror.remote_file(weights) is None


def test_remote_files_are_looked_at_several_at_once(store: FaultyStore, tmp_path: Path) -> None:
    paths = [mirror_path(f"memory://bucket/{i}") for i in range(4)]
    all_here, local = threading.Barrier(4), tmp_path / "local"

    def look(path: Path) -> str:
        if path == local:
            return f"in {threading.current_thread().name}"
        all_here.wait(60)  # it breaks if they come one after the other
        if path == paths[2]:
            raise OSError("gone")
        return path.name

    calls = each_at_once(look, [*paths, local])
    assert [calls[i]() for i in (3, 1, 0)] == ["3", "1", "0"]
    with pytest.raises(OSError, match="gone"):
        calls[2]()
    assert calls[4]() == f"in {threading.current_thread().name}"
