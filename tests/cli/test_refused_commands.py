"""Commands that cannot be done: one error that says what to do, and nothing is left behind."""

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

import matsmerge
from matsmerge import lab
from matsmerge.checkpoints.chat_templates import choose_template
from matsmerge.engine.merge_inputs import fold_adapter
from matsmerge.errors import CheckpointError, OutputError, RecipeError
from matsmerge.files.guarded_files import read_text
from matsmerge.files.remote_names import mirror_path
from matsmerge.lab.tuning.search_space import SearchSpace

Run = Callable[..., tuple[int, str, str]]
MakeState = Callable[..., dict[str, Tensor]]


@pytest.fixture
def models(make_state: MakeState, save_model: Callable[..., Path]) -> list[Path]:
    return [save_model(f"model-{seed}", make_state(seed)) for seed in (1, 2)]


def said(error: str) -> str:
    return " ".join(error.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["merge", "A", "B", "--method", "task_arithmetic", "--base", "A", "--set", "scale"],
            "--set: expected NAME=VALUE, as in scale=0.3, found 'scale'",
        ),
        (
            ["merge", "A", "B", "--method", "average", "--set", ".=1"],
            "--set: expected NAME=VALUE, as in scale=0.3, found '.=1'",
        ),
        (
            ["merge", "A", "B", "--method", "mats", "--base", "A", "--trajectory", "1:999999:1"],
            "at most 1,000 are possible, take larger steps",
        ),
        (
            ["merge", "A", "A", "--method", "average"],
            "is given twice; change its weight instead",
        ),
        (
            ["advise", "one=A", "one=B", "--base", "A"],
            "two models have the same name; name them apart as in NAME=MODEL",
        ),
        (["collect", "A"], "say which data to use with --data FILE"),
        (
            ["export", "A", "--gguf", "--task", "amazon"],
            "--gguf and --vllm print a command; leave out --out and --task",
        ),
        (
            ["experiment", "run", "text-small", "--seeds", "first"],
            "--seeds 'first': expected numbers as in 0,1,2",
        ),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)
def test_from_the_command_line(
    arguments: list[str],
    message: str,
    models: list[Path],
    mats: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    places = {"A": str(models[0]), "B": str(models[1])}
    asked = ["=".join(places.get(part, part) for part in a.split("=")) for a in arguments]
    if asked[0] in ("merge", "collect"):
        asked += ["--out", str(tmp_path / ("out" if asked[0] == "merge" else "out.safetensors"))]
    code, out, error = mats(*asked)
    assert code in (1, 2)
    assert not out
    assert message in said(error)
    assert "Traceback" not in error
    assert sorted(tmp_path.rglob("*")) == before


def test_names_that_there_are_not() -> None:
    for module in (matsmerge, lab):
        with pytest.raises(
            AttributeError, match=f"module '{module.__name__}' has no attribute 'x'"
        ):
            _ = module.x


def test_files_of_other_kinds(tmp_path: Path, models: list[Path]) -> None:
    other = tmp_path / "model.npz"
    other.write_bytes(b"PK")
    with pytest.raises(CheckpointError, match=r"expected \.safetensors, \.bin, \.pt, \.pth, or a"):
        matsmerge.open_checkpoint(other)
    first = matsmerge.open_checkpoint(models[0])
    with pytest.raises(CheckpointError, match="is a full model; expected MODEL.ADAPTER"):
        fold_adapter(first, str(models[1]), "both")
    (tmp_path / "latin").write_bytes("Zürich".encode("latin-1"))
    with pytest.raises(RecipeError, match=r"byte 0xfc at position 1\); save it as UTF-8"):
        read_text(tmp_path / "latin", RecipeError)


def test_a_merge_in_a_folder_is_not_saved_again(tmp_path: Path, models: list[Path]) -> None:
    merged = matsmerge.merge(models, out=tmp_path / "merged")
    with pytest.raises(OutputError, match="it has been written already, to .*merged; copy that"):
        merged.save(tmp_path / "again")
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    "url",
    ["s3://key:secret@bucket/model", "https://host/model?signature=secret", "s3://b/m#secret"],
)
def test_secrets_in_addresses_are_not_repeated(url: str) -> None:
    with pytest.raises(RecipeError, match="has credentials or a query in it") as refused:
        mirror_path(url)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("search", "message"),
    [
        ({"scale": "0.1,,0.3"}, "search: scale: a value is missing between commas"),
        ({"scale": "0:1:1e-9"}, "search: scale: '0:1:1e-9' are 1e\\+09 values; at most"),
        ({"scale": "1:0"}, "'1:0': the first number must be the smaller one"),
        ({"scale": "0:1:-0.1"}, "'0:1:-0.1' is not low:high:step"),
        ({"scale": "a:b"}, "'a:b' is not low:high:step or low:high"),
        ({"iterations": "1.5,2"}, "search: iterations: expected whole numbers, as 10:100:10"),
    ],
)
def test_searches_that_cannot_be(search: dict[str, str], message: str) -> None:
    recipe = {"models": ["a", "b"], "base": "c", "method": {"name": "task_arithmetic"}}
    with pytest.raises(RecipeError, match=message):
        SearchSpace.parse(recipe, search).check()


def test_chat_templates_that_there_are_not(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(RecipeError, match="'chatlm' is neither auto nor a template.*'chatml'"):
        choose_template("chatlm", [], tmp_path)
    assert choose_template("chatlm", [], None)[0] is None  # there is nothing to write it to
