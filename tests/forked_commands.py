"""`mats` in forks of this process, which has everything imported.

A process that starts Python and torch anew takes seconds, a fork milliseconds. A fork leads a
session of its own, so that signals can be sent to it and its workers alone.
"""

import contextlib
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from subprocess import CompletedProcess
from typing import IO, Any

import torch

import matsmerge.api  # noqa: F401
from matsmerge.cli import main
from matsmerge.cli.commands import COMMANDS

_GIVE_UP_SECONDS = 900.0  # only so that what hangs ends


class ForkedCommand:
    """A command that runs, or has run. `prepare` is called in the fork, before the program."""

    def __init__(
        self,
        arguments: Sequence[str | Path],
        prepare: Callable[[], object] = lambda: None,
        program: Callable[[], int | None] = main.main,
    ) -> None:
        self.arguments = [str(argument) for argument in arguments]
        self._printed = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115
        self._status: int | None = None
        if self.arguments and self.arguments[0] in COMMANDS:  # imported once, not by every fork
            import_module(COMMANDS[self.arguments[0]].module)
        self.pid = os.fork()
        if self.pid == 0:
            become(program, ["mats", *self.arguments], self._printed, prepare)

    def poll(self) -> int | None:
        """The exit code, or minus the signal, once it has ended."""
        if self._status is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if done else None
        return self._status

    def send_signal(self, number: int, *, with_workers: bool = False) -> None:
        if self.poll() is None:
            os.killpg(self.pid, number) if with_workers else os.kill(self.pid, number)

    def wait(self) -> CompletedProcess[str]:
        """Wait for its end: what it printed, and its exit code.

        One that was killed has ended when its workers have, which die with it but a moment later.
        """
        deadline = time.monotonic() + _GIVE_UP_SECONDS
        while self.poll() is None:
            if time.monotonic() > deadline:
                os.killpg(self.pid, signal.SIGKILL)
                raise TimeoutError(f"mats {' '.join(self.arguments)}")
            time.sleep(0.002)
        code = self.poll()
        assert code is not None
        if code < 0:
            wait_for_session(self.pid)
        texts = []
        for file in self._printed:
            with file:
                file.seek(0)
                texts.append(file.read().decode(errors="backslashreplace"))
        return CompletedProcess(self.arguments, code, *texts)


def wait_for_session(leader: int) -> None:
    """Wait until the kernel has ended all processes of a session; until then they hold locks."""
    deadline = time.monotonic() + _GIVE_UP_SECONDS
    while _is_running(leader):
        assert time.monotonic() < deadline, f"processes of session {leader} are still there"
        time.sleep(0.002)


def _is_running(session: int) -> bool:
    """Whether a thread of it runs: a process whose first has ended may still have others."""
    for path in Path("/proc").glob("[0-9]*/task/[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            state, _, _, found, *_ = path.read_text().rpartition(")")[2].split()
            if int(found) == session and state not in "ZX":
                return True
    return False


def run_mats(
    *arguments: str | Path, prepare: Callable[[], object] = lambda: None
) -> CompletedProcess[str]:
    """Run a command in a fork."""
    return ForkedCommand(arguments, prepare).wait()


def become(
    program: Callable[[], int | None],
    arguments: Sequence[str],
    streams: Sequence[IO[Any]],
    prepare: Callable[[], object],
) -> None:
    """Turn this fork into a program that prints to two files. Never returns."""
    code = 2
    try:
        os.setsid()
        for number, stream in enumerate(streams, 1):
            os.dup2(stream.fileno(), number)
        for name, number in (("stdout", 1), ("stderr", 2)):
            opened = open(number, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
            setattr(sys, name, opened)
            setattr(sys, f"__{name}__", opened)  # it lives on where `sys.stdout` is replaced
        sys.argv = [*arguments]
        torch.set_num_threads(1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        prepare()
        try:
            code = program() or 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 2
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
