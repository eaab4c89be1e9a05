"""What this machine has to offer."""

import ctypes
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from matsmerge.errors import RecipeError

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_MIN_MEMORY_BYTES = 256_000_000  # enough for any merge; asking for less is up to the user
_WORKERS_PER_CORE, _MIN_WORKERS_ALLOWED = 4, 32
_PR_SET_PDEATHSIG = 1  # of Linux's sys/prctl.h
_CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Memory that can be used now: the system's, or what is left of the container's."""
    try:
        meminfo = Path("/proc/meminfo").read_text()
        found = re.search(r"MemAvailable:\s+(\d+) kB", meminfo)
        available = int(found[1]) * 1024 if found else 0
    except OSError:
        available = 0
    available = available or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit != "max":
            used = int((_CGROUP / "memory.current").read_text())
            statistics = (_CGROUP / "memory.stat").read_text()
            # Files that were read count as used, but give way when memory is needed.
            cached = sum(
                map(int, re.findall(r"^(?:in)?active_file (\d+)", statistics, re.MULTILINE))
            )
            available = min(available, int(limit) - used + cached)
    except (OSError, ValueError):
        pass
    return max(available, 0)


def default_memory_bytes() -> int:
    """Half of what is available: the page cache earns its keep with the other half."""
    return max(available_bytes() // 2, _MIN_MEMORY_BYTES)


def keep_freed_memory() -> None:
    """Let glibc keep what is freed, for the next block to use, instead of asking the kernel anew.

    Blocks come and go thousands of times a second; page faults took a third of a merge.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):  # another C library manages without
        return
    mallopt(_M_TRIM_THRESHOLD, 1 << 30)
    mallopt(_M_MMAP_THRESHOLD, 1 << 25)


def num_cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_workers(num_workers: int) -> int:
    """Refuse more workers than could be of use; each is a process."""
    most = max(_MIN_WORKERS_ALLOWED, _WORKERS_PER_CORE * num_cores())
    if not 1 <= num_workers <= most:
        raise RecipeError(
            f"workers: {num_workers:,} at once, and this machine has {num_cores()} cores; give 1 "
            f"to {most}, or leave it out for one on each core"
        )
    return num_workers


@contextmanager
def starting_workers() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM wait until processes have been started, half of which would hang.

    They inherit that signals wait, so that nothing reaches them before `become_worker`.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def become_worker() -> None:
    """Leave Ctrl-C to the parent, and end at SIGTERM without a word."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})


def die_with(parent: int) -> None:
    """Let Linux kill this process when its parent dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we could ask
        os._exit(1)
