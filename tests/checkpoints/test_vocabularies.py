"""Tokenizers of models to merge: what is refused, what is said, what the output has."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from matsmerge.checkpoints import tokenizers
from matsmerge.checkpoints.vocabularies import TokenizerComparison, compare_tokenizers

Run = Callable[..., tuple[int, str, str]]
State = dict[str, Tensor]
WORDS = [f"w{i}" for i in range(40)]


def tokenizer_json(words: list[str], merges: list[Any] | None = None, **others: Any) -> str:
    content = {
        "version": "1.0",
        "added_tokens": [{"id": len(words), "content": "<end>", "special": True}],
        "normalizer": None,
        "model": {
            "type": "BPE",
            "vocab": {w: i for i, w in enumerate(words)},
            "merges": merges or [],
        },
    }
    return json.dumps({**content, **others})


def make(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        data = content.encode() if isinstance(content, str) else content
        (folder / name).write_bytes(data)
    return folder


def compare(
    tmp_path: Path, base: Mapping[str, str | bytes], *models: Mapping[str, str | bytes]
) -> TokenizerComparison:
    """Compare the tokenizers of models with these files; the output's are the base's."""
    made = {f"m{i}": make(tmp_path / f"m{i}", files) for i, files in enumerate(models)}
    own = make(tmp_path / "base", base)
    return compare_tokenizers(made, ("the base", own), own)


SWAPPED = ["w1", "w0", *WORDS[2:]]
FORMS: dict[str, Callable[[list[str]], dict[str, str | bytes]]] = {
    "tokenizer.json": lambda words: {"tokenizer.json": tokenizer_json(words)},
    "unigram": lambda words: {
        "tokenizer.json": json.dumps({"model": {"vocab": [[w, -1.5] for w in words]}})
    },
    "vocab.txt": lambda words: {"vocab.txt": "\n".join(words) + "\n"},
    "vocab.json": lambda words: {
        "vocab.json": json.dumps({w: i for i, w in enumerate(words)}), "merges.txt": "#version\na b\n",
    },
    "added_tokens.json": lambda words: {
        "vocab.txt": "\n".join(WORDS[2:]),
        "added_tokens.json": json.dumps({w: 38 + i for i, w in enumerate(words[:2])}),
    },
    "added_tokens_decoder": lambda words: {
        "vocab.txt": "\n".join(WORDS[2:]),
        "tokenizer_config.json": json.dumps(
            {"added_tokens_decoder": {str(38 + i): {"content": w} for i, w in enumerate(words[:2])}}
        ),
    },
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_swapped_ids_are_refused(tmp_path: Path, form: str) -> None:
    same = compare(tmp_path / "same", FORMS[form](WORDS), FORMS[form](WORDS))
    assert same == TokenizerComparison()
    found = compare(tmp_path, FORMS[form](WORDS), FORMS[form](WORDS), FORMS[form](SWAPPED))
    (problem,) = found.problems
    assert problem.startswith("m1 and the base give 2 tokens different ids: 'w")
    assert "--ignore-tokenizers" in problem


def test_models_are_compared_with_each_other_too(tmp_path: Path) -> None:
    base = {"vocab.txt": "\n".join(WORDS)}
    one, two = (
        base | {"added_tokens.json": json.dumps({"<a>": i, "<b>": 83 - i})} for i in (41, 42)
    )
    found = compare(tmp_path, base, one, two)
    assert [p.partition(":")[0] for p in found.problems] == [
        "m1 and m0 give 2 tokens different ids"
    ]


def test_closed_formats_are_compared_as_a_whole(tmp_path: Path) -> None:
    one, two = {"tokenizer.model": b"\x00one"}, {"tokenizer.model": b"\x00two"}
    assert compare(tmp_path / "same", one, one) == TokenizerComparison()
    found = compare(tmp_path, one, two)
    assert "m0 and the base have a different tokenizer.model" in found.problems[0]
    other = compare(tmp_path / "formats", one, FORMS["vocab.txt"](WORDS))
    assert "different formats" in other.notes[0]


def test_equal_content_in_another_layout_is_equal(tmp_path: Path) -> None:
    plain = tokenizer_json(WORDS, ["a b", "c d"])
    content = json.loads(tokenizer_json(WORDS, [["a", "b"], ["c", "d"]]))
    content["model"] = {**content["model"], "ignore_merges": False, "dropout": None}
    content["model"]["vocab"] = dict(reversed(content["model"]["vocab"].items()))
    content |= {"truncation": None, "decoder": None}
    other = json.dumps(content, indent=4)
    assert (
        compare(tmp_path, {"tokenizer.json": plain}, {"tokenizer.json": other})
        == TokenizerComparison()
    )


def test_equal_files_are_not_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(*_: object, **__: object) -> None:
        raise AssertionError("there is no need to look into them")

    monkeypatch.setattr(tokenizers, "read_json_as", parse)
    files = {"tokenizer.json": tokenizer_json(WORDS), "tokenizer_config.json": "{}"}
    assert compare(tmp_path, files, files, files) == TokenizerComparison()


def test_tokens_that_one_model_lacks_are_said(tmp_path: Path) -> None:
    more = [*WORDS, "<think>"]
    found = compare(tmp_path, {"vocab.txt": "\n".join(WORDS)}, {"vocab.txt": "\n".join(more)})
    assert found.problems == []
    assert found.notes == [
        "m0 has 1 token that the base lacks: '<think>'; the output has the tokenizer of the base"
    ]


def test_unused_rows_with_a_new_meaning_are_said_and_other_vocabularies_refused(
    tmp_path: Path,
) -> None:
    base = {"vocab.txt": "\n".join(WORDS)}
    found = compare(tmp_path, base, {"vocab.txt": "\n".join([*WORDS[:-1], "<tool>"])})
    assert found.problems == []
    assert (
        "m0 and the base mean different tokens by 1 id: 39 is '<tool>' and 'w39'" in found.notes[0]
    )
    other = {"vocab.txt": "\n".join(w.upper() for w in WORDS)}
    found = compare(tmp_path / "other", base, other)
    assert "mean different tokens by 40 ids" in found.problems[0]


def test_other_cuts_are_said(tmp_path: Path) -> None:
    base = tokenizer_json(WORDS, ["a b"])
    other = tokenizer_json(WORDS, ["c d"], normalizer={"type": "Lowercase"})
    found = compare(tmp_path, {"tokenizer.json": base}, {"tokenizer.json": other})
    assert found.problems == []
    assert "(merges, normalizer of tokenizer.json)" in found.notes[0]


def config(**content: Any) -> dict[str, str | bytes]:
    return {"vocab.txt": "\n".join(WORDS), "tokenizer_config.json": json.dumps(content)}


def test_special_tokens_that_differ_are_said(tmp_path: Path) -> None:
    base = config(eos_token="w1", bos_token={"content": "w0"}, pad_token=None)
    one = config(eos_token={"content": "w2"}, bos_token="w0", pad_token="w3")
    found = compare(tmp_path, base, one)
    assert found.problems == []
    assert found.notes == [
        "eos_token differs: 'w2' in m0, 'w1' in the base; the output has that of the base, 'w1'",
        "pad_token differs: 'w3' in m0, none in the base; the output has that of the base, none",
    ]


def test_chat_templates(tmp_path: Path) -> None:
    one, two = config(chat_template="{{ one }}"), config(chat_template="{{ two }}")
    in_a_file = {**config(), "chat_template.jinja": "{{ one }}"}
    assert compare(tmp_path / "0", one, in_a_file) == TokenizerComparison()
    found = compare(tmp_path / "1", config(), one, in_a_file)
    assert found.chat_template == "{{ one }}"
    assert "the output has the one that all models share" in found.notes[0]
    found = compare(tmp_path / "2", config(), one, two)
    assert found.chat_template is None
    assert "the output has no chat template, as the base has none; m0, m1" in found.notes[0]
    found = compare(tmp_path / "3", two, one, two)
    assert found.notes == ["the chat template differs in m0; the output has that of the base"]


def test_an_output_without_a_tokenizer_is_said(tmp_path: Path) -> None:
    found = compare(tmp_path, {}, config())
    assert found.notes[0].startswith("the output has no tokenizer, since its files are those of")


DAMAGED = {
    "tokenizer.json": ["{", "[]", '{"model": 1}', '{"model": {"vocab": {"a": "b"}}}', "\udcff",
                       '{"model": {"vocab": {"a": 1}, "merges": 5}}',
                       '{"model": {"vocab": {"a": 1}}, "added_tokens": [1]}', "[" * 100_000],
    "tokenizer_config.json": ["5", '{"chat_template": 5}', '{"chat_template": [1]}',
                              '{"added_tokens_decoder": {"x": 1}}'],
    "added_tokens.json": ["[1]", '{"a": {}}'],
    "special_tokens_map.json": ["[]"],
    "vocab.json": ["3", '{"a": "b"}'],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name, texts in DAMAGED.items() for text in texts]
)
def test_damaged_files_are_named(
    mats: Run, make_state: Callable[..., State], save_model: Callable[..., Path], tmp_path: Path,
    name: str, text: str,
) -> None:  # fmt: skip
    files = {} if name in ("tokenizer.json", "vocab.json") else {"vocab.txt": "a\nb"}
    one = save_model("one", make_state(0))
    two = save_model("two", make_state(1))
    make(one, {"vocab.txt": "a\nb"})
    make(two, {**files, name: text.encode(errors="surrogateescape")})
    code, _, err = mats("merge", "--model", one, "--model", two, "-o", tmp_path / "out")
    assert code == 1, err
    assert f"{two / name}: " in err


@pytest.fixture
def swapped(
    make_state: Callable[..., State], save_model: Callable[..., Path], tmp_path: Path
) -> list[str]:
    for i, words in enumerate((WORDS, WORDS, SWAPPED)):
        make(save_model(f"x{i}", make_state(i)), {"tokenizer.json": tokenizer_json(words)})
    return [
        "--base",
        str(tmp_path / "x0"),
        "--model",
        str(tmp_path / "x1"),
        "--model",
        str(tmp_path / "x2"),
    ]


def test_merging_refuses_and_can_be_told_not_to(
    mats: Run, swapped: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    code, _, err = mats("merge", *swapped, "-o", out)
    assert code == 1
    assert "x2 and the base give 2 tokens different ids" in err
    assert not out.exists()
    code, _, err = mats("merge", *swapped, "-o", out, "--ignore-tokenizers")
    assert code == 0, err
    assert "note: ignored: x2 and the base give 2 tokens different ids" in err
    recipe = json.loads((out / "merge.json").read_text())["recipe"]
    assert recipe["ignore_tokenizers"] is True


def test_a_merge_takes_the_models_chat_template(
    mats: Run, make_state: Callable[..., State], save_model: Callable[..., Path], tmp_path: Path
) -> None:
    for i in range(3):
        template = {"chat_template": "{{ hello }}"} if i else {"eos_token": "w1"}
        make(save_model(f"x{i}", make_state(i)), config(**template, model_max_length=5))
    code, _, err = mats(
        "merge", "--base", tmp_path / "x0", "--model", tmp_path / "x1", "--model", tmp_path / "x2",
        "-o", tmp_path / "out",
    )  # fmt: skip
    assert code == 0, err
    assert "note: the base has no chat template" in err
    written = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert written == {"eos_token": "w1", "model_max_length": 5, "chat_template": "{{ hello }}"}


@pytest.mark.parametrize(
    "names", [["embed.weight"], ["model.embed_tokens.weight", "lm_head.weight"]]
)
def test_vocabularies_of_another_size(
    mats: Run, save_model: Callable[..., Path], tmp_path: Path, names: list[str]
) -> None:
    for model, num in (("x1", 32000), ("x2", 32002)):
        state = {name: torch.zeros(num, 2) for name in names}
        save_model(model, {**state, "layers.0.w": torch.zeros(2, 2)})
    code, _, err = mats(
        "merge", "--model", tmp_path / "x1", "--model", tmp_path / "x2", "--dry-run"
    )
    assert code == 1
    assert "has another vocabulary than" in err
    assert "embeddings of 32,002 tokens instead of 32,000" in err
    assert "heads" not in err


def test_an_output_without_a_tokenizer_has_no_part_of_one(tmp_path: Path) -> None:
    """What is said of tokenizers that the output does not have would be wrong."""
    one = config(chat_template="{{ x }}", eos_token="</s>")
    two = config(chat_template="{{ x }}", eos_token="<end>")
    found = compare(tmp_path, {}, one, two)
    assert [note for note in found.notes if "the output has" in note] == found.notes[:1]
    assert found.chat_template is None


def test_lines_end_where_transformers_sees_their_end(tmp_path: Path) -> None:
    words = ["a", "x\u2028y", "b"]
    plain = {"vocab.txt": "\n".join(words)}
    fast = {"tokenizer.json": tokenizer_json(words)}
    assert compare(tmp_path, plain, fast).problems == []
