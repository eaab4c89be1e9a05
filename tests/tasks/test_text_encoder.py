"""A tokenizer that breaks down is an error of its files, not of the program."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from matsmerge.errors import DataError
from matsmerge.tasks.text_encoder import TextEncoder, load_tokenizer


class PanicException(BaseException):
    """What a panic of the tokenizers library is in Python, down to the name."""


class Panicking:
    pad_token_id = 0
    truncation_side = "right"

    def __call__(self, *args: Any, **options: Any) -> Any:
        raise PanicException("called `Option::unwrap()` on a `None` value")


class Interrupted(Panicking):
    def __call__(self, *args: Any, **options: Any) -> Any:
        raise KeyboardInterrupt


def test_panics_while_encoding() -> None:
    encoder = TextEncoder(Panicking(), 8)
    with pytest.raises(DataError, match=r"damaged.*unwrap"):
        encoder.encode(0, "a text")
    with pytest.raises(DataError, match=r"damaged.*unwrap"):
        encoder.ids("a text")
    with pytest.raises(DataError, match=r"damaged.*unwrap"):
        encoder.ids("a long text " * 1000)


def test_panics_while_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", Panicking())
    with pytest.raises(DataError, match=r"damaged.*unwrap"):
        load_tokenizer(tmp_path)


def test_interruptions_pass() -> None:
    with pytest.raises(KeyboardInterrupt):
        TextEncoder(Interrupted(), 8).encode(0, "a text")
