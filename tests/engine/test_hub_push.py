"""The real hub client against a stand-in for the hub on loopback."""

import base64
import hashlib
import http.server
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from s3_server import read_body

import matsmerge
from matsmerge import OutputError, StatisticsError

# The client's own use of its HTTP library.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning")

Save = Callable[..., Path]
Mats = Callable[..., tuple[int, str, str]]


class Hub(http.server.ThreadingHTTPServer):
    """Repositories by name, each with its files; large files come by LFS."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answering)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.large: dict[str, bytes] = {}
        self.broken = ""  # a path that is answered by an error
        self.commits = 0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def commit(self, repo: str, lines: list[dict[str, Any]]) -> None:
        files = dict(self.repos[repo])
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.large[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        self.repos[repo] = files
        self.commits += 1


class _Answering(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        repo = "/".join(path.split("/")[3:5])
        if self.headers.get("Authorization") != "Bearer hf_token":
            self._answer({"error": "who are you"}, 401)
        elif path == "/api/whoami-v2":
            self._answer({"name": "owner", "type": "user"})
        elif "/tree/" in path:
            files = self.server.repos[repo].items()
            self._answer(
                [{"type": "file", "path": n, "oid": "0", "size": len(c)} for n, c in files]
            )
        else:
            self._answer({"id": repo, "private": self.server.private[repo], "siblings": []})

    def do_POST(self) -> None:
        body = read_body(self)
        hub, path = self.server, self.path.partition("?")[0]
        repo = "/".join(path.split("/")[3:5])
        if hub.broken and hub.broken in path:
            self._answer({"error": "out of order"}, 400)
        elif path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked.get('organization', 'owner')}/{asked['name']}"
            is_new = repo not in hub.repos
            hub.repos.setdefault(repo, {})
            hub.private.setdefault(
                repo, asked.get("private") or asked.get("visibility") == "private"
            )
            self._answer({"url": f"{hub.address}/{repo}"}, 200 if is_new else 409)
        elif path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif "/preupload/" in path:
            names = [file["path"] for file in json.loads(body)["files"]]
            mode = {n: "lfs" if n.endswith(".safetensors") else "regular" for n in names}
            self._answer(
                {
                    "files": [
                        {"path": n, "uploadMode": mode[n], "shouldIgnore": False} for n in names
                    ]
                }
            )
        elif path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            for one in objects:
                if one["oid"] not in hub.large:
                    one["actions"] = {"upload": {"href": f"{hub.address}/lfs/{one['oid']}"}}
            self._answer({"transfer": "basic", "objects": objects})
        else:
            assert "/commit/" in path
            hub.commit(repo, [json.loads(line) for line in body.splitlines()])
            oid = hashlib.sha1(str(hub.commits).encode()).hexdigest()
            self._answer(
                {
                    "success": True,
                    "commitOid": oid,
                    "commitUrl": f"{hub.address}/{repo}/commit/{oid}",
                }
            )

    def do_PUT(self) -> None:
        content = read_body(self)
        assert hashlib.sha256(content).hexdigest() == self.path.rpartition("/")[2]
        self.server.large[self.path.rpartition("/")[2]] = content
        self._answer({})

    def _answer(self, content: Any, status: int = 200) -> None:
        encoded = json.dumps(content).encode()
        self.send_response_only(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(encoded)))
        self.end_headers()
        self.wfile.write(encoded)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as found:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", found.address)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", "hf_token")
        yield found
        found.shutdown()


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
