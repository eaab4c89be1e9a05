"""`mats` with merges that can be interrupted half-way, and how to wait for that and go on."""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from matsmerge.files.whole_outputs import staging_path

# A program for `python -c`: enough jobs to be noted are done at once, the others take long.
SLOW_MATS = """
import time
from matsmerge.cli import main
from matsmerge.engine import output_folder, worker
merge = worker.Worker.merge
def stop(self, job, **keywords):
    if job.index > output_folder._SYNC_JOBS:
        time.sleep(2)
    return merge(self, job, **keywords)
worker.Worker.merge = stop
main.main()
"""
_GIVE_UP_SECONDS = 60


def wait_for_jobs(process: "subprocess.Popen[str]", out: Path) -> Path:
    """Wait until a merge has noted some of its jobs; returns its journal."""
    journal = staging_path(out) / "journal.jsonl"
    deadline = time.monotonic() + _GIVE_UP_SECONDS
    while not (journal.exists() and '"jobs"' in journal.read_text()):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return journal


def resume_killed(arguments: Sequence[str | Path]) -> "subprocess.CompletedProcess[str]":
    """Continue a merge that was killed, once the kernel has ended its workers too."""
    for _ in range(100):
        result = subprocess.run(
            [sys.executable, "-m", "matsmerge", *arguments, "--resume"],
            capture_output=True,
            text=True,
            check=False,
        )
        if "another merge is writing" not in result.stderr:
            break
        time.sleep(0.1)
    return result
