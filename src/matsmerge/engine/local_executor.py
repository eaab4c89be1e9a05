"""Jobs in threads or processes of this machine."""

import gc
import multiprocessing
import os
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import (
    FIRST_COMPLETED,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Generic

import torch

from matsmerge.checkpoints.checkpoint import first_line
from matsmerge.engine.devices import PROCESSOR, find_devices, memory_bytes
from matsmerge.engine.executor import HasPeak, J, R
from matsmerge.engine.machine import (
    become_worker,
    check_workers,
    default_memory_bytes,
    die_with,
    num_cores,
    starting_workers,
)
from matsmerge.errors import ResourceError, machine_gave_out

_AHEAD = 4  # jobs for each of several devices
_SECONDS_TO_WAIT = 1.0  # for a result, before it is seen whether there can be one


class LocalExecutor:
    """Workers on this machine, as many jobs at once as fit into `max_bytes`.

    Workers are threads, or with `fork` copies of this process. Threads are safe in any program
    but wait for each other at the interpreter's lock, which halves their speed on small blocks;
    the command line, which is alone in its process, forks where the system can.

    `device` is what `find_devices` takes. Each of the devices has its share of the workers, which
    are threads: CUDA does not survive a fork. `max_bytes` is for each of them; by default it is
    what they have.
    """

    def __init__(
        self,
        num_workers: int | None = None,
        max_bytes: int | None = None,
        *,
        fork: bool = False,
        device: str | None = None,
    ) -> None:
        self.devices = find_devices(device)
        self.num_workers = num_cores() if num_workers is None else check_workers(num_workers)
        self.max_bytes = default_memory_bytes() if max_bytes is None else max_bytes
        self._given_bytes = max_bytes
        self.fork = fork and sys.platform == "linux" and self.devices == (PROCESSOR,)

    @property
    def shares_memory(self) -> bool:
        return not self.fork

    def map(self, function: Callable[[J], R], jobs: Iterable[J]) -> Iterator[R]:
        """Results as they come. A job that alone exceeds its device's memory runs by itself."""
        lanes: dict[str, _Lane[R]] = {}
        num_threads = torch.get_num_threads()
        others = set(multiprocessing.active_children())
        left, waiting = iter(jobs), deque[J]()
        num_ahead = 1 if len(self.devices) == 1 else _AHEAD * len(self.devices)
        try:
            while True:
                # A job whose device is busy lets those of other devices pass.
                waiting.extend(islice(left, num_ahead - len(waiting)))
                for job in {job.device: job for job in reversed(waiting)}.values():
                    if job.device not in lanes:
                        lanes[job.device] = self._lane(job.device, function)
                    if lanes[job.device].has_room(job):
                        waiting.remove(job)
                        lanes[job.device].start(_inherited if self.fork else function, job)
                        break
                else:
                    if not any(lane.running for lane in lanes.values()):
                        break
                    yield from _take(lanes.values())
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
                worker.join()  # until then it has the output's lock
            raise gave_out(error) from error
        finally:
            for lane in lanes.values():
                lane.pool.shutdown(cancel_futures=True)
            torch.set_num_threads(num_threads)

    def _lane(self, device: str, function: Callable[[J], R]) -> "_Lane[R]":
        """The workers of a device: every so many-th, or all where it is only there besides."""
        num = self.num_workers
        max_bytes = self.max_bytes
        if device in self.devices:
            num = max(1, len(range(self.devices.index(device), num, len(self.devices))))
        if device != PROCESSOR and self._given_bytes is None:
            max_bytes = memory_bytes(device)
        if self.fork:
            pool: Any = ProcessPoolExecutor(
                num,
                multiprocessing.get_context("fork"),
                initializer=_enter_copy,
                initargs=(function, os.getpid()),
            )
        else:
            pool = ThreadPoolExecutor(num, initializer=torch.set_num_threads, initargs=(1,))
        return _Lane(pool, num, max_bytes)


@dataclass(frozen=True)
class _Lane(Generic[R]):
    """The workers that are pinned to a device, and the memory of each job they run there."""

    pool: Any
    num_workers: int
    max_bytes: int
    running: dict[Future[R], int] = field(default_factory=dict)

    def has_room(self, job: HasPeak) -> bool:
        is_free = len(self.running) <= self.num_workers  # one more, so that no worker waits
        fits = sum(self.running.values()) + job.peak_bytes <= self.max_bytes
        return not self.running or (is_free and fits)

    def start(self, function: Callable[[J], R], job: J) -> None:
        with starting_workers():
            future = self.pool.submit(function, job)
        self.running[future] = job.peak_bytes


def gave_out(error: BaseException) -> ResourceError:
    """What to do where there is no more memory, or no more processes or files."""
    return ResourceError(
        f"the machine, or a limit on this process, gave out ({first_line(error)}); lower --workers "
        "or --max-memory, raise the limit (ulimit), or use --device cpu, and continue with --resume"
    )


def _take(lanes: Collection[_Lane[R]]) -> Iterator[R]:
    done: set[Future[R]] = set()
    while not done:
        # Without memory the thread that passes jobs to processes may die, and nobody is told.
        managers = [getattr(lane.pool, "_executor_manager_thread", None) for lane in lanes]
        is_dead = any(manager is not None and not manager.is_alive() for manager in managers)
        running = [future for lane in lanes for future in lane.running]
        done, _ = wait(running, _SECONDS_TO_WAIT, return_when=FIRST_COMPLETED)
        if is_dead and not done:
            raise MemoryError("the thread that manages workers has died")
    for future in done:
        for lane in lanes:
            lane.running.pop(future, None)
        yield future.result()


_function: Callable[[Any], Any]


def _enter_copy(function: Callable[[Any], Any], parent: int) -> None:
    """Begin as a forked worker: the parent deals with Ctrl-C, and takes us along when it dies."""
    global _function
    _function = function
    # The collector would write to all objects there are, and so copy those of the parent.
    gc.freeze()
    become_worker()
    die_with(parent)
    torch.set_num_threads(1)


def _inherited(job: Any) -> Any:
    return _function(job)
