"""What a collection has got so far, on disk, so that an interrupted one can go on."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from matsmerge.errors import OutputError, StatisticsError
from matsmerge.statistics.collection import Collection
from matsmerge.statistics.statistics import Origin
from matsmerge.statistics.statistics_file import open_statistics, save_statistics

_SECONDS_BETWEEN = 60.0


class PartialFile:
    """The hidden file beside an output. `identity` says what collection it belongs to."""

    def __init__(self, target: Path, identity: str, process: str = "") -> None:
        self.path = partial_path(target, process)
        self._identity = identity
        self._saved_at = time.monotonic()

    def load(self, collection: Collection) -> int:
        """Go on from what there is; returns the number of batches that are done."""
        if not self.path.exists():
            return 0
        saved = open_statistics(self.path)
        if saved.progress.get("identity") != self._identity:
            raise OutputError(
                f"{self.path}: the interrupted collection was of another model, other data or "
                "other options; start anew with --overwrite"
            )
        num_batches = saved.progress.get("num_batches")
        if not isinstance(num_batches, int):
            raise StatisticsError(f"{self.path}: damaged; start anew with --overwrite")
        collection.restore(saved)
        return num_batches

    def save(self, collection: Collection, num_batches: int) -> None:
        """Keep all that is done."""
        origin = Origin(name="", fingerprint=self._identity)
        progress = {"identity": self._identity, "num_batches": num_batches}
        # Twice the precision of the sums, so that they come back as they were.
        so_far = collection.statistics(origin, (), own_names=True)
        save_statistics(so_far, self.path, "float64", progress)
        self._saved_at = time.monotonic()

    @property
    def is_due(self) -> bool:
        return time.monotonic() - self._saved_at > _SECONDS_BETWEEN

    def remove(self) -> int:
        """Forget all that is done; returns the number of batches that then are, none."""
        self.path.unlink(missing_ok=True)
        return 0


def partial_path(target: Path, process: str = "") -> Path:
    """Where an unfinished collection is kept."""
    return target.with_name(f".{target.name}{process}.partial")


class Interruption:
    """Whether somebody asked to stop. Asking twice stops at once."""

    def __init__(self) -> None:
        self.is_asked = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Let Ctrl-C and the polite signal to end wait until a batch is done."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def ask(_number: int, _frame: FrameType | None) -> None:
            if self.is_asked:
                raise KeyboardInterrupt
            self.is_asked = True

        before = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
