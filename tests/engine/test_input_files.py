"""Inputs that change between the beginning of a merge and its end, resumed or not."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_commands import ForkedCommand, run_mats
from safetensors.torch import load_file, save_file
from slow_commands import slow_down, wait_for_jobs
from torch import Tensor

import matsmerge
from matsmerge import CheckpointError, OutputError
from matsmerge.checkpoints.fingerprint import fingerprint
from matsmerge.engine import merge_run, output_folder, plan
from matsmerge.engine.measurement import measure
from matsmerge.files.whole_outputs import staging_path
from matsmerge.methods.site import BLOCK_ELEMENTS

NUM_ELEMENTS = 100_000
NUM_CHANGED = 20_000


@pytest.fixture
def models(save_model: Callable[..., Path]) -> list[Path]:
    return [
        save_model(f"m{i}", {"w": make_values(i)}, config__json="{}", glossary__txt="a")
        for i in range(3)
    ]


def make_values(seed: int, num: int = NUM_ELEMENTS) -> Tensor:
    return torch.randn(num, generator=torch.Generator().manual_seed(seed)).half()


def change_inside(path: Path, num_changed: int = NUM_CHANGED) -> None:
    """Change numbers where no fingerprint looks: between the first and second of its stretches."""
    before = fingerprint(matsmerge.open_checkpoint(path))
    header = int.from_bytes(path.read_bytes()[:8], "little")
    with path.open("r+b") as file:
        file.seek(8 + header + 2 * 1000)
        file.write(b"\x11" * (2 * num_changed))
    assert fingerprint(matsmerge.open_checkpoint(path)) == before
    touch(path)


def touch(path: Path) -> None:
    """Let a file be modified a second later than it was, however coarse the clock is."""
    at = path.stat().st_mtime_ns + 10**9
    os.utime(path, ns=(at, at))


def interrupt(models: list[Path], out: Path, **options: Any) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output_folder.OutputFolder, "finish", stop)
        with pytest.raises(KeyboardInterrupt):
            matsmerge.merge(models[1:], models[0], "task_arithmetic", out=out, **options)


def resume(models: list[Path], out: Path, **options: Any) -> Path:
    return matsmerge.merge(
        models[1:], models[0], "task_arithmetic", out=out, resume=True, **options
    ).folder


def test_a_change_is_noticed_when_resuming(models: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    interrupt(models, out)
    for model in models:
        change_inside(model / "model.safetensors")
    with pytest.raises(OutputError) as error:
        resume(models, out)
    assert len(error.value.problems) == 3
    for problem, model in zip(error.value.problems, [*models[1:], models[0]], strict=True):
        assert problem.startswith(f"{model / 'model.safetensors'}: was modified")
        assert "--overwrite" in problem
        assert "--verify" in problem
    assert staging_path(out).exists()
    matsmerge.merge(models[1:], models[0], "task_arithmetic", out=out, overwrite=True)


def test_another_size(models: list[Path], tmp_path: Path) -> None:
    interrupt(models, tmp_path / "out", verify=True)
    (models[0] / "glossary.txt").write_text("ab")  # it goes with the output
    with pytest.raises(OutputError, match=r"glossary.txt: has 2 bytes, and had 1 when .* began"):
        resume(models, tmp_path / "out")


@pytest.mark.parametrize("how", ["touched", "copied", "moved"])
def test_the_same_content_in_another_file(models: list[Path], tmp_path: Path, how: str) -> None:
    plain = matsmerge.merge(models[1:], models[0], "task_arithmetic", out=tmp_path / "plain").folder
    for out, options in ((tmp_path / "a", {}), (tmp_path / "b", {"verify": True})):
        interrupt(models, out, **options)
        file = models[1] / "model.safetensors"
        if how == "touched":
            touch(file)
        elif how == "copied":
            shutil.copy2(file, tmp_path / "copy")
            (tmp_path / "copy").replace(file)
        else:
            models[1].rename(tmp_path / "moved")
            (tmp_path / "moved").rename(models[1])
        if how != "moved" and not options:
            with pytest.raises(
                OutputError, match="m1/model.safetensors: was modified, or replaced"
            ):
                resume(models, out)
            with pytest.raises(OutputError, match="only a merge that is begun with --verify"):
                resume(models, out, verify=True)  # too late
            continue
        resume(models, out)
        merged = (out / "model.safetensors").read_bytes()
        assert merged == (plain / "model.safetensors").read_bytes()


def test_digests_see_a_change_that_hides_itself(models: list[Path], tmp_path: Path) -> None:
    interrupt(models, tmp_path / "out", verify=True)
    file = models[1] / "model.safetensors"
    before = file.stat().st_mtime_ns
    change_inside(file)
    with pytest.raises(OutputError, match="m1/model.safetensors: has another content"):
        resume(models, tmp_path / "out")
    os.utime(file, ns=(before, before))
    with pytest.raises(OutputError, match="m1/model.safetensors: has another content"):
        resume(models, tmp_path / "out", verify=True)


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("folder", [False, True])
def test_a_change_while_merging(
    models: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    verify: bool,
    folder: bool,
) -> None:
    file = models[1] / "model.safetensors"

    def change(*arguments: Any) -> Any:
        before = file.stat().st_mtime_ns
        change_inside(file)
        if verify and folder:
            os.utime(file, ns=(before, before))
        return measure(*arguments)

    monkeypatch.setattr(merge_run, "measure", change)
    options: dict[str, Any] = {"out": tmp_path / "out", "verify": verify} if folder else {}
    with pytest.raises(CheckpointError, match="m1/model.safetensors: was changed while"):
        matsmerge.merge(models[1:], models[0], "task_arithmetic", **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m0", "m1", "m2"]


def test_a_change_since_it_was_opened(models: list[Path], tmp_path: Path) -> None:
    opened = [matsmerge.open_checkpoint(model) for model in models]
    change_inside(models[2] / "model.safetensors")
    with pytest.raises(CheckpointError, match="m2/model.safetensors: was changed"):
        matsmerge.merge(opened, out=tmp_path / "out")


def test_objects_have_no_files(models: list[Path], tmp_path: Path) -> None:
    states = [load_file(model / "model.safetensors") for model in models]
    matsmerge.merge(states, out=tmp_path / "out", verify=True)
    for model, state in zip(models, states, strict=True):
        torch.save(state, model / "pytorch_model.bin")
        (model / "model.safetensors").unlink()
    interrupt(models, tmp_path / "pickled")
    touch(models[1] / "pytorch_model.bin")
    with pytest.raises(OutputError, match="m1/pytorch_model.bin: was modified"):
        resume(models, tmp_path / "pickled")


def test_shards(models: list[Path], tmp_path: Path) -> None:
    for model in models:
        (model / "model.safetensors").rename(model / "first.safetensors")
        save_file({"v": torch.ones(2)}, model / "second.safetensors")
        shards = {"w": "first.safetensors", "v": "second.safetensors"}
        index = json.dumps({"weight_map": shards})
        (model / "model.safetensors.index.json").write_text(index)
    interrupt(models, tmp_path / "out")
    touch(models[0] / "second.safetensors")
    with pytest.raises(OutputError, match="m0/second.safetensors: was modified"):
        resume(models, tmp_path / "out")


def test_killed_changed_and_resumed_from_the_command_line(
    save_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "JOB_ELEMENTS", BLOCK_ELEMENTS)
    size = 12 * BLOCK_ELEMENTS
    models = [save_model(f"m{i}", {"w": make_values(i, size)}) for i in range(2)]
    out = tmp_path / "out"
    arguments = ["merge", *(f"--model={model}" for model in models), "-o", str(out)]
    command = ForkedCommand(arguments, slow_down(tmp_path / "never"))
    wait_for_jobs(command, out)
    command.send_signal(signal.SIGKILL)
    command.wait()
    for model in models:
        change_inside(model / "model.safetensors")
    result = run_mats(*arguments, "--resume")
    assert result.returncode == 1
    assert result.stderr.replace("\n", "").count("was modified") == 2
    assert not out.exists()
