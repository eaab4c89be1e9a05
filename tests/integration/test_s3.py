"""Merging from and to a real S3 server on loopback."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_commands import ForkedCommand, run_mats
from s3_server import CREDENTIALS, Proxy, s3_server

import matsmerge
from matsmerge import CheckpointError
from matsmerge.files import remote_store

Save = Callable[..., Path]
URLS = ["s3://bucket/a", "s3://bucket/b"]
MODEL_BYTES = 24_000_000  # three blocks


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with s3_server() as found:
        yield found


@pytest.fixture
def proxy(port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """The store with nothing in it but an empty bucket, and an empty cache."""
    import s3fs

    with Proxy(port) as found:
        for key, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": found.address}.items():
            monkeypatch.setenv(key, value)
        monkeypatch.setenv("MATSMERGE_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(remote_store, "_DELAYS", (0.0, 0.0))
        monkeypatch.setattr(s3fs.S3FileSystem, "read_timeout", 300)  # a busy machine is no fault
        monkeypatch.setattr(s3fs.S3FileSystem, "connect_timeout", 300)
        s3fs.S3FileSystem.clear_instance_cache()
        store = s3fs.S3FileSystem()
        if store.exists("bucket"):
            store.rm("bucket", recursive=True)
        store.mkdir("bucket")
        yield found
        found.shutdown()
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def store(proxy: Proxy) -> Any:
    import s3fs

    return s3fs.S3FileSystem()


@pytest.fixture
def models(proxy: Proxy, store: Any, save_model: Save) -> list[Path]:
    folders = []
    for seed, name in enumerate("ab"):
        values = torch.randn(MODEL_BYTES // 4 - 1000, generator=torch.Generator().manual_seed(seed))
        state = {"w": values, "bias": values[:1000].clone()}
        folders.append(save_model(name, state, config__json='{"model_type": "tiny"}'))
        for path in folders[-1].iterdir():
            store.put_file(str(path), f"bucket/{name}/{path.name}")
    proxy.answers.clear()
    return folders


def merging(*more: str) -> list[str]:
    return ["merge", "--model", URLS[0], "--model", URLS[1], "-o", "s3://bucket/out", *more]


def test_a_dry_run_moves_headers(models: list[Path], proxy: Proxy) -> None:
    result = run_mats(*merging("--dry-run"))
    assert result.returncode == 0, result.stderr
    read = [answer for answer in proxy.answers if answer[0] == "GET"]
    assert sum(num for *_, num in read) < 100_000
    ranges = [asked for _, path, asked, _ in read if path.endswith("model.safetensors")]
    assert ranges == ["bytes=0-32767"] * 2


def test_forked_workers_read_and_write(
    models: list[Path], proxy: Proxy, store: Any, tmp_path: Path
) -> None:
    local = matsmerge.merge(models, out=tmp_path / "out").folder
    result = run_mats(*merging("--workers", "2", "--json"))
    assert result.returncode == 0, result.stderr
    assert "s3://bucket/out" in result.stdout
    for path in local.iterdir():
        if not path.name.startswith("."):
            assert store.cat_file(f"bucket/out/{path.name}") == path.read_bytes()
    assert {Path(n).name for n in store.find("bucket/out")} == {
        p.name for p in local.iterdir() if p.name[0] != "."
    }
    # Each byte once, by whichever worker came first; and what is read to tell models apart.
    inputs = [
        num for m, path, _, num in proxy.answers if m == "GET" and re.search("/[ab]/model", path)
    ]
    assert 2 * MODEL_BYTES <= sum(inputs) < 2.1 * MODEL_BYTES
    proxy.answers.clear()
    again = run_mats(*merging("--overwrite"))
    assert again.returncode == 0, again.stderr
    kept = [
        num for m, path, _, num in proxy.answers if m == "GET" and re.search("/[ab]/model", path)
    ]
    assert sum(kept) < MODEL_BYTES // 100


def test_broken_answers_are_asked_for_again(
    models: list[Path], proxy: Proxy, store: Any, tmp_path: Path
) -> None:
    local = matsmerge.merge(models, out=tmp_path / "out").folder
    kinds = ["500", "reset", "short"]
    met: list[tuple[str, str, str]] = []

    def fault(*asked: str) -> str | None:
        method, path, span = asked
        met.append((method, path, span))
        is_first = met.count((method, path, span)) == 1
        return (
            kinds[len(met) % 3]
            if is_first and "model.safetensors" in path and method != "HEAD"
            else None
        )

    proxy.fault = fault
    matsmerge.merge(URLS, out="s3://bucket/out")
    proxy.fault = lambda *_: None
    assert len(met) > 10
    assert (
        store.cat_file("bucket/out/model.safetensors") == (local / "model.safetensors").read_bytes()
    )


@pytest.mark.parametrize("kind", ["500", "reset", "short"])
def test_a_server_that_stays_broken_is_one_error(
    models: list[Path], proxy: Proxy, store: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_store, "_DELAYS", (0.0,))
    planned = matsmerge.plan(URLS)
    proxy.fault = lambda method, path, span: (
        kind if "/b/model" in path and method == "GET" else None
    )
    with pytest.raises(matsmerge.ResourceError) as error:
        planned.merge("s3://bucket/out")
    (problem,) = error.value.problems
    assert re.match(
        r"s3://bucket/b/model.safetensors: cannot be read any more \(bytes \d+ to \d+: 2 attempts failed",
        problem,
    )
    assert CREDENTIALS["AWS_SECRET_ACCESS_KEY"] not in problem
    assert not store.exists("bucket/out")
    proxy.fault = lambda *_: None
    planned.merge("s3://bucket/out", resume=True)
    assert store.exists("bucket/out/merge.json")


def test_a_killed_upload_shows_no_model_and_is_continued(
    models: list[Path], proxy: Proxy, store: Any, tmp_path: Path
) -> None:
    local = matsmerge.merge(models, out=tmp_path / "out").folder
    is_there: list[str] = []
    may_go_on: list[bool] = []

    def fault(method: str, path: str, _: str) -> str | None:
        if method in ("PUT", "POST") and "out/model.safetensors" in path and not may_go_on:
            is_there.append(path)
            while not may_go_on:
                time.sleep(0.05)
            return "reset"
        return None

    proxy.fault = fault
    command = ForkedCommand(merging())
    while not is_there and command.poll() is None:
        time.sleep(0.05)
    command.send_signal(signal.SIGKILL)
    command.wait()
    may_go_on.append(True)
    assert is_there
    store.invalidate_cache()
    small = {"config.json", "README.md", "mergekit_config.yml"}
    assert {Path(n).name for n in store.find("bucket/out")} <= small
    with pytest.raises(CheckpointError):
        matsmerge.open_checkpoint("s3://bucket/out")
    result = run_mats(*merging("--resume"))
    assert result.returncode == 0, result.stderr
    store.invalidate_cache()
    for name in ("model.safetensors", "merge.json"):
        assert store.cat_file(f"bucket/out/{name}") == (local / name).read_bytes()


def test_many_parts_appear_as_one(proxy: Proxy, store: Any, tmp_path: Path) -> None:
    file = tmp_path / "large"
    file.write_bytes(os.urandom(2**20) * 120)  # more than two parts of s3fs
    proxy.fault = lambda method, path, _: "500" if "partNumber=2" in path else None
    with pytest.raises(OSError, match="attempts failed"):
        remote_store.put(file, "s3://bucket/large")
    assert not store.exists("bucket/large")
    assert not store.list_multipart_uploads("bucket")
    proxy.fault = lambda *_: None
    assert remote_store.put(file, "s3://bucket/large").size == file.stat().st_size
    assert any("uploads" in path for method, path, *_ in proxy.answers if method == "POST")


def test_a_bucket_that_is_not_there(proxy: Proxy, tmp_path: Path, save_model: Save) -> None:
    folder = save_model("m", {"w": torch.randn(3)})
    with pytest.raises(matsmerge.ResourceError, match="writing s3://none/out/"):
        matsmerge.merge([folder], out="s3://none/out")
    with pytest.raises(CheckpointError, match="s3://none/m: no such file or folder in that store"):
        matsmerge.open_checkpoint("s3://none/m")
