"""Uploads: what makes a folder look complete comes last, and goes first."""

import os
from pathlib import Path

import pytest
from faulty_store import FaultyStore

from matsmerge.files.mirror import fetch_path
from matsmerge.files.remote_names import mirror_path
from matsmerge.files.upload import UPLOADS, upload_file, upload_folder
from matsmerge.progress import Callback, Progress, Update

URL = "memory://bucket/out"
FILES = {
    "merge.json": "manifest",
    "model.safetensors.index.json": "index",
    "model-00001-of-00002.safetensors": "one",
    "model-00002-of-00002.safetensors": "two",
    "config.json": "{}",
    "heads/a.safetensors": "head",
    ".paths.json": "private",
}


@pytest.fixture
def folder(store: FaultyStore, tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / "made" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "made" / name).write_text(text)
    return tmp_path / "made"


def upload(folder: Path, progress: Progress | None = None) -> None:
    target = mirror_path(URL)
    upload_folder(folder, target, folder.parent / UPLOADS, progress or Progress())


def stored(store: FaultyStore) -> dict[str, str]:
    return {
        n.removeprefix("/bucket/out/"): store.cat_file(n).decode() for n in store.find("/bucket")
    }


def test_the_manifest_is_last_and_private_files_stay(folder: Path, store: FaultyStore) -> None:
    told: list[Update] = []
    upload(folder, Callback(told.append))
    assert stored(store) == {n: t for n, t in FILES.items() if n != ".paths.json"}
    assert FaultyStore.order[-2:] == [
        "put /bucket/out/model.safetensors.index.json",
        "put /bucket/out/merge.json",
    ]
    assert told[-1].done == told[-1].total == sum(len(t) for n, t in FILES.items() if n[0] != ".")
    target = mirror_path(URL)
    assert (target / "config.json").read_text() == "{}"
    assert (target / "model-00001-of-00002.safetensors").read_bytes() == b""


@pytest.mark.parametrize(
    "at", ["config.json", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
)
def test_an_upload_that_breaks_off_shows_no_model(
    folder: Path, store: FaultyStore, at: str
) -> None:
    def fault(operation: str, path: str) -> None:
        if operation == "put" and path.endswith(at):
            raise OSError("500")

    FaultyStore.fault = fault
    with pytest.raises(OSError, match=f"writing {URL}/{at}: 3 attempts failed"):
        upload(folder)
    assert not {"merge.json", "model.safetensors.index.json"} & stored(store).keys()
    FaultyStore.fault = None
    FaultyStore.order.clear()
    before = stored(store)
    upload(folder)
    assert stored(store) == {n: t for n, t in FILES.items() if n != ".paths.json"}
    assert len(FaultyStore.order) == len(FILES) - 1 - len(before)  # nothing twice, nothing removed


def test_what_was_changed_since_is_sent_again(folder: Path, store: FaultyStore) -> None:
    upload(folder)
    (folder / "config.json").write_text("[]")
    os.utime(folder / "config.json", (2**31, 2**31))  # however coarse the clock is
    store.put("/bucket/out/heads/a.safetensors", b"by somebody else")
    FaultyStore.order.clear()
    upload(folder)
    assert stored(store) == {n: t for n, t in FILES.items() if n != ".paths.json"} | {
        "config.json": "[]"
    }
    assert {line.split()[0] for line in FaultyStore.order} == {"put", "remove"}
    assert {line.rpartition("/")[2] for line in FaultyStore.order} == {
        "config.json",
        "a.safetensors",
    }


def test_of_what_is_replaced_the_manifest_goes_first(folder: Path, store: FaultyStore) -> None:
    for name in ("merge.json", "model.safetensors", "config.json", "old/notes.txt"):
        store.put(f"/bucket/out/{name}", b"old")
    upload(folder)
    assert FaultyStore.order[:2] == [
        "remove /bucket/out/merge.json",
        "remove /bucket/out/model.safetensors",
    ]
    assert stored(store) == {n: t for n, t in FILES.items() if n != ".paths.json"}


def test_a_file(store: FaultyStore, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"content")
    path = mirror_path("memory://bucket/x.json")
    upload_file(tmp_path / "x", path)
    assert store.cat_file("/bucket/x.json") == b"content"
    assert fetch_path(path).read_bytes() == b"content"
