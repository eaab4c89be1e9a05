"""What a search has found so far, for a page that follows it."""

import math
from pathlib import Path
from typing import Any

from matsmerge.files.journal_file import line_of, read_journal_lines
from matsmerge.files.whole_outputs import StagedFolder
from matsmerge.lab.reports.document import Report, ReportSection
from matsmerge.lab.reports.sections.tuning_trials import tuning_trials
from matsmerge.lab.tuning.trials import (
    JOURNAL,
    REPORT,
    best,
    read_tuning_report,
    trial_of_line,
)


def tuning_so_far(title: str, out: Path, *, lowest: bool = False) -> Report | None:
    """The trials of a search that writes to `out`, also when it is over; None before the first.

    `lowest`: the best is the one with the lowest score, as it is of distances.
    """
    path = StagedFolder(out.absolute(), "search").output / JOURNAL
    if not path.exists() and (out / REPORT).exists():
        return _report(title, read_tuning_report(out / REPORT), "Over")
    lines, _ = read_journal_lines(path)
    trials = [trial_of_line(line, line_of(path, i)) for i, line in enumerate(lines[1:], 2)]
    if not any(math.isfinite(trial.score) for trial in trials):
        return None
    chosen = best(trials, lowest=lowest).to_json()
    found = {"trials": [trial.to_json() for trial in trials], "best": chosen}
    return _report(title, found, "Running")


def _report(title: str, found: dict[str, Any], kind: str) -> Report:
    return Report(title, "", [ReportSection("What was tried", tuning_trials(found))], kind=kind)
