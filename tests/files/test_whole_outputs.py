"""Files and folders are whole or absent, whatever happens while they are written."""

import errno
import os
from pathlib import Path

import pytest

from matsmerge.errors import OutputError
from matsmerge.files import whole_outputs
from matsmerge.files.whole_outputs import (
    StagedFolder,
    held,
    is_interrupted,
    put_in_place,
    put_text,
    staging_path,
    whole_file,
    writing,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError])
def test_a_file_that_is_not_completed(tmp_path: Path, failure: type[BaseException]) -> None:
    path = tmp_path / "new" / "file"
    put_text(path, "old")

    def fail() -> None:
        with whole_file(path) as file:
            file.write(b"half")
            raise failure

    with pytest.raises(failure):
        fail()
    assert path.read_text() == "old"
    assert names(path.parent) == ["file"]
    put_text(path, "new")
    assert path.read_text() == "new"
    assert names(path.parent) == ["file"]


def test_what_a_killed_run_left_of_a_file(tmp_path: Path) -> None:
    (tmp_path / ".file.tmp").write_text("a longer half")
    put_text(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "new"
    assert names(tmp_path) == ["file"]


def test_what_the_system_says_against_writing(tmp_path: Path) -> None:
    for number, reason in ((errno.ENOSPC, "the disk is full"), (errno.EIO, "Input/output error")):
        with pytest.raises(OutputError, match=f"out: cannot be written .{reason}."):  # noqa: SIM117
            with writing(tmp_path / "out"):
                raise OSError(number, os.strerror(number))


def test_a_folder_appears_when_it_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "old").write_text("")
    staged = StagedFolder(target, "merge")
    staged.open()
    staged.output.mkdir()
    (staged.output / "new").write_text("")
    assert is_interrupted(target)
    assert names(target) == ["old"]
    staged.put_in_place()
    assert names(target) == ["new"]
    staged.discard()
    assert names(tmp_path) == ["out"]


def test_one_run_at_a_time(tmp_path: Path) -> None:
    first, second = (StagedFolder(tmp_path / "out", "merge") for _ in range(2))
    first.open()
    with pytest.raises(OutputError, match="out: another merge is writing it just now"):
        second.open()
    assert not second.is_open
    first.close()
    second.open()
    second.discard()
    with held(tmp_path, "run"), pytest.raises(OutputError, match="another run is writing"):  # noqa: SIM117
        with held(tmp_path, "run"):
            pass


def test_what_is_kept_and_what_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staged = StagedFolder(tmp_path / "out", "merge")
    staged.open()
    removed: list[str] = []
    remove = whole_outputs.remove

    def note(path: Path) -> None:
        removed.append(path.name)
        remove(path)

    monkeypatch.setattr(whole_outputs, "remove", note)
    for name in "abc":
        (staged.path / name).write_text("")
    staged.clear(first="c", keep=frozenset("a"))
    assert removed == ["c", "b"]
    (staged.path / "z").mkdir()
    staged.discard(last="a")
    assert removed == ["c", "b", "z", "a"]
    assert not staged.path.exists()


def test_an_earlier_folder_stays_if_the_new_one_cannot_take_its_place(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("")
    with pytest.raises(OSError, match="No such file"):
        put_in_place(tmp_path / "gone", tmp_path / "out", tmp_path / "replaced")
    assert names(tmp_path / "out") == ["old"]
    assert names(tmp_path) == ["out"]


def test_what_is_left_when_the_output_is_in_place_is_no_interrupted_run(tmp_path: Path) -> None:
    (staging_path(tmp_path / "out") / "replaced").mkdir(parents=True)
    assert not is_interrupted(tmp_path / "out")
