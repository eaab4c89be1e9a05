"""Recipes of several documents, which use each other's results."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

import matsmerge
from matsmerge import OutputError, RecipeError
from matsmerge.recipes.recipe_file import read_recipes

SERIES = """
models: [first, second]
base: first
method: {name: task_arithmetic, scale: 2}
---
name: second
models: [B, first]
method: average
---
name: first
models: [A, B]
method: average
"""
SERIES = SERIES.replace("models: [first, second]\nbase: first", "models: [second]\nbase: first")


@pytest.fixture
def recipe(
    make_state: Callable[..., dict[str, Tensor]], save_model: Callable[..., Path], tmp_path: Path
) -> Callable[[str], Path]:
    for seed, name in enumerate("ABC", 1):
        save_model(name, make_state(seed))

    def write(text: str) -> Path:
        for name in "ABC":
            text = text.replace(name, str(tmp_path / name))
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        return path

    return write


def test_results_are_used_by_later_ones(recipe: Callable[[str], Path], tmp_path: Path) -> None:
    planned = matsmerge.plan(recipe(SERIES))
    assert [one.recipe.name for one in planned.earlier] == ["first", "second"]
    merged = planned.merge(tmp_path / "out")
    a, b = (load_file(tmp_path / f"{n}/model.safetensors")["layers.1.w"].double() for n in "AB")
    first = (a + b) / 2
    second = (b + first) / 2
    expected = first + 2 * (second - first)
    torch.testing.assert_close(merged["layers.1.w"], expected.float())
    assert merged.report["recipe"]["models"][0]["model"] == "second"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["A", "B", "C", "out", "recipe.yaml"]


def test_what_is_published_names_the_models_that_all_began_with(
    recipe: Callable[[str], Path], tmp_path: Path
) -> None:
    unused = "---\nname: third\nmodels: [C]\nmethod: average\n"
    planned = matsmerge.plan(recipe(SERIES + unused))
    planned.merge(tmp_path / "out", intermediates=tmp_path / "kept")

    def published(folder: Path) -> tuple[list[str], list[str | None]]:
        card = (folder / "README.md").read_text()
        assert str(tmp_path) not in card
        documents = yaml.safe_load_all((folder / "mergekit_config.yml").read_text())
        names = [document.get("name") for document in documents]
        return yaml.safe_load(card.split("---\n")[1])["base_model"], names

    assert published(tmp_path / "out") == (["A", "B"], ["first", "second", None])
    assert published(tmp_path / "kept/second") == (["B", "A"], ["first", "second"])
    assert published(tmp_path / "kept/third") == (["C"], ["third"])
    recipes, _ = read_recipes(tmp_path / "out/mergekit_config.yml")
    assert [one.name for one in recipes] == ["first", "second", None]


def test_results_are_kept_and_used_again(
    recipe: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = matsmerge.plan(recipe(SERIES))
    planned.merge(tmp_path / "out", intermediates=tmp_path / "kept")
    weights = tmp_path / "kept/first/model.safetensors"
    before = weights.stat().st_mtime_ns
    second = tmp_path / "kept/second/model.safetensors"
    assert second.exists()
    planned.merge(tmp_path / "again", intermediates=tmp_path / "kept")
    assert weights.stat().st_mtime_ns == before
    again = tmp_path / "again/model.safetensors"
    assert again.read_bytes() == (tmp_path / "out/model.safetensors").read_bytes()
    # Another merge of the same name is not taken for it, nor replaced without being asked.
    changed = matsmerge.plan(recipe(SERIES.replace("[A, B]", "[A, C]")))
    with pytest.raises(OutputError):
        changed.merge(tmp_path / "new", intermediates=tmp_path / "kept")
    changed.merge(tmp_path / "new", intermediates=tmp_path / "kept", overwrite=True)
    assert weights.stat().st_mtime_ns != before


def test_heads_stay_with_what_is_made_of_a_result(
    recipe: Callable[[str], Path], tmp_path: Path
) -> None:
    text = "models: [joint]\nbase: C\nheads: layers.0.*\nmethod: polarize_layers\n---\n"
    text += "name: joint\nmodels: [A, B]\nbase: C\nheads: layers.0.*\nmethod: task_arithmetic\n"
    merged = matsmerge.plan(recipe(text)).merge(tmp_path / "out", intermediates=tmp_path / "kept")
    heads = {name: load_file(tmp_path / f"out/heads/{name}.safetensors") for name in "AB"}
    for name, head in heads.items():
        model = load_file(tmp_path / name / "model.safetensors")
        assert list(head) == ["layers.0.b", "layers.0.w"]
        assert all(torch.equal(values, model[n]) for n, values in head.items())
        before = tmp_path / f"kept/joint/heads/{name}.safetensors"
        assert before.read_bytes() == (tmp_path / f"out/heads/{name}.safetensors").read_bytes()
    assert merged.report["heads"] == {name: sorted(head) for name, head in heads.items()}
    # What is said of a parameter is about itself.
    said = merged.report["parameters"]
    assert all(list(one["measured"]) == ["ratio"] for one in said.values() if "measured" in one)
    again = matsmerge.merge([tmp_path / "out", tmp_path / "kept/joint"], method="average")
    assert again.report["heads"] == {}  # of which would they be?


def test_an_interrupted_series_goes_on(
    recipe: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matsmerge.engine import merge_series
    from matsmerge.engine.merge_run import merge_to_folder

    planned = matsmerge.plan(recipe(SERIES))
    calls: list[str] = []

    def stop_at_the_last(prepared: Any, target: Path, options: Any) -> Path:
        calls.append(target.name)
        if target.name == "out" and len(calls) == 3:
            raise KeyboardInterrupt
        return merge_to_folder(prepared, target, options)

    monkeypatch.setattr(merge_series, "merge_to_folder", stop_at_the_last)
    with pytest.raises(KeyboardInterrupt):
        planned.merge(tmp_path / "out")
    planned.merge(tmp_path / "out", resume=True)
    assert calls == ["first", "second", "out", "out"]
    assert not (tmp_path / ".out.merges").exists()


def test_a_series_is_not_merged_into_memory(recipe: Callable[[str], Path]) -> None:
    with pytest.raises(RecipeError, match="into a folder"):
        matsmerge.plan(recipe(SERIES)).merge()


def test_problems_of_all_documents_come_before_any_work(
    recipe: Callable[[str], Path], tmp_path: Path
) -> None:
    text = """
models: [first, second]
method: average
---
name: first
models: [A, B]
method: {name: average}
overrides: [{match: gone.*, method: {normalize: false}}]
---
name: second
models: [A, nowhere/at-all]
method: average
"""
    with pytest.raises(RecipeError) as error:
        matsmerge.plan(recipe(text))
    found = "\n".join(error.value.problems)
    assert "first: the override pattern 'gone.*'" in found
    assert "second: nowhere/at-all" in found
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{name: a, models: [b], method: average}\n---\n{name: b, models: [a], method: average}", "in a circle.*: a, b"),
        ("{name: a, models: [a, x], method: average}\n---\n{models: [a], method: average}", "circle"),
        ("{models: [x], method: average}\n---\n{models: [y], method: average}", "have no name"),
        ("{name: a, models: [x], method: average}\n---\n{name: a, models: [y], method: average}", "a is given twice"),
        ("{name: a, models: [x], method: averag}\n---\n{models: [a], method: tie}", r"document a: .*averag"),
    ],
)  # fmt: skip
def test_documents_that_do_not_go_together(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=message):
        read_recipes(path)


def test_one_recipe_is_expected_elsewhere(recipe: Callable[[str], Path]) -> None:
    with pytest.raises(RecipeError, match="has 3 documents"):
        matsmerge.read_recipe(recipe(SERIES))
