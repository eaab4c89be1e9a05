"""Complete or absent: interruptions at any point, resuming, overwriting, refusing."""

import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_commands import ForkedCommand, run_mats
from safetensors.torch import load_file
from slow_commands import slow_down, wait_for_jobs
from torch import Tensor

import matsmerge
from matsmerge import OutputError, ResourceError
from matsmerge.engine import layout, output_folder, plan, worker
from matsmerge.engine.local_executor import LocalExecutor
from matsmerge.files import whole_outputs
from matsmerge.files.whole_outputs import staging_path
from matsmerge.methods.site import BLOCK_ELEMENTS

Save = Callable[..., Path]
State = dict[str, Tensor]


@pytest.fixture
def models(make_state: Callable[..., State], save_model: Save) -> list[Path]:
    return [save_model(f"m{i}", make_state(i), config__json="{}") for i in range(3)]


def everything(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_nothing_else_is_left(models: list[Path], tmp_path: Path) -> None:
    out = matsmerge.merge(models[1:], models[0], "ties", out=tmp_path / "new" / "out").folder
    written = {"model.safetensors", "config.json", "README.md", "merge.json"}
    assert set(everything(out)) == {*written, ".paths.json", ".gitignore"}
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_existing_output(models: list[Path], tmp_path: Path) -> None:
    out = matsmerge.merge(models, out=tmp_path / "out").folder
    before = everything(out)
    with pytest.raises(OutputError, match="--overwrite"):
        matsmerge.merge(models[1:], out=out)
    assert everything(out) == before
    matsmerge.merge(models[1:], out=out, overwrite=True)
    assert everything(out) != before
    matsmerge.merge(models, out=out, overwrite=True)
    assert everything(out) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m0", "m1", "m2", "out"]


def test_only_our_own_output_is_ever_replaced(models: list[Path], tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.tex").write_text("years of work")
    file = tmp_path / "file"
    file.write_text("x")
    for target in (precious, file):
        with pytest.raises(OutputError, match="holds no merge of ours"):
            matsmerge.merge(models, out=target, overwrite=True)
    assert (precious / "thesis.tex").read_text() == "years of work"
    for target in (models[0], models[0] / "below", tmp_path):
        with pytest.raises(OutputError, match="overlaps|holds no merge of ours"):
            matsmerge.merge(models, out=target, overwrite=True)


def test_an_empty_folder_is_like_none(models: list[Path], tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    matsmerge.merge(models, out=empty)
    assert (empty / "merge.json").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "other")
    with pytest.raises(OutputError, match="not the name of a folder"):
        matsmerge.merge(models, out=tmp_path / "link")
    (tmp_path / "other" / ".hidden").write_text("")
    with pytest.raises(OutputError, match="holds no merge of ours"):
        matsmerge.merge(models, out=tmp_path / "other")


def test_a_mounted_folder_cannot_be_replaced(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path).name == "disk")
    with pytest.raises(OutputError, match="disk: exists and holds no merge of ours"):
        matsmerge.merge(models, out=tmp_path / "disk")
    matsmerge.merge(models, out=tmp_path / "disk" / "out")


@pytest.mark.parametrize("name", ["x" * 300, "x" * 250, "ä" * 120, f"{'x' * 300}/out", "a\0b"])
def test_names_that_do_not_fit_are_refused_before_any_work(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(worker.Worker, "merge", None)
    with pytest.raises(OutputError, match="name that is too long|a zero byte"):
        matsmerge.merge(models, out=tmp_path / name)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m0", "m1", "m2"]


def test_a_long_name_that_fits(models: list[Path], tmp_path: Path) -> None:
    out = matsmerge.merge(models, out=tmp_path / ("x" * 223)).folder
    matsmerge.merge(models, out=out, overwrite=True)


def test_not_enough_disk(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage)
    with pytest.raises(OutputError, match="not enough disk space.* needed and 1 kB free"):
        matsmerge.merge(models, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not staging_path(tmp_path / "out").exists()


def test_disk_that_fills_up_while_writing(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(layout.ShardFiles, "write", full)
        with pytest.raises(ResourceError, match="No space left.*--resume"):
            matsmerge.merge(models, out=out)
    assert not out.exists()
    matsmerge.merge(models, out=out, resume=True)
    plain = matsmerge.merge(models, out=tmp_path / "plain").folder
    assert (out / "model.safetensors").read_bytes() == (plain / "model.safetensors").read_bytes()


def test_errors_leave_nothing(models: list[Path], tmp_path: Path) -> None:
    state = load_file(models[1] / "model.safetensors")
    state["layers.1.b"][2] = float("nan")
    from safetensors.torch import save_file

    save_file(state, models[1] / "model.safetensors")
    with pytest.raises(
        matsmerge.NonFiniteError, match=r"m1: tensor 'layers.1.b' holds nan \(element 2"
    ):
        matsmerge.merge(models, out=tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m0", "m1", "m2"]
    matsmerge.merge(models, out=tmp_path / "out", allow_nonfinite=True)


@pytest.fixture
def small_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many jobs even for small models."""
    for module in (plan, worker):
        monkeypatch.setattr(module, "BLOCK_ELEMENTS", 64)
    monkeypatch.setattr(plan, "JOB_ELEMENTS", 64)
    monkeypatch.setattr(output_folder, "_SYNC_JOBS", 1)


@pytest.mark.usefixtures("small_jobs")
@pytest.mark.parametrize("method", ["average", "ties", "model_stock", "dare_ties"])
@pytest.mark.parametrize("stop_after", [0, 1, 4])
def test_interrupted_and_resumed_is_undisturbed(
    models: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    stop_after: int,
) -> None:
    arguments: dict[str, Any] = {"base": models[0], "method": method}
    plain = matsmerge.merge(models[1:], out=tmp_path / "plain", **arguments).folder
    out = tmp_path / "out"
    seen: list[int] = []

    def interrupt(self: Any, receipt: Any) -> None:
        if len(seen) == stop_after:
            raise KeyboardInterrupt
        seen.append(receipt.job_index)
        original(self, receipt)

    original = output_folder.OutputFolder.note_finished
    with monkeypatch.context() as patch:
        patch.setattr(output_folder.OutputFolder, "note_finished", interrupt)
        with pytest.raises(KeyboardInterrupt):
            matsmerge.merge(models[1:], out=out, **arguments)
    assert not out.exists()
    with pytest.raises(OutputError, match="interrupted; continue it with --resume"):
        matsmerge.merge(models[1:], out=out, **arguments)

    # A torn last line, as a power cut would leave it.
    with (staging_path(out) / "journal.jsonl").open("a") as journal:
        journal.write('{"jobs": {"1')
    merged: list[int] = []

    def count(self: Any, job: Any, **keywords: Any) -> Any:
        merged.append(job.index)
        return merge(self, job, **keywords)

    merge = worker.Worker.merge
    monkeypatch.setattr(worker.Worker, "merge", count)
    matsmerge.merge(models[1:], out=out, resume=True, **arguments)
    assert everything(out).keys() == everything(plain).keys()
    for name, content in everything(plain).items():
        assert everything(out)[name] == _renamed(content)
    assert not set(merged) & set(seen)


def test_resume_refuses_other_inputs_and_recipes(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(output_folder.OutputFolder, "note_finished", interrupt)
        with pytest.raises(KeyboardInterrupt):
            matsmerge.merge(models, out=out)
    changes: tuple[dict[str, Any], ...] = ({"weights": [1, 2, 3]}, {"dtype": "bfloat16"})
    for change in changes:
        with pytest.raises(OutputError, match="other inputs, another recipe"):
            matsmerge.merge(models, out=out, resume=True, **change)
    matsmerge.merge(models, out=out, overwrite=True)
    assert not staging_path(out).exists()
    matsmerge.merge(models, out=tmp_path / "other", resume=True)  # nothing to resume: a new run


def test_two_runs_at_once(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"

    def second(self: Any, receipt: Any) -> None:
        original(self, receipt)
        with pytest.raises(OutputError, match="another merge is writing"):
            matsmerge.merge(models, out=out, resume=True)

    original = output_folder.OutputFolder.note_finished
    with monkeypatch.context() as patch:
        patch.setattr(output_folder.OutputFolder, "note_finished", second)
        matsmerge.merge(models, out=out)


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGINT])
def test_killed_and_resumed_from_the_command_line(
    save_model: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signal_number: int
) -> None:
    monkeypatch.setattr(plan, "JOB_ELEMENTS", BLOCK_ELEMENTS)
    size = 12 * BLOCK_ELEMENTS
    for i in range(2):
        values = torch.randn(size, generator=torch.Generator().manual_seed(i)).half()
        save_model(f"m{i}", {"w": values})
    arguments = ["merge", "--model", str(tmp_path / "m0"), "--model", str(tmp_path / "m1")]
    plain, out = tmp_path / "plain", tmp_path / "out"
    assert run_mats(*arguments, "-o", plain).returncode == 0
    command = ForkedCommand([*arguments, "-o", out], slow_down(tmp_path / "go on"))
    journal = wait_for_jobs(command, out)
    command.send_signal(signal_number)
    (tmp_path / "go on").touch()  # after Ctrl-C jobs that have begun are waited for
    ended = command.wait()
    assert ended.returncode == (-signal.SIGKILL if signal_number == signal.SIGKILL else 130)
    if signal_number == signal.SIGINT:
        assert "--resume" in ended.stderr
        assert "Traceback" not in ended.stderr
    assert not out.exists()
    done = sum(len(json.loads(line).get("jobs", [])) for line in journal.read_text().splitlines())
    assert 0 < done < 12
    result = run_mats(*arguments, "-o", out, "--resume")
    assert result.returncode == 0, result.stderr
    assert (out / "model.safetensors").read_bytes() == (plain / "model.safetensors").read_bytes()
    assert (out / "merge.json").read_bytes() == (plain / "merge.json").read_bytes()


@pytest.mark.parametrize("moment", ["manifest", "sync", "rename"])
def test_failures_at_the_very_end_can_be_resumed(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    out = tmp_path / "out"
    plain = matsmerge.merge(models, models[0], "average", out=tmp_path / "plain").folder

    def fail(*arguments: Any, **keywords: Any) -> None:
        if moment != "manifest" or str(arguments[0]).endswith("merge.json"):
            raise OSError(5, "Input/output error")
        original(*arguments, **keywords)

    original: Any = Path.write_text
    with monkeypatch.context() as patch:
        if moment == "manifest":
            patch.setattr(Path, "write_text", fail)
        elif moment == "sync":
            patch.setattr(whole_outputs, "sync", fail)
        else:
            patch.setattr(Path, "rename", fail)
        with pytest.raises(ResourceError, match="Input/output error"):
            matsmerge.merge(models, models[0], "average", out=out)
    assert not out.exists()
    matsmerge.merge(models, models[0], "average", out=out, resume=True)
    assert (out / "merge.json").read_bytes() == (plain / "merge.json").read_bytes()
    assert set(everything(out)) == set(everything(plain))


def test_a_second_run_cannot_empty_a_folder_that_is_being_finished(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    tried: list[str] = []

    def sync(path: Path) -> None:
        if not tried:
            tried.append("")
            with pytest.raises(OutputError, match="another merge is writing"):
                matsmerge.merge(models, out=out, overwrite=True)
        original(path)

    original = whole_outputs.sync
    monkeypatch.setattr(whole_outputs, "sync", sync)
    matsmerge.merge(models, out=out)
    assert tried
    assert (out / "model.safetensors").stat().st_size > 1000


def test_a_failing_resume_keeps_what_was_done(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(output_folder.OutputFolder, "note_finished", interrupt)
        with pytest.raises(KeyboardInterrupt):
            matsmerge.merge(models, out=out)

    def unreadable(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(output_folder.OutputFolder, "_continue", unreadable)
        with pytest.raises(OutputError, match="Input/output error"):
            matsmerge.merge(models, out=out, resume=True)
    assert staging_path(out).exists()
    matsmerge.merge(models, out=out, resume=True)


def test_left_overs_of_a_killed_overwrite(models: list[Path], tmp_path: Path) -> None:
    out = matsmerge.merge(models, out=tmp_path / "out").folder
    choices: list[dict[str, Any]] = [{"overwrite": True}, {"resume": True}]
    for options in choices:
        (staging_path(out) / "replaced").mkdir(parents=True)
        (staging_path(out) / "replaced" / "x").write_text("")
        if options.get("resume"):  # as if the new one had been put in place never
            out.rename(tmp_path / "elsewhere")
        matsmerge.merge(models, out=out, **options)
        assert not staging_path(out).exists()


def test_killed_when_the_output_is_in_place(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, out = matsmerge.merge(models, out=tmp_path / "plain").folder, tmp_path / "out"

    def killed(self: whole_outputs.StagedFolder, **_: Any) -> None:
        self.close()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(whole_outputs.StagedFolder, "discard", killed)
        with pytest.raises(KeyboardInterrupt):
            matsmerge.merge(models, out=out)
    before = everything(out)
    assert set(before) == set(everything(plain))
    with pytest.raises(OutputError) as error:
        matsmerge.merge(models, out=out)
    assert error.value.problems == [f"{out}: exists already; replace it with --overwrite"]
    with pytest.raises(OutputError, match="other inputs, another recipe"):
        matsmerge.merge(models[1:], out=out, resume=True)
    monkeypatch.setattr(worker.Worker, "merge", None)
    assert matsmerge.merge(models, out=out, resume=True).folder == out
    assert everything(out) == before
    assert not staging_path(out).exists()


def _merge_until(arguments: dict[str, Any], place: str, last: int, connection: Any) -> None:
    """Merge, and die before the operation on files under `place` that has this number."""
    num_operations = 0

    def count(event: str, details: tuple[Any, ...]) -> None:
        nonlocal num_operations
        if event in OPERATIONS and any(place in str(d) for d in details):
            num_operations += 1
            if num_operations == last:
                os._exit(9)

    sys.addaudithook(count)
    matsmerge.merge(**arguments)
    connection.send(num_operations)
    connection.close()
    os._exit(0)


OPERATIONS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate")


@pytest.mark.parametrize("overwrite", [False, True])
def test_killed_before_any_operation_on_files(
    models: list[Path], tmp_path: Path, overwrite: bool
) -> None:
    plain = matsmerge.merge(models, out=tmp_path / "plain").folder
    expected = {n: _renamed(c) for n, c in everything(plain).items()}
    context = multiprocessing.get_context("fork")
    for last in range(1, 1000):
        out = tmp_path / "runs" / str(last) / "out"
        if overwrite:
            matsmerge.merge(models[1:], out=out)
        arguments = {"models": models, "out": out, "overwrite": overwrite}
        here, there = context.Pipe()
        process = context.Process(
            target=_merge_until, args=(arguments, str(out.parent), last, there)
        )
        process.start()
        process.join(60)
        if process.exitcode == 0:
            assert here.recv() == last - 1
            break
        assert process.exitcode == 9
        if out.exists():  # the old one, or the new one, but nothing else
            assert set(everything(out)) == set(expected)
        is_done = out.exists() and everything(out) == expected
        if is_done and not list(staging_path(out).glob("*")):
            continue  # only an empty hidden folder was still to be removed, if anything
        is_old = out.exists() and not is_done
        matsmerge.merge(models, out=out, resume=True, overwrite=is_old)
        assert everything(out) == expected, last
        assert [path.name for path in out.parent.iterdir()] == ["out"], last
    assert last > 10


def test_odd_places(models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    with pytest.raises(OutputError, match="cannot be written to"):
        matsmerge.merge(models, out="circle/out")
    for place in (".", "/", "dangling", "circle"):
        with pytest.raises(OutputError, match="not the name of a folder"):
            matsmerge.merge(models, out=place)
    first = matsmerge.merge(models, out="out").folder
    with pytest.raises(OutputError, match="overlaps with the input"):
        matsmerge.merge([first / "model.safetensors", models[0]], out=first, overwrite=True)
    assert (first / "model.safetensors").exists()
    monkeypatch.setenv("HOME", str(tmp_path))
    matsmerge.merge(models, out="~/home")
    assert (tmp_path / "home").exists()


def test_companions_are_checked_before_any_work(models: list[Path], tmp_path: Path) -> None:
    for text in ("{", "[1]"):
        (models[0] / "config.json").write_text(text)
        with pytest.raises(matsmerge.CheckpointError, match="config.json"):
            matsmerge.merge(models, out=tmp_path / "out")
    assert not staging_path(tmp_path / "out").exists()


def _merge_as_nobody(arguments: dict[str, Any], connection: Any) -> None:
    if os.geteuid() == 0:  # root may read and write everything
        os.setuid(65534)
    try:
        matsmerge.merge(**arguments)
    except matsmerge.MatsError as error:
        connection.send(str(error))
    else:
        connection.send("no error")


@pytest.fixture
def seen_by_all() -> Iterator[Path]:
    """A folder that other users may enter, which pytest's own are not."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_unreadable_and_unwritable(models: list[Path], tmp_path: Path, seen_by_all: Path) -> None:
    matsmerge.merge(models, out=tmp_path / "warm-up")  # so that all modules are loaded
    models = [Path(shutil.move(model, seen_by_all)) for model in models]
    locked = seen_by_all / "locked"
    locked.mkdir()
    locked.chmod(0o500)
    models[1].chmod(0)
    context = multiprocessing.get_context("fork")
    try:
        for arguments, message in (
            ({"models": [models[0], models[2]], "out": locked / "out"}, "cannot be written to"),
            ({"models": [models[0], models[1]]}, "m1: cannot be read"),
        ):
            here, there = context.Pipe()
            process = context.Process(target=_merge_as_nobody, args=(arguments, there))
            process.start()
            there.close()
            assert message in here.recv()
            process.join()
    finally:
        models[1].chmod(0o755)
        locked.chmod(0o755)
    assert not list(locked.iterdir())


def test_the_default_block_is_what_methods_expect() -> None:
    assert plan.JOB_ELEMENTS % BLOCK_ELEMENTS == 0
    assert LocalExecutor().max_bytes > 0


def _renamed(content: bytes) -> bytes:
    """A file of `plain` as it is in `out`: its card has the folder's name in it."""
    return content.replace(b"plain", b"out")
