"""What a page shows of a search that still runs."""

import json
from pathlib import Path

import pytest

from matsmerge.errors import OutputError
from matsmerge.files.whole_outputs import StagedFolder
from matsmerge.lab.reports.page import to_page
from matsmerge.lab.reports.tuning_progress import tuning_so_far
from matsmerge.lab.tuning.trials import JOURNAL, REPORT, Journal, Trial

TRIALS = [
    Trial(choice={"scale": scale}, scores={"film": score, "news": 0.5})
    for scale, score in ((0.1, 0.6), (0.2, 0.9), (0.3, 0.7))
]


def begin(out: Path) -> Journal:
    staged = StagedFolder(out, "search")
    staged.output.mkdir(parents=True)
    return Journal(staged.output / JOURNAL, "x", resume=False)


def test_trials_so_far(tmp_path: Path) -> None:
    out = tmp_path / "best"
    assert tuning_so_far("Tuning", out) is None
    journal = begin(out)
    assert tuning_so_far("Tuning", out) is None
    journal.add(Trial(choice={"scale": 9.0}, failure="too large"))
    assert tuning_so_far("Tuning", out) is None  # nothing was scored
    for trial in TRIALS:
        journal.add(trial)
    report = tuning_so_far("Tuning", out)
    assert report is not None
    assert report.kind == "Running"
    page = to_page(report)
    assert "scale = 0.2 has the best mean score" in page
    assert page.index("scale = 0.2</") < page.index("scale = 0.3</") < page.index("scale = 0.1</")
    assert "70.0" in page
    assert "too large" in page
    lowest = tuning_so_far("Tuning", out, lowest=True)
    assert lowest is not None
    assert "scale = 0.1 has the best mean score" in to_page(lowest)


def test_a_search_that_is_over(tmp_path: Path) -> None:
    out = tmp_path / "best"
    out.mkdir()
    found = {"best": TRIALS[1].to_json(), "trials": [trial.to_json() for trial in TRIALS]}
    (out / REPORT).write_text(json.dumps(found))
    report = tuning_so_far("Tuning", out)
    assert report is not None
    assert report.kind == "Over"
    begin(out)  # it is done again, and nothing of that is known yet
    assert tuning_so_far("Tuning", out) is None


def test_a_damaged_journal(tmp_path: Path) -> None:
    out = tmp_path / "best"
    begin(out).add(TRIALS[0])
    path = StagedFolder(out, "search").output / JOURNAL
    path.write_text(path.read_text() + '{"choice": 3}\n')
    with pytest.raises(OutputError, match="line 3: damaged"):
        tuning_so_far("Tuning", out)
