"""A page that shows how far long work is, on this machine alone, while it runs."""

import sys
import threading
import webbrowser
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from matsmerge.errors import MatsError
from matsmerge.lab.reports.document import Items, Report
from matsmerge.lab.reports.page import to_page
from matsmerge.progress import Callback, Progress, Update

_SECONDS = 3  # between two looks
_NUM_NOTES = 12

MakeReport = Callable[[], Report | None]  # what was found so far, if anything was


class LivePage(Progress):
    """A listener that puts what it hears on a page, and tells another one."""

    def __init__(self, title: str, told: Progress, make: MakeReport = lambda: None) -> None:
        self._empty = Report(title, "", [], kind="Running")
        self._told = told
        self._make = make
        self._heard = Update()
        self._inner = Callback(self._hear)
        self._notes: deque[str] = deque(maxlen=_NUM_NOTES)
        self._is_over = False
        self._seen = threading.Event()  # the page of what is over was asked for
        self.was_asked = False

    def stage(self, title: str, total: int | None = None, unit: str = "", done: int = 0) -> None:
        self._inner.stage(title, total, unit, done)
        self._told.stage(title, total, unit, done)

    def advance(self, amount: int, doing: str | None = None) -> None:
        self._inner.advance(amount, doing)
        self._told.advance(amount, doing)

    def note(self, text: str) -> None:
        self._notes.append(text)
        self._told.note(text)

    def _hear(self, update: Update) -> None:
        self._heard = update

    def content(self) -> str:
        """The page as it is now; it asks for the next one by itself until the work is over."""
        self.was_asked = True
        is_over, heard = self._is_over, self._heard
        try:
            report = self._make() or self._empty
        except MatsError:  # what is there cannot be read just now
            report = self._empty
        of = f" of {heard.total:,}" if heard.total is not None else ""
        how_far = f"{heard.title}: {heard.done:,}{of} {heard.unit}" if heard.title else "starting"
        now = [f"now: {heard.text}"] if heard.text else []
        share = heard.done / heard.total if heard.total else None
        said = [*now, *reversed(self._notes)]
        lately = Items("over", said) if is_over else Items(how_far, said, share=share)
        if not is_over:
            report = replace(report, warnings=[lately])
        elif report is self._empty:
            report = replace(report, kind="Over", warnings=[lately])
        content = to_page(report, refresh=0 if is_over else _SECONDS)
        if is_over:
            self._seen.set()
        return content

    def end(self) -> None:
        """Say that it is over, and let a browser that looked on see how it ended."""
        self._is_over = True
        if self.was_asked:
            self._seen.wait(2 * _SECONDS)


@contextmanager
def watched(
    title: str, told: Progress, say: Callable[[str], None], make: MakeReport = lambda: None
) -> Iterator[Progress]:
    """Serve a live page while the block runs, and open it where somebody looks on."""
    page = LivePage(title, told, make)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # Another site whose name leads here is told nothing.
            if self.path != "/" or self.headers.get("Host") != name:
                self.send_error(404)
                return
            content = page.content().encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        name = f"127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://{name}/"
        say(f"watch it at {address}")
        if sys.stdout.isatty():
            webbrowser.open(address)
        try:
            yield page
            page.end()
        finally:
            server.shutdown()
