"""Where jobs run."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Protocol, TypeVar

import torch

from matsmerge.engine.machine import default_memory_bytes, num_cores


class HasPeak(Protocol):
    """Something that knows how much memory working on it takes."""

    @property
    def peak_bytes(self) -> int: ...


J = TypeVar("J", bound=HasPeak)
R = TypeVar("R")


class Executor(Protocol):
    """Applies a function to jobs and yields the results in any order.

    Function, jobs and results can be pickled, so they may run in other processes or on
    other machines that see the same files.
    """

    def map(self, function: Callable[[J], R], jobs: Iterable[J]) -> Iterator[R]: ...


class LocalExecutor:
    """Threads of this process, as many jobs at once as fit into `max_bytes`.

    Threads suffice because reading files and torch's operations release the interpreter's lock.
    """

    def __init__(self, num_workers: int | None = None, max_bytes: int | None = None) -> None:
        self.num_workers = num_workers or num_cores()
        self.max_bytes = default_memory_bytes() if max_bytes is None else max_bytes

    @property
    def max_in_flight(self) -> int:
        """Jobs that may be running or waiting for their result to be taken."""
        return self.num_workers + 1

    def map(self, function: Callable[[J], R], jobs: Iterable[J]) -> Iterator[R]:
        """Results as they come. A job that alone exceeds `max_bytes` runs by itself."""
        num_threads = torch.get_num_threads()
        running: dict[Future[R], int] = {}
        pool = ThreadPoolExecutor(
            self.num_workers, initializer=torch.set_num_threads, initargs=(1,)
        )
        try:
            for job in jobs:
                while running and (
                    len(running) >= self.max_in_flight
                    or sum(running.values()) + job.peak_bytes > self.max_bytes
                ):
                    yield from _take(running)
                running[pool.submit(function, job)] = job.peak_bytes
            while running:
                yield from _take(running)
        finally:
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(num_threads)


def _take(running: dict[Future[R], int]) -> Iterator[R]:
    done, _ = wait(running, return_when=FIRST_COMPLETED)
    for future in done:
        result = future.result()
        yield result
        del running[future]
