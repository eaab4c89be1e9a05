"""Conversations as a tokenizer's chat template writes them, and whose tokens are whose."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matsmerge.data.row_problems import describe_value, library_errors
from matsmerge.data.row_values import list_of, text_of
from matsmerge.errors import DataError
from matsmerge.models.pretrained import quiet, refusing_panics
from matsmerge.problems import noted
from matsmerge.tasks.task import Turns
from matsmerge.tasks.text_encoder import MAX_CHARS, Ids, TextEncoder

ASSISTANT = "assistant"
_ROLES = {"human": "user", "gpt": ASSISTANT}  # where messages are {from, value}
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")

Message = dict[str, Any]


def messages_of(row: Mapping[str, Any], column: str) -> list[Message]:
    """A column's messages, each with `role` and `content`, whichever way they were spelled."""
    messages: list[Message] = []
    problems: list[str] = []
    for position, value in enumerate(list_of(row, column), 1):
        with noted(problems, DataError, before=f"'{column}': message {position}: "):
            if not isinstance(value, Mapping):
                raise DataError(f"expected role and content, found {describe_value(value)}")
            if "role" in value or "from" not in value:
                message = {"role": text_of(value, "role"), "content": text_of(value, "content")}
                messages.append({**value, **message})
            else:
                role = text_of(value, "from")
                content = text_of(value, "value")
                messages.append({"role": _ROLES.get(role, role), "content": content})
    DataError.raise_all(problems)
    if not messages:
        raise DataError(f"'{column}': holds no messages")
    return messages


def encode_conversation(
    encoder: TextEncoder, messages: Sequence[Message], turns: Turns
) -> tuple[Ids, list[bool]]:
    """A conversation's ids, uncut, and which of them are of the turns that count.

    Where the template marks them by `{% generation %}`, these are the assistant's; else they are
    what each of its messages adds to the text of those before, without what asks for it.
    """
    num_chars = sum(len(message["content"]) for message in messages)
    if num_chars > MAX_CHARS:
        raise DataError(
            f"a conversation of {num_chars:,} characters, at most {MAX_CHARS:,} are read; cut it"
        )
    tokenizer = encoder.tokenizer
    if turns == "all":
        text = _render(tokenizer, messages)
        ids: Ids = encoder.tokenize(text, add_special_tokens=False)["input_ids"]
        return ids, [True] * len(ids)
    if all(message["role"] != ASSISTANT for message in messages):
        found = ", ".join(dict.fromkeys(message["role"] for message in messages))
        raise DataError(
            f"no message has the role '{ASSISTANT}', only {found}, so none is predicted; leave it "
            "out, or count all with turns: all in a task file"
        )
    if not tokenizer.is_fast:
        raise DataError(
            "the tokenizer does not say which characters a token is of, so the assistant's cannot "
            "be found; use one with a tokenizer.json, or turns: all in a task file"
        )
    if _MARKED.search(tokenizer.get_chat_template()):
        with refusing_panics():
            marked = _apply(
                tokenizer, messages, return_dict=True, return_assistant_tokens_mask=True
            )
        return list(marked["input_ids"]), [bool(one) for one in marked["assistant_masks"]]
    text = _render(tokenizer, messages)
    spans = list(_assistant_spans(tokenizer, messages, text))
    features = encoder.tokenize(text, add_special_tokens=False, return_offsets_mapping=True)
    counted = [
        any(start < stop and start < last and first < stop for first, last in spans)
        for start, stop in features["offset_mapping"]
    ]
    return list(features["input_ids"]), counted


def check_template(tokenizer: Any) -> None:
    """Refuse a tokenizer that cannot write conversations at all."""
    if getattr(tokenizer, "chat_template", None):
        return
    raise DataError(
        f"{tokenizer.name_or_path}: the tokenizer has no chat template, which messages need; put "
        "chat_template.jinja beside it, name a folder that has one as `tokenizer:` of a task file "
        "(mats collect: --tokenizer), or make columns input and target, or text"
    )


def _assistant_spans(
    tokenizer: Any, messages: Sequence[Message], text: str
) -> Iterator[tuple[int, int]]:
    """Where in the conversation's text the assistant's turns begin and end."""
    for i, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        before, asked = "", ""
        if i > 0:
            before = _render(tokenizer, messages[:i])
            asked = _render(tokenizer, messages[:i], add_generation_prompt=True)
        after = _render(tokenizer, messages[: i + 1])
        if not (text.startswith(after) and after.startswith(before)):
            raise DataError(
                f"the chat template writes the messages up to the {i + 1}. in another way when "
                "others follow, so the assistant's turns cannot be found; mark them in the "
                "template by {% generation %} and {% endgeneration %}, give conversations that "
                "end with their first answer, or count all with turns: all in a task file"
            )
        # What asks for an answer, as <|im_start|>assistant, is not part of it. Some templates let
        # it go on with what is not in every answer, as <think>.
        different = (n for n, (a, b) in enumerate(zip(asked, after, strict=False)) if a != b)
        start = next(different, min(len(asked), len(after)))
        yield max(start, len(before)), len(after)


def _render(tokenizer: Any, messages: Sequence[Message], **options: Any) -> str:
    text: str = _apply(tokenizer, messages, tokenize=False, **options)
    return text


def _apply(tokenizer: Any, messages: Sequence[Message], **options: Any) -> Any:
    with library_errors("the chat template fails on these messages"), quiet():
        return tokenizer.apply_chat_template(list(messages), **options)
