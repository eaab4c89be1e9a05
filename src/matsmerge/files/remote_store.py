"""Requests to remote stores by fsspec, made again where they fail.

What cannot be done is an `OSError` whose text says what was asked for, so that it is reported like
an error of the disk. Credentials are found by fsspec's libraries and never seen here.
"""

import errno
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from matsmerge.files.remote_names import LIBRARIES
from matsmerge.optional_import import import_optional

_DELAYS = (0.2, 0.5, 1.0, 2.0)  # seconds between attempts; the libraries try again themselves, too
# What stores call the version of a file; those that have none give at least a time.
_VERSIONS = (
    *("ETag", "etag", "blob_id", "md5Hash", "content_md5", "LastModified", "last_modified"),
    *("Last-Modified", "updated", "mtime", "created"),
)

T = TypeVar("T")


@dataclass(frozen=True)
class RemoteState:
    """The size and the version that a remote file has."""

    size: int
    version: str


def look(url: str, depth: int | None = None) -> RemoteState | dict[str, RemoteState] | None:
    """The state of a file; of a folder that of each file in it; None where there is neither."""

    def call(store: Any, path: str) -> RemoteState | dict[str, RemoteState] | None:
        store.invalidate_cache()
        try:
            found = store.info(path)
        except FileNotFoundError:
            return None
        if found["type"] != "directory":
            return _state(found)
        listed = store.find(path, maxdepth=depth, detail=True)
        names = {name.rstrip("/").removeprefix(f"{path}/"): i for name, i in listed.items()}
        return {n: _state(info) for n, info in names.items() if info["type"] == "file" and n}

    return attempt(url, "looking it up", call)


def read_range(url: str, size: int, start: int, stop: int) -> bytes:
    """Bytes `start` to `stop` of a file that has so many in all."""
    what = f"bytes {start} to {stop}"

    def call(store: Any, path: str) -> bytes:
        options = {"cache_type": "none"} if url.startswith("hf://") else {}  # else it reads ahead
        found: bytes = store.cat_file(path, start=start, end=stop, **options)
        if len(found) == size != stop - start:
            raise OSError(
                errno.ENOTSUP, f"{what}: the server sends whole files only; download it first"
            )
        if len(found) != stop - start:
            raise OSError(errno.EIO, f"{len(found)} bytes came")
        return found

    return attempt(url, what, call) if stop > start else b""


def put(file: Path, url: str) -> RemoteState:
    """Store a file under a URL, whole or not at all, and return the state that it has there."""

    def call(store: Any, path: str) -> RemoteState:
        store.put_file(str(file), path)
        store.invalidate_cache()
        state = _state(store.info(path))
        if state.size != file.stat().st_size:
            raise OSError(errno.EIO, f"{state.size} of {file.stat().st_size} bytes arrived")
        return state

    return attempt(url, f"writing {url}", call)


def delete(url: str) -> None:
    """Remove a file."""
    attempt(url, f"removing {url}", lambda store, path: store.rm_file(path))


def attempt(url: str, what: str, call: Callable[[Any, str], T]) -> T:
    """Call with the store and path of a URL, several times if need be; `what` is done is said."""
    scheme = url.partition("://")[0]
    import_optional(LIBRARIES[scheme])
    # Not kept: fsspec keeps it, and makes another in a forked process.
    store = import_optional("fsspec").filesystem(scheme)
    path = store._strip_protocol(url)
    for delay in (*_DELAYS, None):
        try:
            return call(store, path)
        except FileNotFoundError as error:
            raise FileNotFoundError(errno.ENOENT, f"{what}: it is not there") from error
        except PermissionError as error:
            raise PermissionError(errno.EACCES, f"{what}: access was denied") from error
        except Exception as error:  # each library has its own
            if getattr(error, "errno", None) == errno.ENOTSUP:
                raise
            if delay is None:
                num = len(_DELAYS) + 1
                last = f"{what}: {num} attempts failed, the last with {_reason(error)}"
                raise OSError(errno.EIO, last) from error
            time.sleep(delay)
    raise AssertionError


def _state(info: Mapping[str, Any]) -> RemoteState:
    version = next((str(info[key]) for key in _VERSIONS if info.get(key)), "")
    return RemoteState(info["size"], version)


def _reason(error: Exception) -> str:
    """The first line of a foreign error, without queries of URLs, which may be signatures."""
    text = str(getattr(error, "strerror", None) or error).strip() or type(error).__name__
    return re.sub(r"\?[^\s'\")]*", "?…", text.splitlines()[0])[:200]
