"""Names of remote files: URLs, and the local path that stands for each.

Every remote file has one path in the mirror, `CACHE/remote/SCHEME/BUCKET/KEY`. All code that takes
paths takes this one, and only what reads or writes bytes asks, by `url_of`, whether a path is
remote. What is hidden in the mirror (`.NAME.partial`, say) is local: work in progress.
"""

import os
import re
from pathlib import Path
from urllib.parse import quote, unquote

# What fsspec needs for each scheme, besides itself.
LIBRARIES = {
    "s3": "s3fs",
    "gs": "gcsfs",
    "az": "adlfs",
    "hf": "huggingface_hub",
    "http": "aiohttp",
    "https": "aiohttp",
    "memory": "fsspec",
}
# A `Path` of a URL has one slash fewer.
_KNOWN = re.compile(rf"({'|'.join(LIBRARIES)}):/{{1,3}}(?!/)")
_ANY = re.compile(r"[a-zA-Z][\w+.-]*://")


def cache_root() -> Path:
    """Where copies of what is elsewhere are kept."""
    return Path(os.environ.get("MATSMERGE_CACHE") or "~/.cache/matsmerge").expanduser()


def is_remote(source: str | Path) -> bool:
    """Whether a source is a URL; one of an unknown scheme counts too."""
    return bool(_KNOWN.match(str(source)) or _ANY.match(str(source)))


def mirror_path(source: str | Path) -> Path:
    """The local path that stands for a URL."""
    from matsmerge.errors import RecipeError  # which uses this module itself

    text = str(source)
    found = _KNOWN.match(text)
    if found is None:
        expected = ", ".join(f"{scheme}://" for scheme in LIBRARIES)
        raise RecipeError(f"{text}: cannot be used; expected a local path, or one of {expected}")
    parts = text[found.end() :].rstrip("/").split("/")
    if re.search(r"[?#]", text) or "@" in parts[0]:
        # Not shown: it may be a password or a signature.
        raise RecipeError(
            f"{found[1]}://{parts[0].rpartition('@')[2]}/…: has credentials or a query in it, "
            "which would end up in files and messages; let the library find credentials by itself"
        )
    if any(part.startswith(".") or not part for part in parts):
        raise RecipeError(f"{text}: has an empty part, or one that begins with a dot; rename it")
    return _root().joinpath(found[1], *(quote(part, safe="") for part in parts))


def url_of(path: Path) -> str | None:
    """The URL that a path stands for; None for what is only here."""
    root = _root()
    if not path.is_relative_to(root):
        return None
    scheme, *parts = path.relative_to(root).parts or ("",)
    if not parts or any(part.startswith(".") for part in parts):
        return None
    return f"{scheme}://{'/'.join(map(unquote, parts))}"


def with_urls(text: str) -> str:
    """A message with URLs in place of the paths that stand for them."""
    root = f"{_root()}/"
    if root not in text:
        return text
    pattern = rf"{re.escape(root)}(\w+)/([\w.~%/-]*)"
    return re.sub(pattern, lambda found: f"{found[1]}://{unquote(found[2])}", text)


def _root() -> Path:
    return cache_root().resolve() / "remote"
