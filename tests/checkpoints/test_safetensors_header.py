import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save_file

from matsmerge.checkpoints import stored
from matsmerge.checkpoints.checkpoint import DTYPES, TensorSpec
from matsmerge.checkpoints.safetensors_header import encode_header, read_header
from matsmerge.errors import CheckpointError


def write(path: Path, header: str | bytes, data: bytes = b"") -> Path:
    raw = header if isinstance(header, bytes) else header.encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def test_reads_what_safetensors_writes(tmp_path: Path) -> None:
    state = {"a": torch.randn(3, 4), "b": torch.arange(5), "c": torch.tensor(1.5).bfloat16()}
    save_file(state, tmp_path / "x.safetensors", metadata={"format": "pt"})
    header = read_header(tmp_path / "x.safetensors")
    assert header.specs == {n: TensorSpec(t.dtype, tuple(t.shape)) for n, t in state.items()}
    assert header.metadata == {"format": "pt"}


@settings(max_examples=50, deadline=None)
@given(
    specs=st.dictionaries(
        st.text(min_size=1, max_size=10).filter(lambda s: s != "__metadata__"),
        st.builds(
            TensorSpec,
            st.sampled_from(list(DTYPES.values())),
            st.lists(st.integers(0, 4), max_size=3).map(tuple),
        ),
        max_size=5,
    )
)
def test_safetensors_reads_what_we_write(specs: dict[str, TensorSpec]) -> None:
    header, offsets = encode_header(specs, {"format": "pt"})
    size = sum(spec.num_bytes for spec in specs.values())
    loaded = load(header + bytes(size))
    assert {n: (t.dtype, tuple(t.shape)) for n, t in loaded.items()} == {
        n: (s.dtype, s.shape) for n, s in specs.items()
    }
    assert all(offset <= len(header) + size for offset in offsets.values())


EMPTY = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (json.dumps({"a": GOOD}), b"1234567", "truncated"),
        (json.dumps({"a": GOOD}), b"123456789", "bytes left over"),
        (
            json.dumps({"a": GOOD | {"dtype": "F6_E2M3"}}),
            b"12345678",
            "a.dtype: .*convert .*F6_E2M3",
        ),
        (json.dumps({"a": GOOD | {"data_offsets": [8, 16]}}), b"1" * 16, "expected 0 to 8"),
        (json.dumps({"a": GOOD | {"shape": [3]}}), b"12345678", "'a'.*expected 0 to 12"),
        (json.dumps({"a": GOOD | {"shape": [-2]}}), b"12345678", "a.shape.0: .* found -2"),
        (json.dumps({"a": GOOD | {"shape": [True, 2]}}), b"12345678", "a.shape.0: .* integer"),
        (json.dumps({"a": EMPTY | {"shape": [0, 10**30]}}), b"", "a.shape.1: .* 10{30}"),
        (json.dumps({"a": EMPTY | {"shape": [0, 2**63 - 1]}}), b"", "a.shape: nothing can load"),
        (json.dumps({"a": EMPTY | {"shape": [2**31, 0, 2**31]}}), b"", "a.shape: nothing can load"),
        (json.dumps({"a": EMPTY | {"shape": [0] + [1] * 64}}), b"", "a.shape: .* at most 64 items"),
        (json.dumps({"\ud800": EMPTY}), b"", "damaged header"),
        ('{"a": 1, "a": 2}', b"", "'a' appears twice"),
        ('{"a": {}}', b"", "damaged header"),
        ("[1]", b"", "damaged header"),
        ('{"__metadata__": [1]}', b"", "__metadata__: .* dictionary"),
        (b"\xff\xfe", b"", "damaged header"),
        ("{" * 100_000, b"", "damaged header"),
    ],
)
def test_damaged_files(tmp_path: Path, header: str | bytes, data: bytes, message: str) -> None:
    path = write(tmp_path / "x.safetensors", header, data)
    with pytest.raises(CheckpointError, match=message) as error:
        read_header(path)
    assert "x.safetensors" in str(error.value)


def test_not_even_a_header(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"12")
    with pytest.raises(CheckpointError, match="only 2 bytes"):
        read_header(path)
    path.write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        read_header(path)


def test_large_dimensions_of_empty_tensors_that_can_be_loaded(tmp_path: Path) -> None:
    content = json.dumps({"a": EMPTY | {"shape": [0, 2**30, 2**29]}, "😀": EMPTY})
    path = write(tmp_path / "x.safetensors", content)
    assert read_header(path).specs["a"].shape == (0, 2**30, 2**29)
    assert load(path.read_bytes())["a"].double().numpy().size == 0


@pytest.mark.parametrize("is_escaped", [False, True])
def test_a_million_tensors_are_refused_before_they_are_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_escaped: bool
) -> None:
    entry = json.dumps(EMPTY).replace("offsets", "offset\\u0073" if is_escaped else "offsets")
    content = ",".join(f'"{i}":{entry}' for i in range(1_000_000))
    path = write(tmp_path / "x.safetensors", f"{{{content}}}")
    monkeypatch.setattr(json, "loads", None)
    with pytest.raises(CheckpointError, match="more than 3,000,000 values"):
        read_header(path)


def test_values_that_are_no_tensors_count_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "x.safetensors", f'{{"a": [{"[]," * 4_000_000}0]}}')
    monkeypatch.setattr(json, "loads", None)
    with pytest.raises(CheckpointError, match="more than 3,000,000 values"):
        read_header(path)


def test_tensors_of_all_shards_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "MAX_TENSORS", 5)
    names = [[str(10 * i + j) for j in range(2)] for i in range(4)]
    paths = [
        write(tmp_path / f"{i}.safetensors", json.dumps(dict.fromkeys(own, EMPTY)))
        for i, own in enumerate(names)
    ]
    stored.StoredCheckpoint("", paths[:2], None)
    with pytest.raises(CheckpointError, match="2.safetensors: .*more than"):
        stored.StoredCheckpoint("", paths, None)
