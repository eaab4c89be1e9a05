"""Small files that we are given, read so that nothing in them can do harm.

Only regular files of a limited size are read: a device or a pipe would never end. What is inside
becomes a value of the type that is expected, or an error that names the file and what is wrong.
"""

import json
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import IO, Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from matsmerge.errors import MatsError

_MAX_BYTES = 64 * 2**20
_MAX_JSON_VALUES = 2_000_000  # each takes up to a hundred bytes once it is read
_MAX_TYPED_VALUES = 1_000_000  # and each that does not fit a few hundred more
_MAX_PROBLEMS = 5
_MAX_DESCRIBED = 10_000  # describing a million problems takes a minute
_MAX_QUOTED = 60

_HALVES = re.compile(r"\\[uU](?:0000)?[dD][89a-fA-F]")

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)


class Content(BaseModel):
    """What a file must say: values of exactly these types, and numbers that are finite.

    Keys that it does not list are let be.
    """

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)


Count = Annotated[int, Field(ge=0, lt=2**63)]  # how many there are of something; a position


def _numbers(values: Any) -> list[float]:
    if not isinstance(values, list) or not all(map(_is_number, values)):
        raise ValueError("expected a list of numbers")
    return values


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 2**63)


# Up to millions of numbers, which are one problem if they are wrong. What was measured may be
# infinite or no number.
Numbers = Annotated[Any, AfterValidator(_numbers)]


def open_regular(path: Path, error_type: type[MatsError]) -> IO[bytes]:
    """A file open for reading, if it is a regular one; of others, reading may never end."""
    try:
        # Opening a pipe would wait for its other end.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise error_type(f"{path}: not a regular file; give a file with content")
        return os.fdopen(descriptor, "rb")
    except (OSError, ValueError) as error:  # a name with a zero byte is a ValueError
        reason = getattr(error, "strerror", None) or error
        raise error_type(f"{path}: cannot be read ({reason})") from error


def read_bytes(path: Path, error_type: type[MatsError], most_bytes: int = _MAX_BYTES) -> bytes:
    """A regular file's content, if it is not larger than it may be."""
    try:
        with open_regular(path, error_type) as file:
            size = os.fstat(file.fileno()).st_size
            # Reading sets aside as much memory as may come, which is not all that is allowed.
            most = min(most_bytes, size + 2**20)
            content = file.read(most + 1) if size <= most_bytes else None
    except OSError as error:
        raise error_type(f"{path}: cannot be read ({error.strerror})") from error
    if content is None or len(content) > most_bytes:
        raise error_type(
            f"{path}: larger than the {most_bytes:,} bytes that such a file may have; "
            "is it the right file?"
        )
    return content


def read_text(path: Path, error_type: type[MatsError], most_bytes: int = _MAX_BYTES) -> str:
    """A regular UTF-8 file's text, if it is not larger than it may be."""
    return decode(read_bytes(path, error_type, most_bytes), str(path), error_type)


def decode(content: bytes, where: str, error_type: type[MatsError]) -> str:
    """UTF-8 text, without the mark that some editors put at its beginning."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        found = f"byte {content[error.start]:#04x} at position {error.start}"
        raise error_type(f"{where}: not UTF-8 text ({found}); save it as UTF-8") from error


def read_json(
    path: Path,
    error_type: type[MatsError],
    most_bytes: int = _MAX_BYTES,
    object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None,
    most_values: int = _MAX_JSON_VALUES,
) -> Any:
    """What is in a JSON file."""
    text = read_text(path, error_type, most_bytes)
    return parse_json(text, str(path), error_type, object_pairs_hook, most_values)


def parse_json(
    text: str,
    where: str,
    error_type: type[MatsError],
    object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None,
    most_values: int = _MAX_JSON_VALUES,
) -> Any:
    """What a JSON text says; `where` it was found is named in errors."""
    if sum(map(text.count, "[{,")) > most_values:
        raise error_type(
            f"{where}: more than {most_values:,} values in JSON; is it the right file?"
        )
    try:
        found = json.loads(text, object_pairs_hook=object_pairs_hook)
        check_unicode(text, found)
        return found
    except RecursionError as error:
        raise error_type(f"{where}: not valid JSON (nested too deeply)") from error
    except ValueError as error:  # also numbers of thousands of digits
        raise error_type(f"{where}: not valid JSON ({error})") from error


def check_unicode(text: str, content: Any) -> None:
    r"""Refuse half a character, which JSON and YAML can say (`\ud800`) and no file can hold."""
    if _HALVES.search(text):
        try:
            json.dumps(content, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"half a character, {error.object[error.start]!r}") from error


def read_json_as(
    path: Path,
    expected: type[M],
    error_type: type[MatsError],
    most_values: int = _MAX_TYPED_VALUES,
) -> M:
    """A JSON file's content as a typed model."""
    content = read_json(path, error_type, most_values=most_values)
    return parse_as(content, expected, str(path), error_type)


def parse_as(content: Any, expected: type[T], where: str, error_type: type[MatsError]) -> T:
    """A value as a type that pydantic knows; every part that does not fit is named."""
    try:
        return TypeAdapter(expected).validate_python(content)
    except ValidationError as error:
        raise error_type(describe_problems(error, where)) from error


def describe_problems(error: ValidationError, where: str) -> list[str]:
    """The first parts that do not fit, and how many more there are."""
    if error.error_count() > _MAX_DESCRIBED:
        return [f"{where}: {error.error_count():,} values are not what they should be"]
    found = error.errors(include_url=False, include_context=False)
    problems = [f"{where}: {_described(item)}" for item in found[:_MAX_PROBLEMS]]
    if len(found) > _MAX_PROBLEMS:
        problems.append(f"{where}: and {len(found) - _MAX_PROBLEMS} more like these")
    return problems


def _described(problem: ErrorDetails) -> str:
    place = ".".join(map(_shortened, problem["loc"])) or "the whole"
    if problem["type"] == "missing":
        return f"{place}: is missing"
    message = re.sub(" or instance of .*", "", problem["msg"]).removeprefix("Value error, ")
    return f"{place}: {message[0].lower()}{message[1:]}, found {quoted(problem['input'])}"


def _shortened(part: int | str) -> str:
    text = str(part)
    return text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]}…"


def quoted(value: Any) -> str:
    """A value that was found, short enough for a message."""
    if isinstance(value, (dict, list)):
        return "a mapping" if isinstance(value, dict) else "a list"
    text = repr(value)
    return text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]}…"
