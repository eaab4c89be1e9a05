"""`mats mergekit`: mergekit's command lines."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor
from vocabulary_folders import save_folder

Mats = Callable[..., tuple[int, str, str]]


@pytest.fixture
def recipe(
    make_state: Callable[..., dict[str, Tensor]], save_model: Callable[..., Path], tmp_path: Path
) -> Callable[[str], Path]:
    for seed, name in enumerate(("BASE", "A", "B")):
        save_model(name, make_state(seed), config__json='{"architectures": ["LlamaModel"]}')

    def write(text: str) -> Path:
        for name in ("BASE", "A", "B"):
            text = text.replace(f": {name}", f": {tmp_path / name}")
        path = tmp_path / "recipe.yml"
        path.write_text(text)
        return path

    return write


LINEAR = "{merge_method: linear, models: [{model: A}, {model: B}], parameters: {weight: 1}}"
DARE = (
    "{merge_method: dare_linear, base_model: BASE, models: [{model: A}, {model: B}], "
    "parameters: {weight: 1, density: 0.5}}"
)


def test_flags_of_mergekit(mats: Mats, recipe: Callable[[str], Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    flags = ["--copy-tokenizer", "--allow-crimes", "--out-shard-size", "1k", "--lazy-unpickle"]
    flags += ["--cuda", "--no-write-model-card", "-v", "-j", "1", "--lora-merge-cache", "x"]
    flags += ["--trust-remote-code", "--write-threads", "2", "--gpu-rich", "--no-quiet"]
    code, _, said = mats("mergekit", recipe(LINEAR), out, *flags)
    assert code == 0, said
    for flag in ("--allow-crimes", "--lazy-unpickle", "--cuda", "--no-write-model-card",
                 "--lora-merge-cache", "--trust-remote-code", "--write-threads", "--gpu-rich"):  # fmt: skip
        assert f"note: {flag}: " in said
    assert "--copy-tokenizer" not in said
    assert len(list(out.glob("*.safetensors"))) > 1
    assert mats("mergekit", recipe(LINEAR), out, "--quiet")[0] == 0  # as mergekit, once more


def test_what_is_written(mats: Mats, recipe: Callable[[str], Path], tmp_path: Path) -> None:
    assert mats("mergekit", recipe(LINEAR), tmp_path / "out", "--quiet")[0] == 0
    config = yaml.safe_load((tmp_path / "out/mergekit_config.yml").read_text())
    assert [entry["model"] for entry in config["models"]] == ["A", "B"]
    card = (tmp_path / "out/README.md").read_text()
    assert str(tmp_path) not in card
    front = yaml.safe_load(card.split("---")[1])
    assert front["tags"] == ["merge", "mergekit", "matsmerge"]
    assert front["base_model"] == ["A", "B"]
    assert front["base_model_relation"] == "merge"
    assert "LlamaModel.from_pretrained('out')" in card


def test_seeds(mats: Mats, recipe: Callable[[str], Path], tmp_path: Path) -> None:
    def merge(name: str, *flags: str) -> tuple[bytes, Any]:
        assert mats("mergekit", recipe(DARE), tmp_path / name, "--quiet", *flags)[0] == 0
        report = json.loads((tmp_path / name / "merge.json").read_text())
        weights = (tmp_path / name / "model.safetensors").read_bytes()
        return weights, report["recipe"]["method"].get("seed")

    assert merge("a")[0] != merge("b", "--random-seed", "7")[0]
    assert merge("c", "--random-seed", "7") == merge("d", "--random-seed", "7")
    assert merge("e", "--random-seed", "7")[1] == 7


def test_truncated_embeddings_follow_the_tokenizer_of_the_base(mats: Mats, tmp_path: Path) -> None:
    rows = torch.arange(10.0).reshape(5, 2)
    for name, added in (("A", []), ("B", ["<x>", "<y>"])):
        state = {"embed_tokens.weight": rows[: 3 + len(added)], "norm.weight": torch.ones(2)}
        save_folder(tmp_path / name, state, ["a", "b", "c"], added, vocab_size=3 + len(added))
    path = tmp_path / "recipe.yml"
    path.write_text(LINEAR.replace("model: ", f"model: {tmp_path}/"))
    assert mats("mergekit", path, tmp_path / "out")[0] == 1  # which tokenizer is not said
    code, _, said = mats("mergekit", path, tmp_path / "out", "--unsafe-truncate-embeddings")
    assert code == 0, said
    assert "note: --unsafe-truncate-embeddings: no rows are cut off blindly" in said
    found = load_file(tmp_path / "out/model.safetensors")["embed_tokens.weight"]
    assert torch.equal(found, rows[:3])


def test_several_documents(mats: Mats, recipe: Callable[[str], Path], tmp_path: Path) -> None:
    named = LINEAR.replace("{", "{name: First, ", 1)
    path = recipe(f"{named}\n---\n{LINEAR.replace('model: B', 'model: First')}")
    code, _, said = mats("mergekit", path, "--out-path", tmp_path / "out", "-I", tmp_path / "kept")
    assert code == 0, said
    assert (tmp_path / "kept/First/merge.json").exists()
    assert (tmp_path / "out/merge.json").exists()
    assert mats("mergekit", recipe(named), "-I", tmp_path / "all", "--quiet")[0] == 0
    assert (tmp_path / "all/First/merge.json").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "say where to write"),
        (["out", "--out-shard-size", "much"], "is not a size"),
    ],
)
def test_refused(
    flags: list[str], message: str, mats: Mats, recipe: Callable[[str], Path], tmp_path: Path
) -> None:
    given = [tmp_path / "out" if flag == "out" else flag for flag in flags]
    code, _, said = mats("mergekit", recipe(LINEAR), *given)
    assert code == 1
    assert message in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("asked", ["chatml", "auto"])
def test_a_chat_template_that_is_chosen_is_the_only_one_spoken_of(
    mats: Mats, recipe: Callable[[str], Path], tmp_path: Path, asked: str
) -> None:
    path = recipe(f"{LINEAR[:-1]}, chat_template: {asked}}}")
    for name in ("A", "B"):
        settings = {"chat_template": f"{name} {{{{ messages }}}}"}
        (tmp_path / name / "tokenizer_config.json").write_text(json.dumps(settings))
    code, _, said = mats("mergekit", path, tmp_path / "out")
    assert code == 0, said
    assert "the chat template" not in said
    assert ("chat_template: that of 1 of 2 models" in said) == (asked == "auto")
