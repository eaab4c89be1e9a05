"""Results on a disk that is full: all of them or none, and nothing hidden."""

import contextlib
import errno
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from matsmerge.errors import DataError, OutputError
from matsmerge.lab.evaluation.metrics import Score
from matsmerge.lab.evaluation.results import Reading, Results, ScoredTask
from matsmerge.lab.evaluation.results_folder import write_folder


def make_results(line: str = "{}") -> Results:
    task = ScoredTask(
        kind="sequence_classification", metrics={"accuracy": Reading()}, num_examples=100
    )
    outcome: Any = SimpleNamespace(to_lines=lambda: [line])
    return Results(
        {"a": task, "b": task},
        {"one": {}, "two": {}},
        {m: {t: {"accuracy": Score(0.5, 0.1)} for t in "ab"} for m in ("one", "two")},
        outcomes={m: dict.fromkeys("ab", outcome) for m in ("one", "two")},
    )


def full_after(num: int, patch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Let what writes fail once, after so many times; returns how often it was asked."""
    asked = 0

    def limited(original: Any) -> Any:
        def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
            nonlocal asked
            if original.__name__ == "open" and "w" not in (arguments or ("",))[0]:
                return original(self, *arguments, **keywords)
            asked += 1
            if asked == num + 1:
                raise OSError(errno.ENOSPC, "No space left on device")
            return original(self, *arguments, **keywords)

        return call

    for name in ("open", "mkdir", "write_text", "rename"):
        patch.setattr(Path, name, limited(getattr(Path, name)))
    return lambda: asked


@pytest.mark.parametrize("is_there", [False, True])
def test_a_full_disk_leaves_nothing(tmp_path: Path, is_there: bool) -> None:
    target = tmp_path / "scores"
    if is_there:
        write_folder(make_results("old"), target)
    for num in range(100):
        with pytest.MonkeyPatch.context() as patch:
            asked = full_after(num, patch)
            with contextlib.suppress(OutputError):
                write_folder(make_results(), target, overwrite=True)
            is_done = asked() <= num
        assert [p.name for p in tmp_path.iterdir()] == (["scores"] if is_there or is_done else [])
        if is_done:
            break
        if is_there:
            assert (target / "predictions" / "one" / "a.jsonl").read_text() == "old\n"
    assert num > 8
    assert (target / "predictions" / "one" / "a.jsonl").read_text() == "{}\n"


def test_an_interruption_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Results, "to_markdown", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_folder(make_results(), tmp_path / "scores")
    assert list(tmp_path.iterdir()) == []


def test_half_a_character_is_written_as_json_has_it(tmp_path: Path) -> None:
    write_folder(make_results('{"answer": "\ud800"}'), tmp_path / "scores")
    written = (tmp_path / "scores" / "predictions" / "one" / "a.jsonl").read_text()
    assert written == '{"answer": "\\ud800"}\n'


@pytest.mark.parametrize("about", [{"fingerprint": []}, {"source": 5}, 5])
def test_what_is_known_of_a_model_has_its_type(about: object) -> None:
    content = {**make_results().to_json(), "models": {"one": about}}
    with pytest.raises(DataError, match=r"models\.one"):
        Results.from_json(content)
