"""The real hub client against a stand-in for the hub on loopback."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hub_server import Hub, hub_server

import matsmerge
from matsmerge import OutputError, StatisticsError

# The client's own use of its HTTP library.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning")

Save = Callable[..., Path]
Mats = Callable[..., tuple[int, str, str]]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_server(monkeypatch) as found:
        yield found


@pytest.fixture
def folder(save_model: Save) -> Path:
    """A merged model, with everything that goes with it."""
    models = []
    for name in "ab":
        torch.manual_seed(ord(name))
        models.append(
            save_model(name, {"w": torch.randn(4, 4)}, config__json='{"model_type": "x"}')
        )
    return matsmerge.merge(models, out=models[0].with_name("merged")).folder


def local_files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if not p.name.startswith(".")}


def test_a_merged_model_is_private(hub: Hub, folder: Path) -> None:
    address = matsmerge.push(folder, "owner/merged")
    assert address.startswith(f"{hub.address}/owner/merged/commit/")
    assert hub.repos == {"owner/merged": local_files(folder)}
    assert {"README.md", "merge.json", "model.safetensors"} <= hub.repos["owner/merged"].keys()
    assert hub.private == {"owner/merged": True}
    assert hub.commits == 1


def test_from_the_command_line(hub: Hub, folder: Path, mats: Mats) -> None:
    code, out, err = mats("push", folder, "owner/merged", "--public", "--json")
    assert code == 0, err
    assert json.loads(out)["repo"] == "owner/merged"
    assert hub.private == {"owner/merged": False}
    beside = folder.with_name("again")
    models = [str(folder.with_name(name)) for name in "ab"]
    code, out, err = mats(
        "merge", "--model", models[0], "--model", models[1], "-o", beside, "--push", "owner/again"
    )
    assert code == 0, err
    assert f"{beside} is on the hub as owner/again" in " ".join(out.split())
    assert hub.repos["owner/again"] == local_files(beside)
    assert hub.private["owner/again"]


def test_statistics_too(hub: Hub, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "gram.safetensors"
    matsmerge.collect(torch.nn.Linear(4, 4, bias=False), [torch.randn(5, 4)], "gram", out=file)
    matsmerge.push(folder, "owner/merged", statistics=file)
    assert hub.repos["owner/merged"]["statistics.safetensors"] == file.read_bytes()
    matsmerge.push(file, "owner/numbers")
    assert hub.repos["owner/numbers"] == {"statistics.safetensors": file.read_bytes()}
    with pytest.raises(StatisticsError, match="holds no statistics"):
        matsmerge.push(folder, "owner/merged", statistics=folder / "model.safetensors")


def test_weights_of_an_earlier_push_go(hub: Hub, folder: Path) -> None:
    old = {
        "model-00001-of-00002.safetensors": b"",
        "model.safetensors.index.json": b"",
        "notes.txt": b"mine",
    }
    hub.repos["owner/merged"], hub.private["owner/merged"] = dict(old), True
    matsmerge.push(folder, "owner/merged")
    assert hub.repos["owner/merged"] == {"notes.txt": b"mine", **local_files(folder)}


def test_a_folder_without_a_card_gets_one(hub: Hub, save_model: Save) -> None:
    folder = save_model("plain", {"w": torch.randn(2)}, config__json="{}")
    matsmerge.push(folder, "owner/plain")
    card = hub.repos["owner/plain"]["README.md"].decode()
    assert card.startswith("---\nlibrary_name: transformers\ntags:\n- matsmerge\n---\n")
    assert not (folder / "README.md").exists()


def test_nothing_private_becomes_public_by_mistake(hub: Hub, folder: Path) -> None:
    hub.repos["owner/merged"], hub.private["owner/merged"] = {}, False
    with pytest.raises(OutputError, match="owner/merged: is there already, and public"):
        matsmerge.push(folder, "owner/merged")
    matsmerge.push(folder, "owner/merged", public=True)
    assert hub.commits == 1


@pytest.mark.parametrize("broken", ["preupload", "commit"])
def test_what_breaks_off_is_not_there(hub: Hub, folder: Path, broken: str) -> None:
    hub.broken = broken
    with pytest.raises(OutputError, match="owner/merged: the hub did not accept it"):
        matsmerge.push(folder, "owner/merged")
    assert hub.repos == {"owner/merged": {}}
    hub.broken = ""
    matsmerge.push(folder, "owner/merged")
    assert hub.repos == {"owner/merged": local_files(folder)}


@pytest.mark.parametrize("repo", ["name", "owner/na me", "a/b/c"])
def test_names_that_are_none(hub: Hub, folder: Path, mats: Mats, repo: str) -> None:
    with pytest.raises(OutputError, match=repo):
        matsmerge.push(folder, repo)
    out = folder.with_name("out")
    code, _, err = mats("merge", "--model", folder.with_name("a"), "-o", out, "--push", repo)
    assert code == 1
    assert repo in err
    assert not out.exists()  # it is said before the work


def test_strangers_are_told_to_log_in(
    hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    with pytest.raises(OutputError, match="hf auth login") as error:
        matsmerge.push(folder, "owner/merged")
    assert "hf_other" not in str(error.value)
    assert not hub.repos


def test_what_is_no_model(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="expected a model's folder"):
        matsmerge.push(tmp_path / "none", "owner/name")
    with pytest.raises(matsmerge.CheckpointError, match="no model weights"):
        matsmerge.push(tmp_path, "owner/name")
