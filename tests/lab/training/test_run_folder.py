"""The hidden folder of a run: one run at a time, and nothing half done is taken for done."""

import json
from pathlib import Path

import pytest
from damaged_files import mutated_texts

from matsmerge.errors import OutputError
from matsmerge.lab.training import run_folder
from matsmerge.lab.training.run_folder import RunFolder, move_state, read_state


def checkpoint(folder: RunFolder, step: int, state: str = "{}") -> Path:
    path = folder.path / f"checkpoint-{step}"
    path.mkdir()
    (path / "trainer_state.json").write_text(state)
    return path


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    first, second = RunFolder(tmp_path / "out"), RunFolder(tmp_path / "out", resume=True)
    first.open({"a": 1})
    with pytest.raises(OutputError, match="another training is writing it"):
        second.open({"a": 1})
    assert (first.path / "run.json").exists()
    first.close()
    assert not first.path.exists()
    assert second.open({"a": 1}) is None
    second.close()


def test_the_last_complete_checkpoint(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "out")
    folder.open({"a": 1, "b": 2})
    checkpoint(folder, 90)
    newest = checkpoint(folder, 100)
    torn = checkpoint(folder, 110, "{")
    (folder.path / "checkpoint-120").mkdir()
    folder.output.mkdir()
    folder.close()
    again = RunFolder(tmp_path / "out", resume=True)
    with pytest.raises(OutputError, match=r"b was 2 and is 3;.*--overwrite"):
        again.open({"a": 1, "b": 3})
    assert again.open({"a": 1, "b": 2}) == newest
    assert not torn.exists()
    assert not again.output.exists()
    assert read_state(newest) == {}
    again.close()
    anew = RunFolder(tmp_path / "out", overwrite=True)
    assert anew.open({"a": 1, "b": 3}) is None
    assert json.loads((anew.path / "run.json").read_text()) == {"a": 1, "b": 3}
    anew.close()


def test_the_output_takes_the_place_of_an_earlier_one(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "old").write_text("old")
    folder = RunFolder(target)
    folder.open({})
    folder.output.mkdir()
    (folder.output / "training.json").write_text("{}")
    (folder.output / "weights").write_text("")
    (folder.output / "weights").chmod(0o600)
    folder.finish()
    assert sorted(p.name for p in target.iterdir()) == ["training.json", "weights"]
    assert (target / "weights").stat().st_mode == (target / "training.json").stat().st_mode
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_targets(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path)
    for name, message in (
        ("file", "holds no training of ours"),
        ("file/out", "cannot be written to"),
        ("link", "is not the name of a folder"),
        ("/", "is not the name of a folder"),
    ):
        with pytest.raises(OutputError, match=message):
            RunFolder(tmp_path / name, overwrite=True).check()
    RunFolder(tmp_path / "a" / "b").check()


def test_damaged_runs(tmp_path: Path) -> None:
    state = {
        "global_step": 90, "max_steps": 100, "epoch": 1.0, "best_metric": 0.5, "log_history": [{}],
        "best_model_checkpoint": "/somewhere/checkpoint-80", "stateful_callbacks": {},
    }  # fmt: skip
    identity = {"model": "x", "options": {"seed": 1}}
    for number, content in enumerate((identity, state)):
        for what, text in mutated_texts(content):
            folder = RunFolder(tmp_path / "out")
            folder.open(identity)
            path = checkpoint(folder, 90, json.dumps(state))
            damaged = [folder.path / "run.json", path / "trainer_state.json"][number]
            damaged.write_bytes(text)
            folder.close()
            again = RunFolder(tmp_path / "out", resume=True)
            try:
                last = again.open(identity)
                if last is not None:
                    move_state(last)
            except OutputError:
                assert number == 0, what
            except Exception as error:
                raise AssertionError(what) from error
            finally:
                again.close()


def test_a_kill_while_a_run_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path / "out")
    folder.open({"a": 1})
    newest = checkpoint(folder, 100)
    folder.close()
    again = RunFolder(tmp_path / "out", resume=True)
    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "put_text", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            again.open({"a": 1})
    again.close()
    assert RunFolder(tmp_path / "out", resume=True).open({"a": 1}) == newest
