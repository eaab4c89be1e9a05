import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import Tensor, nn

from matsmerge import CheckpointError, open_checkpoint
from matsmerge.checkpoints.checkpoint import Checkpoint
from matsmerge.checkpoints.source import Source

Save = Callable[..., Path]


def content(checkpoint: Checkpoint) -> dict[str, Tensor]:
    return {name: checkpoint[name] for name in checkpoint.specs}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


@pytest.fixture
def state(make_state: Callable[..., dict[str, Tensor]]) -> dict[str, Tensor]:
    return make_state()


def write_shards(folder: Path, state: dict[str, Tensor], suffix: str) -> None:
    folder.mkdir()
    weight_map = {}
    for i, name in enumerate(state):
        file = f"shard-{i % 3}.{suffix}"
        weight_map[name] = file
    for file in set(weight_map.values()):
        part = {n: state[n] for n, f in weight_map.items() if f == file}
        if suffix == "safetensors":
            save_file(part, folder / file)
        else:
            torch.save(part, folder / file)
    stem = "model.safetensors" if suffix == "safetensors" else "pytorch_model.bin"
    (folder / f"{stem}.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_every_format_reads_the_same(tmp_path: Path, state: dict[str, Tensor]) -> None:
    save_file(state, tmp_path / "one.safetensors")
    torch.save(state, tmp_path / "one.bin")
    torch.save({"state_dict": state}, tmp_path / "nested.pt")
    torch.save(state, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    write_shards(tmp_path / "sharded", state, "safetensors")
    write_shards(tmp_path / "pickled", state, "bin")
    (tmp_path / "adapter").mkdir()
    save_file(state, tmp_path / "adapter" / "adapter_model.safetensors")
    names = "one.safetensors", "one.bin", "nested.pt", "old.pth", "sharded", "pickled", "adapter"
    sources: list[Source] = [*(tmp_path / name for name in names), str(tmp_path / "sharded"), state]
    for source in sources:
        assert equal(content(open_checkpoint(source)), state)


def test_pieces(tmp_path: Path, state: dict[str, Tensor]) -> None:
    save_file(state, tmp_path / "one.safetensors")
    sources: tuple[Source, ...] = (tmp_path / "one.safetensors", state)
    for source in sources:
        piece = open_checkpoint(source).read("embed.weight", 7, 100)
        assert torch.equal(piece, state["embed.weight"].flatten()[7:100])


def test_a_pickled_copy_reads_too(tmp_path: Path, state: dict[str, Tensor]) -> None:
    save_file(state, tmp_path / "one.safetensors")
    checkpoint = open_checkpoint(tmp_path / "one.safetensors")
    _ = checkpoint["scalar"]
    assert equal(content(pickle.loads(pickle.dumps(checkpoint))), state)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def test_tied_weights_are_one_tensor(tmp_path: Path) -> None:
    model = Tied()
    save_model(model, str(tmp_path / "tied.safetensors"))
    torch.save(model.state_dict(), tmp_path / "tied.bin")
    sources: tuple[Source, ...] = (model, tmp_path / "tied.safetensors", tmp_path / "tied.bin")
    for source in sources:
        checkpoint = open_checkpoint(source)
        assert len(checkpoint.specs) == len(checkpoint.aliases) == 1
        assert torch.equal(checkpoint["head.weight"], checkpoint["embed.weight"])


def test_non_contiguous_and_overlapping_tensors() -> None:
    whole = torch.arange(12.0).view(3, 4)
    checkpoint = open_checkpoint({"whole": whole, "turned": whole.T, "row": whole[0]})
    assert not checkpoint.aliases
    assert torch.equal(checkpoint["turned"], whole.T)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"a": "../outside.safetensors"}}, "not a file name in its folder"),
        ({"weight_map": {"a": "/etc/passwd"}}, "not a file name in its folder"),
        ({"weight_map": {"a": ".."}}, "not a file name in its folder"),
        ({"weight_map": {"a": ""}}, "not a file name in its folder"),
        ({"weight_map": {"a": "x" * 300}}, "not a file name in its folder"),
        ({"weight_map": {"a": "x\0.safetensors"}}, "not a file name in its folder"),
        ({"weight_map": {"a": "\ud800"}}, "half a character"),
        ({"weight_map": {"a": "pipe.safetensors"}}, "which is not a regular file"),
        ({"weight_map": {"a": 3}}, "not a checkpoint index: weight_map.a: .* string, found 3"),
        ({"weight_map": {f"a{i}": f"{i}" for i in range(99)}}, "and 91 more"),
        ({"weight_map": {"a": "gone.safetensors"}}, "'gone.safetensors', which is missing"),
        ({"weight_map": {"a": "x.safetensors", "b": "x.safetensors"}}, "lists 'b', which no shard"),
        ({"weight_map": {"b": "y.safetensors"}}, "does not list 'c'.*\n.*lists 'b'"),
        ({"weight_map": {"a": "x.safetensors", "c": "twin.safetensors"}}, "'a' is also in"),
        ({"weights": {}}, "not a checkpoint index"),
        ([], "not a checkpoint index"),
        ({"weight_map": {"a": ["x.safetensors"]}}, "weight_map.a: .* string, found a list"),
        ({"weight_map": 3}, "not a checkpoint index: weight_map: "),
    ],
)
def test_bad_index(tmp_path: Path, index: object, message: str) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "outside.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.ones(2)}, folder / "x.safetensors")
    save_file({"c": torch.ones(2)}, folder / "y.safetensors")
    save_file({"a": torch.ones(2), "c": torch.ones(2)}, folder / "twin.safetensors")
    os.mkfifo(folder / "pipe.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=f"(?s){message}"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "model.safetensors.index.json",
        "adapter_model.safetensors",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
        "other.safetensors",
        "other.pt",
    ],
)
def test_a_pipe_is_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    sources = [tmp_path / name] if not name.endswith(".json") else []
    for source in [*sources, *([tmp_path] if not name.endswith(".pt") else [])]:
        with pytest.raises(CheckpointError, match=f"{name}: not a regular file"):
            open_checkpoint(source)


def test_devices_and_folders_are_no_files(tmp_path: Path) -> None:
    (tmp_path / "zero.safetensors").symlink_to("/dev/zero")
    (tmp_path / "zero.bin").symlink_to("/dev/zero")
    for name in ("zero.safetensors", "zero.bin"):
        with pytest.raises(CheckpointError, match="not a regular file"):
            open_checkpoint(tmp_path / name)
    (tmp_path / "m" / "model.safetensors").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="not a regular file"):
        open_checkpoint(tmp_path / "m")
    with pytest.raises(CheckpointError, match="cannot be read|no such file"):
        open_checkpoint("a\0b.safetensors")


def test_a_key_twice_in_the_index(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    text = '{"weight_map": {"a": "x.safetensors", "a": "x.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="'a' appears twice"):
        open_checkpoint(tmp_path)


def test_a_tensor_in_two_pickled_shards(tmp_path: Path) -> None:
    for name in ("x.bin", "y.bin"):
        torch.save({"a": torch.ones(2), name: torch.ones(1)}, tmp_path / name)
    index = {"weight_map": {"a": "x.bin", "x.bin": "x.bin", "y.bin": "y.bin"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="'a' is also in another shard"):
        open_checkpoint(tmp_path)


def test_all_damaged_shards_are_named(tmp_path: Path, state: dict[str, Tensor]) -> None:
    write_shards(tmp_path / "m", state, "safetensors")
    for i in (0, 2):
        path = tmp_path / "m" / f"shard-{i}.safetensors"
        path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(tmp_path / "m")
    assert len(error.value.problems) == 2


def test_links_out_of_the_folder(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "outside.safetensors")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.safetensors").symlink_to(tmp_path / "outside.safetensors")
    with pytest.raises(CheckpointError, match="outside of its folder"):
        open_checkpoint(tmp_path / "m")


def test_links_in_a_circle(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="model.safetensors: cannot be read"):
        open_checkpoint(tmp_path)


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (Path("evil"),)  # type: ignore[return-value]


@pytest.mark.parametrize("protocol", [True, False])
def test_pickles_with_code_are_refused(tmp_path: Path, protocol: bool) -> None:
    path = tmp_path / "evil.pt"
    torch.save({"a": torch.ones(2), "b": Evil()}, path, _use_new_zipfile_serialization=protocol)
    with pytest.raises(CheckpointError, match="refused"):
        open_checkpoint(path)
    torch.save(nn.Linear(2, 2), path, _use_new_zipfile_serialization=protocol)
    with pytest.raises(CheckpointError, match="refused"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"model": torch.ones(1), "step": 3}, r"expected a dict of tensors.*\['model', 'step'\]"),
        ([torch.ones(1)], "expected a dict of tensors.*found list"),
    ],
)
def test_other_pickles(tmp_path: Path, content: object, message: str) -> None:
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path / "x.pt")


def test_nothing_to_open(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.md").write_text("")
    save_file({}, tmp_path / "none.safetensors")
    (tmp_path / "empty.bin").write_bytes(b"")
    torch.save({3: torch.ones(1)}, tmp_path / "number.bin")
    for source, message in (
        (tmp_path / "gone", "no such file or folder"),
        ("gone", "no such file or folder"),
        (tmp_path / "empty", "no model weights.*an empty folder"),
        (tmp_path / "notes.md", "expected .safetensors"),
        (tmp_path / "none.safetensors", "holds no tensors"),
        (tmp_path / "empty.bin", "refused; it is damaged"),
        (tmp_path / "number.bin", "the key 3 is not a name"),
        ("~nosuchuser/x/y", "no such file or folder"),
        ("x" * 300, "cannot be read"),
        ({"a": 3}, "is a int, expected a tensor"),
        ({"a": torch.ones(1, dtype=torch.complex64)}, "complex64, which cannot be merged"),
        ({"a": torch.ones(1, device="meta")}, "meta device"),
    ):
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(source)  # type: ignore[arg-type]
