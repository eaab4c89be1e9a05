"""Merges on Ray: the same bytes as here, on one node and on three, whatever dies meanwhile."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from prefix_families import KINDS, Family, family
from ray_clusters import cluster, resize
from safetensors.torch import save_file
from solved_models import make_nets, make_statistics

import matsmerge
from matsmerge import Executor, LocalExecutor, RayExecutor, ResourceError
from matsmerge.engine import ray_executor
from matsmerge.engine.executor import Piece
from matsmerge.engine.layout import ShardFiles
from matsmerge.engine.plan import Job
from matsmerge.files.whole_outputs import staging_path
from matsmerge.methods import METHODS
from matsmerge.methods.mats import Mats
from matsmerge.recipes.recipe import make_recipe
from matsmerge.statistics.statistics_file import save_statistics

ray = pytest.importorskip("ray", reason="needs the extra matsmerge[ray]")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

# What a method needs beside models and statistics.
OPTIONS: dict[str, dict[str, Any]] = {"passthrough": {"model": "b"}, "nearswap": {"t": 0.01}}
Work = Piece[int]
Expected = Callable[[str], dict[str, bytes]]
ALONG = [n for n, c in METHODS.items() if issubclass(c, Mats) and c().uses_merged_inputs]


def work(number: int, peak_bytes: int = 1) -> Work:
    return Piece(number, 0, peak_bytes)


@pytest.fixture(scope="module")
def one_cluster() -> Iterator[Any]:
    with cluster() as made:
        yield made


@pytest.fixture
def nodes(one_cluster: Any) -> Any:
    """A cluster of three nodes."""
    resize(one_cluster, 3)
    return one_cluster


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models with statistics; and in `along` those that are merged along their blocks."""
    folder = tmp_path_factory.mktemp("inputs")
    base, models = make_nets(2)
    for name, model in zip(("base", "a", "b"), (base, *models), strict=True):
        save_file(model.state_dict(), folder / f"{name}.safetensors")
    for name, found in zip(("a", "b"), make_statistics(2), strict=True):
        save_statistics(found, folder / f"{name}.statistics.safetensors")
    family("bert", folder / "along", torch.float32)
    return folder


def recipe_of(inputs: Path, method: str) -> dict[str, Any]:
    made = {"name": method, **OPTIONS.get(method, {})}
    if method in ALONG:
        along = Family(KINDS["bert"], inputs / "along")
        models = [
            {"model": str(model), "data": str(data)}
            for model, data in zip(along.paths, along.data, strict=True)
        ]
        return {"models": models, "method": {**made, "init": "average"}}
    models = [
        {
            "model": str(inputs / f"{name}.safetensors"),
            "name": name,
            "statistics": str(inputs / f"{name}.statistics.safetensors"),
        }
        for name in ("a", "b")[: METHODS[method].num_models]
    ]
    return {"models": models, "base": str(inputs / "base.safetensors"), "method": made}


def merge(inputs: Path, method: str, out: Path, executor: Executor) -> dict[str, bytes]:
    """Merge into a folder; all of its files."""
    matsmerge.merge(make_recipe(recipe_of(inputs, method)), out=out, executor=executor)
    return read(out)


def read(out: Path) -> dict[str, bytes]:
    assert not staging_path(out).exists()
    return {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def expected(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """What threads of this process make of a method."""
    folder = tmp_path_factory.mktemp("threads")
    return cache(lambda method: merge(inputs, method, folder / method / "out", LocalExecutor(2)))


@pytest.mark.parametrize("method", METHODS)
def test_forked_processes_give_the_bytes_of_threads(
    method: str, inputs: Path, expected: Expected, tmp_path: Path
) -> None:
    found = merge(inputs, method, tmp_path / "out", LocalExecutor(2, fork=True))
    assert found == expected(method)


# One of each grain, of those that measure first, draw at random or solve, and of those along the
# merged model: to Ray all others look like one of them.
ON_RAY = {
    *("average", "ties", "dare_linear", "model_stock", "passthrough", "tsv_m", "iso_c", "svc"),
    *("actmat", "regmean", "block_fisher", "mats", "mats_kfac", "mats_cross"),
}


@pytest.mark.parametrize(
    "method",
    [pytest.param(m, marks=[] if m in ON_RAY else [pytest.mark.long]) for m in METHODS],
)
@pytest.mark.parametrize("num_nodes", [pytest.param(1, marks=pytest.mark.long), 3])
def test_ray_gives_the_bytes_of_threads(
    num_nodes: int,
    method: str,
    inputs: Path,
    expected: Expected,
    tmp_path: Path,
    one_cluster: Any,
) -> None:
    resize(one_cluster, num_nodes)
    assert merge(inputs, method, tmp_path / "out", RayExecutor()) == expected(method)


def wait_for(folder: Path, num: int) -> None:
    """Until a folder holds so many files."""
    deadline = time.monotonic() + 300
    while len(list(folder.iterdir())) < num and time.monotonic() < deadline:
        time.sleep(0.02)


def test_jobs_run_on_all_nodes(nodes: Any, tmp_path: Path) -> None:
    def wait(_: Work) -> None:
        (tmp_path / ray.get_runtime_context().get_node_id()).touch()
        wait_for(tmp_path, 3)

    executor = RayExecutor()
    assert executor.num_workers == 3
    assert executor.max_bytes == 3 * executor.largest_job_bytes == 6 * 10**9
    assert len(list(executor.map(wait, map(work, range(6))))) == 6
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("by_variable", [False, True])
def test_a_cluster_that_is_not_there_is_said_at_once(
    monkeypatch: pytest.MonkeyPatch, by_variable: bool
) -> None:
    """Ray itself would try the address for minutes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # and nobody listens
        address = f"127.0.0.1:{free.getsockname()[1]}"

        def refuse(*_: Any, **__: Any) -> None:
            raise AssertionError("Ray was asked")

        monkeypatch.setattr(ray, "init", refuse)
        monkeypatch.setattr(ray, "is_initialized", lambda: False)
        monkeypatch.setenv("RAY_ADDRESS", address if by_variable else "elsewhere:1")
        with pytest.raises(ResourceError, match=f"Ray on {address} .*nobody answers there"):
            _ = RayExecutor(None if by_variable else address).num_workers


def test_what_a_job_raises_ends_it(nodes: Any) -> None:
    def fail(given: Work) -> int:
        if given.content == 3:
            raise matsmerge.NonFiniteError(["one", "two"])
        if given.content == 4:
            Path("/nowhere/file").read_bytes()
        if given.content == 5:
            raise MemoryError
        return given.content

    executor = RayExecutor()
    with pytest.raises(matsmerge.NonFiniteError) as error:
        list(executor.map(fail, (work(n) for n in range(1000) if n not in (4, 5))))
    assert error.value.problems == ["one", "two"]
    with pytest.raises(ResourceError, match="/nowhere/file: the node .* does not see this file"):
        list(executor.map(fail, [work(4)]))
    with pytest.raises(ResourceError, match="gave out"):
        list(executor.map(fail, [work(5)]))
    with pytest.raises(ResourceError, match="needs 3 GB of memory, and .* has 2 GB"):
        list(executor.map(fail, [work(0, peak_bytes=3 * 10**9)]))


def test_folders_that_nodes_do_not_see(
    nodes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RayExecutor().check_sees(tmp_path)
    assert list(tmp_path.iterdir()) == []
    elsewhere = nullcontext(SimpleNamespace(name="/nowhere/mark"))
    monkeypatch.setattr(tempfile, "NamedTemporaryFile", lambda **_: elsewhere)
    with pytest.raises(ResourceError, match="do not see this folder; merge into one"):
        RayExecutor().check_sees(tmp_path)


def test_budgets_are_kept(nodes: Any, tmp_path: Path) -> None:
    """Also one that is smaller than the cluster."""

    def note(given: Work) -> int:
        here = tmp_path / str(given.content)
        here.touch()
        time.sleep(0.05)
        found = len(list(tmp_path.iterdir()))
        here.unlink()
        return found

    works = [work(i, peak_bytes=10) for i in range(6)]
    assert set(RayExecutor(max_bytes=15).map(note, works)) == {1}
    assert set(RayExecutor(num_workers=1).map(note, works)) == {1}


@pytest.mark.long
def test_a_job_that_always_kills_its_worker_is_given_up(
    nodes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_executor, "_RETRIES", 1)
    with pytest.raises(ResourceError, match="died, 2 times with one job"):
        list(RayExecutor().map(lambda _: os.kill(os.getpid(), signal.SIGKILL), [work(0)]))


class Deadly(RayExecutor):
    """Two merging jobs die in the middle of a tensor: their workers, or the nodes of these."""

    def __init__(self, marks: Path, *, with_node: bool) -> None:
        super().__init__()
        self.marks, self.with_node = marks, with_node
        marks.mkdir()

    def map(self, function: Any, jobs: Any) -> Any:
        marks, with_node = self.marks, self.with_node
        head = ray.get_runtime_context().get_node_id()  # where this process is, too

        def do_or_die(job: Any) -> Any:
            dead = [mark.name for mark in marks.iterdir()]
            is_spared = with_node and ray.get_runtime_context().get_node_id() == head
            is_chosen = isinstance(job, Job) and len(dead) < 2 and str(job.index) not in dead
            if is_chosen and not is_spared:
                (marks / str(job.index)).touch()
                victim = os.getppid() if with_node else os.getpid()
                write = ShardFiles.write

                def write_and_die(self: Any, name: str, start: int, values: Any) -> None:
                    write(self, name, start, values[: len(values) // 2])
                    os.kill(victim, signal.SIGKILL)
                    # A worker may outlive its node's raylet, and would then say that it is done.
                    os.kill(os.getpid(), signal.SIGKILL)

                ShardFiles.write = write_and_die  # type: ignore[method-assign]
            elif is_spared and isinstance(job, Job):
                wait_for(marks, 2)  # else all may be done before other nodes have begun
            return function(job)

        return super().map(do_or_die, jobs)


@pytest.mark.long
@pytest.mark.parametrize("with_node", [False, True], ids=["worker", "node"])
def test_what_dies_is_done_again_elsewhere(
    with_node: bool,
    inputs: Path,
    expected: Expected,
    tmp_path: Path,
    nodes: Any,
) -> None:
    executor = Deadly(tmp_path / "marks", with_node=with_node)
    try:
        found = merge(inputs, "mats_kfac", tmp_path / "out", executor)
    finally:
        if with_node:
            resize(nodes, 1)  # of those that are dead the cluster does not know
    assert found == expected("mats_kfac")
    assert len(list(executor.marks.iterdir())) == 2


# `mats` that gets a signal when so many jobs have been noted.
ENDED_MATS = """
import os, signal
from matsmerge.cli import main
from matsmerge.engine.output_folder import OutputFolder
note = OutputFolder.note_finished
def note_and_end(self, receipt):
    note(self, receipt)
    if len(self.finished) == NUM_JOBS:
        self._start_sync().result()
        os.kill(os.getpid(), SIGNAL)
OutputFolder.note_finished = note_and_end
main.main()
"""


@pytest.mark.long
def test_a_driver_that_ends_is_continued(
    inputs: Path, expected: Expected, tmp_path: Path, nodes: Any
) -> None:
    """After Ctrl-C, then after a kill."""
    recipe, out = tmp_path / "recipe.yaml", tmp_path / "out"
    recipe.write_text(yaml.safe_dump(recipe_of(inputs, "mats_kfac") | {"executor": "ray"}))
    for ending, num_jobs, more in ((signal.SIGINT, 2, ()), (signal.SIGKILL, 4, ("--resume",))):
        code = ENDED_MATS.replace("SIGNAL", str(int(ending))).replace("NUM_JOBS", str(num_jobs))
        ended = subprocess.run(
            [sys.executable, "-c", code, "merge", recipe, "--out", out, "--workers", "1", *more],
            capture_output=True,
            text=True,
            check=False,
        )
        if ending is signal.SIGINT:
            assert (ended.returncode, ended.stdout) == (130, ""), ended.stderr
            assert "interrupted; continue with --resume" in ended.stderr
        else:
            assert ended.returncode == -ending, ended.stderr
        assert staging_path(out).exists()
        assert not out.exists()
    matsmerge.merge(str(recipe), out=out, resume=True)  # by the executor of the recipe
    assert read(out) == expected("mats_kfac")
