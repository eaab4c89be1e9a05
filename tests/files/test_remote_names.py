"""URLs and the paths that stand for them."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from matsmerge.errors import CheckpointError, RecipeError
from matsmerge.files.remote_names import cache_root, is_remote, mirror_path, url_of, with_urls

PART = st.text(st.characters(codec="utf-8", exclude_characters="/?#\0@"), min_size=1, max_size=8)


@given(
    st.sampled_from(["s3", "gs", "az", "hf", "http", "https", "memory"]),
    st.lists(PART, min_size=1, max_size=4),
)
def test_a_url_and_its_path_are_one_thing(scheme: str, parts: list[str]) -> None:
    if any(part.startswith(".") for part in parts):
        return
    url = f"{scheme}://{'/'.join(parts)}"
    assert url_of(mirror_path(url)) == url
    assert is_remote(url)


@pytest.mark.parametrize(
    "source", ["a/b", "/a/b", "owner/name@main", "owner/name:config", "./s3:/x", "C:/x"]
)
def test_local(source: str) -> None:
    assert not is_remote(source)


def test_a_path_made_of_a_url() -> None:
    assert mirror_path(Path("s3://bucket/a/")) == mirror_path("s3://bucket/a")
    assert url_of(mirror_path("s3://bucket") / "x.json") == "s3://bucket/x.json"


@pytest.mark.parametrize("source", ["ftp://host/a", "s3a://b/c", "file:///etc/x"])
def test_unknown_schemes(source: str) -> None:
    with pytest.raises(RecipeError, match="expected a local path, or one of s3://, gs://"):
        mirror_path(source)


@pytest.mark.parametrize("source", ["s3://b/a/../c", "s3://b//c", "s3://b/.hidden/c", "s3://"])
def test_parts_that_lead_elsewhere(source: str) -> None:
    with pytest.raises(RecipeError):
        mirror_path(source)


@pytest.mark.parametrize(
    "source", ["https://host/a?X-Amz-Signature=secret", "https://me:secret@host/a"]
)
def test_credentials_are_refused_and_not_repeated(source: str) -> None:
    with pytest.raises(RecipeError, match="credentials") as error:
        mirror_path(source)
    assert "secret" not in str(error.value)


def test_work_in_progress_is_local() -> None:
    folder = mirror_path("s3://bucket/out")
    assert url_of(folder.with_name(".out.partial") / "output" / "x") is None
    assert url_of(cache_root().resolve() / "remote") is None
    assert url_of(Path("/elsewhere/s3/bucket")) is None


def test_messages_name_urls() -> None:
    path = mirror_path("http://host:80/a b/model.safetensors")
    error = CheckpointError(f"{path}: truncated; see '{path.parent}'")
    assert error.problems == [
        "http://host:80/a b/model.safetensors: truncated; see 'http://host:80/a b'"
    ]
    assert with_urls("/a/b: plain") == "/a/b: plain"


@pytest.mark.parametrize(
    ("scheme", "slashes"), [("s3", 1), ("s3", 2), ("s3", 3), ("memory", 2), ("hf", 1)]
)
def test_slashes_that_paths_lose(scheme: str, slashes: int) -> None:
    source = f"{scheme}:{'/' * slashes}bucket/key"
    assert is_remote(source)
    assert url_of(mirror_path(source)) == f"{scheme}://bucket/key"
    assert mirror_path(f"{source}/") == mirror_path(source)


def test_the_cache_may_be_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = mirror_path("s3://b/k")
    monkeypatch.setenv("MATSMERGE_CACHE", str(tmp_path / "other"))
    moved = mirror_path("s3://b/k")
    assert moved.is_relative_to(tmp_path / "other")
    assert moved != path
    assert url_of(path) is None  # of another cache: a path like any other
    assert url_of(moved) == "s3://b/k"


def test_what_is_no_file_of_a_store() -> None:
    root = mirror_path("s3://bucket").parent
    assert url_of(root) is None
    assert url_of(root.parent) is None
    assert url_of(Path("/tmp/x")) is None
    assert url_of(mirror_path("s3://bucket")) == "s3://bucket"


def test_messages_without_remote_files_stay() -> None:
    for text in ("", "plain", "/tmp/a: no such file", "s3://b/k: denied"):
        assert with_urls(text) == text
    one, two = mirror_path("s3://b/größe x"), mirror_path("gs://c/d")
    assert with_urls(f"{one}: copied to {two}") == "s3://b/größe x: copied to gs://c/d"
