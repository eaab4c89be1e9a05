"""A real S3 server on loopback, behind a proxy that counts bytes and breaks answers."""

import http.client
import http.server
import importlib.util
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

# What becomes of a request (method, path, range): "500", "reset", "short", or None.
Fault = Callable[[str, str, str], str | None]


class Proxy(http.server.ThreadingHTTPServer):
    """Passes requests on to the server, and notes how many bytes each answer had."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Passing)
        self.behind = port
        self.answers: list[tuple[str, str, str, int]] = []  # method, path, range, bytes
        self.fault: Fault = lambda *_: None
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_: object) -> None:
        """Clients that hang up are what this is for."""


class _Passing(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def _pass_on(self) -> None:
        body = read_body(self)
        asked = (self.command, self.path, self.headers.get("Range", ""))
        fault = self.server.fault(*asked)
        if fault == "reset":
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.connection.close()
            self.close_connection = True
            return
        if fault == "500":
            self._answer(500, [], b"")
            return
        behind = http.client.HTTPConnection("127.0.0.1", self.server.behind, timeout=60)
        headers = {k: v for k, v in self.headers.items() if k.lower() != "transfer-encoding"}
        behind.request(self.command, self.path, body, headers | {"Content-Length": str(len(body))})
        found = behind.getresponse()
        content = found.read()
        behind.close()
        self.server.answers.append((*asked, len(content)))
        headers_back = [(k, v) for k, v in found.getheaders() if k.lower() not in _OWN]
        if self.command == "HEAD":
            headers_back.append(("Content-Length", found.getheader("Content-Length") or "0"))
        self._answer(found.status, headers_back, content, short=fault == "short")

    def _answer(
        self, status: int, headers: list[tuple[str, str]], content: bytes, short: bool = False
    ) -> None:
        self.send_response_only(status)
        for key, value in headers:
            self.send_header(key, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if short else content)
        self.close_connection = short

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass_on  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


def read_body(request: http.server.BaseHTTPRequestHandler) -> bytes:
    """What was sent with a request, in one piece or in chunks."""
    if request.headers.get("Transfer-Encoding", "").lower() != "chunked":
        return request.rfile.read(int(request.headers.get("Content-Length") or 0))
    content = bytearray()
    while size := int(request.rfile.readline().split(b";")[0], 16):
        content += request.rfile.read(size)
        request.rfile.readline()
    request.rfile.readline()
    return bytes(content)


_OWN = ("content-length", "transfer-encoding", "connection", "date", "server")


@contextmanager
def s3_server() -> Iterator[int]:
    """The port of a moto server that runs in a process of its own."""
    for name in ("moto", "s3fs"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name}: pip install 'matsmerge[dev]'")
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        env={**os.environ, **CREDENTIALS},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.kill()


# It takes a port that is free, and says which: one that is chosen before may be taken meanwhile.
_SERVER = """
import threading
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
threading.Event().wait()
"""


CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "not-a-real-secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_MAX_ATTEMPTS": "1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
