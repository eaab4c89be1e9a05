"""Ray and S3 together: nodes that share nothing with the driver but the store."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ray_clusters import cluster
from s3_server import CREDENTIALS, s3_server
from safetensors.torch import save_file

import matsmerge
from matsmerge import LocalExecutor, RayExecutor
from matsmerge.engine.layout import ShardFiles

pytest.importorskip("ray", reason="needs the extra matsmerge[ray]")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An S3 server, and nodes that have another cache than this process."""
    with s3_server() as port:
        for key, value in CREDENTIALS.items():
            monkeypatch.setenv(key, value)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("MATSMERGE_CACHE", str(tmp_path / "theirs"))
        with cluster(2):
            monkeypatch.setenv("MATSMERGE_CACHE", str(tmp_path / "ours"))
            import s3fs

            s3fs.S3FileSystem.clear_instance_cache()
            made = s3fs.S3FileSystem()
            made.mkdir("bucket")
            yield made


@pytest.mark.long
@pytest.mark.parametrize("max_shard_bytes", [40_000, 10**9])
def test_a_merge_in_the_store(
    max_shard_bytes: int, store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed, name in enumerate(("base", "a", "b")):
        torch.manual_seed(seed)
        state = {f"layers.{i}.weight": torch.randn(64, 64) for i in range(6)}
        (tmp_path / name).mkdir()
        save_file(state, tmp_path / name / "model.safetensors")
        store.put(str(tmp_path / name), f"bucket/{name}", recursive=True)
    monkeypatch.setattr("matsmerge.engine.plan.JOB_ELEMENTS", 5000)

    def merge(place: str, out: str, executor: Any) -> None:
        models = [f"{place}/a", f"{place}/b"]
        planned = matsmerge.plan(models, f"{place}/base", "ties", density=0.5)
        planned.merge(out, executor=executor, max_shard_bytes=max_shard_bytes)

    merge(str(tmp_path), str(tmp_path / "out"), LocalExecutor(1))

    def refuse(*_: object) -> None:
        raise AssertionError("the driver has written weights")

    monkeypatch.setattr(ShardFiles, "write", refuse)
    merge("s3://bucket", "s3://bucket/out", RayExecutor())
    store.invalidate_cache()
    found = {n.removeprefix("bucket/out/"): store.cat_file(n) for n in store.find("bucket/out")}
    local = [path for path in (tmp_path / "out").iterdir() if path.name[0] != "."]
    assert found == {path.name: path.read_bytes() for path in local}
    num_shards = sum(name.endswith(".safetensors") for name in found)
    assert num_shards == (3 if max_shard_bytes < 10**9 else 1)
    assert store.find("bucket/.out.partial") == []
