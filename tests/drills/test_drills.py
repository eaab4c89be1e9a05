"""A short version of scripts/drills: some kills, damaged inputs and signals, and all bombs."""

import subprocess
import sys
from pathlib import Path


def test_nothing_is_lost_or_half_done() -> None:
    numbers = ["--mutants", "40", "--kills", "6", "--signals", "2"]
    result = subprocess.run(
        [sys.executable, Path(__file__).with_name("run.py"), "--seed", "0", *numbers],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr[-3000:]
