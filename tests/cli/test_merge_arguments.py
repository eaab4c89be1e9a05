"""What a command line of `mats merge` names: a recipe, models, numbers of iterations."""

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from matsmerge.cli.merge_command import _parse_list
from matsmerge.errors import RecipeError

Run = Callable[..., tuple[int, str, str]]
State = dict[str, Tensor]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, []),
        ("10", [10]),
        ("10,20,50", [10, 20, 50]),
        ("10:30:10", [10, 20, 30]),
        ("10:35:10", [10, 20, 30]),
        ("5:5:1", [5]),
        ("0:2:1", [0, 1, 2]),
        (" 1, 2", [1, 2]),
    ],
)
def test_numbers_of_iterations(text: str | None, expected: list[int]) -> None:
    assert _parse_list(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", ",", "a", "1,,2", "1:2", "1:2:3:4", "1:5:0", "5:1:1", "5:1:-1", "1.5", "1;2", ":::"],
)
def test_what_is_no_list_of_numbers(text: str) -> None:
    with pytest.raises(RecipeError, match="--trajectory: expected 10,20,50 or 10:100:10, found"):
        _parse_list(text)


@pytest.fixture
def models(make_state: Callable[..., State], save_model: Callable[..., Path]) -> list[Path]:
    return [save_model(f"m{i}", make_state(i)) for i in range(3)]


def test_a_recipe_stands_alone(mats: Run, models: list[Path], tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"models: [{models[0]}, {models[1]}]\nmethod: average\n")
    code, _, err = mats("merge", recipe, models[2], "-o", tmp_path / "out")
    assert code == 1
    assert f"{recipe}: give one recipe file alone" in " ".join(err.split())
    assert not (tmp_path / "out").exists()


def test_models_may_be_named_without_an_option(
    mats: Run, models: list[Path], tmp_path: Path
) -> None:
    for i, given in enumerate(
        (
            [models[0], models[1], "--method", "average"],
            [models[0], "--model", models[1], "--method", "average"],
            ["--model", models[0], "--model", models[1]],
        )
    ):
        code, _, err = mats("merge", *given, "-o", tmp_path / f"out{i}", "-q")
        assert code == 0, err
    first, *others = ((tmp_path / f"out{i}" / "model.safetensors").read_bytes() for i in range(3))
    assert all(other == first for other in others)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["GONE.yaml", "-o", "OUT"], "GONE.yaml: cannot be read (No such file"),
        (["M0", "M1", "--method", "tise", "-o", "OUT"], "did you mean 'ties'"),
        (["M0", "M1", "--method", "slerp", "M2", "-o", "OUT"], "merges exactly 2 models, 3 given"),
        (["M0", "M0", "--method", "average", "-o", "OUT"], "is given twice"),
        (["M0", "M1", "--method", "ties", "-o", "OUT"], "base"),
        (["M0", "M1", "--method", "average"], "--out"),
        (["M0", "M1", "--method", "average", "--trajectory", "1", "-o", "OUT"], "no iterations"),
    ],
)
def test_what_cannot_be_merged(
    mats: Run, models: list[Path], tmp_path: Path, arguments: list[str], message: str
) -> None:
    places = {f"M{i}": model for i, model in enumerate(models)}
    places |= {"OUT": tmp_path / "out", "GONE.yaml": tmp_path / "GONE.yaml"}
    code, out, err = mats("merge", *(places.get(a, a) for a in arguments))
    assert (code, out) == (1, "")
    assert message in " ".join(err.split()), err
    assert not (tmp_path / "out").exists()
