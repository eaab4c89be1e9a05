"""Searches and their journals as they should not be."""

import json
import os
from pathlib import Path

import pytest
from damaged_files import mutants, mutated_texts, refused

from matsmerge.errors import OutputError, RecipeError
from matsmerge.lab.tuning.search_space import parse_values
from matsmerge.lab.tuning.trials import Journal, Trial
from matsmerge.lab.tuning.tuning_file import read_tuning_file


def journal(path: Path) -> Journal:
    return Journal(path, "the search", resume=True)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "trials.jsonl"
    first = journal(path)
    for scale in (0.25, 0.5):
        trial = Trial(choice={"scale": scale}, scores={"rte": scale}, errors={"rte": float("nan")})
        first.add(trial)
    return path


@pytest.mark.parametrize("number", [0, 1, 2])
def test_journals_with_wrong_types(number: int, path: Path) -> None:
    lines = path.read_text().splitlines()
    num_refused = 0
    for what, mutant in mutants(json.loads(lines[number])):
        changed = [*lines[:number], json.dumps(mutant), *lines[number + 1 :]]
        path.write_text("".join(f"{line}\n" for line in changed))
        try:
            json.dumps([trial.to_json() for trial in journal(path).trials.values()])
        except OutputError as error:
            num_refused += "--overwrite" in str(error)
        except Exception as error:
            raise AssertionError(what) from error
    assert num_refused > 10


def test_a_journal_that_was_cut_off(path: Path) -> None:
    whole = path.read_bytes()
    for rest in (b'{"choice', b"\xff\xfe", b"[" * 100_000, b"\0" * 50):
        path.write_bytes(whole + rest)
        assert len(journal(path).trials) == 2
        assert path.read_bytes() == whole


def test_a_journal_that_is_no_file(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(OutputError, match="not a regular file"):
        journal(path)


@pytest.mark.parametrize(
    "text", ["[" * 3000, "&a [*a]", "!!int x", "0x_", "\0", '"\\ud800"', "*a", "{"]
)
def test_values_that_cannot_be_read(text: str) -> None:
    with pytest.raises(RecipeError, match="^search: scale: "):
        parse_values("scale", text)


def test_words_to_try() -> None:
    assert parse_values("method", "2020-99-99,ties") == ["2020-99-99", "ties"]


def test_damaged_files_of_searches(tmp_path: Path) -> None:
    path = tmp_path / "search.yaml"
    content = {
        "recipe": {"models": ["a", "b"], "method": {"name": "ties", "scale": 0.5}},
        "tasks": ["rte.yaml"],
        "search": {"scale": "0:1:0.1", "density": [0.1, 0.2]},
        "strategy": "grid",
        "trials": 3,
        "seed": 1,
    }

    def use() -> None:
        found = read_tuning_file(path)
        for key, value in found.search.items():
            parse_values(key, value)
        if isinstance(found.recipe, dict):
            found.plain_recipe()

    num = len(refused(path, mutated_texts(content), use, names_file=False))
    assert num > 50


def test_a_search_that_was_killed_before_it_had_begun(path: Path) -> None:
    for text in ("", '{"iden'):
        path.write_text(text)
        assert journal(path).trials == {}
        assert "the search" in path.read_text()
