"""Small files that we are given, read so that nothing in them can do harm.

Only regular files of a limited size are read: a device or a pipe would never end. What is inside
becomes a value of the type that is expected, or an error that names the file and what is wrong.
"""

import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from matsmerge.errors import MatsError
from matsmerge.files.remote_names import is_remote, mirror_path
from matsmerge.problems import shortened

_MAX_BYTES = 64 * 2**20
_MAX_JSON_VALUES = 2_000_000  # each takes up to a hundred bytes once it is read
_MAX_TYPED_VALUES = 1_000_000  # and each that does not fit a few hundred more
_MAX_PROBLEMS = 5
_MAX_DESCRIBED = 10_000  # describing a million problems takes a minute
_MAX_QUOTED = 60

_HALVES = re.compile(r"\\[uU](?:0000)?[dD][89a-fA-F]")

T = TypeVar("T")


class Content(BaseModel):
    """What a file must say: values of exactly these types, and numbers that are finite.

    Keys that it does not list are let be.
    """

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)


Count = Annotated[int, Field(ge=0, lt=2**63)]  # how many there are of something; a position


def local_path(source: str | Path) -> Path:
    """A path with `~` replaced, where that names a user; of a URL the path that stands for it."""
    if is_remote(source):
        return mirror_path(source)
    try:
        return Path(source).expanduser()
    except RuntimeError:
        return Path(source)


def _numbers(values: Any) -> list[float]:
    if not isinstance(values, list) or not all(map(_is_number, values)):
        raise ValueError("expected a list of numbers")
    return values


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 2**63)


# Up to millions of numbers, which are one problem if they are wrong. What was measured may be
# infinite or no number.
Numbers = Annotated[Any, AfterValidator(_numbers)]


@contextmanager
def reading(path: Path | str, error_type: type[MatsError]) -> Iterator[None]:
    """Turn an error of the system while a file is read into one that names the file."""
    try:
        yield
    # A zero byte in a name is a ValueError, links in a circle are a RuntimeError.
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise error_type(f"{path}: cannot be read ({reason})") from error


def open_regular(path: Path, error_type: type[MatsError]) -> BufferedReader:
    """Open a regular file for reading; others are refused, since reading them may never end."""
    with reading(path, error_type):
        # Opening a pipe would wait for its other end.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise error_type(f"{path}: not a regular file; give a file with content")
        return os.fdopen(descriptor, "rb")


def read_bytes(path: Path, error_type: type[MatsError], most_bytes: int = _MAX_BYTES) -> bytes:
    """Read a regular file of at most so many bytes."""
    with reading(path, error_type), open_regular(path, error_type) as file:
        size = os.fstat(file.fileno()).st_size
        # Reading sets aside as much memory as may come, which is not all that is allowed.
        most = min(most_bytes, size + 2**20)
        content = file.read(most + 1) if size <= most_bytes else None
    if content is None or len(content) > most_bytes:
        raise error_type(
            f"{path}: larger than the {most_bytes:,} bytes that such a file may have; "
            "is it the right file?"
        )
    return content


def read_text(path: Path, error_type: type[MatsError], most_bytes: int = _MAX_BYTES) -> str:
    """Read a regular file of UTF-8 text of at most so many bytes."""
    return decode_text(read_bytes(path, error_type, most_bytes), str(path), error_type)


def decode_text(content: bytes, where: str, error_type: type[MatsError]) -> str:
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
    most_values: int = _MAX_JSON_VALUES,
    unique: bool = False,
) -> Any:
    """Read a JSON file."""
    text = read_text(path, error_type, most_bytes)
    return parse_json(text, str(path), error_type, most_values, unique)


def parse_json(
    text: str,
    where: str,
    error_type: type[MatsError],
    most_values: int = _MAX_JSON_VALUES,
    unique: bool = False,
) -> Any:
    """Parse JSON; `where` it was found is named in errors.

    If keys must be `unique`, one that is given twice is an error.
    """
    if sum(map(text.count, "[{,")) > most_values:
        raise error_type(
            f"{where}: more than {most_values:,} values in JSON; is it the right file?"
        )
    try:
        found = json.loads(text, object_pairs_hook=_unique if unique else None)
        check_unicode(text, found)
        return found
    except RecursionError as error:
        raise error_type(f"{where}: not valid JSON (nested too deeply)") from error
    except ValueError as error:  # also numbers of thousands of digits
        raise error_type(f"{where}: not valid JSON ({error})") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"'{clipped(key)}' appears twice")
        found[key] = value
    return found


def check_unicode(text: str, content: Any) -> None:
    r"""Refuse half a character, which JSON and YAML can say (`\ud800`) and no file can hold."""
    if _HALVES.search(text):
        try:
            json.dumps(content, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"half a character, {error.object[error.start]!r}") from error


def read_json_as(
    path: Path,
    expected: type[T],
    error_type: type[MatsError],
    most_bytes: int = _MAX_BYTES,
    most_values: int = _MAX_TYPED_VALUES,
) -> T:
    """Read a JSON file as a type that pydantic knows."""
    content = read_json(path, error_type, most_bytes, most_values)
    return parse_as(content, expected, str(path), error_type)


def parse_as(content: Any, expected: type[T], where: str, error_type: type[MatsError]) -> T:
    """Check a value against a type that pydantic knows; each part that does not fit is named."""
    try:
        return TypeAdapter(expected).validate_python(content)
    except ValidationError as error:
        raise error_type(_describe(error, where)) from error


def _describe(error: ValidationError, where: str) -> list[str]:
    """The first parts that do not fit, and how many more there are."""
    if error.error_count() > _MAX_DESCRIBED:
        return [f"{where}: {error.error_count():,} values are not what they should be"]
    found = error.errors(include_url=False, include_context=False)
    return shortened([f"{where}: {_described(item)}" for item in found], _MAX_PROBLEMS)


def _described(problem: ErrorDetails) -> str:
    place = ".".join(clipped(str(part)) for part in problem["loc"]) or "the whole"
    if problem["type"] == "missing":
        return f"{place}: is missing"
    message = re.sub(" or instance of .*", "", problem["msg"]).removeprefix("Value error, ")
    return f"{place}: {message[0].lower()}{message[1:]}, found {quoted(problem['input'])}"


def quoted(value: Any) -> str:
    """A value that was found, short enough for a message."""
    if isinstance(value, (dict, list)):
        return "a mapping" if isinstance(value, dict) else "a list"
    return clipped(repr(value))


def clipped(text: str) -> str:
    """The beginning of a text, short enough for a message."""
    return text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]}…"
