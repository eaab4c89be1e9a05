"""Text to token ids with a model's own tokenizer, and ids to padded tensors."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from matsmerge.errors import DataError
from matsmerge.files.guarded_files import quoted
from matsmerge.models.pretrained import read_with, refusing_panics
from matsmerge.tasks.task import has_any

Ids = list[int]

DEFAULT_MAX_LENGTH = 512
# Text is cut before it is tokenized, which takes hundreds of bytes for each character: to so many
# characters for each token that is kept, if these are enough.
_CHARS_PER_TOKEN = 32
MAX_CHARS = 2**20
_MIN_LONG = 2**12
_SPARE_TOKENS = 8  # where a text is cut, its tokens may be others
# One of these holds the vocabulary; without it, transformers would make up an empty tokenizer.
TOKENIZER_FILES = (
    "tokenizer.json",
    "vocab.*",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "*vocab*.txt",
)


@dataclass
class TextEncoder:
    """A tokenizer with the limits of a model; remembers which examples did not fit."""

    tokenizer: Any
    max_length: int
    max_positions: int | None = None  # of the model, which takes no more; None: any number
    use_token_types: bool = False
    truncated: dict[int, int] = field(default_factory=dict)  # example -> tokens that were cut
    has_shortened: bool = False  # some text before it was tokenized: they are at least so many

    @classmethod
    def for_model(cls, model: nn.Module, folder: Path, max_length: int | None) -> "TextEncoder":
        """The tokenizer in the folder, checked against the model."""
        tokenizer = load_tokenizer(folder)
        embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
        num_embeddings = int(embedding.weight.shape[0])
        if len(tokenizer) > num_embeddings:
            raise DataError(
                f"{folder}: the tokenizer has {len(tokenizer)} tokens, but the model's embedding "
                f"has only {num_embeddings}; they do not belong together"
            )
        limit = num_positions(model)
        if max_length is not None and not 1 <= max_length <= (limit or max_length):
            most = "" if limit is None else f" to {limit}, the model's number of positions"
            raise DataError(f"expected a max_length from 1{most}, found {max_length}")
        if max_length is None:
            most = tokenizer.model_max_length
            if not isinstance(most, int | float) or isinstance(most, bool) or not most >= 1:
                raise DataError(
                    f"{folder}: expected a model_max_length of at least 1 in the tokenizer's "
                    f"configuration, found {quoted(most)}; put it right, or give --max-length"
                )
            max_length = int(min(limit or DEFAULT_MAX_LENGTH, DEFAULT_MAX_LENGTH, most))
        accepted = inspect.signature(model.forward).parameters
        use_token_types = (
            "token_type_ids" in tokenizer.model_input_names
            and "token_type_ids" in accepted
            and getattr(model.config, "type_vocab_size", 2) > 1
        )
        encoder = cls(tokenizer, max_length, limit, use_token_types)
        config: Any = model.config
        if getattr(config, "pad_token_id", None) is None:
            # Decoders that classify find the last real token by it.
            config.pad_token_id = encoder.pad_id
        return encoder

    @property
    def pad_id(self) -> int:
        """What padding holds: masked, so that it only has to be in the vocabulary."""
        known = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0)
        return next(token for token in known if token is not None)

    @property
    def notes(self) -> list[str]:
        """How many examples did not fit, and by how much."""
        num = len(self.truncated)
        if not num:
            return []
        were, longest = ("example was", "") if num == 1 else ("examples were", " the longest")
        at_least = "at least " if self.has_shortened else ""
        most = max(self.truncated.values())
        return [
            f"{num} {were} longer than {self.max_length} tokens and cut,{longest} by "
            f"{at_least}{most} token{'s' * (most != 1)}"
        ]

    def note_cut(self, number: int, num_tokens: int) -> None:
        """Remember that so many tokens of an example, or of one of its parts, did not fit."""
        self.truncated[number] = max(num_tokens, self.truncated.get(number, 0))

    def encode(
        self,
        number: int,
        text: Any,
        pair: str | None = None,
        *,
        max_length: int | None = None,
        **options: Any,
    ) -> Any:
        """The tokenizer's features of a text, of two, or of a list of words; cut if too long."""
        limit = self.max_length if max_length is None else max_length
        options |= {
            "return_attention_mask": False,
            "return_token_type_ids": self.use_token_types,
        }
        text = self._cut(text, limit)
        pair = self._cut(pair, limit)
        if "text_target" in options:
            options["text_target"] = self._cut(options["text_target"], limit)
        features = self.tokenize(text, pair, truncation=True, max_length=limit, **options)
        if len(features["input_ids"]) >= limit:
            whole = self.tokenize(text, pair, **options)
            if len(whole["input_ids"]) > limit:
                self.note_cut(number, len(whole["input_ids"]) - limit)
        return features

    def ids(self, text: str, *, special: bool = True, from_end: bool = False) -> Ids:
        """A text's ids, uncut; a very long text keeps one end, with more tokens than fit."""
        text = self._cut(text, self.max_length, from_end=from_end)
        ids: Ids = self.tokenize(text, add_special_tokens=special)["input_ids"]
        return ids

    def tokenize(self, text: Any, pair: Any = None, **options: Any) -> Any:
        """The tokenizer's features of a text as it is, unless told otherwise."""
        options = {"truncation": False, "verbose": False} | options
        with refusing_panics():
            return self.tokenizer(text, pair, **options)

    def _cut(self, text: Any, limit: int, *, from_end: bool | None = None) -> Any:
        """A text or list of words, shortened if the rest cannot change the tokens that are kept."""
        if text is None or _num_chars(text) <= _CHARS_PER_TOKEN * limit + _MIN_LONG:
            return text
        if from_end is None:
            from_end = self.tokenizer.truncation_side == "left"
        part = _part(text, _CHARS_PER_TOKEN * limit + _MIN_LONG, from_end=from_end)
        tokens = self.tokenize(part, is_split_into_words=isinstance(text, list))["input_ids"]
        if len(tokens) > limit + _SPARE_TOKENS:
            self.has_shortened = True
            return part
        if _num_chars(text) > MAX_CHARS:
            raise DataError(
                f"a text of {_num_chars(text):,} characters begins with {_num_chars(part):,} that "
                f"are only {len(tokens)} tokens, so it would have to be read as a whole, which is "
                f"done up to {MAX_CHARS:,} characters; is it text? Cut it"
            )
        return text

    def pad(self, features: Sequence[Mapping[str, Ids]]) -> dict[str, Tensor]:
        """Features as tensors, padded on the right, with an attention mask."""
        inputs = {
            name: pad_ids([f[name] for f in features], self.pad_id if name == "input_ids" else 0)
            for name in ("input_ids", "token_type_ids")
            if name in features[0]
        }
        return inputs | {"attention_mask": mask_of([len(f["input_ids"]) for f in features])}


def _num_chars(text: str | list[str]) -> int:
    return len(text) if isinstance(text, str) else sum(map(len, text)) + len(text)


def _part(text: Any, num_chars: int, *, from_end: bool) -> Any:
    """The characters at one end; of a list of words, as many words."""
    if isinstance(text, str):
        return text[-num_chars:] if from_end else text[:num_chars]
    words = text[::-1] if from_end else text
    sizes = accumulate(len(word) + 1 for word in words)
    num = max(1, sum(size <= num_chars for size in sizes))
    return text[-num:] if from_end else text[:num]


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer in a model's folder; code in the folder is never run."""
    if not has_any(folder, TOKENIZER_FILES):
        raise DataError(
            f"{folder}: has no tokenizer (such as tokenizer.json); "
            "say where it is with --tokenizer FOLDER"
        )
    return read_with("AutoTokenizer", folder, f"{folder}: the tokenizer")


def num_positions(model: nn.Module) -> int | None:
    """How many tokens a model can tell apart by position; None if any number."""
    limit = getattr(model.config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit <= 0:
        return None
    for name, module in model.named_modules():
        # Such models count positions from behind the padding's.
        if (
            name.endswith("position_embeddings")
            and getattr(module, "padding_idx", None) is not None
        ):
            return limit - int(module.padding_idx) - 1
    return limit


def pad_ids(rows: Sequence[Sequence[int]], value: int, length: int | None = None) -> Tensor:
    """Rows of different length as one tensor, padded on the right."""
    length = max(map(len, rows)) if length is None else length
    return torch.tensor([[*row, *[value] * (length - len(row))] for row in rows])


def mask_of(lengths: Sequence[int]) -> Tensor:
    """An attention mask (rows, longest): 1 where a row has a token."""
    return (torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]).long()
