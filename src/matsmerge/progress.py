"""Progress of long work: what it reports, and who listens.

Merging, collecting, training, tuning, evaluating and suites all report it in the same way:
a `stage` begins, it advances, and now and then there is something to note. The command line draws
bars; from Python any function can listen, and `logging.getLogger("matsmerge")` is told stages and
notes, of which nothing is shown unless `logging` is set up.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

BYTES = "bytes"
_log = logging.getLogger("matsmerge")
_log.addHandler(logging.NullHandler())


class Progress:
    """A listener that does nothing; others override what they want to hear."""

    def stage(self, title: str, total: int | None = None, unit: str = BYTES, done: int = 0) -> None:
        """A stage begins: `total` units, if that is known, of which some may be done already."""

    def advance(self, amount: int, doing: str | None = None) -> None:
        """So many units more are done; `doing` is what to show beside the bar from now on."""

    def note(self, text: str) -> None:
        """Something happened that deserves a line."""


@dataclass(frozen=True)
class Update:
    """How far the work is, as a callback is told."""

    title: str = ""
    done: int = 0
    total: int | None = None
    unit: str = BYTES
    text: str = ""  # what is being done, or a note


class Callback(Progress):
    """A listener that calls a function with an `Update` each time."""

    def __init__(self, call: Callable[[Update], object]) -> None:
        self._call = call
        self._last = Update()

    def stage(self, title: str, total: int | None = None, unit: str = BYTES, done: int = 0) -> None:
        self._tell(Update(title, done, total, unit))

    def advance(self, amount: int, doing: str | None = None) -> None:
        text = self._last.text if doing is None else doing
        self._tell(replace(self._last, done=self._last.done + amount, text=text))

    def note(self, text: str) -> None:
        self._call(replace(self._last, text=text))

    def _tell(self, update: Update) -> None:
        self._last = update
        self._call(update)


AnyProgress = Progress | Callable[[Update], object]


def listener(progress: AnyProgress | None) -> Progress:
    """The listener for what a user gave: a listener, a function that is called, or None."""
    if isinstance(progress, Logged):
        return progress
    if progress is None:
        return Logged(Progress())
    return Logged(Callback(progress) if callable(progress) else progress)


@dataclass
class Logged(Progress):
    """A listener that tells `logging` and another."""

    told: Progress

    def stage(self, title: str, total: int | None = None, unit: str = BYTES, done: int = 0) -> None:
        _log.info("%s%s", title, "" if total is None else f": {total} {unit}")
        self.told.stage(title, total, unit, done)

    def advance(self, amount: int, doing: str | None = None) -> None:
        self.told.advance(amount, doing)

    def note(self, text: str) -> None:
        _log.info(text)
        self.told.note(text)


@dataclass
class Stopwatch(Logged):
    """A listener that notes how long each stage takes, and tells another."""

    seconds: dict[str, float] = field(default_factory=dict)
    _stage: str = "preparing"
    _began: float = field(default_factory=time.monotonic)

    def stage(self, title: str, total: int | None = None, unit: str = BYTES, done: int = 0) -> None:
        self._turn(title)
        self.told.stage(title, total, unit, done)

    def note(self, text: str) -> None:
        self.told.note(text)

    def stop(self) -> dict[str, float]:
        self._turn("")
        return self.seconds

    def _turn(self, stage: str) -> None:
        now = time.monotonic()
        self.seconds[self._stage] = self.seconds.get(self._stage, 0.0) + now - self._began
        self._stage, self._began = stage, now
