"""Journals that are torn, damaged, or no journals."""

import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import matsmerge
from matsmerge import OutputError
from matsmerge.cli import main
from matsmerge.engine import output_folder
from matsmerge.files import journal_file
from matsmerge.files.whole_outputs import staging_path

State = dict[str, Tensor]


@pytest.fixture
def models(make_state: Callable[..., State], save_model: Callable[..., Path]) -> list[Path]:
    return [save_model(f"m{i}", make_state(i)) for i in range(2)]


@pytest.fixture
def out(models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A merge that was interrupted when all jobs were done."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(output_folder.OutputFolder, "finish", interrupt)
        with pytest.raises(KeyboardInterrupt):
            matsmerge.merge(models, out=tmp_path / "out", method="average")
    return tmp_path / "out"


def line(**entry: Any) -> str:
    text = json.dumps(entry)
    return f'{text[:-1]}, "check": {zlib.crc32(text.encode())}}}\n'


def test_lines_are_written_like_this(out: Path) -> None:
    lines = (staging_path(out) / "journal.jsonl").read_text().splitlines(keepends=True)
    for one in lines:
        content = json.loads(one)
        del content["check"]
        assert line(**content) == one


@pytest.mark.parametrize(
    "content",
    [
        "[]\n",
        "3\n",
        "null\n",
        "{}\n",
        "no JSON\n",
        line(identity=3, inputs=[]),
        line(identity="x"),
        line(identity="x", inputs={}),
        line(identity="x", inputs=[{"name": "x"}]),
        line(identity="x", inputs=[], more=1),
        "FIRST" + line(jobs=[]),
        "FIRST" + line(jobs={"x": [[1.0], {}, {}]}),
        "FIRST" + line(jobs={"0": 1}),
        "FIRST" + line(jobs={"0": [[], {}, {}]}),  # fewer pieces than the job has
        "FIRST" + line(jobs={"77": [[1.0], {}, {}]}),
        "FIRST" + line(jobs={"0": [["x"], {}, {}]}),
        "FIRST" + line(measured=[1]),
        "FIRST" + line(measured={"w": {"ratio": "x"}}),
        "FIRST[1, 2]\n" + line(jobs={}),
        "FIRST" + line(jobs={}).replace("jobs", "job5"),
        "FIRST" + line(measured={}).replace("{}", '{"w": {}}'),  # another checksum
        "\udcff\udcfe\n" + line(jobs={}),
        "FIRST" + "[" * 100_000 + "\n" + line(jobs={}),
    ],
)
def test_damaged_journals(
    models: list[Path], out: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = staging_path(out) / "journal.jsonl"
    first = path.read_text().splitlines(keepends=True)[0]
    path.write_bytes(os.fsencode(content.replace("FIRST", first)))
    with pytest.raises(OutputError, match=r"journal.jsonl: .*--overwrite"):
        matsmerge.merge(models, out=out, resume=True)
    arguments = ["merge", "--model", str(models[0]), "--model", str(models[1]), "-o", str(out)]
    assert main.run([*arguments, "--resume", "-q", "--workers", "1"]) == 1
    assert "journal.jsonl" in capsys.readouterr().err
    matsmerge.merge(models, out=out, overwrite=True)


@pytest.mark.parametrize("kind", ["pipe", "folder", "link to a device", "too large"])
def test_what_is_no_journal(
    models: list[Path], out: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = staging_path(out) / "journal.jsonl"
    if kind == "too large":
        monkeypatch.setattr(journal_file, "_MAX_BYTES", 100)
    else:
        path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link to a device":
        path.symlink_to("/dev/zero")
    with pytest.raises(OutputError, match=r"journal.jsonl: (not a regular file|larger than)"):
        matsmerge.merge(models, out=out, resume=True)
    matsmerge.merge(models, out=out, overwrite=True)


@pytest.mark.parametrize("torn", ["", "{", '{"jobs": {"0": [[1', "\0" * 50])
def test_a_torn_line_is_forgotten(models: list[Path], out: Path, tmp_path: Path, torn: str) -> None:
    plain = matsmerge.merge(models, out=tmp_path / "plain").folder
    with (staging_path(out) / "journal.jsonl").open("a") as file:
        file.write(torn)
    matsmerge.merge(models, out=out, resume=True)
    assert (out / "merge.json").read_bytes() == (plain / "merge.json").read_bytes()


def test_a_torn_first_line_is_a_beginning(models: list[Path], out: Path) -> None:
    path = staging_path(out) / "journal.jsonl"
    path.write_text(path.read_text()[:20])
    matsmerge.merge(models, out=out, resume=True)
