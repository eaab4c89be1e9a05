"""Models of different vocabularies, merged by us and by mergekit from the same YAML.

Which ids mergekit gives to tokens that it adds may be another one each time, so rows are compared
token by token.
"""

from pathlib import Path

import pytest
import torch
from mergekit_process import IS_THERE, WHY_NOT, merge_by_mergekit
from safetensors.torch import load_file
from tiny_models import WORDS, llama_config, make_tokenizer, save
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM

from matsmerge.cli import main

pytestmark = pytest.mark.skipif(not IS_THERE, reason=WHY_NOT)
TURNED = [*WORDS[:4], *reversed(WORDS[4:]), "zz"]
VOCABULARIES: dict[str, tuple[list[str], list[str], int]] = {  # words, added words, rows
    "BASE": (WORDS, [], 20),
    "A": (WORDS, [], 20),
    "B": (WORDS, ["<x>", "<y>"], 22),
    "C": (TURNED, ["<y>"], 24),
}
ENTRIES = ", ".join(
    f"{{model: ROOT/{name}, parameters: {{weight: {weight}DENSITY}}}}"
    for name, weight in (("A", 0.4), ("B", 0.6), ("C", 0.5))
)
RECIPES = {
    "union": "{merge_method: ties, base_model: ROOT/BASE, models: [DENSE], tokenizer_source: union}",
    "one-padded": (
        "{merge_method: linear, models: [PLAIN], "
        "tokenizer: {source: ROOT/C, pad_to_multiple_of: 16}}"
    ),
    "tokens": (
        "{merge_method: task_arithmetic, base_model: ROOT/BASE, models: [PLAIN], tokenizer: {"
        "source: union, pad_to_multiple_of: 32, tokens: {<x>: {source: ROOT/B}, "
        "a: {source: {kind: zero}, force: true}, "
        "b: {source: {kind: model_token, model: ROOT/C, token: c}, force: true}, "
        "<y>: {source: {kind: model_token, model: ROOT/B, token_id: 21}}, "
        "<new>: {source: {kind: model_token, model: ROOT/A, token: d}}}}}"
    ),
    "base": (
        "{merge_method: slerp, base_model: ROOT/A, models: [{model: ROOT/A}, {model: ROOT/B}], "
        "parameters: {t: 0.3}, tokenizer: {source: base}}"
    ),
    "slices": (
        "{merge_method: slerp, base_model: ROOT/C, slices: [{sources: [{model: ROOT/B, layer_range: "
        "[0, 2]}, {model: ROOT/C, layer_range: [0, 2]}]}], parameters: {t: 0.3}, "
        "tokenizer_source: union}"
    ),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("models")
    for seed, (name, (words, added, rows)) in enumerate(VOCABULARIES.items()):
        tokenizer = make_tokenizer(words)
        tokenizer.add_tokens(added)
        torch.manual_seed(seed)
        save(LlamaForCausalLM(llama_config(vocab_size=rows)), root / name, tokenizer, seed)
    return root


def read(folder: Path) -> tuple[dict[str, int], dict[str, Tensor]]:
    state = {k: v for p in folder.glob("*.safetensors") for k, v in load_file(p).items()}
    return AutoTokenizer.from_pretrained(folder).get_vocab(), state


@pytest.mark.parametrize("name", RECIPES)
def test_rows_agree(name: str, root: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    text = RECIPES[name].replace("PLAIN", ENTRIES.replace("DENSITY", ""))
    text = text.replace("DENSE", ENTRIES.replace("DENSITY", ", density: 0.7"))
    recipe.write_text(text.replace("ROOT", str(root)))
    assert main.run(["merge", str(recipe), "--out", str(tmp_path / "ours"), "--quiet"]) == 0
    merge_by_mergekit(recipe, tmp_path / "theirs")
    (tokens, ours), (their_tokens, theirs) = read(tmp_path / "ours"), read(tmp_path / "theirs")
    assert tokens.keys() == their_tokens.keys()
    assert ours.keys() == theirs.keys()
    padding = range(len(tokens), len(ours["lm_head.weight"]))
    rows = [*(tokens[t] for t in tokens), *padding]
    their_rows = [*(their_tokens[t] for t in tokens), *padding]
    for key, value in theirs.items():
        is_by_token = key in ("lm_head.weight", "model.embed_tokens.weight")
        assert ours[key].shape == value.shape
        a, b = (ours[key][rows], value[their_rows]) if is_by_token else (ours[key], value)
        error = (a.double() - b.double()).abs().max() / b.double().abs().max()
        assert error < 1e-6, key
