"""A merge along the merged model that is killed goes on where it was, to the same bytes."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_commands import run_mats
from prefix_families import Family, family
from slow_commands import ending_note

from matsmerge.engine.local_executor import LocalExecutor
from matsmerge.engine.merge_run import RunOptions, merge_to_folder
from matsmerge.engine.output_folder import OutputFolder
from matsmerge.engine.prepared_merge import prepare_merge
from matsmerge.files.whole_outputs import staging_path
from matsmerge.recipes.recipe import make_recipe

NUM_FINISHED = 10  # jobs that have been noted: the second block has begun


class Counting(LocalExecutor):
    """Notes the layers that it is asked to merge."""

    def __init__(self) -> None:
        super().__init__(1)
        self.names: list[str] = []

    def map(self, function: Any, jobs: Any) -> Any:
        jobs = list(jobs)
        self.names += [name for job in jobs for name in getattr(job, "names", ())]
        return super().map(function, jobs)


def recipe_of(members: Family) -> dict[str, Any]:
    models = [
        {"model": str(path), "data": str(data)}
        for path, data in zip(members.paths, members.data, strict=True)
    ]
    return {"models": models, "method": {"name": "mats_cross", "init": "average"}}


def test_a_killed_merge_goes_on_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(family("bert", tmp_path, torch.float32))
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    killed, whole = tmp_path / "a" / "out", tmp_path / "b" / "out"
    with monkeypatch.context() as patch:
        patch.setattr(OutputFolder, "note_finished", ending_note(NUM_FINISHED, signal.SIGKILL))
        ended = run_mats("merge", tmp_path / "recipe.yaml", "--out", killed)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert not killed.exists()
    assert staging_path(killed).exists()
    prepared = prepare_merge(make_recipe(recipe))
    first, again = Counting(), Counting()
    merge_to_folder(prepared, whole, RunOptions(first))
    merge_to_folder(prepared, killed, RunOptions(again, resume=True))
    in_first_block = "bert.encoder.layer.0."
    assert any(in_first_block in name and "dense" in name for name in first.names)
    assert not any(in_first_block in name for name in again.names)
    assert set(again.names) < set(first.names)
    files = [path.relative_to(whole) for path in whole.rglob("*") if path.is_file()]
    assert {path.relative_to(killed) for path in killed.rglob("*") if path.is_file()} == {*files}
    for file in files:
        assert (killed / file).read_bytes() == (whole / file).read_bytes(), file
