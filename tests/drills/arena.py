"""Commands in processes of their own, forked from one that has everything imported.

A process that starts Python and torch anew takes seconds; a fork takes milliseconds, so that
thousands of damaged inputs can be tried.
"""

import contextlib
import os
import resource
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from forked_commands import become, wait_for_session

from matsmerge.cli import main
from matsmerge.statistics import partial_file

# Of a processor, for an input that is refused: not by the clock, which depends on what else runs.
MAX_SECONDS = 10.0
MAX_GROWTH_BYTES = 2**30
_GIVE_UP_SECONDS = 300.0  # by the clock: what waits as long is ended, which counts as a failure


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int  # negative: the signal that ended it
    text: str  # what it printed
    seconds: float  # by the clock
    processor_seconds: float
    growth_bytes: int  # memory beyond what it began with, at its peak

    def problems(self) -> list[str]:
        """What no command may do, whatever it is given."""
        found = []
        if self.code not in (0, 1):
            found.append(f"exit code {self.code}")
        if "Traceback (most recent call last)" in self.text:
            found.append("a traceback")
        if self.processor_seconds > MAX_SECONDS:
            found.append(f"{self.processor_seconds:.1f} s")
        if self.growth_bytes > MAX_GROWTH_BYTES:
            found.append(f"{self.growth_bytes / 2**20:.0f} MiB")
        return found


def run(
    folder: Path,
    arguments: Sequence[str],
    *,
    signal_after: float | None = None,
    which: signal.Signals = signal.SIGKILL,
) -> Outcome:
    """Run a command in a folder; it and all its workers get a signal after some seconds."""
    output = folder.with_name(f"{folder.name}.output")
    output.touch()
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        program = partial(main.run, list(arguments))
        with output.open("wb") as file:
            become(program, ["mats", *arguments], [file, file], partial(_prepare, folder))
    deadline = None if signal_after is None else began + signal_after
    usage = None
    while usage is None:
        done, status, ended = os.wait4(child, os.WNOHANG)
        if done:
            usage = ended
        elif deadline is not None and time.monotonic() >= deadline:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, which)
            deadline = None
        elif time.monotonic() - began > _GIVE_UP_SECONDS:
            os.killpg(child, signal.SIGKILL)
            time.sleep(0.1)
        else:
            time.sleep(0.002)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what it may have left running
    wait_for_session(child)
    text = output.read_bytes().decode(errors="replace")
    output.unlink()
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    growth = max(0, usage.ru_maxrss - start) * 1024
    code, seconds = os.waitstatus_to_exitcode(status), time.monotonic() - began
    return Outcome(code, text, seconds, usage.ru_utime + usage.ru_stime, growth)


def _prepare(folder: Path) -> None:
    os.chdir(folder)
    partial_file._SECONDS_BETWEEN = 0.0  # so that there is something to continue


@dataclass
class Tally:
    """How often something was tried, and what did not hold."""

    name: str
    tried: int = 0
    slowest: float = 0.0
    largest_bytes: int = 0

    def __post_init__(self) -> None:
        self.violations: list[str] = []

    def count(self, outcome: Outcome) -> None:
        self.tried += 1
        self.slowest = max(self.slowest, outcome.processor_seconds)
        self.largest_bytes = max(self.largest_bytes, outcome.growth_bytes)

    def report(self, say: Callable[[str], None]) -> None:
        held = self.tried - len(self.violations)
        say(
            f"{self.name}: tried {self.tried}, held {held}; slowest {self.slowest:.1f} s, "
            f"most memory {self.largest_bytes / 2**20:.0f} MiB"
        )
        for violation in self.violations:
            say(f"  {violation}")
