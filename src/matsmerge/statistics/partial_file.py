"""What a collection has got so far, on disk, so that an interrupted one can go on."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from matsmerge.checkpoints.safetensors_header import read_header
from matsmerge.checkpoints.stored import StoredCheckpoint
from matsmerge.errors import AnotherRunError, MatsError, StatisticsError
from matsmerge.files.guarded_files import parse_as, parse_json
from matsmerge.files.whole_outputs import temporary_path
from matsmerge.problems import reworded
from matsmerge.statistics.collection import Collection, CollectionState
from matsmerge.statistics.statistics_file import write_arrays
from matsmerge.statistics.totals import State

_SECONDS_BETWEEN = 60.0
_METADATA_KEY = "matsmerge_interrupted_collection_2"  # 1 had other sketches


class _Interrupted(State):
    """A partial file's JSON: the collection that it is of, and how far that is."""

    identity: str
    state: CollectionState


class PartialFile:
    """The hidden file beside an output, one for each process.

    `identity` says what collection it belongs to.
    """

    def __init__(self, target: Path, identity: str, process: str = "") -> None:
        self.path = partial_path(target, process)
        self.identity = identity
        self._of_process = f"{identity} {process}"
        self._saved_at = time.monotonic()

    def load(self, collection: Collection) -> int:
        """Go on from what there is; returns the number of batches that are done."""
        if not self.path.exists():
            return 0
        try:
            content = read_header(self.path).metadata.get(_METADATA_KEY)
            if content is None:
                raise StatisticsError("is no interrupted collection of this version of matsmerge")
            where = "its header"
            parsed = parse_json(content, where, StatisticsError)
            saved = parse_as(parsed, _Interrupted, where, StatisticsError)
            if saved.identity == self._of_process:
                arrays = StoredCheckpoint(str(self.path), [self.path], None)
                collection.restore(saved.state, arrays)
                return saved.state.num_batches
        except MatsError as error:
            raise StatisticsError(
                [
                    f"{self.path}: cannot be continued ({problem.removeprefix(f'{self.path}: ')}); "
                    "start anew with --overwrite"
                    for problem in error.problems
                ]
            ) from error
        raise AnotherRunError(
            f"{self.path}: the interrupted collection was of another model, other data or other "
            "options; start anew with --overwrite"
        )

    def save(self, collection: Collection) -> None:
        """Write all that is done so far; the collection goes on as if nothing had been written."""
        state, arrays = collection.state()
        content = _Interrupted(identity=self._of_process, state=state).model_dump_json()
        kept = "what was kept before is still there, " if self.path.exists() else ""
        with reworded(after=f"; {kept}make room and continue with --resume"):
            write_arrays(self.path, arrays, {_METADATA_KEY: content})
        self._saved_at = time.monotonic()

    @property
    def is_due(self) -> bool:
        return time.monotonic() - self._saved_at > _SECONDS_BETWEEN

    def remove(self) -> None:
        """Forget all that is done."""
        self.path.unlink(missing_ok=True)
        temporary_path(self.path).unlink(missing_ok=True)  # of a run that was killed


def partial_path(target: Path, process: str = "") -> Path:
    """Where an unfinished collection is kept."""
    return target.with_name(f".{target.name}{process}.partial")


class Interruption:
    """A request to stop, by Ctrl-C or SIGTERM; a second one stops at once."""

    def __init__(self) -> None:
        self.number: int | None = None  # of the signal by which somebody asked

    @property
    def is_asked(self) -> bool:
        return self.number is not None

    def check(self) -> None:
        """Stop, if somebody asked."""
        if self.is_asked:
            raise KeyboardInterrupt(self.number)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Let Ctrl-C and the polite signal to end wait until a batch is done."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def ask(number: int, _frame: FrameType | None) -> None:
            if self.is_asked:
                raise KeyboardInterrupt(number)
            self.number = number

        before = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
