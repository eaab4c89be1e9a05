"""Standard output and error that never get in the way of the work.

A full disk, a closed pipe or a character that the terminal does not have is no reason to leave a
merge half done. What cannot be printed is dropped, and said at the end where somebody can see it.
"""

import errno
import io
import os
import sys
from typing import Any


class _Lasting(io.TextIOWrapper):
    """A stream that goes on after a failure, without being written to."""

    failure: OSError | None = None

    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except OSError as error:
            self._give_up(error)
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self.failure = error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())  # what is still in the buffer goes there
        os.close(nowhere)


def protect_streams() -> None:
    """Let the standard streams outlive full disks, closed pipes and unknown characters."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # it was closed, and a model's file would get its number
            os.open(os.devnull, os.O_RDWR)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = _lasting(sys.stdout, 1), _lasting(sys.stderr, 2)


def output_failure() -> str | None:
    """Why standard output was not written; a reader that has seen enough is no failure."""
    sys.stdout.flush()
    failure = getattr(sys.stdout, "failure", None)
    return None if failure is None or failure.errno == errno.EPIPE else str(failure.strerror)


def _lasting(stream: Any, descriptor: int) -> _Lasting:
    buffer = stream.buffer if stream else open(descriptor, "wb", closefd=False)  # noqa: SIM115
    return _Lasting(
        buffer,
        encoding=stream.encoding if stream else "utf-8",
        errors="backslashreplace",
        line_buffering=stream.line_buffering if stream else True,
    )
