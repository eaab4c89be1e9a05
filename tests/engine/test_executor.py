import gc
import itertools
import os
import pickle
import signal
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft_models import adapt, make_base
from safetensors.torch import save_file

import matsmerge
from matsmerge import Executor, ResourceError, SerialExecutor
from matsmerge.engine.local_executor import LocalExecutor
from matsmerge.engine.merge_run import RunOptions, merge_to_folder
from matsmerge.engine.prepared_merge import prepare_merge
from matsmerge.recipes.recipe import make_recipe


@dataclass(frozen=True)
class Work:
    number: int
    peak_bytes: int = 1
    device: str = "cpu"


@pytest.mark.parametrize("fork", [False, True])
def test_every_job_once(fork: bool) -> None:
    executor = LocalExecutor(2, 100, fork=fork)
    results = executor.map(lambda work: work.number**2, [Work(i) for i in range(20)])
    assert sorted(results) == [i**2 for i in range(20)]


@pytest.mark.parametrize("fork", [False, True])
def test_errors_come_through_and_end_it(fork: bool) -> None:
    def fail(work: Work) -> int:
        if work.number == 3:
            raise matsmerge.NonFiniteError(["one", "two"])
        return work.number

    def jobs() -> object:
        """Without end, however long the error takes."""
        deadline = time.monotonic() + 60
        for i in itertools.count():
            assert time.monotonic() < deadline
            yield Work(i)

    with pytest.raises(matsmerge.NonFiniteError) as error:
        list(LocalExecutor(2, 100, fork=fork).map(fail, jobs()))  # type: ignore[arg-type]
    assert error.value.problems == ["one", "two"]


def test_memory_budget_is_kept() -> None:
    lock, now, most = threading.Lock(), [0], [0]

    def run(work: Work) -> int:
        with lock:
            now[0] += work.peak_bytes
            most[0] = max(most[0], now[0])
        time.sleep(0.005)
        with lock:
            now[0] -= work.peak_bytes
        return work.number

    works = [Work(i, peak_bytes=(i * 7) % 5 + 1) for i in range(40)]
    list(LocalExecutor(4, 8).map(run, works))
    assert 5 <= most[0] <= 8
    # One that is too large by itself still runs, alone.
    most[0] = 0
    list(LocalExecutor(4, 8).map(run, [Work(0, 3), Work(1, 20), Work(2, 3)]))
    assert most[0] == 20


def test_a_worker_that_is_killed() -> None:
    def die(work: Work) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(matsmerge.ResourceError, match="a worker was killed"):
        list(LocalExecutor(1, 100, fork=True).map(die, [Work(0)]))


def test_forked_workers_leave_the_objects_of_their_parent_to_it() -> None:
    """What the collector looks at is copied from memory that was shared."""
    before = gc.get_freeze_count()
    own = [[i] for i in range(10_000)]
    (num,) = LocalExecutor(1, 100, fork=True).map(lambda _: gc.get_freeze_count(), [Work(0)])
    assert num >= before + len(own)
    assert gc.get_freeze_count() == before


def test_threads_leave_torch_as_it_was() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    list(LocalExecutor(2, 100).map(lambda work: work.number, [Work(i) for i in range(4)]))
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


class SpawningExecutor:
    """Another process that shares nothing with us but files, as a cluster would.

    One job at a time needs no care for `max_bytes`. The process is slow to start, and is kept.
    """

    num_workers = 1
    max_bytes = 1 << 40
    shares_memory = False
    devices = ("cpu",)

    @cached_property
    def _pool(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, get_context("spawn"), torch.set_num_threads, (1,))

    def map(self, function, jobs):  # type: ignore[no-untyped-def]
        pickled = pickle.dumps(function)
        yield from self._pool.map(partial(_unpickle_and_call, pickled), jobs)


def _unpickle_and_call(pickled: bytes, job: object) -> tuple[object, int]:
    return pickle.loads(pickled)(job)  # type: ignore[no-any-return]


# Each is to give the bytes that threads of this process give, and the errors.
EXECUTORS: list[Executor] = [SpawningExecutor()]


@pytest.fixture(params=EXECUTORS, ids=lambda executor: type(executor).__name__)
def executor(request: pytest.FixtureRequest) -> Executor:
    found: Executor = request.param
    return found


@pytest.mark.parametrize("method", ["ties", "slerp", "iso_c"])
def test_the_protocol_suffices_for_other_machines(
    tmp_path: Path, method: str, executor: Executor
) -> None:
    for i in range(3):
        g = torch.Generator().manual_seed(i)
        save_file({"w": torch.randn(200, 300, generator=g)}, tmp_path / f"{i}.safetensors")
    recipe = make_recipe(
        {
            "models": [str(tmp_path / "1.safetensors"), str(tmp_path / "2.safetensors")],
            "base": str(tmp_path / "0.safetensors"),
            "method": method,
            "dtype": "float64",
        }
    )
    merge_to_folder(prepare_merge(recipe), tmp_path / "here")
    merge_to_folder(prepare_merge(recipe), tmp_path / "there", RunOptions(executor))
    here, there = ((tmp_path / n / "model.safetensors").read_bytes() for n in ("here", "there"))
    assert here == there


def test_errors_come_from_other_machines_as_they_are(tmp_path: Path, executor: Executor) -> None:
    for name, value in (("a", 1.0), ("b", float("nan"))):
        save_file({"w": torch.full((3,), value)}, tmp_path / f"{name}.safetensors")
    models = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    with pytest.raises(matsmerge.NonFiniteError, match="b.safetensors: tensor 'w' holds nan"):
        matsmerge.merge(models, out=tmp_path / "out", executor=executor)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("output", ["adapter", "dense"])
def test_adapters_are_merged_by_the_executor_that_was_given(
    tmp_path: Path, output: str, executor: Executor
) -> None:
    """Also where the merged values are only the beginning of what is written."""
    base = make_base("bert", tmp_path / "base")
    config = LoraConfig(r=2, target_modules=["query"])
    adapters = [adapt(base, config, tmp_path / f"lora{i}", seed=i) for i in range(2)]
    options: dict[str, Any] = {"method": "ties", "align": "knots", "output": output}
    matsmerge.merge(adapters, out=tmp_path / "here", **options)
    matsmerge.merge(adapters, out=tmp_path / "there", executor=executor, **options)
    names = sorted(p.name for p in (tmp_path / "here").glob("*.safetensors"))
    assert names
    for name in names:
        here, there = ((tmp_path / n / name).read_bytes() for n in ("here", "there"))
        assert here == there


def test_what_is_no_executor_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    models = [{"w": torch.ones(2)}, {"w": torch.zeros(2)}]
    for given, problem in (
        (object(), "found object without num_workers, max_bytes, devices, shares_memory, map"),
        (0, "found int without"),
        (LocalExecutor, "found LocalExecutor without num_workers, max_bytes"),
    ):
        for out in (None, tmp_path / "out"):
            with pytest.raises(matsmerge.RecipeError, match=problem):
                matsmerge.merge(models, out=out, executor=given)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_memory_that_is_not_shared_is_not_merged_into() -> None:
    models = [{"w": torch.ones(2)}, {"w": torch.zeros(2)}]
    for executor in (SpawningExecutor(), LocalExecutor(fork=True)):
        with pytest.raises(ResourceError, match="do not share the memory of this process"):
            matsmerge.merge(models, executor=executor)
    merged = matsmerge.merge(models, executor=SerialExecutor())
    assert merged["w"].tolist() == [0.5, 0.5]
