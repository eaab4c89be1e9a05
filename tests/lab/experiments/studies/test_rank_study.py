"""Methods with second moments of every rank: what is merged, what is scored, what it takes."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tiny_suite import make_base, make_data, tiny_suite

from matsmerge.errors import RecipeError
from matsmerge.lab.experiments.suite_plan import SuitePlan
from matsmerge.lab.experiments.suite_run import run_suite

METHODS: dict[str, Any] = {
    "average": {"method": "average"},
    "mats_kfac": {"method": "mats_kfac", "search": {"iterations": [1, 5]}},
}
STUDIES = {"ranks": {"ranks": [1, 3]}}


def test_each_rank_is_tuned_and_weighed(tmp_path: Path) -> None:
    suite = tiny_suite(methods=METHODS, studies=STUDIES)
    places: dict[str, Any] = {
        "base": make_base(tmp_path / "base"), "data": make_data(tmp_path / "data")
    }  # fmt: skip
    results = run_suite(suite, tmp_path / "run", **places, num_workers=1)
    found = results.variants["full"]
    assert [(one.method, one.rank, one.seed) for one in found.ranks] == [
        ("mats_kfac", rank, 0) for rank in (1, 3, None)
    ]
    (row,) = [row for row in found.comparison if row.method == "mats_kfac"]
    assert found.ranks[-1].score == row.test.mean
    steps = tmp_path / "run" / "steps"
    files = list(steps.glob("collect-*/statistics.safetensors"))
    assert len(files) == 2
    kfac = [
        values
        for file in files
        for name, values in load_file(file).items()
        if name.split("/")[1] in ("inputs", "mean", "outputs")
    ]
    num_bytes = sum(values.nbytes for values in kfac)
    low, high, whole = (one.num_bytes for one in found.ranks)
    assert low < high < whole == num_bytes
    assert num_bytes < sum(file.stat().st_size for file in files)  # which have Fisher, too
    for rank in (1, 3):
        ((one, two), (used,)) = (
            sorted(steps.glob(f"compress-full-0-*-{rank}-*/statistics.safetensors")),
            steps.glob(f"merge-full-0-mats_kfac-rank-{rank}-*/recipe.yaml"),
        )
        assert all(str(file) in used.read_text() for file in (one, two))
    # What was collected is collected once, and cut.
    kinds = [step.kind for step in results.steps]
    assert (kinds.count("collect"), kinds.count("compress"), kinds.count("weigh")) == (2, 4, 3)


def test_methods_are_the_suites() -> None:
    with pytest.raises(RecipeError, match="studies: ranks: methods: there is no 'mats_kfac'"):
        tiny_suite(studies={"ranks": {}})
    with pytest.raises(RecipeError, match="ranks"):
        tiny_suite(methods=METHODS, studies={"ranks": {"ranks": [0]}})
    variants = {"other": {**METHODS["mats_kfac"], "variants": []}}
    plan = SuitePlan(
        tiny_suite(methods=METHODS | variants, studies={"ranks": {"methods": ["other"]}})
    )
    assert not [step for step in plan.steps if step.kind == "compress"]
