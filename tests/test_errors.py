"""Errors as they travel between processes and to the screen."""

import pickle

import pytest

import matsmerge
from matsmerge import errors
from matsmerge.errors import AnotherRunError, MatsError, OutputError, closest
from matsmerge.files.remote_names import mirror_path

KINDS = [
    kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, MatsError)
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_they_come_out_of_another_process_as_they_were(kind: type[MatsError]) -> None:
    for problems in ("one", ["one", "two"], []):
        error = kind(problems)
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is kind
        assert again.problems == error.problems
        assert str(again) == str(error)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_all_at_once_or_none(kind: type[MatsError]) -> None:
    kind.raise_all([])
    kind.raise_all(iter(()))
    with pytest.raises(kind) as error:
        kind.raise_all(f"problem {i}" for i in range(3))
    assert error.value.problems == ["problem 0", "problem 1", "problem 2"]
    assert str(error.value).splitlines() == error.value.problems


def test_they_are_public_and_of_one_tree() -> None:
    for kind in KINDS:
        assert issubclass(kind, MatsError)
        assert getattr(matsmerge, kind.__name__, kind) is kind
    assert issubclass(AnotherRunError, OutputError)


def test_paths_of_remote_files_are_said_as_urls() -> None:
    path = mirror_path("s3://bucket/model")
    assert MatsError(f"{path}: gone").problems == ["s3://bucket/model: gone"]
    assert str(MatsError([f"{path}: gone", "other"])) == "s3://bucket/model: gone\nother"


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("tise", ["ties", "average"], "; did you mean 'ties'?"),
        ("xyz", ["ties", "average"], "; there is ties, average"),
        ("x", [], "; it takes none"),
        ("1", [1, 2], "; did you mean '1'?"),
        ("ties" * 1000, ["ties"], "; there is ties"),
    ],
)
def test_what_may_have_been_meant(name: str, known: list[object], expected: str) -> None:
    assert closest(name, known) == expected


def test_a_long_list_of_what_there_is_is_cut() -> None:
    said = closest("?", [f"option-{i}" for i in range(50)])
    assert said.count(",") == 19
