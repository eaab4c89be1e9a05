"""Data in every format, and everything that can be wrong with it."""

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from matsmerge.data.rows import fingerprint_rows, read_data
from matsmerge.errors import DataError
from matsmerge.optional_import import import_optional

ROWS = [
    {"text": "a b", "label": 0},
    {"text": "c\u2028d", "label": 1},
    {"text": 'e "f", g', "label": 0},
]
CSV = 'text,label\na b,0\nc\u2028d,1\n"e ""f"", g",0\n'


def lines(rows: list[dict[str, Any]] = ROWS) -> str:
    return "\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n"


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("d.jsonl", lines()),
        ("d.jsonl", "\ufeff" + lines().replace("\n", "\r\n\r\n")),
        ("d.ndjson", lines()),
        ("d.json", lines()),
        ("d.json", json.dumps(ROWS, indent=1)),
        ("d.jsonl.gz", gzip.compress(lines().encode(), mtime=0)),
        ("d.json.gz", gzip.compress(json.dumps(ROWS).encode(), mtime=0)),
    ],
)
def test_json(name: str, content: str | bytes, tmp_path: Path) -> None:
    data = read_data(write(tmp_path / name, content))
    assert list(data.rows) == ROWS
    assert data.columns == ["text", "label"]
    assert data.fingerprint == fingerprint_rows(ROWS)
    assert len(data) == 3


def test_csv_and_tsv_are_text(tmp_path: Path) -> None:
    expected = [{k: str(v) for k, v in row.items()} for row in ROWS]
    plain = read_data(write(tmp_path / "d.csv", CSV))
    zipped = read_data(write(tmp_path / "e.CSV.gz", gzip.compress(CSV.encode(), mtime=0)))
    tabs = read_data(
        write(tmp_path / "d.tsv", 'text\tlabel\na b\t0\nc\u2028d\t1\n"e ""f"", g"\t0\n')
    )
    for data in (plain, zipped, tabs):
        assert list(data.rows) == expected
        assert data.fingerprint == plain.fingerprint
    long = read_data(write(tmp_path / "long.csv", "text\n" + "x" * 200_000 + "\n"))
    assert len(long.rows[0]["text"]) == 200_000


def test_rows_may_lack_columns(tmp_path: Path) -> None:
    data = read_data(write(tmp_path / "d.jsonl", '{"a": 1}\n{"b": 2}\n'))
    assert data.columns == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "d.jsonl",
            '{"a": 1}\n{"a": \n',
            r"d.jsonl: line 2: expected one JSON object per line.*damaged",
        ),
        (
            "d.jsonl",
            '{"a": 1}\n[1]\n3\n',
            r"line 2: expected an object, found list \[1\]\n.*line 3: .*int 3",
        ),
        ("d.jsonl", "[" * 100_000, "line 1: .*damaged"),
        ("d.json", '[{"a": 1},', "damaged JSON .*line 1 column 11"),
        ("d.json", '[{"a": 1}, null]', "item 2: expected an object, found null"),
        ("d.json", '{\n"a": 1}', "line 1: expected one JSON object per line"),
        ("d.jsonl", "".join("x\n" * 15), r"line 10: .*\nand 5 more$"),
        ("d.jsonl", b'{"a": 1}\n{"a": "\xff"}', "line 2: expected UTF-8 text, found the byte 0xff"),
        ("d.jsonl.gz", gzip.compress(lines().encode(), mtime=0)[:-12], "cut short"),
        ("d.jsonl.gz", b"plain", "not a valid gzip file"),
        (
            "d.csv",
            "a,b\n1,2\n1,2,3\n4\n",
            r"line 3: expected 2 fields .* found 3\n.*line 4: .* found 1",
        ),
        ("d.csv", "a,a\n1,2\n", "line 1: expected a header with a different name for each column"),
        ("d.csv", 'a,b\n1,"2\n', "line 2: unexpected end of data"),
        ("d.csv", "a,b\n", "holds no rows"),
        ("d.jsonl", "", "holds no rows"),
        ("d.json", "[]", "holds no rows"),
        ("d.parquet", b"PAR1", "not a readable Parquet file"),
        ("d.txt", "x", "expected a file ending in .jsonl"),
        ("data", "x", "expected a file ending in .jsonl"),
    ],
)
def test_damage(name: str, content: str | bytes, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, content)
    with pytest.raises(DataError, match=r"(?s)" + message) as caught:
        read_data(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["data/typo.jsonl", "data/typo.CSV.gz", "data/typo.parquet"])
def test_what_is_named_as_a_file_is_not_looked_for_on_the_hub(name: str) -> None:
    with pytest.raises(DataError, match=f"^{name}: no such file or folder"):
        read_data(name)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file or folder.*owner/name"):
        read_data(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="some/dataset: no such local path, and the hub"):
        read_data("some/dataset")
    with pytest.raises(DataError, match="expected a folder written by .*found nothing"):
        read_data(tmp_path)
    with pytest.raises(DataError, match="single file, which has no split 'train'"):
        read_data(write(tmp_path / "d.jsonl", lines()), split="train")


def test_parquet(tmp_path: Path) -> None:
    pyarrow = import_optional("pyarrow")
    parquet = import_optional("pyarrow.parquet")

    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "d.parquet")
    data = read_data(tmp_path / "d.parquet")
    assert data.columns == ["text", "label"]
    assert list(data.rows) == ROWS
    assert data.rows[-1] == ROWS[-1]
    assert data.rows[1:] == ROWS[1:]
    assert data.fingerprint == fingerprint_rows(ROWS)


def test_saved_datasets(tmp_path: Path) -> None:
    datasets = import_optional("datasets")

    datasets.disable_progress_bars()
    dataset = datasets.Dataset.from_list(ROWS)
    dataset.save_to_disk(tmp_path / "one")
    data = read_data(tmp_path / "one")
    assert list(data.rows) == ROWS
    assert data.fingerprint == fingerprint_rows(ROWS)
    with pytest.raises(DataError, match="single dataset, which has no split"):
        read_data(tmp_path / "one", split="train")

    both = datasets.DatasetDict({"train": dataset, "test": dataset.select([1])})
    both.save_to_disk(tmp_path / "two")
    assert list(read_data(tmp_path / "two", split="test").rows) == ROWS[1:2]
    with pytest.raises(DataError, match="has the splits train, test; choose one with --split"):
        read_data(tmp_path / "two")
    with pytest.raises(DataError, match="no split 'tets'; did you mean 'test'"):
        read_data(tmp_path / "two", split="tets")
    (tmp_path / "two" / "train" / "state.json").write_text("{")
    with pytest.raises(DataError, match="the dataset cannot be read"):
        read_data(tmp_path / "two", split="train")


def test_hub_datasets_are_never_run(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = import_optional("datasets")

    seen: dict[str, Any] = {}

    def load(
        name: str, config: str | None, trust_remote_code: bool | None = None, **options: Any
    ) -> Any:
        seen.update(name=name, config=config, trust=trust_remote_code, **options)
        return datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)})

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert list(read_data("owner/name:sst2@main").rows) == ROWS
    assert seen == {"name": "owner/name", "config": "sst2", "trust": False, "revision": "main"}


def test_image_folder(tmp_path: Path) -> None:
    for name in ("cat/b.png", "cat/a.PNG", "dog/c.jpg", "dog/notes.txt"):
        (tmp_path / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        write(tmp_path / "images" / name, name)
    data = read_data(tmp_path / "images")
    assert [(row["image"], row["label"]) for row in data.rows] == [
        ("cat/a.PNG", "cat"), ("cat/b.png", "cat"), ("dog/c.jpg", "dog"),
    ]  # fmt: skip
    assert len(read_data(tmp_path, split="images")) == 3
    with pytest.raises(DataError, match="no subfolder 'test'"):
        read_data(tmp_path / "images", split="test")


def test_fingerprints_are_of_content(tmp_path: Path) -> None:
    a = read_data(write(tmp_path / "a.jsonl", lines()))
    reordered = [dict(reversed(row.items())) for row in ROWS]
    assert read_data(write(tmp_path / "b.json", json.dumps(reordered))).fingerprint == a.fingerprint
    assert fingerprint_rows(ROWS[::-1]) != a.fingerprint
    assert fingerprint_rows([ROWS[0], {**ROWS[1], "label": "1"}, ROWS[2]]) != a.fingerprint


def test_fingerprints_of_images_are_of_their_bytes(tmp_path: Path) -> None:
    from PIL import Image

    content = b"some bytes"
    write(tmp_path / "x.png", content)
    path = write(tmp_path / "d.jsonl", '{"image": "x.png"}')
    data = read_data(path)
    assert data.fingerprint == fingerprint_rows([{"image": content}])
    assert data.fingerprint == fingerprint_rows([{"image": {"bytes": content, "path": "y.png"}}])
    write(tmp_path / "x.png", b"other bytes")
    assert read_data(path).fingerprint != data.fingerprint
    red, blue = (
        fingerprint_rows([{"image": Image.new("RGB", (2, 2), c)}]) for c in ("red", "blue")
    )
    assert red != blue


def test_missing_libraries_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(DataError, match=r"needs pyarrow.*pip install 'matsmerge\[hf\]'"):
        read_data(write(tmp_path / "d.parquet", b"x"))
