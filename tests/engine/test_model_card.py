"""A card says what was merged, whatever the models and their cards are like."""

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from markdown_it import MarkdownIt
from torch import Tensor

import matsmerge

Save = Callable[..., Path]
State = dict[str, Tensor]

# Notes are warnings of the library.
pytestmark = pytest.mark.filterwarnings("ignore:.*its card says nothing:UserWarning")

CARD = "---\nlicense: mit\nlanguage: [de, en]\ndatasets:\n- owner/data\n---\n\n# A model\n"


def merge_with(
    cards: list[bytes], make_state: Callable[..., State], save_model: Save, tmp_path: Path
) -> tuple[dict[str, Any], list[str]]:
    """The metadata of the merge's card, and its notes."""
    models = []
    for number, card in enumerate(cards):
        models.append(save_model(f"m{number}", make_state(number), config__json="{}"))
        (models[-1] / "README.md").write_bytes(card)
    out = matsmerge.merge(models, out=tmp_path / "out").folder
    text = (out / "README.md").read_text(encoding="utf-8")
    notes = json.loads((out / "merge.json").read_text())["notes"]
    return yaml.safe_load(text.split("---\n")[1]), notes


def test_what_cards_agree_on(
    make_state: Callable[..., State], save_model: Save, tmp_path: Path
) -> None:
    second = "---\nlicense: mit\nlanguage: de\ndatasets: other/data\n---\n"
    found, notes = merge_with(
        [CARD.encode(), b"\xef\xbb\xbf" + second.replace("\n", "\r\n").encode()],
        make_state,
        save_model,
        tmp_path,
    )
    assert found["license"] == "mit"
    assert "language" not in found
    assert found["datasets"] == ["owner/data", "other/data"]
    assert not any("card" in note for note in notes)


BOMB = "a0: &a0 [x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 11)
)


@pytest.mark.parametrize(
    ("front", "reason"),
    [
        ("datasets: &a [*a]", "an alias of something that it is part of"),
        ("datasets: " + "[" * 3000, "more than 50 levels deep"),
        (BOMB, "more than 50,000 values"),
        ("license: !!python/name:os.system", "'!!python/name:os.system': expected text"),
        ("license: mit\nlicense: mit", "given twice"),
        ("size: " + "9" * 5000, "more than 100 digits"),
        ("license: mit\0", "the character 0x0"),
        ("license: [", "not valid YAML"),
    ],
)
def test_unusable_cards_are_left_out_with_a_note(
    front: str, reason: str, make_state: Callable[..., State], save_model: Save, tmp_path: Path
) -> None:
    cards = [CARD.encode(), f"---\n{front}\n---\n".encode()]
    found, notes = merge_with(cards, make_state, save_model, tmp_path)
    assert "license" not in found
    (note,) = (note for note in notes if "its card says nothing for the merge's card" in note)
    assert note.startswith("m1: ")
    assert reason in note
    assert str(tmp_path) not in note


@pytest.mark.parametrize("content", [b"\xff\xfe", b"---\nlicense: \xff\n---\n", b"#" * (65 << 20)])
def test_unreadable_cards(
    content: bytes, make_state: Callable[..., State], save_model: Save, tmp_path: Path
) -> None:
    _, notes = merge_with([CARD.encode(), content], make_state, save_model, tmp_path)
    assert any("m1: its card says nothing" in note for note in notes)


@pytest.mark.parametrize("value", ["5", "{a: b}", "~", "[1, [2], {a: 3}]", "2020-99-99", "true"])
def test_values_of_other_types_are_ignored(
    value: str, make_state: Callable[..., State], save_model: Save, tmp_path: Path
) -> None:
    front = "".join(f"{key}: {value}\n" for key in ("datasets", "license", "language"))
    cards = [f"---\n{front}pipeline_tag: fill-mask\n---\n".encode()] * 2
    found, notes = merge_with(cards, make_state, save_model, tmp_path)
    assert found["pipeline_tag"] == "fill-mask"
    texts = {"2020-99-99"} & {value}
    assert set(found.get("datasets", [])) == texts
    assert found.keys() & {"license", "language"} == ({"license", "language"} if texts else set())
    assert not any("card" in note for note in notes)


def test_a_card_that_is_a_pipe(
    make_state: Callable[..., State], save_model: Save, tmp_path: Path
) -> None:
    models = [save_model(f"m{n}", make_state(n), config__json="{}") for n in range(2)]
    os.mkfifo(models[0] / "README.md")
    (models[1] / "README.md").mkdir()
    out = matsmerge.merge(models, out=tmp_path / "out").folder
    notes = json.loads((out / "merge.json").read_text())["notes"]
    assert sum("its card says nothing" in note for note in notes) == 2


def test_names_are_escaped(
    make_state: Callable[..., State], save_model: Save, tmp_path: Path
) -> None:
    names = ["a|b", "<b>bold", "two\nlines", "`x`", "[link](y)", "# z & &lt;"]
    models = [save_model(f"m{n}", make_state(n), config__json="{}") for n in range(len(names))]
    places = [
        model.rename(model.with_name(name)) for model, name in zip(models, names, strict=True)
    ]
    out = matsmerge.merge(places, out=tmp_path / "<i>the | title").folder
    text = (out / "README.md").read_text(encoding="utf-8").split("---\n", 2)[2]
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    assert not [t for t in tokens if t.type == "html_block"]
    lines = [
        (opening.type, token)
        for opening, token in itertools.pairwise(tokens)
        if token.type == "inline"
    ]
    assert not [c for _, t in lines for c in t.children or [] if c.type == "html_inline"]
    cells = [_plain(token) for kind, token in lines if kind == "td_open"]
    assert cells[::2] == [" ".join(name.split()) for name in names]
    assert cells[1::2] == ["1"] * len(names)
    assert _plain(lines[0][1]) == "<i>the | title"


def _plain(token: Any) -> str:
    return "".join(child.content for child in token.children)
