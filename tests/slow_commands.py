"""Merges that can be interrupted half-way, and how to wait for that."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forked_commands import ForkedCommand

from matsmerge.engine import output_folder, worker
from matsmerge.engine.output_folder import OutputFolder
from matsmerge.files.whole_outputs import staging_path

_GIVE_UP_SECONDS = 300


def slow_down(go_on: Path) -> Callable[[], None]:
    """For `prepare`: enough jobs to be noted are done at once, others wait for a file."""

    def prepare() -> None:
        merge = worker.Worker.merge

        def stop(self: Any, job: Any, **keywords: Any) -> Any:
            deadline = time.monotonic() + _GIVE_UP_SECONDS
            while job.index > output_folder._SYNC_JOBS and not go_on.exists():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            return merge(self, job, **keywords)

        worker.Worker.merge = stop  # type: ignore[assignment,method-assign]

    return prepare


def ending_note(num_jobs: int, number: int) -> Callable[[Any, Any], None]:
    """For `OutputFolder.note_finished`: the process gets a signal with so many jobs noted."""
    note = OutputFolder.note_finished

    def note_and_end(self: OutputFolder, receipt: Any) -> None:
        note(self, receipt)
        if len(self.finished) == num_jobs:
            self._start_sync().result()
            os.kill(os.getpid(), number)

    return note_and_end


def wait_for_jobs(command: ForkedCommand, out: Path) -> Path:
    """Wait until a merge has noted some of its jobs; returns its journal."""
    journal = staging_path(out) / "journal.jsonl"
    deadline = time.monotonic() + _GIVE_UP_SECONDS
    while not (journal.exists() and '"jobs"' in journal.read_text()):
        assert command.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return journal
