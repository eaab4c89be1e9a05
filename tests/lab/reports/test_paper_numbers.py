"""The paper's numbers: means agree with the tasks they are of, and names are found."""

from statistics import fmean

import pytest

from matsmerge.errors import DataError
from matsmerge.lab.reports.paper_numbers import paper_column, paper_columns


def test_means_are_those_of_the_tasks() -> None:
    checked = 0
    for name, column in paper_columns().items():
        for method, scores in column.by_task.items():
            assert len(scores) == len(column.tasks), (name, method)
            assert fmean(scores) == pytest.approx(column.mean[method], abs=0.051), (name, method)
            checked += 1
    assert checked == 30


def test_all_columns_are_there() -> None:
    sets = {"t0-8": ("ia3", "full"), "ties-7": ("ia3", "full"), "vision-8": ("b32", "l14")}
    names = {f"{s}/{kind}" for s, kinds in sets.items() for kind in kinds}
    assert set(paper_columns()) == names | {"intermediate/ia3", "intermediate/full"}


def test_numbers_are_found_by_any_spelling() -> None:
    column = paper_column("ties-7/full")
    assert column.of_task("mats", "story_cloze") == 83.0
    assert column.of_task("mats", "WikiQA") == 94.5
    assert column.of_task("mats_kfac", "WikiQA") is None
    assert column.of_task("mats", "newsgroups") is None
    assert paper_column("intermediate/ia3").of_donor("mats", "mnli") == 83.0
    assert paper_column("t0-8/full").of_fisher("block_fisher", "empirical", "validation") == 76.1


def test_an_unknown_column_is_named() -> None:
    with pytest.raises(DataError, match="ties-7/ful'.*did you mean 'ties-7/full'"):
        paper_column("ties-7/ful")
