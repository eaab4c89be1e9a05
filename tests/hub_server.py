"""A stand-in for the hub on loopback, which the real hub client talks to."""

import base64
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import huggingface_hub.constants
import pytest
from s3_server import read_body


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
        self.ranges: list[tuple[str, str]] = []  # of files that were read
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
        elif "/resolve/" in path:
            self._send_range(*path.removeprefix("/").split("/resolve/main/"))
        elif path == "/api/whoami-v2":
            self._answer({"name": "owner", "type": "user"})
        elif "/tree/" in path:
            files = self.server.repos[repo].items()
            self._answer(
                [{"type": "file", "path": n, "oid": "0", "size": len(c)} for n, c in files]
            )
        elif repo not in self.server.repos:
            self._answer({"error": "no such repository"}, 404, "RepoNotFound")
        else:
            self._answer({"id": repo, "private": self.server.private.get(repo), "siblings": []})

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

    def _send_range(self, repo: str, name: str) -> None:
        asked = self.headers.get("Range", "")
        self.server.ranges.append((name, asked))
        first, _, last = asked.removeprefix("bytes=").partition("-")
        content = self.server.repos[repo][name]
        part = content[int(first) : int(last) + 1] if asked else content
        self.send_response_only(206 if asked else 200)
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)

    def _answer(self, content: Any, status: int = 200, error: str = "") -> None:
        encoded = json.dumps(content).encode()
        self.send_response_only(status)
        if error:
            self.send_header("X-Error-Code", error)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(encoded)))
        self.end_headers()
        self.wfile.write(encoded)


@contextmanager
def hub_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that the client takes for the only one, and is logged in to."""
    with Hub() as found:
        template = f"{found.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", found.address)
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", "hf_token")
        yield found
        found.shutdown()
