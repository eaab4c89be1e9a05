"""Ctrl-C and SIGTERM, which end a command at any moment and always in the same way.

The exception that a signal raises can get lost: in a `__del__` or a callback, in a library that
catches everything, in an extension that is being imported. So it is never raised within an import,
and an exception that is dropped without having ended the command is raised again.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SECONDS = 0.02  # until the next attempt to interrupt
_IMPORTING = "<frozen importlib._bootstrap>"
_AT_ONCE = 3  # signals that end a command without waiting until it has cleaned up
_SECONDS_IN_SILENCE = 1.0  # after a signal, before it is said what is waited for
_WAITING = b"\ninterrupted; waiting for work that has begun (Ctrl-C twice more: not waiting)\n"


class Interrupted(KeyboardInterrupt):
    """Raised where the program is when a signal comes; its argument is the signal's number."""

    def __init__(self, number: int, dropped: Callable[[], None]) -> None:
        super().__init__(number)
        self._dropped = dropped

    def __del__(self) -> None:
        self._dropped()


class Listener:
    """Listens for signals from `begin` to `end`, in the process that began it.

    Until `starting` is over there is nothing to clean up, and a signal ends the process on the
    spot. A second signal waits for the cleaning up that the first one caused; the third does not,
    which leaves what a killed process leaves, for `--resume`.
    """

    def __init__(self) -> None:
        self.number: int | None = None  # of the first signal that came
        self.starting = True
        self._process = os.getpid()
        self._is_over = False
        self._is_raised = False
        self._num_signals = 0

    def begin(self) -> None:
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as `nohup` and `&` have it
                signal.signal(number, self._hear)
        signal.signal(signal.SIGALRM, self._try_again)
        sys.unraisablehook = _without_interruptions(sys.unraisablehook)

    def end(self) -> None:
        """From here on nothing is interrupted any more: all that is left is to exit."""
        self._is_over = True
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a copy that has not yet got handlers of its own
            os._exit(128 + number)
        if self._is_over:
            return
        self.number = self.number or number
        self._num_signals += 1
        if self.starting or self._num_signals >= _AT_ONCE:
            os.write(2, b"error: interrupted\n")
            os._exit(128 + self.number)
        if self._num_signals == 1 and number == signal.SIGINT:
            explanation = threading.Timer(_SECONDS_IN_SILENCE, self._explain)
            explanation.daemon = True
            explanation.start()
        self._interrupt(frame)

    def _explain(self) -> None:
        """Say that the signal was heard, if the command has not ended yet."""
        if not self._is_over:
            os.write(2, _WAITING)

    def _try_again(self, _number: int, frame: FrameType | None) -> None:
        if self.number is not None and not self._is_over:
            self._interrupt(frame)

    def _interrupt(self, frame: FrameType | None) -> None:
        if self._is_raised:  # it is being cleaned up
            return
        if _is_importing(frame):
            self._wait()
            return
        assert self.number is not None
        self._is_raised = True
        raise Interrupted(self.number, self._note_dropped)

    def _note_dropped(self) -> None:
        self._is_raised = False
        if not self._is_over:
            self._wait()

    def _wait(self) -> None:
        """Try again in a moment."""
        signal.setitimer(signal.ITIMER_REAL, _SECONDS)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTING:
            return True
        frame = frame.f_back
    return False


def _without_interruptions(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """An unraisable hook that says nothing of interruptions; they are raised again."""

    def show(unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, Interrupted):
            hook(unraisable)

    return show
