import os
import pickle
import signal
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import matsmerge
from matsmerge.engine.executor import LocalExecutor
from matsmerge.engine.merging import merge_to_folder
from matsmerge.engine.preparing import prepare
from matsmerge.recipes.recipe import make_recipe


@dataclass(frozen=True)
class Work:
    number: int
    peak_bytes: int = 1


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

    started: list[int] = []

    def jobs() -> object:
        for i in range(1000):
            started.append(i)
            yield Work(i)

    with pytest.raises(matsmerge.NonFiniteError) as error:
        list(LocalExecutor(2, 100, fork=fork).map(fail, jobs()))  # type: ignore[arg-type]
    assert error.value.problems == ["one", "two"]
    assert len(started) < 100


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


def test_threads_leave_torch_as_it_was() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    list(LocalExecutor(2, 100).map(lambda work: work.number, [Work(i) for i in range(4)]))
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


class SpawningExecutor:
    """Other processes that share nothing with us but files, as a cluster would."""

    def map(self, function, jobs):  # type: ignore[no-untyped-def]
        pickled = pickle.dumps(function)
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            yield from pool.map(partial(_unpickle_and_call, pickled), jobs)


def _unpickle_and_call(pickled: bytes, job: object) -> tuple[object, int]:
    return pickle.loads(pickled)(job)  # type: ignore[no-any-return]


@pytest.mark.parametrize("method", ["ties", "slerp"])
def test_the_protocol_suffices_for_other_machines(tmp_path: Path, method: str) -> None:
    for i in range(3):
        g = torch.Generator().manual_seed(i)
        save_file({"w": torch.randn(100, 30, generator=g)}, tmp_path / f"{i}.safetensors")
    recipe = make_recipe(
        {
            "models": [str(tmp_path / "1.safetensors"), str(tmp_path / "2.safetensors")],
            "base": str(tmp_path / "0.safetensors"),
            "method": method,
        }
    )
    merge_to_folder(prepare(recipe), tmp_path / "here")
    merge_to_folder(prepare(recipe), tmp_path / "there", executor=SpawningExecutor())
    here, there = ((tmp_path / n / "model.safetensors").read_bytes() for n in ("here", "there"))
    assert here == there
