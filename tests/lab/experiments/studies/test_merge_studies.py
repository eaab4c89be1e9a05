"""Studies that compare merges, where a method has more to search than numbers."""

from pathlib import Path

import pytest
from tiny_suite import make_base, make_data, tiny_suite

from matsmerge.lab.experiments.suite_run import run_suite


@pytest.mark.long
def test_matched_heads_are_searched_for_a_target(tmp_path: Path) -> None:
    search = {"match_heads": [True, False], "weight.has_a": [0.5, 2]}
    method = {"method": "mats_cross", "expectation": "true", "search": search}
    suite = tiny_suite(
        methods={"mats_cross": method},
        studies={"intermediate": {"target": "has_a", "donors": ["early"]}},
    )
    base, data = make_base(tmp_path / "base"), make_data(tmp_path / "data")
    results = run_suite(suite, tmp_path / "run", base=base, data=data, num_workers=1)
    found = results.variants["full"].intermediate
    assert [one.method for one in found] == ["individual", "mats_cross"]
    assert found[1].chosen.keys() == search.keys()
    (report,) = (tmp_path / "run" / "steps").glob("merge-*-mats_cross-*/tuning.json")
    tried = report.read_text()
    assert tried.count('"match_heads": true') >= 2
    assert tried.count('"match_heads": false') >= 2
