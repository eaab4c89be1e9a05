"""Models of different vocabularies, merged and loaded again."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import WORDS, llama_config, make_tokenizer, save
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
from vocabulary_folders import save_folder

import matsmerge
from matsmerge.errors import CheckpointError, MatsError, RecipeError

Run = Callable[..., tuple[int, str, str]]
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TURNED = [*WORDS[:2], "</s>", "<s>", *reversed(WORDS[4:])]  # other ids for nearly all words
VOCABULARIES: dict[str, tuple[list[str], list[str], int]] = {  # words, added words, rows
    "base": (WORDS, [], 20),
    "a": (WORDS, [], 24),  # with rows that no token has
    "b": (WORDS, ["<x>", "<y>"], 22),
    "c": ([*TURNED, "zz"], ["<y>"], 22),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("vocabularies")
    for seed, (name, (words, added, rows)) in enumerate(VOCABULARIES.items()):
        tokenizer = make_tokenizer(words)
        tokenizer.add_tokens(added)
        torch.manual_seed(seed)
        ids = {"bos_token_id": words.index("<s>"), "eos_token_id": words.index("</s>")}
        model = LlamaForCausalLM(llama_config(vocab_size=rows, **ids))
        save(model, root / name, tokenizer, seed)
    return root


def rows_of(root: Path, model: str, table: str = EMBED) -> dict[str, Tensor]:
    """A model's rows by token."""
    words, added, _ = VOCABULARIES[model]
    values = load_file(root / model / "model.safetensors")[table].double()
    return {word: values[i] for i, word in enumerate([*words, *added])}


def merge(root: Path, names: str, out: Path, base: str | None = None, **options: Any) -> Path:
    models = {name: root / name for name in names}
    planned = matsmerge.plan(models, None if base is None else root / base, **options)
    planned.merge(out)
    return out


def check_loads(out: Path) -> tuple[dict[str, int], dict[str, Tensor]]:
    """The tokens and tensors of an output that transformers agrees to load."""
    tokenizer, model = (c.from_pretrained(out) for c in (AutoTokenizer, AutoModelForCausalLM))
    vocabulary = tokenizer.get_vocab()
    state = load_file(out / "model.safetensors")
    assert model.config.vocab_size == len(state[EMBED]) > max(vocabulary.values())
    assert torch.equal(model.get_input_embeddings().weight, state[EMBED])
    for key in ("bos_token_id", "eos_token_id"):
        word = "<s>" if key == "bos_token_id" else "</s>"
        assert getattr(model.config, key) == vocabulary[word]
        assert getattr(model.generation_config, key) == vocabulary[word]
    ids = tokenizer("a b <y>", add_special_tokens=False)["input_ids"]
    if "<y>" in vocabulary:
        assert ids == [vocabulary[word] for word in ("a", "b", "<y>")]
    return vocabulary, state


def test_union(root: Path, tmp_path: Path) -> None:
    """base + sum of changes, where who lacks a token sees the base's row or the others' mean."""
    out = merge(root, "abc", tmp_path / "out", "base", method="task_arithmetic", scale=0.5,
                tokenizer="union")  # fmt: skip
    vocabulary, state = check_loads(out)
    assert sorted(vocabulary, key=vocabulary.__getitem__) == [*WORDS, "zz", "<x>", "<y>"]
    for table in (EMBED, HEAD):
        own = {name: rows_of(root, name, table) for name in ("a", "b", "c", "base")}
        for word, row in vocabulary.items():
            having = [rows[word] for rows in own.values() if word in rows]
            lacked = own["base"].get(word, torch.stack(having).mean(0))
            start, *others = (own[name].get(word, lacked) for name in ("base", "a", "b", "c"))
            expected = start + 0.5 * sum(other - start for other in others)
            torch.testing.assert_close(state[table][row].double(), expected, rtol=1e-6, atol=1e-6)


def test_a_stack_takes_each_row_from_its_own_model(root: Path, tmp_path: Path) -> None:
    """Also those of models that have no part in the embeddings, which are of the first range."""
    recipe = {"models": [str(root / "c"), str(root / "b")], "base": str(root / "base"),
              "method": "passthrough", "stack": [{"c": [0, 1]}, {"b": [0, 2]}],
              "tokenizer": "union"}  # fmt: skip
    matsmerge.plan(matsmerge.Recipe.model_validate(recipe)).merge(tmp_path / "out")
    vocabulary, state = check_loads(tmp_path / "out")
    assert sorted(vocabulary, key=vocabulary.__getitem__) == [*WORDS, "zz", "<y>", "<x>"]
    for table, first, second in ((EMBED, "c", "b"), (HEAD, "b", "c")):
        own = rows_of(root, second, table) | rows_of(root, first, table)
        for word, row in vocabulary.items():
            torch.testing.assert_close(state[table][row].double(), own[word], rtol=0, atol=0)


def test_one_models_tokenizer_and_padding(root: Path, tmp_path: Path) -> None:
    spec = {"source": str(root / "c"), "pad_to_multiple_of": 8}
    out = merge(root, "abc", tmp_path / "out", "base", method="average", tokenizer=spec)
    vocabulary, state = check_loads(out)
    assert vocabulary == {word: i for i, word in enumerate([*TURNED, "zz", "<y>"])}
    own = [rows_of(root, name) for name in "abc"]
    base = rows_of(root, "base")
    means = {}
    for word in vocabulary:
        having = [rows[word] for rows in own if word in rows]
        lacked = base.get(word, torch.stack(having).mean(0))
        means[word] = torch.stack([rows.get(word, lacked) for rows in own]).mean(0)
        torch.testing.assert_close(state[EMBED][vocabulary[word]].double(), means[word])
    assert state[EMBED].shape == (24, 16)
    padding = torch.stack(list(means.values())).mean(0)
    torch.testing.assert_close(state[EMBED][22:].double(), padding.expand(2, -1))


def test_rules_for_tokens(root: Path, tmp_path: Path) -> None:
    tokens: dict[str, Any] = {
        "<x>": {"source": {"kind": "zero"}},
        "<y>": {"source": {"kind": "mean"}, "force": True},
        "a": {"source": "c", "force": True},
        "b": {"source": {"kind": "model_token", "model": "b", "token": "<x>"}, "force": True},
        "<new>": {"source": {"kind": "model_token", "model": "base", "token_id": 7}},
    }
    out = merge(root, "bc", tmp_path / "out", "base", method="average",
                tokenizer={"source": "base", "tokens": tokens})  # fmt: skip
    vocabulary, state = check_loads(out)
    assert [vocabulary[t] for t in ("<x>", "<y>", "<new>")] == [20, 21, 22]
    b, c, base = (rows_of(root, name) for name in ("b", "c", "base"))
    expected = {
        "<x>": b["<x>"] / 2,  # its own, and zero
        "<y>": (b["<y>"] + c["<y>"]) / 2,
        "a": c["a"],
        "b": b["<x>"],
        "<new>": base[WORDS[7]],
        "c": (b["c"] + c["c"]) / 2,
    }
    for word, row in expected.items():
        torch.testing.assert_close(state[EMBED][vocabulary[word]].double(), row)


def test_padded_embeddings_are_trimmed(root: Path, tmp_path: Path) -> None:
    out = merge(root, "a", tmp_path / "out", method="average", tokenizer="base")
    _, state = check_loads(out)
    own = load_file(root / "a" / "model.safetensors")
    assert torch.equal(state[EMBED], own[EMBED][:20])
    assert torch.equal(state[HEAD], own[HEAD][:20])


def test_one_model_in_the_same_out(root: Path, tmp_path: Path) -> None:
    out = merge(root, "b", tmp_path / "out", tokenizer="union")
    _, state = check_loads(out)
    own = load_file(root / "b" / "model.safetensors")
    assert all(torch.equal(state[name], own[name]) for name in own)
    for name in ("tokenizer.json", "config.json"):
        files = [json.loads((folder / name).read_text()) for folder in (out, root / "b")]
        assert files[0] == files[1]


def test_tied_embeddings(tmp_path: Path) -> None:
    for seed, name in enumerate("ab"):
        tokenizer = make_tokenizer(WORDS)
        tokenizer.add_tokens(["<x>"] * seed)
        config = llama_config(vocab_size=20 + seed, tie_word_embeddings=True)
        save(LlamaForCausalLM(config), tmp_path / name, tokenizer, seed)
    out = merge(tmp_path, "ab", tmp_path / "out", tokenizer="union")
    _, state = check_loads(out)
    assert HEAD not in state
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    theirs = load_file(tmp_path / "b" / "model.safetensors")[EMBED]
    assert torch.equal(state[EMBED][20], theirs[20])


def test_the_dry_run_says_what_becomes_of_rows(mats: Run, root: Path) -> None:
    models = [arg for name in "abc" for arg in ("--model", root / name)]
    base = ("--base", root / "base", "--method", "task_arithmetic", "--tokenizer", "union")
    code, out, err = mats("merge", *models, *base, "--dry-run", "--json")
    assert code == 0, err
    found = json.loads(out)["vocabulary"]
    rows = {one["token"]: one for one in found.pop("rows")}
    assert found == {
        "num_rows": 23, "num_tokens": 23, "in_all_models": 20, "given_by": {"c": 1, "b": 1},
        "averaged": 1, "zero": 0, "padding": 0,
    }  # fmt: skip
    assert rows["<y>"] == {
        "row": 22, "token": "<y>", "own": {"b": 21, "c": 21}, "given": {"b": 21, "c": 21}
    }  # fmt: skip
    code, out, err = mats("merge", *models, *base, "--dry-run")
    assert code == 0, err
    assert "averaged over those that have them" in out


def test_the_command_line_pads_and_says_where_rows_come_from(
    mats: Run, root: Path, tmp_path: Path
) -> None:
    models = ["b=" + str(root / "b"), "c=" + str(root / "c"), "--base", str(root / "base")]
    flags = ["--pad-to-multiple-of", "16", "--token", "<x>=b", "--token", "<y>=zero", "--token"]
    flags += ["a==b=mean"]

    def rows(*given: str) -> tuple[Any, dict[str, Any]]:
        code, out, err = mats("merge", *given, "--dry-run", "--json")
        assert code == 0, err
        found = json.loads(out)["vocabulary"]
        return found["num_rows"], {one["token"]: one for one in found["rows"]}

    num, found = rows(*models, "--method", "task_arithmetic", *flags)
    assert num == 32  # of the 20 tokens of the base, and three
    assert (found["<x>"]["given"], found["<y>"]["given"]) == ({"b": 20}, {})
    assert "a==b" in found
    # A recipe's own are kept, but for what is said.
    tokenizer = {"source": "union", "tokens": {"<x>": {"source": "b"}}}
    entries = [{"model": str(root / name), "name": name} for name in "bc"]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        json.dumps(
            {
                "models": entries,
                "base": str(root / "base"),
                "method": "task_arithmetic",
                "tokenizer": tokenizer,
            }
        )
    )
    num, found = rows(str(recipe), "--pad-to-multiple-of", "8", "--token", "<y>=zero")
    assert num == 24  # of 23 tokens
    assert (found["<x>"]["given"], found["<y>"]["given"]) == ({"b": 20}, {})
    code, _, err = mats("merge", *models, "--token", "<x>", "--dry-run")
    assert code == 1
    assert "--token: expected TOKEN=MODEL, found '<x>'" in err


def test_tokens_that_nobody_has_are_said(root: Path) -> None:
    options: Any = {"tokenizer": {"source": "base", "tokens": {"<new>": {}}}}
    notes = matsmerge.plan([root / "a", root / "b"], root / "base", **options).notes
    assert any("no model has a row for 1 token, so that it is zero: '<new>'" in n for n in notes)


def test_tokenizers_are_inputs_that_must_not_change(root: Path) -> None:
    planned = matsmerge.plan([root / "a", root / "b"], tokenizer="union")
    files = {file.path for c in planned.prepared.checkpoints for file in c.files}
    assert {root / name / "tokenizer.json" for name in "ab"} <= files


WRONG: list[tuple[Any, list[str]]] = [
    (
        {
            "tokens": {
                "<x>": {"source": "a"},
                "<y>": {"source": "d"},
                "a": {"source": {"kind": "model_token", "model": "b", "token": "<z>"}},
                "b": {"source": {"kind": "model_token", "model": "a", "token_id": 24}},
            }
        },
        [
            "'<x>': a has no row for a token '<x>'",
            "'<y>': there is no model 'd'",
            "'a': b has no row for a token '<z>'",
            "'b': a has 24 rows, and none for id 24",
        ],
    ),
    ("./nowhere", ["tokenizer: source: ", "nowhere"]),
]


@pytest.mark.parametrize(("tokenizer", "messages"), WRONG)
def test_what_is_wrong_is_said_at_once(root: Path, tokenizer: Any, messages: list[str]) -> None:
    with pytest.raises(MatsError) as error:
        matsmerge.plan({"a": root / "a", "b": root / "b"}, tokenizer=tokenizer)
    assert all(message in str(error.value) for message in messages)


def state(num_rows: int) -> dict[str, Tensor]:
    return {"embed.weight": torch.randn(num_rows, 2), "layers.0.weight": torch.randn(2, 2)}


def test_missing_tokenizers(tmp_path: Path) -> None:
    """A model without one has the base's if it has as many rows; otherwise nobody knows."""
    for name, num in (("base", 3), ("same", 3), ("other", 4), ("another", 5)):
        save_folder(tmp_path / name, state(num), ["x", "y", "z"])
        if name != "base":
            (tmp_path / name / "tokenizer.json").unlink()
    planned = matsmerge.plan([tmp_path / "same"], tmp_path / "base", tokenizer="union")
    assert "same has no tokenizer; it is taken to be base's" in planned.notes
    models = [tmp_path / name for name in ("same", "other", "another")]
    with pytest.raises(CheckpointError) as error:
        matsmerge.plan(models, tmp_path / "base", tokenizer="union")
    assert [p.partition(",")[0] for p in error.value.problems] == [
        f"{tmp_path / name}: has no tokenizer" for name in ("other", "another")
    ]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer.json": None, "tokenizer.model": "?"}, "that is not looked into (tokenizer.model)"),
        ({"tokenizer.json": None, "vocab.txt": "x\ny\nz"}, "has no tokenizer.json to add '<t>' to"),
        ({"added_tokens.json": '{"u": 9}'}, "have gaps"),
        ({"added_tokens.json": '{"u": 99999999}'}, "found 'u': 99999999"),
        ({"model.safetensors": {"layers.0.weight": torch.zeros(2, 2)}}, "has no embeddings"),
    ],
)  # fmt: skip
def test_bases_that_cannot_be_added_to(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    base = save_folder(tmp_path / "base", state(3), ["x", "y", "z"])
    model = save_folder(tmp_path / "model", state(4), ["x", "y", "z"], ["<t>"])
    for name, content in files.items():
        if isinstance(content, dict):
            save_folder(base, content, ["x", "y", "z"])
        elif content is None:
            (base / name).unlink()
        else:
            (base / name).write_text(content)
    with pytest.raises(MatsError) as error:
        matsmerge.plan([model], base, tokenizer="union")
    assert message in str(error.value)


def test_a_tokenizer_of_no_model(tmp_path: Path) -> None:
    """Rows of tokens that no model has are zero."""
    models = [save_folder(tmp_path / n, state(3), ["x", "y", "z"], vocab_size=3) for n in "ab"]
    other = save_folder(tmp_path / "other", state(1), ["u", "z", "y"])
    out = tmp_path / "out"
    matsmerge.plan(models, tokenizer=str(other)).merge(out)
    found = load_file(out / "model.safetensors")["embed.weight"]
    own = [load_file(m / "model.safetensors")["embed.weight"] for m in models]
    mean = torch.stack(own).double().mean(0).float()
    assert torch.equal(found, torch.stack([torch.zeros(2), mean[2], mean[1]]))
    assert (out / "tokenizer.json").read_bytes() == (other / "tokenizer.json").read_bytes()


def test_adapters(root: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from peft_models import adapt, fold

    config = peft.LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"])
    lora = adapt(root / "base", config, tmp_path / "lora")
    with pytest.raises(RecipeError, match="--output dense"):
        matsmerge.plan([lora], root / "base", tokenizer="union")
    models = {"lora": lora, "b": root / "b"}
    plan = matsmerge.plan(models, root / "base", tokenizer="union", output="dense")
    plan.merge(tmp_path / "out")
    _, state = check_loads(tmp_path / "out")
    folded = fold(root / "base", lora)[EMBED]
    own = load_file(root / "b" / "model.safetensors")[EMBED].double()
    torch.testing.assert_close(state[EMBED][:20].double(), (folded + own[:20]) / 2)
    torch.testing.assert_close(state[EMBED][20:].double(), own[20:])


def test_adapters_that_bring_embeddings(root: Path, tmp_path: Path) -> None:
    """Tokens that were trained beside a LoRA, and its tokenizer, are those of a model."""
    peft = pytest.importorskip("peft")
    from peft_models import adapt, load

    model = load(root / "base")
    model.resize_token_embeddings(21, mean_resizing=False)
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"]
    )
    lora = adapt(model, config, tmp_path / "lora")
    tokenizer = make_tokenizer(WORDS)
    tokenizer.add_tokens(["<p>"])
    tokenizer.save_pretrained(lora)
    models = {"lora": lora, "b": root / "b"}
    plan = matsmerge.plan(models, root / "base", tokenizer="union", output="dense")
    plan.merge(tmp_path / "out")
    vocabulary, state = check_loads(tmp_path / "out")
    own = load_file(lora / "adapter_model.safetensors")
    for table in (EMBED, HEAD):
        (trained,) = (t for n, t in own.items() if n.endswith(f"model.{table}"))
        assert torch.equal(state[table][vocabulary["<p>"]], trained[20])
    assert len(state[EMBED]) == 23
