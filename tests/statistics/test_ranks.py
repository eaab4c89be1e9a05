"""The rank that is collected unless another is asked for."""

import inspect

import matsmerge
from matsmerge.cli.collect_command import Collected
from matsmerge.statistics.collection_options import CollectionOptions
from matsmerge.statistics.ranks import AUTO_RANK, RANK_UNLESS_GIVEN


def test_it_is_the_same_wherever_statistics_are_collected() -> None:
    functions = (matsmerge.collect, matsmerge.StatisticsCallback.__init__)
    defaults = [inspect.signature(f).parameters["rank"].default for f in functions]
    assert {*defaults, Collected.model_fields["rank"].default} == {RANK_UNLESS_GIVEN}


def test_a_file_that_says_nothing_of_a_rank_holds_whole_moments() -> None:
    assert CollectionOptions.model_validate({}).sketch_rank is None
    assert "rank" not in CollectionOptions(rank="full").model_dump()
    assert CollectionOptions(rank="auto").sketch_rank == AUTO_RANK
