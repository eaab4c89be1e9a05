"""Processes of this machine that do steps, as Ray does them on others."""

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from matsmerge.engine.executor import J, R
from matsmerge.engine.machine import become_worker, die_with, num_cores, starting_workers


@dataclass(frozen=True)
class StepProcesses:
    """A process for each of so many workers; one alone is this process."""

    num_workers: int

    @contextmanager
    def opened(self, function: Callable[[J], R]) -> Iterator[Callable[[J], Future[R]]]:
        """Yield what starts a job; processes that are still at work when this fails are ended."""
        if self.num_workers == 1:
            yield lambda job: _done_here(function, job)
            return
        pool = ProcessPoolExecutor(
            self.num_workers,
            multiprocessing.get_context("spawn"),
            initializer=_become_worker,
            initargs=(max(1, num_cores() // self.num_workers),),
        )

        def submit(job: J) -> Future[R]:
            # Ctrl-C does not reach the processes, from their first moment on; we take them along.
            with starting_workers():
                return pool.submit(function, job)

        try:
            yield submit
        except BaseException:
            for process in list((getattr(pool, "_processes", None) or {}).values()):
                process.terminate()  # a step may take an hour
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def _done_here(function: Callable[[J], R], job: J) -> Future[R]:
    future: Future[R] = Future()
    try:
        future.set_result(function(job))
    except Exception as error:
        future.set_exception(error)
    return future


def _become_worker(num_threads: int) -> None:
    """Begin as a worker: the parent handles Ctrl-C, and the worker ends when the parent dies."""
    import torch

    become_worker()
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    if sys.platform == "linux" and parent.pid is not None:
        die_with(parent.pid)
    else:
        threading.Thread(target=watch, daemon=True).start()
    torch.set_num_threads(num_threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
