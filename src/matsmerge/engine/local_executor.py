"""Jobs in threads or processes of this machine."""

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import (
    FIRST_COMPLETED,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch

from matsmerge.checkpoints.checkpoint import first_line
from matsmerge.engine.executor import J, R
from matsmerge.engine.machine import (
    become_worker,
    check_workers,
    default_memory_bytes,
    die_with,
    num_cores,
    starting_workers,
)
from matsmerge.errors import ResourceError, machine_gave_out

_SECONDS_TO_WAIT = 1.0  # for a result, before it is seen whether there can be one


class LocalExecutor:
    """Workers on this machine, as many jobs at once as fit into `max_bytes`.

    Workers are threads, or with `fork` copies of this process. Threads are safe in any program
    but wait for each other at the interpreter's lock, which halves their speed on small blocks;
    the command line, which is alone in its process, forks where the system can.
    """

    def __init__(
        self,
        num_workers: int | None = None,
        max_bytes: int | None = None,
        *,
        fork: bool = False,
    ) -> None:
        self.num_workers = num_cores() if num_workers is None else check_workers(num_workers)
        self.max_bytes = default_memory_bytes() if max_bytes is None else max_bytes
        self.fork = fork and sys.platform == "linux"

    @property
    def shares_memory(self) -> bool:
        return not self.fork

    def map(self, function: Callable[[J], R], jobs: Iterable[J]) -> Iterator[R]:
        """Results as they come. A job that alone exceeds `max_bytes` runs by itself."""
        running: dict[Future[R], int] = {}
        num_threads = torch.get_num_threads()
        others = set(multiprocessing.active_children())
        if self.fork:
            pool: Any = ProcessPoolExecutor(
                self.num_workers,
                multiprocessing.get_context("fork"),
                initializer=_enter_copy,
                initargs=(function, os.getpid()),
            )
            function = _inherited
        else:
            pool = ThreadPoolExecutor(
                self.num_workers, initializer=torch.set_num_threads, initargs=(1,)
            )
        try:
            for job in jobs:
                while running and (
                    len(running) > self.num_workers
                    or sum(running.values()) + job.peak_bytes > self.max_bytes
                ):
                    yield from _take(running, pool)
                with starting_workers():
                    future = pool.submit(function, job)
                running[future] = job.peak_bytes
            while running:
                yield from _take(running, pool)
        except BrokenProcessPool as error:
            raise ResourceError(
                "a worker was killed, probably for want of memory; lower --workers or --max-memory "
                "and continue with --resume"
            ) from error
        except (MemoryError, RuntimeError, OSError) as error:
            if not machine_gave_out(error):
                raise
            # A pool that could not start all of its workers waits for the others for ever.
            for worker in set(multiprocessing.active_children()) - others:
                worker.kill()
            raise gave_out(error) from error
        finally:
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(num_threads)


def gave_out(error: BaseException) -> ResourceError:
    """What to do where there is no more memory, or no more processes or files."""
    return ResourceError(
        f"the machine, or a limit on this process, gave out ({first_line(error)}); lower --workers "
        "or --max-memory, or raise the limit (ulimit), and continue with --resume"
    )


def _take(running: dict[Future[R], int], pool: Any) -> Iterator[R]:
    done: set[Future[R]] = set()
    while not done:
        # Without memory the thread that passes jobs to processes may die, and nobody is told.
        manager = getattr(pool, "_executor_manager_thread", None)
        is_dead = manager is not None and not manager.is_alive()
        done, _ = wait(running, _SECONDS_TO_WAIT, return_when=FIRST_COMPLETED)
        if is_dead and not done:
            raise MemoryError("the thread that manages workers has died")
    for future in done:
        del running[future]
        yield future.result()


_function: Callable[[Any], Any]


def _enter_copy(function: Callable[[Any], Any], parent: int) -> None:
    """Begin as a forked worker: the parent deals with Ctrl-C, and takes us along when it dies."""
    global _function
    _function = function
    become_worker()
    die_with(parent)
    torch.set_num_threads(1)


def _inherited(job: Any) -> Any:
    return _function(job)
