"""`mats merge` with methods that solve systems."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from solved_models import make_nets, make_statistics

import matsmerge
from matsmerge.statistics.statistics_file import save_statistics

Run = Callable[..., tuple[int, str, str]]
BASE, MODELS = make_nets()


@pytest.fixture
def arguments(save_model: Callable[..., Path], tmp_path: Path) -> list[str]:
    """Base, models and statistics as options."""
    found = ["--base", str(save_model("base", dict(BASE.state_dict())))]
    for i, (model, statistics) in enumerate(zip(MODELS, make_statistics(), strict=True)):
        file = tmp_path / f"s{i}.safetensors"
        save_statistics(statistics, file)
        folder = save_model(f"m{i}", dict(model.state_dict()))
        found += ["--model", str(folder), "--statistics", str(file)]
    return found


@pytest.mark.parametrize(
    ("options", "method", "parameters"),
    [
        (["--method", "regmean"], "regmean", {}),
        (["--method", "diagonal_fisher"], "diagonal_fisher", {}),
        (["--method", "actmat"], "actmat", {}),
        (
            ["--method", "mats", "--init", "task_arithmetic", "--scale", "0.5", "--objective",
             "gram", "--iterations", "3", "--bias"],
            "mats",
            {"scale": 0.5, "iterations": 3, "bias": True},
        ),
        (
            ["--objective", "kfac", "--preconditioner", "kronecker", "--damping", "0.1",
             "--otherwise", "init", "--embeddings"],
            "mats",
            {"objective": "kfac", "preconditioner": "kronecker", "damping": 0.1,
             "otherwise": "init", "embeddings": True},
        ),
        (
            ["--method", "regmean", "--off-diagonal", "0.5", "--ridge", "0.01"],
            "regmean",
            {"off_diagonal": 0.5, "ridge": 0.01},
        ),
        (
            ["--method", "mats", "--stop", "held_out", "--tolerance", "1e-3"],
            "mats",
            {"stop": "held_out", "tolerance": 1e-3},
        ),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:merged by:UserWarning")
def test_options(
    mats: Run,
    arguments: list[str],
    tmp_path: Path,
    options: list[str],
    method: str,
    parameters: dict[str, Any],
) -> None:
    out = tmp_path / "out"
    code, text, error = mats("merge", *options, *arguments, "--out", out)
    assert code == 0, error
    assert "layer" in text
    expected = matsmerge.merge(
        MODELS,
        BASE,
        method,
        statistics=make_statistics(),
        **parameters,
    )
    for name, values in load_file(out / "model.safetensors").items():
        torch.testing.assert_close(values, expected[name], rtol=1e-4, atol=1e-5)


def test_trajectory_and_trace(mats: Run, arguments: list[str], tmp_path: Path) -> None:
    out, trace = tmp_path / "out", tmp_path / "trace.jsonl"
    code, _, error = mats(
        "merge", "--method", "mats_kfac", *arguments, "--out", out,
        "--trajectory", "2:6:2", "--trace", trace,
    )  # fmt: skip
    assert code == 0, error
    assert {p.name for p in out.iterdir()} == {
        "iteration-2", "iteration-4", "iteration-6", "merge.json", ".paths.json", ".gitignore",
    }  # fmt: skip
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    assert {"parameter", "iteration", "residual", "objective_value"} <= lines[0].keys()
    code, _, error = mats(
        "merge", "--method", "mats", *arguments, "--out", tmp_path / "b", "--trace", trace
    )
    assert code == 1
    assert "exists already" in error


def test_a_recipe_with_stages(mats: Run, arguments: list[str], tmp_path: Path) -> None:
    models = "".join(
        f"  - {{model: {arguments[i + 1]}, statistics: {arguments[i + 3]}}}\n" for i in (2, 6, 10)
    )
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"base: {arguments[1]}\nmodels:\n{models}"
        "method:\n  name: mats\n  stages:\n"
        "    - {objective: gram, iterations: 5}\n"
        "    - {objective: kfac, preconditioner: kronecker, bias: true}\n"
    )
    code, text, error = mats("merge", recipe, "--dry-run")
    assert code == 0, error
    assert "gram by" in text
    assert "then kfac(bias=True) by" in text
    code, text, error = mats("merge", recipe, "--out", tmp_path / "out")
    assert code == 0, error
    assert "gram" in text
    assert "kfac" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--method", "regmean", "--trajectory", "5"], "has no iterations"),
        (["--method", "mats", "--trajectory", "5-7"], "expected 10,20,50"),
        (["--method", "mats", "--objective", "kfac", "--solver", "closed_form"], "no closed form"),
        (["--method", "mats", "--objective", "grams"], "did you mean 'gram'"),
        (["--method", "ties", "--iterations", "5"], "unknown parameter 'iterations'"),
        (["--method", "mats", "--statistics", "nowhere.safetensors"], "4 times --statistics"),
    ],
)
def test_errors(
    mats: Run, arguments: list[str], tmp_path: Path, options: list[str], message: str
) -> None:
    code, _, error = mats("merge", *options, *arguments, "--out", tmp_path / "out")
    assert code == 1
    assert message in " ".join(error.split()), error
    assert not (tmp_path / "out").exists()
