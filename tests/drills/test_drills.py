"""A short version of scripts/drills: some kills, damaged inputs and signals, and all bombs."""

import pytest
from forked_commands import ForkedCommand

from drills import run


@pytest.mark.long
def test_nothing_is_lost_or_half_done() -> None:
    numbers = ["--seed", "0", "--mutants", "40", "--kills", "3", "--signals", "1"]
    result = ForkedCommand(numbers, program=run.main).wait()
    assert result.returncode == 0, result.stdout + result.stderr[-3000:]
