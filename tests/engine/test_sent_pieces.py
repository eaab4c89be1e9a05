"""Outputs in a store, sent there by workers that do not see the driver's disk."""

import pickle
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_store import FaultyStore

import matsmerge
from matsmerge import LocalExecutor, OutputError, ResourceError
from matsmerge.checkpoints.checkpoint import TensorSpec
from matsmerge.engine import sent_pieces
from matsmerge.engine.executor import Distant, SerialExecutor
from matsmerge.engine.layout import ShardFiles, make_layout
from matsmerge.engine.sent_pieces import SentPieces
from matsmerge.files.remote_names import mirror_path
from matsmerge.files.whole_outputs import staging_path

OUT = "memory://bucket/out"
STAGING = "/bucket/.out.partial"


class Away(SerialExecutor):
    """Works on copies of what it is given, and after so many merging jobs gets Ctrl-C."""

    shares_memory = False

    def __init__(self, num_jobs: int = 10**6) -> None:
        super().__init__()
        self.num_jobs, self.num_done = num_jobs, 0
        self.seen: list[Path] = []

    def map(self, function: Any, jobs: Iterable[Any]) -> Iterator[Any]:
        away = pickle.loads(pickle.dumps(function))
        for job in jobs:
            if self.num_done == self.num_jobs:
                raise KeyboardInterrupt
            self.num_done += 1
            yield pickle.loads(pickle.dumps(away(job)))

    @contextmanager
    def opened(self, function: Any) -> Iterator[Callable[[Any], Future[Any]]]:
        def submit(job: Any) -> Future[Any]:
            future: Future[Any] = Future()
            try:
                future.set_result(pickle.loads(pickle.dumps(function))(job))
            except Exception as error:
                future.set_exception(error)
            return future

        yield submit

    def check_sees(self, folder: Path) -> None:
        self.seen.append(folder)


@pytest.fixture
def models(save_model: Any, make_state: Any, store: FaultyStore) -> list[Path]:
    return [save_model(n, make_state(i)) for i, n in enumerate(("a", "b"))]


@pytest.fixture
def few_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several jobs, and pieces that are read in several blocks."""
    monkeypatch.setattr("matsmerge.engine.plan.JOB_ELEMENTS", 8)
    monkeypatch.setattr(sent_pieces, "BLOCK_BYTES", 64)


def stored(store: FaultyStore, folder: str) -> dict[str, bytes]:
    return {n.removeprefix(f"{folder}/"): store.cat_file(n) for n in store.find(folder)}


def visible(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name[0] != ".")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_runs_are_joined_and_sent_once(store: FaultyStore, tmp_path: Path) -> None:
    values = torch.arange(20, dtype=torch.float32)
    shapes = {"a": (3, 4), "b": (8,)}
    layout = make_layout({n: TensorSpec(torch.float32, s) for n, s in shapes.items()}, "model")
    files = ShardFiles(tmp_path / "files", layout)
    sink = pickle.loads(pickle.dumps(SentPieces("memory://bucket/p", files.shard_of)))
    sink.write("a", 8, values[8:12])
    sink.write("a", 0, values[:4])
    sink.write("b", 0, values[12:])
    assert stored(store, "/bucket/p") == {}
    sink.flush()
    begin = len(layout.shards[0].header)
    found = stored(store, "/bucket/p/model.safetensors")
    assert found == {
        f"{begin}": values[:4].numpy().tobytes(),
        f"{begin + 32}": values[8:].numpy().tobytes(),
    }
    FaultyStore.order.clear()
    sink.flush()
    assert FaultyStore.order == []


@pytest.mark.parametrize("max_shard_bytes", [10**9, 600])
@pytest.mark.usefixtures("few_elements")
def test_the_same_bytes_as_on_the_disk(
    max_shard_bytes: int, models: list[Path], store: FaultyStore, tmp_path: Path
) -> None:
    planned = matsmerge.plan(models)
    local = planned.merge(tmp_path / "out", max_shard_bytes=max_shard_bytes).folder
    executor = Away()
    assert isinstance(executor, Distant)
    assert not isinstance(LocalExecutor(1), Distant)
    FaultyStore.order.clear()
    planned.merge(OUT, executor=executor, max_shard_bytes=max_shard_bytes)
    assert stored(store, "/bucket/out") == visible(local)
    assert stored(store, STAGING) == {}
    assert executor.seen == []  # no folder has to be seen
    put = [one.removeprefix("put ") for one in FaultyStore.order if one.startswith("put ")]
    of_jobs = [name for name in put if name.startswith(STAGING)]
    assert len(of_jobs) >= executor.num_done > 3
    assert put[: len(of_jobs)] == of_jobs
    weights = [name for name in put if name.endswith(".safetensors") and name not in of_jobs]
    assert len(weights) == (1 if max_shard_bytes > 600 else len(list(local.glob("*.safetensors"))))
    assert put[-1] == "/bucket/out/merge.json"
    assert not staging_path(mirror_path(OUT)).exists()


@pytest.mark.usefixtures("few_elements")
def test_what_was_sent_is_not_sent_again(
    models: list[Path], store: FaultyStore, tmp_path: Path
) -> None:
    local = matsmerge.merge(models, out=tmp_path / "out").folder
    with pytest.raises(KeyboardInterrupt):
        matsmerge.merge(models, out=OUT, executor=Away(3))
    assert stored(store, "/bucket/out") == {}
    assert stored(store, STAGING)
    with pytest.raises(OutputError, match="another executor"):
        matsmerge.merge(models, out=OUT, executor=LocalExecutor(1), resume=True)
    FaultyStore.order.clear()

    def fault(operation: str, path: str) -> None:
        if operation == "put" and path == "/bucket/out/model.safetensors":
            raise OSError("500")

    FaultyStore.fault = fault
    rest = Away()
    with pytest.raises(ResourceError, match="writing memory://bucket/out/model.safetensors"):
        matsmerge.merge(models, out=OUT, executor=rest, resume=True)
    assert "merge.json" not in stored(store, "/bucket/out")
    FaultyStore.fault = None
    none = Away()
    matsmerge.merge(models, out=OUT, executor=none, resume=True)
    assert rest.num_done > none.num_done == 0
    assert stored(store, "/bucket/out") == visible(local)
    assert stored(store, STAGING) == {}


@pytest.mark.usefixtures("few_elements")
def test_a_piece_that_is_gone(models: list[Path], store: FaultyStore) -> None:
    with pytest.raises(KeyboardInterrupt):
        matsmerge.merge(models, out=OUT, executor=Away(4))
    store.rm_file(next(iter(store.find(STAGING))))
    with pytest.raises(OutputError, match="does not make the whole of it"):
        matsmerge.merge(models, out=OUT, executor=Away(), resume=True)
    assert stored(store, "/bucket/out").keys().isdisjoint({"merge.json", "model.safetensors"})


def test_folders_that_workers_write_to_must_be_seen(
    models: list[Path], store: FaultyStore, tmp_path: Path
) -> None:
    executor = Away()
    matsmerge.merge(models, out=tmp_path / "new" / "out", executor=executor)
    assert executor.seen == [tmp_path]
