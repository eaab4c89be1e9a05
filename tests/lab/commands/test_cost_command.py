"""`mats cost`: formulas for a model's shape, and a merge that is measured."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
import yaml
from peft import IA3Config
from peft_models import adapt, make_base

Run = Callable[..., tuple[int, str, str]]
State = dict[str, torch.Tensor]


def test_formulas_of_a_model(tmp_path: Path, mats: Run, save_model: Callable[..., Path]) -> None:
    state = {"a.weight": torch.ones(5, 3), "a.bias": torch.ones(5), "norm.weight": torch.ones(5)}
    path = save_model("model", state)
    code, out, error = mats(
        "cost", "--model", path, "--num-models", 2, "--num-examples", 7, "--iterations", 4,
        "--tokens-per-example", 11, "--json",
    )  # fmt: skip
    assert code == 0, error
    found = json.loads(out)
    assert found["setting"]["num_parameters"] == 25
    assert found["setting"]["num_tokens"] == 77
    assert found["operations"]["average"]["total"] == 50
    assert found["operations"]["mats"]["merging"] == 9 + 2 * 45 + 15 + 4 * (45 + 12 * 15)
    code, out, error = mats("cost", "--model", path)
    assert code == 0, error
    assert "multitask training" in out


def test_vectors_run_the_whole_base(tmp_path: Path, mats: Run) -> None:
    base = make_base("llama", tmp_path / "base")
    config = IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    adapter = adapt(base, config, tmp_path / "ia3")
    code, out, error = mats("cost", "--model", adapter, "--json")
    assert code == 0, error
    found = json.loads(out)
    assert found["setting"]["num_parameters"] == 2 * 16
    assert "regmean" not in found["operations"]
    fisher = found["operations"]["diagonal_fisher"]["statistics"]
    assert fisher > 3 * 8 * 1000 * found["setting"]["num_tokens"]


def test_a_merge_that_is_measured(
    tmp_path: Path, mats: Run, save_model: Callable[..., Path]
) -> None:
    torch.manual_seed(0)
    paths = [save_model(n, {"a.weight": torch.randn(6, 4)}) for n in ("base", "x", "y")]
    recipe = tmp_path / "recipe.yaml"
    content = {
        "models": [str(p) for p in paths[1:]],
        "base": str(paths[0]),
        "method": {"name": "actmat"},
    }
    recipe.write_text(yaml.safe_dump(content))
    code, out, error = mats("cost", recipe, "--measure", "--json")
    assert code == 0, error
    measured = json.loads(out)["measured"]
    # At least the two covariances D^T D of (6, 4) task vectors.
    assert measured["operations"] >= 2 * 4 * 6 * 4
    assert measured["seconds"] > 0
    assert measured["peak_bytes"] > 1_000_000


def test_what_is_refused(tmp_path: Path, mats: Run) -> None:
    for arguments, message in (
        ([], "give either a recipe file, or --model"),
        (["--model", "x", "--measure"], "needs a recipe file"),
        ([tmp_path / "none.yaml"], "none.yaml"),
    ):
        code, _, error = mats("cost", *arguments)
        assert code == 1
        assert message in " ".join(error.split())
