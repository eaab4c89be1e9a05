"""Listeners: functions, nothing, and what commands draw."""

from pathlib import Path

import pytest
import torch
from torch import nn

import matsmerge
from matsmerge.progress import Callback, Logged, Progress, Update, listener


def test_a_function_is_told_all_there_is_to_tell() -> None:
    updates: list[Update] = []
    told = listener(updates.append)
    told.stage("merging", 10, done=2)
    told.advance(3, "a")
    told.advance(1)
    told.note("b")
    told.stage("writing", unit="files")
    assert updates == [
        Update("merging", 2, 10),
        Update("merging", 5, 10, text="a"),
        Update("merging", 6, 10, text="a"),
        Update("merging", 6, 10, text="b"),
        Update("writing", 0, None, "files"),
    ]


def test_what_is_given() -> None:
    assert isinstance(listener(None), Progress)
    given = Callback(print)
    told = listener(given)
    assert isinstance(told, Logged)
    assert told.told is given
    assert listener(told) is told


def test_stages_and_notes_are_logged(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each once, whoever listens besides; quiet unless `logging` is set up."""
    models = [{"w": torch.ones(2, 2)}, {"w": torch.zeros(2, 2)}]
    matsmerge.merge(models)
    assert not caplog.messages
    with caplog.at_level("INFO", "matsmerge"):
        matsmerge.merge(models, progress=lambda _: None)
        listener(None).note("here")
    assert caplog.messages == ["merging: 32 bytes", "here"]
    assert {record.name for record in caplog.records} == {"matsmerge"}
    shown = capsys.readouterr()
    assert shown.out + shown.err == ""


def test_collecting_tells_a_function(tmp_path: Path) -> None:
    updates: list[Update] = []
    batches = [torch.ones(2, 3), torch.ones(3, 3)]
    matsmerge.collect(
        nn.Linear(3, 2), batches, progress=updates.append, out=tmp_path / "a.safetensors"
    )
    assert [u.done for u in updates] == [0, 2, 5]
    assert {(u.title, u.unit, u.total) for u in updates} == {("collecting", "examples", None)}
