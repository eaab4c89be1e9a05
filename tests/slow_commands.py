"""Merges that can be interrupted half-way, and how to wait for that and go on."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from forked_commands import ForkedCommand, run_mats

from matsmerge.engine import output_folder, worker
from matsmerge.engine.output_folder import OutputFolder
from matsmerge.files.whole_outputs import staging_path

_GIVE_UP_SECONDS = 60


def slow_down() -> None:
    """Of the merges of this process enough jobs to be noted are done at once, others take long."""
    merge = worker.Worker.merge

    def stop(self: Any, job: Any, **keywords: Any) -> Any:
        if job.index > output_folder._SYNC_JOBS:
            time.sleep(2)
        return merge(self, job, **keywords)

    worker.Worker.merge = stop  # type: ignore[assignment,method-assign]


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


def resume_killed(arguments: Sequence[str | Path]) -> CompletedProcess[str]:
    """Continue a merge that was killed, once the kernel has ended its workers too."""
    for _ in range(100):
        result = run_mats(*arguments, "--resume")
        if "another merge is writing" not in result.stderr:
            break
        time.sleep(0.1)
    return result
