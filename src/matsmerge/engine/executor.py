"""Executors, which run jobs: their interface, the simplest one, and how work is given to them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, Protocol, TypeVar, runtime_checkable

from matsmerge.engine.devices import PROCESSOR
from matsmerge.engine.machine import default_memory_bytes
from matsmerge.errors import RecipeError
from matsmerge.progress import Progress


class HasPeak(Protocol):
    """A job that says how much memory it takes, and on which device."""

    @property
    def peak_bytes(self) -> int: ...
    @property
    def device(self) -> str: ...


J = TypeVar("J", bound=HasPeak)
R = TypeVar("R")
T = TypeVar("T")


class Executor(Protocol):
    """Applies a function to jobs and yields the results in any order.

    Function, jobs and results can be pickled, so they may run on other machines that see the same
    files. Results are small: what is large is written where it belongs by the function itself,
    into files or, if the workers share the memory of this process, into its tensors.

    A worker computes with one thread, `torch.set_num_threads(1)`: with more of them sums are
    rounded differently, and the last bits are not those that `LocalExecutor` gives.
    """

    @property
    def num_workers(self) -> int:
        """How many jobs run at once, at most."""

    @property
    def max_bytes(self) -> int:
        """Memory that all jobs which run at once on the processor may take together."""

    @property
    def devices(self) -> Sequence[str]:
        """What jobs are spread over, such as ("cuda:0", "cuda:1"); else ("cpu",)."""

    @property
    def shares_memory(self) -> bool:
        """Whether what a job writes into a tensor of this process is there afterwards."""

    def map(self, function: Callable[[J], R], jobs: Iterable[J]) -> Iterator[R]:
        """Results as they come; what a job raises is raised here, as it is.

        The `peak_bytes` of the jobs that run at once do not add up to more than `max_bytes`, unless
        one alone does; on another `device` than the processor, to more than that has. That is up to
        the executor. Any job may be one for the processor.
        """


class Starter(Protocol):
    """Starts jobs one by one, for those that must wait until others have ended."""

    @property
    def num_workers(self) -> int:
        """How many jobs run at once, at most."""

    def opened(
        self, function: Callable[[J], R], /
    ) -> AbstractContextManager[Callable[[J], Future[R]]]:
        """A context in which a function can be applied to jobs, which do not outlive it."""


@runtime_checkable
class Distant(Starter, Protocol):
    """An executor whose workers may be on machines that do not see this one's disk."""

    def check_sees(self, folder: Path) -> None:
        """Refuse a folder that not all workers see, before any work."""


def check_executor(executor: object) -> None:
    """Refuse what is no executor, before anything is done."""
    members = [name for name in vars(Executor) if not name.startswith("_")]
    lacking = [name for name in members if not hasattr(executor, name)]
    if lacking:
        kind = executor.__name__ if isinstance(executor, type) else type(executor).__name__
        raise RecipeError(
            f"executor: expected an object such as matsmerge.LocalExecutor(2), found {kind} "
            f"without {', '.join(lacking)}"
        )


class SerialExecutor:
    """One job after the other in this thread, so that what happens in it can be watched.

    A job computes with all threads that torch has here, so that the last bits may be other ones.
    """

    num_workers = 1
    shares_memory = True

    def __init__(
        self, max_bytes: int | None = None, *, devices: Sequence[str] = (PROCESSOR,)
    ) -> None:
        self.max_bytes = default_memory_bytes() if max_bytes is None else max_bytes
        self.devices = devices

    def map(self, function: Callable[[J], R], jobs: Iterable[J]) -> Iterator[R]:
        yield from map(function, jobs)


@dataclass(frozen=True)
class Piece(Generic[T]):
    """One of many like things to work on: its size for progress, and the memory that it takes.

    Pieces are read and looked at rather than computed with, and stay on the processor.
    """

    content: T
    num_bytes: int
    peak_bytes: int
    device: str = PROCESSOR


def map_pieces(
    executor: Executor,
    progress: Progress,
    title: str,
    function: Callable[[T], R],
    pieces: Sequence[Piece[T]],
) -> Iterator[R]:
    """Apply a function to all pieces and yield the results, in any order; progress is reported."""
    progress.stage(title, sum(piece.num_bytes for piece in pieces))
    for result, num_bytes in executor.map(partial(_work_on, function), pieces):
        yield result
        progress.advance(num_bytes)


def _work_on(function: Callable[[T], R], piece: Piece[T]) -> tuple[R, int]:
    return function(piece.content), piece.num_bytes
