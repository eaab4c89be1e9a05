"""Small files that would become large, and things that are no files: refused at little cost."""

import gzip
import os
import struct
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from tiny_models import make_tokenizer

from matsmerge.data.image_files import check_image, open_image
from matsmerge.data.labels import Labels
from matsmerge.data.row_values import list_of, text_of
from matsmerge.data.rows import read_data
from matsmerge.errors import DataError
from matsmerge.tasks.text_encoder import TextEncoder

MB = 2**20
MOST = 400 * MB  # of the 1 GB that refusing an input may take


@pytest.fixture
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    yield
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < MOST


def compressed(piece: bytes, num: int) -> bytes:
    """A gzip file of a piece, often: of as many members, which are read as one."""
    return gzip.compress(piece, 9) * num


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.jsonl.gz", lambda: compressed(bytes(MB), 500), "line 1 .*more than 4,194,304 bytes"),
        ("d.csv.gz", lambda: compressed(bytes(MB), 500), "line 1 .*more than 4,194,304 bytes"),
        ("d.jsonl.gz", lambda: compressed(b"\n" * MB, 200), "more than 5,000,000 lines"),
        ("d.jsonl.gz", lambda: compressed(b" " * MB + b"\n", 200), "20 times.*gunzip"),
        pytest.param(
            "d.jsonl.gz", lambda: compressed(b'{"a": 1}\n' * MB, 6), "more than 5,000,000 lines",
            marks=pytest.mark.long,
        ),
        ("d.json.gz", lambda: compressed(b"[" * MB, 60), "10,000,000 values"),
        ("d.json.gz", lambda: compressed(b"1," * (MB // 2), 60), "line 1.*bytes"),
        ("d.json.gz", lambda: compressed(b"[" + b"1.5," * MB, 12), "8,000,000 values.*jq"),
        ("d.jsonl", lambda: b'{"text": "' + b"a" * 10_000_000 + b'"}\n', "4,194,304.*Cut long"),
        ("d.csv", lambda: b'a,b\n1,"' + b"a\n" * 3_000_000 + b'"\n', "line .*field larger than"),
        ("d.tsv", lambda: b"\t".join(b"c%d" % i for i in range(20_000)) + b"\n", "20,000 columns"),
        ("d.jsonl", lambda: b"\x00" * 1000 + b"\n" + b"x" * 60, "line 1: .*damaged JSON"),
        ("d.jsonl", lambda: b"x\n" * 2_000_000, "and at least 990 more"),
    ],
)  # fmt: skip
def test_text(name: str, content: object, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content())  # type: ignore[operator]
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=rf"(?s){name}: .*{message}"):
            read_data(tmp_path / name)
        assert tracemalloc.get_traced_memory()[1] < MOST
    finally:
        tracemalloc.stop()


def test_more_text_than_is_read(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    with path.open("wb") as file:  # takes no room on the disk
        file.truncate(3 * 2**30)
    with pytest.raises(DataError, match="4,194,304 bytes"):
        read_data(path)


def test_real_data_is_not_refused(tmp_path: Path) -> None:
    """Well compressed, with long lines, and with all kinds of line ends."""
    text = "word " * 600_000
    (tmp_path / "d.jsonl.gz").write_bytes(compressed(f'{{"text": "{text}"}}\r\n'.encode(), 3))
    assert [len(row["text"]) for row in read_data(tmp_path / "d.jsonl.gz").rows] == [3_000_000] * 3
    for end in ("\n", "\r\n", "\r"):
        (tmp_path / "d.csv").write_bytes(f'\ufeffa,b{end}1,"x{end}y"{end}'.encode())
        assert list(read_data(tmp_path / "d.csv").rows) == [{"a": "1", "b": f"x{end}y"}]


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "zero.jsonl").symlink_to("/dev/zero")
    (tmp_path / "zero.parquet").symlink_to("/dev/zero")
    for name in ("pipe.jsonl", "zero.jsonl", "zero.parquet"):
        with pytest.raises(DataError, match="no regular file"):
            read_data(tmp_path / name)
    with pytest.raises(DataError, match="cannot be read|no such file"):
        read_data(f"{tmp_path}/a\0b.jsonl")
    with pytest.raises(DataError, match="cannot be read|no such file"):
        read_data(f"{tmp_path}/{'a' * 300}.jsonl")


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "d.parquet"
    # Half a million times the same long text: a few kilobytes, and half a terabyte.
    one = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 500_000), ["a" * MB])
    parquet.write_table(pyarrow.table({"text": one}), path, store_schema=False)
    before = pyarrow.default_memory_pool().max_memory()
    data = read_data(path)
    assert (len(data), len(data.rows[499_999]["text"])) == (500_000, MB)
    assert pyarrow.default_memory_pool().max_memory() - before < MOST
    parquet.write_table(
        pyarrow.table({"text": ["a" * (100 * MB)]}), path, compression="zstd", use_dictionary=False
    )
    with pytest.raises(DataError, match="at most 67,108,864 bytes, 20 times"):
        read_data(path)
    zeros = pyarrow.nulls(10**6, pyarrow.int64())
    parquet.write_table(pyarrow.table({f"c{i}": zeros for i in range(60)}), path)
    with pytest.raises(DataError, match="60,000,000 values"):
        read_data(path)


def png(width: int, height: int) -> bytes:
    """A PNG of zeros, of a few kilobytes."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + checksum

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    pixels = zlib.compress(bytes(1000))
    parts = (chunk(b"IHDR", header), chunk(b"IDAT", pixels), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize(("width", "height"), [(9_000, 9_000), (10_000, 10_000), (60_000, 60_000)])
def test_images(width: int, height: int, tmp_path: Path, little_memory: None) -> None:
    """Between PIL's warning and its error, and beyond both."""
    content = png(width, height)
    (tmp_path / "x.png").write_bytes(content)
    for source in (content, tmp_path / "x.png"):
        with pytest.raises(DataError, match="pixels, expected at most 67,108,864; make it smaller"):
            check_image(source)
        with pytest.raises(DataError, match="pixels"):
            open_image(source, "RGB")


def test_images_that_are_read(tmp_path: Path) -> None:
    Image.new("RGB", (30, 20)).save(tmp_path / "x.png")
    check_image(tmp_path / "x.png")
    assert open_image(tmp_path / "x.png", "L").size == (30, 20)


class CountingTokenizer:
    """A tokenizer that remembers how much text it was given."""

    def __init__(self) -> None:
        self.own = make_tokenizer()
        self.longest = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.own, name)

    def __call__(self, text: object, pair: object = None, **options: object) -> object:
        for given in (text, pair, options.get("text_target")):
            words = given if isinstance(given, list) else [given or ""]
            self.longest = max(self.longest, sum(map(len, words)))
        return self.own(text, pair, **options)


def test_text_is_cut_before_it_is_tokenized() -> None:
    tokenizer = CountingTokenizer()
    cut, whole = TextEncoder(tokenizer, 20), TextEncoder(make_tokenizer(), 20)
    text = "a b c d e f " * 10_000
    words = text.split()
    for given, is_split in ((text, False), (words, True)):
        found = cut.encode(0, given, is_split_into_words=is_split)
        expected = whole.tokenizer(
            given, truncation=True, max_length=20, is_split_into_words=is_split
        )
        assert found["input_ids"] == expected["input_ids"]
    assert (
        cut.encode(1, text, "e f")["input_ids"]
        == (whole.tokenizer(text, "e f", truncation=True, max_length=20)["input_ids"])
    )
    assert cut.ids(text)[:20] == whole.tokenizer(text)["input_ids"][:20]
    assert cut.ids(text, from_end=True)[-20:] == whole.tokenizer(text)["input_ids"][-20:]
    assert set(cut.truncated) == {0, 1}
    assert tokenizer.longest < 10_000


def test_text_that_cannot_be_cut() -> None:
    encoder = TextEncoder(make_tokenizer(), 20)
    assert len(encoder.encode(0, " " * 100_000 + "a b")["input_ids"]) == 4
    with pytest.raises(DataError, match="a text of 3,000,000 characters.*is it text"):
        encoder.encode(0, " " * 3_000_000)


def test_values() -> None:
    with pytest.raises(DataError, match="not valid JSON"):
        list_of({"tokens": "[" * 100_000}, "tokens")
    with pytest.raises(DataError, match="no valid Unicode"):
        text_of({"text": "\ud800"}, "text")
    labels = Labels(2, {"yes": 0, "no": 1}, "class")
    for wrong in ("9" * 5000, "x" * 1_000_000):
        with pytest.raises(DataError, match=r"characters\) is no class") as caught:
            labels.number(wrong)
        assert len(str(caught.value)) < 300
