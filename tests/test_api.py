"""Merging from Python: what `merge` takes, and what it returns."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import matsmerge
from matsmerge import OutputError, RecipeError
from matsmerge.methods import TaskArithmetic
from matsmerge.progress import Update

State = dict[str, Tensor]


@pytest.fixture
def states() -> list[State]:
    torch.manual_seed(0)
    base = {"a.weight": torch.randn(6, 4), "b": torch.randn(5)}
    return [base, *({n: t + 0.1 * torch.randn_like(t) for n, t in base.items()} for _ in range(2))]


@pytest.fixture
def files(states: list[State], tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"m{i}.safetensors" for i in range(len(states))]
    for path, state in zip(paths, states, strict=True):
        save_file(state, path)
    return paths


def test_methods_by_name_as_plain_data_and_as_objects(states: list[State]) -> None:
    base, *models = states
    found = [
        matsmerge.merge(models, base, "task_arithmetic", scale=0.3),
        matsmerge.merge(models, base, {"name": "task_arithmetic", "scale": 0.3}),
        matsmerge.merge(models, base, TaskArithmetic(scale=0.3)),
        matsmerge.merge(models, base, TaskArithmetic(scale=5.0), scale=0.3),
    ]
    for merged in found[1:]:
        assert all(torch.equal(merged[name], found[0][name]) for name in base)


def test_recipes(files: list[Path], tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    models = "".join(f"- {file}\n" for file in files[1:])
    path.write_text(f"base: {files[0]}\nmethod: {{name: ties, density: 0.5}}\nmodels:\n{models}")
    expected = matsmerge.merge(files[1:], files[0], "ties", density=0.5)
    recipe, notes = matsmerge.read_recipe(path)
    assert not notes
    for given in (path, str(path), recipe):
        merged = matsmerge.merge(given)
        assert all(torch.equal(merged[name], expected[name]) for name in expected)
    with pytest.raises(RecipeError, match="a recipe says models"):
        matsmerge.merge(recipe, method="average", weights=[1, 2])
    with pytest.raises(RecipeError, match="a mapping from names to models, or a recipe"):
        matsmerge.merge(str(files[0]))


def test_what_was_merged_in_memory(states: list[State]) -> None:
    base, *models = states
    merged = matsmerge.merge(models, base, "task_arithmetic", scale=0.3)
    assert list(merged) == list(base)
    assert len(merged) == 2
    assert {n: tuple(t.shape) for n, t in merged.state_dict().items()} == {
        "a.weight": (6, 4),
        "b": (5,),
    }
    assert merged.parameters["b"]["norm"] == pytest.approx(float(merged["b"].norm()))
    assert merged.report["rules"][0]["scale"] == 0.3
    assert "merging" in merged.seconds
    assert all(seconds >= 0 for seconds in merged.seconds.values())
    assert not merged.layers
    assert "in memory: 2 tensors" in repr(merged)
    with pytest.raises(OutputError, match=r"save\(folder\)"):
        _ = merged.folder


def test_what_was_merged_into_a_folder(files: list[Path], tmp_path: Path) -> None:
    in_memory = matsmerge.merge(files[1:], files[0], "task_arithmetic")
    merged = matsmerge.merge(files[1:], files[0], "task_arithmetic", out=tmp_path / "out")
    assert merged.folder == tmp_path / "out"
    assert merged.report == in_memory.report
    assert merged.keys() == in_memory.keys()
    assert all(torch.equal(merged[name], in_memory[name]) for name in in_memory)
    with pytest.raises(KeyError):
        _ = merged["nothing"]
    with pytest.raises(OutputError, match="written already"):
        merged.save(tmp_path / "again")


def test_saving_gives_the_same_folder(files: list[Path], tmp_path: Path) -> None:
    straight = matsmerge.merge(files[1:], files[0], "ties", out=tmp_path / "straight").folder
    merged = matsmerge.merge(files[1:], files[0], "ties")
    saved = merged.save(tmp_path / "saved")
    names = sorted(p.name for p in straight.iterdir())
    assert sorted(p.name for p in saved.iterdir()) == names
    for name in names:
        if name != "README.md":  # its title is the folder's name
            assert (saved / name).read_bytes() == (straight / name).read_bytes()
    with pytest.raises(OutputError, match="exists already"):
        merged.save(tmp_path / "saved")
    merged.save(tmp_path / "saved", overwrite=True)


@pytest.mark.filterwarnings("ignore:merged by:UserWarning")
def test_layers_and_trajectories(files: list[Path], tmp_path: Path) -> None:
    options: dict[str, Any] = {"trajectory": [1, 3]}
    merged = matsmerge.merge(files[1:], files[0], "actmat", **options)
    (report,) = merged.layers["a.weight"]
    assert report["objective"] == "actmat"
    assert list(merged.trajectory) == [1, 3]
    assert torch.equal(merged["a.weight"], merged.trajectory[3]["a.weight"])
    assert merged.trajectory[1].report["iteration"] == 1
    written = matsmerge.merge(files[1:], files[0], "actmat", out=tmp_path / "out", **options)
    saved = merged.save(tmp_path / "saved")
    for at in (1, 3):
        assert torch.equal(written.trajectory[at]["a.weight"], merged.trajectory[at]["a.weight"])
        file = saved / f"iteration-{at}" / "model.safetensors"
        assert torch.equal(load_file(file)["a.weight"], merged.trajectory[at]["a.weight"])
    assert torch.equal(written["a.weight"], merged["a.weight"])


def test_tied_weights_have_all_their_names(tmp_path: Path) -> None:
    shared = torch.ones(3, 2)
    models = [{"e": shared * i, "h": torch.zeros(1)} for i in (1, 3)]
    for model in models:
        model["o"] = model["e"]
    merged = matsmerge.merge(models)
    assert merged["o"].data_ptr() == merged["e"].data_ptr()
    again = matsmerge.merge(models, out=tmp_path / "out")
    assert sorted(again) == sorted(merged) == ["e", "h", "o"]
    assert torch.equal(again["o"], merged["o"])


def test_progress_is_told(states: list[State]) -> None:
    told: list[Update] = []
    matsmerge.merge(states[1:], states[0], "task_arithmetic", progress=told.append)
    last = [update for update in told if update.title == "merging"][-1]
    assert last.done == last.total


def test_a_plan_says_what_will_happen(files: list[Path], tmp_path: Path) -> None:
    planned = matsmerge.plan(files[1:], files[0], "task_arithmetic", scale=0.5)
    assert planned.recipe.method.name == "task_arithmetic"
    assert planned.num_parameters == 29
    assert planned.peak_bytes() > 0
    merged = planned.merge(tmp_path / "out", max_shard_bytes=100)
    assert len(list(merged.folder.glob("model-*.safetensors"))) == 2
    assert torch.equal(merged["b"], planned.merge()["b"])
