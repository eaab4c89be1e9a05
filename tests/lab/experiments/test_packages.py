import hashlib
import io
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from matsmerge.errors import DataError
from matsmerge.lab.experiments.archives import read_member, read_members
from matsmerge.lab.experiments.packages import PACKAGES, Package, fetch

FILES = {"data/a.txt": b"first", "data/b.txt": b"second", "other.bin": bytes(1000)}


def zip_of(files: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return file.getvalue()


def tar_of(files: dict[str, bytes], kind: str = "gz") -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=f"w:{kind}") as archive:  # type: ignore[call-overload]
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


def deb_of(files: dict[str, bytes]) -> bytes:
    data = tar_of({f"./{name}": content for name, content in files.items()}, "xz")
    parts = {"debian-binary": b"2.0\n", "control.tar.xz": b"odd", "data.tar.xz": data}
    deb = b"!<arch>\n"
    for name, content in parts.items():
        deb += f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode()
        deb += content + b"\n" * (len(content) % 2)
    return deb


@pytest.mark.parametrize("make", [zip_of, tar_of, deb_of])
def test_members_of_archives(make: object, tmp_path: Path) -> None:
    assert callable(make)
    content = make(FILES)
    (tmp_path / "archive").write_bytes(content)
    expected = {name: FILES[name] for name in ("data/a.txt", "data/b.txt")}
    for archive in (content, tmp_path / "archive"):
        assert read_members(archive, "data/*.txt") == expected
        assert read_member(archive, "other.bin") == bytes(1000)


def test_links_are_no_files(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path / "secret")
        archive.addfile(link)
    assert read_members(file.getvalue(), "link") == {}


CONTENT = tar_of(FILES)
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and three packages, each with the same archive."""
    monkeypatch.setenv("MATSMERGE_CACHE", str(tmp_path / "cache"))
    for registry in ("PyPI", "npm", "Debian"):
        package = Package(registry, "1.0", f"{registry}-1.0.tgz", DIGEST)
        monkeypatch.setitem(PACKAGES, registry, package)
    return tmp_path / "cache/packages"


def put_tools(place: Path, monkeypatch: pytest.MonkeyPatch, content: bytes = CONTENT) -> Path:
    """Tools that write down how they are called, and leave a file where they are called."""
    place.mkdir()
    (place / "served.tgz").write_bytes(content)
    script = f'#!/bin/sh\necho "$@" >>"{place}/calls"\n/bin/cp "{place}/served.tgz" got.tgz\n'
    for tool in ("npm", "apt-get", "python"):
        (place / tool).write_text(script)
        (place / tool).chmod(0o755)
    monkeypatch.setenv("PATH", str(place))
    monkeypatch.setattr(sys, "executable", str(place / "python"))
    return place / "calls"


@pytest.mark.parametrize(
    ("registry", "call"),
    [
        ("PyPI", "-m pip download --no-deps --require-hashes"),
        ("npm", "pack npm@1.0 --ignore-scripts"),
        ("Debian", "download --quiet Debian=1.0"),
    ],
)
def test_a_package_is_fetched_once(
    registry: str, call: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = put_tools(tmp_path / "tools", monkeypatch)
    path = fetch(registry)
    assert path == cache / f"{registry}-1.0.tgz"
    assert path.read_bytes() == CONTENT
    assert calls.read_text().startswith(call)
    assert fetch(registry) == path
    assert len(calls.read_text().splitlines()) == 1
    path.write_bytes(CONTENT[:-1])  # damaged
    assert fetch(registry).read_bytes() == CONTENT
    assert len(calls.read_text().splitlines()) == 2
    assert [file.name for file in cache.iterdir()] == [path.name]


def test_another_file_is_refused(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_tools(tmp_path / "tools", monkeypatch, b"something else")
    found = hashlib.sha256(b"something else").hexdigest()
    with pytest.raises(
        DataError, match=f"npm package npm 1.0: .* SHA-256 {DIGEST}, found {found}; it is not used"
    ):
        fetch("npm")
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(("registry", "tool"), [("npm", "npm"), ("Debian", "apt-get")])
def test_tool_that_is_not_there(
    registry: str, tool: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(DataError, match=f"{tool} to fetch it, which is not installed") as caught:
        fetch(registry)
    assert f"put the file {registry}-1.0.tgz into {cache}" in str(caught.value)


def test_pip_that_is_not_there(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match="pip to fetch it, which is not installed"):
        fetch("PyPI")


def test_no_network(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_tools(tmp_path / "tools", monkeypatch)
    (tmp_path / "tools/npm").write_text("#!/bin/sh\necho no route to host >&2\nexit 1\n")
    with pytest.raises(DataError, match=r"npm package npm 1.0 is needed .*no route to host") as e:
        fetch("npm")
    assert "takes a network once" in str(e.value)
    assert f"put the file npm-1.0.tgz into {cache}" in str(e.value)


def test_every_package_is_pinned() -> None:
    for package in PACKAGES.values():
        assert len(bytes.fromhex(package.sha256)) == 32
        assert package.version in package.file
        assert Path(package.file).name == package.file
