"""Everything that a merge reads and writes, in a store that is not a disk."""

import http.server
import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_store import FaultyStore, failing
from hub_server import hub_server
from tiny_models import bert_config, make_tokenizer, save, write_rows
from transformers import BertForSequenceClassification

import matsmerge
from matsmerge import CheckpointError, OutputError, ResourceError
from matsmerge.checkpoints import safetensors_header
from matsmerge.checkpoints.fingerprint import fingerprint
from matsmerge.files import remote_file, remote_store, whole_outputs
from matsmerge.files.remote_names import mirror_path

Save = Callable[..., Path]
Mats = Callable[..., tuple[int, str, str]]
URLS = ["memory://bucket/a", "memory://bucket/b"]
BASE = "memory://bucket/base"


def put_folder(store: FaultyStore, folder: Path, name: str) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            store.put(f"/bucket/{name}/{path.relative_to(folder)}", path.read_bytes())


@pytest.fixture
def models(store: FaultyStore, save_model: Save, make_state: Any) -> list[Path]:
    """Two models, here and in the store."""
    found = []
    for seed, name in enumerate(("base", "a", "b")):
        found.append(save_model(name, make_state(seed), config__json='{"model_type": "tiny"}'))
        put_folder(store, found[-1], name)
    return found[1:]


def stored(store: FaultyStore, name: str) -> dict[str, bytes]:
    return {
        n.removeprefix(f"/bucket/{name}/"): store.cat_file(n) for n in store.find(f"/bucket/{name}")
    }


def test_opening_reads_headers_only(models: list[Path], store: FaultyStore) -> None:
    checkpoint = matsmerge.open_checkpoint(URLS[0])
    assert checkpoint.label == URLS[0]
    size = store.size("/bucket/a/model.safetensors")
    assert [(s, e) for n, s, e in FaultyStore.ranges if n.endswith("safetensors")] == [(0, size)]
    assert matsmerge.open_checkpoint(Path(URLS[0])).label == URLS[0]
    local = matsmerge.open_checkpoint(models[0])
    assert checkpoint.specs == local.specs
    assert all(torch.equal(checkpoint[name], local[name]) for name in local.specs)
    assert fingerprint(checkpoint) == fingerprint(local)


def test_a_fingerprint_reads_stretches_alone(store: FaultyStore, save_model: Save) -> None:
    folder = save_model("large", {"w": torch.randn(1_000_000), "b": torch.randn(5)})
    put_folder(store, folder, "large")
    checkpoint = matsmerge.open_checkpoint("memory://bucket/large")
    FaultyStore.ranges.clear()
    assert fingerprint(checkpoint) == fingerprint(matsmerge.open_checkpoint(folder))
    assert sum(end - start for _, start, end in FaultyStore.ranges) == 4 * 256 * 4 + 5 * 4


@pytest.mark.parametrize("method", ["average", "ties"])
def test_the_same_bytes_as_from_the_disk(
    models: list[Path], store: FaultyStore, tmp_path: Path, method: str
) -> None:
    base = models[0].with_name("base")
    local = matsmerge.merge(models, base, method, out=tmp_path / "out").folder
    made = matsmerge.merge(URLS, BASE, method, out="memory://bucket/out")
    found = stored(store, "out")
    expected = {
        str(p.relative_to(local)): p.read_bytes()
        for p in local.rglob("*")
        if p.is_file() and p.name[0] != "."
    }
    assert found == expected
    assert b"bucket" not in found["merge.json"] + found["README.md"]
    assert torch.equal(made["layers.0.w"], matsmerge.open_checkpoint(local)["layers.0.w"])
    assert not whole_outputs.staging_path(mirror_path("memory://bucket/out")).exists()


@pytest.mark.parametrize("cache", ["20GB", "1KB"])
def test_blocks_are_fetched_once(
    cache: str, models: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A header and a block of each file; stretches by themselves only where blocks do not stay."""
    monkeypatch.setenv("MATSMERGE_CACHE_SIZE", cache)
    if cache == "1KB":  # a block that comes before it is asked for may be read before it goes
        monkeypatch.setattr(remote_file.RemoteFile, "prefetch", lambda *_: None)
    matsmerge.merge(URLS, out=tmp_path / "out")
    read = [name for name, _, _ in FaultyStore.ranges if name == "/bucket/a/model.safetensors"]
    assert (len(read) == 2) == (cache == "20GB")


def test_faults_on_the_way_change_nothing(
    models: list[Path], store: FaultyStore, tmp_path: Path
) -> None:
    local = matsmerge.merge(models, out=tmp_path / "out").folder
    faults: list[Exception | bytes] = [OSError("500"), ConnectionResetError("reset"), b"short"]
    met: list[tuple[str, str]] = []

    def fault(operation: str, path: str) -> bytes | None:
        met.append((operation, path))
        if met.count((operation, path)) > 2 or operation not in ("read", "put"):
            return None
        instead = faults[len(met) % 3]
        if isinstance(instead, Exception):
            raise instead
        return instead if operation == "read" else None

    FaultyStore.fault = fault
    matsmerge.merge(URLS, out="memory://bucket/out")
    FaultyStore.fault = None
    assert stored(store, "out")["model.safetensors"] == (local / "model.safetensors").read_bytes()
    assert {operation for operation, _ in met} > {"read", "put"}


def test_a_store_that_fails_for_good_is_one_error(models: list[Path], store: FaultyStore) -> None:
    planned = matsmerge.plan(URLS)
    remote_file.forget_blocks(f"{URLS[1]}/model.safetensors")

    def fault(operation: str, path: str) -> None:
        if operation == "read" and path == "/bucket/b/model.safetensors":
            raise OSError("503 Slow Down")

    FaultyStore.fault = fault
    with pytest.raises(ResourceError) as error:
        planned.merge("memory://bucket/out")
    (problem,) = error.value.problems
    assert problem.startswith(
        "memory://bucket/b/model.safetensors: cannot be read any more (bytes "
    )
    assert "3 attempts failed, the last with 503 Slow Down); what was done is kept" in problem
    assert not stored(store, "out")
    FaultyStore.fault = None
    planned.merge("memory://bucket/out", resume=True)
    assert "merge.json" in stored(store, "out")


def test_a_change_while_it_is_merged(
    models: list[Path], store: FaultyStore, make_state: Any, save_model: Save
) -> None:
    planned = matsmerge.plan(URLS)
    put_folder(store, save_model("other", make_state(5)), "b")
    with pytest.raises(
        CheckpointError, match="memory://bucket/b/model.safetensors: was changed while"
    ):
        planned.merge("memory://bucket/out")
    store.rm("/bucket/b/model.safetensors")
    with pytest.raises(ResourceError, match="no longer in its store"):
        planned.merge("memory://bucket/out")
    assert not stored(store, "out")


def test_every_byte_is_verified(models: list[Path], store: FaultyStore) -> None:
    matsmerge.merge(URLS, out="memory://bucket/out", verify=True)
    assert "merge.json" in stored(store, "out")


def test_an_upload_that_breaks_off_is_continued(
    models: list[Path], store: FaultyStore, tmp_path: Path
) -> None:
    local = matsmerge.merge(models, out=tmp_path / "out").folder

    def fault(operation: str, path: str) -> None:
        if operation == "put" and path.endswith("model.safetensors"):
            raise OSError("500")

    FaultyStore.fault = fault
    with pytest.raises(
        ResourceError, match="writing memory://bucket/out/model.safetensors: 3 attempts"
    ):
        matsmerge.merge(URLS, out="memory://bucket/out")
    small = {"config.json", "README.md", "mergekit_config.yml"}
    assert stored(store, "out").keys() == small
    with pytest.raises(CheckpointError, match="no model weights"):
        matsmerge.open_checkpoint("memory://bucket/out")
    FaultyStore.fault = None
    with pytest.raises(OutputError, match="interrupted; continue it with --resume"):
        matsmerge.merge(URLS, out="memory://bucket/out")
    matsmerge.merge(URLS, out="memory://bucket/out", resume=True)
    assert stored(store, "out")["model.safetensors"] == (local / "model.safetensors").read_bytes()
    assert stored(store, "out")["merge.json"] == (local / "merge.json").read_bytes()


@pytest.mark.parametrize("has_versions", [True, False])
def test_other_models_do_not_continue_it(
    models: list[Path],
    store: FaultyStore,
    save_model: Save,
    make_state: Any,
    monkeypatch: pytest.MonkeyPatch,
    has_versions: bool,
) -> None:
    """Known by their versions; in a store that has none, by what they hold."""
    if not has_versions:
        monkeypatch.setattr(remote_store, "_VERSIONS", ())
    FaultyStore.fault = failing(1000, OSError("500"), "put")
    with pytest.raises(ResourceError, match="writing memory://bucket/out/"):
        matsmerge.merge(URLS, out="memory://bucket/out")
    FaultyStore.fault = None
    changed = "model.safetensors: was modified" if has_versions else "had other inputs, another"
    put_folder(store, save_model("other", make_state(5)), "b")
    remote_file.forget_blocks(f"{URLS[1]}/model.safetensors")
    with pytest.raises(OutputError, match=changed):
        matsmerge.merge(URLS, out="memory://bucket/out", resume=True)
    assert not stored(store, "out")


def test_an_output_is_only_replaced_if_it_is_ours(models: list[Path], store: FaultyStore) -> None:
    matsmerge.merge(URLS, out="memory://bucket/out")
    with pytest.raises(OutputError, match="memory://bucket/out: exists already; replace it"):
        matsmerge.merge(URLS, out="memory://bucket/out")
    matsmerge.merge(URLS, BASE, "task_arithmetic", out="memory://bucket/out", overwrite=True)
    assert (
        json.loads(stored(store, "out")["merge.json"])["recipe"]["method"]["name"]
        == "task_arithmetic"
    )
    with pytest.raises(OutputError, match="memory://bucket/a: exists and holds no merge of ours"):
        matsmerge.merge(URLS, out="memory://bucket/a", overwrite=True)
    with pytest.raises(OutputError, match="https://host/out: can be read and not written to"):
        matsmerge.merge(URLS, out="https://host/out")


def test_recipes_statistics_and_the_command_line(
    models: list[Path], store: FaultyStore, mats: Mats
) -> None:
    module = torch.nn.Linear(4, 3)
    store.put("/bucket/recipe.yaml", json.dumps({"models": URLS, "method": "average"}).encode())
    code, out, err = mats(
        "merge", "memory://bucket/recipe.yaml", "-o", "memory://bucket/out", "--workers", 1
    )
    assert code == 0, err
    assert "merged into memory://bucket/out" in out
    collected = matsmerge.collect(
        module, [torch.randn(5, 4)], "gram", out="memory://bucket/s.safetensors"
    )
    opened = matsmerge.open_statistics("memory://bucket/s.safetensors")
    assert opened.header == collected.header
    assert all(torch.equal(opened.arrays[n], collected.arrays[n]) for n in collected.arrays.specs)
    code, out, err = mats("inspect", "memory://bucket/s.safetensors")
    assert code == 0, err
    code, _, err = mats("merge", "memory://bucket/none.yaml", "-o", "memory://bucket/out2")
    assert code == 1
    assert "memory://bucket/none.yaml" in err


def test_statistics_beside_a_remote_model(
    store: FaultyStore, tmp_path: Path, save_model: Save
) -> None:
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        module = torch.nn.Linear(4, 3, bias=False)
        folder = save_model(name, module.state_dict())
        rows = [torch.randn(20, 4)]
        matsmerge.collect(
            module, rows, "gram", checkpoint=folder, out=folder / "statistics.safetensors"
        )
        put_folder(store, folder, name)
    local = matsmerge.merge([tmp_path / "a", tmp_path / "b"], method="regmean")
    remote = matsmerge.merge(URLS, method="regmean")
    assert torch.equal(local["weight"], remote["weight"])
    FaultyStore.fault = failing(1000, PermissionError("no"), "info")
    with pytest.raises(
        CheckpointError, match="memory://bucket/a: cannot be read .looking it up: access was denied"
    ):
        matsmerge.merge(URLS, method="regmean")


def test_a_pickled_model_comes_whole(store: FaultyStore, tmp_path: Path) -> None:
    for name in "ab":
        torch.save({"w": torch.randn(3)}, tmp_path / f"{name}.bin")
        store.put(f"/bucket/{name}/pytorch_model.bin", (tmp_path / f"{name}.bin").read_bytes())
    local = matsmerge.merge([tmp_path / "a.bin", tmp_path / "b.bin"])
    assert torch.equal(matsmerge.merge(URLS)["w"], local["w"])


def test_collecting_from_a_store(store: FaultyStore, mats: Mats, tmp_path: Path) -> None:
    model = BertForSequenceClassification(bert_config(num_labels=2))
    put_folder(store, save(model, tmp_path / "model", make_tokenizer()), "model")
    write_rows(tmp_path / "rows.jsonl", [{"text": t, "label": i % 2} for i, t in enumerate("abcd")])
    (tmp_path / "task.yaml").write_text("data: rows.jsonl\n")
    for name in ("rows.jsonl", "task.yaml"):
        store.put(f"/bucket/tasks/{name}", (tmp_path / name).read_bytes())
    common = ["--statistics", "gram"]
    code, _, err = mats("collect", tmp_path / "model", "--task", tmp_path / "task.yaml", *common)
    assert code == 0, err
    code, out, err = mats(
        "collect", "memory://bucket/model", "--task", "memory://bucket/tasks/task.yaml", *common
    )
    assert code == 0, err
    assert "memory://bucket/model/statistics.safetensors" in "".join(out.split())
    made = matsmerge.open_statistics("memory://bucket/model/statistics.safetensors")
    local = matsmerge.open_statistics(tmp_path / "model" / "statistics.safetensors")
    assert made.header.model == local.header.model
    assert all(torch.equal(made.arrays[n], local.arrays[n]) for n in local.arrays.specs)


class _Ranges(http.server.BaseHTTPRequestHandler):
    """A web server with one file, which it sends by ranges if `whole` is not asked for."""

    content = b""

    def do_GET(self) -> None:
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        start, stop = (int(found[1]), int(found[2]) + 1) if found else (0, len(self.content))
        if "none" in self.path:
            self.send_error(404)
            return
        if "whole" in self.path:
            start, stop = 0, len(self.content)
        part = self.content[start:stop]
        self.send_response(206 if found else 200)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("ETag", '"1"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(part)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


def test_a_file_of_a_web_server(models: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp", reason="pip install 'matsmerge[remote]'")
    monkeypatch.setattr(_Ranges, "content", (models[0] / "model.safetensors").read_bytes())
    monkeypatch.setattr(safetensors_header, "_FETCHED_BYTES", 64)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Ranges) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        found = matsmerge.open_checkpoint(f"{address}/model.safetensors")
        assert found.label == f"{address}/model.safetensors"
        local = matsmerge.open_checkpoint(models[0])
        assert all(torch.equal(found[name], local[name]) for name in local.specs)
        with pytest.raises(CheckpointError, match="no such file or folder in that store"):
            matsmerge.open_checkpoint(f"{address}/none.safetensors")
        with pytest.raises(CheckpointError, match=r"whole.safetensors: .* sends whole files only"):
            matsmerge.open_checkpoint(f"{address}/whole.safetensors")
        server.shutdown()


def test_a_repository_of_the_hub_by_ranges(
    models: list[Path], monkeypatch: pytest.MonkeyPatch, save_model: Save
) -> None:
    """`hf://` reads what is needed and not the 5 MB after it, as the hub's file system would."""
    large = save_model("large", {"w": torch.randn(1_000_000), "v": torch.randn(1_000_000)})
    with hub_server(monkeypatch) as hub:
        for name, folder in (("large", large), ("a", models[0]), ("b", models[1])):
            hub.repos[f"owner/{name}"] = {p.name: p.read_bytes() for p in folder.iterdir()}
        found = matsmerge.open_checkpoint("hf://owner/large/model.safetensors")
        assert hub.ranges == [("model.safetensors", "bytes=0-32767")]
        local = matsmerge.open_checkpoint(large)
        assert fingerprint(found) == fingerprint(local)
        assert len(hub.ranges) == 1 + 2 * 4
        assert torch.equal(found["w"], local["w"])
        made = matsmerge.merge(["hf://owner/a", "hf://owner/b"])
        expected = matsmerge.merge(models)
        names = matsmerge.open_checkpoint(models[0]).specs
        assert all(torch.equal(made[name], expected[name]) for name in names)
        with pytest.raises(CheckpointError, match="hf://owner/none/m.safetensors: no such file"):
            matsmerge.open_checkpoint("hf://owner/none/m.safetensors")
