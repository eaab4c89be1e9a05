"""The page that follows long work: what it shows, who may see it, and how it ends."""

import re
import sys
import threading
import urllib.error
import urllib.request
import webbrowser
from collections.abc import Callable

import pytest
from made_up_results import make_results

from matsmerge.errors import DataError
from matsmerge.lab.reports import live_page
from matsmerge.lab.reports.document import Report
from matsmerge.lab.reports.live_page import LivePage, watched
from matsmerge.lab.reports.suite_report import suite_report
from matsmerge.progress import Progress


class Heard(Progress):
    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def stage(self, title: str, total: int | None = None, unit: str = "", done: int = 0) -> None:
        self.calls.append(("stage", title, total, unit, done))

    def advance(self, amount: int, doing: str | None = None) -> None:
        self.calls.append(("advance", amount, doing))

    def note(self, text: str) -> None:
        self.calls.append(("note", text))


def fetch(address: str, host: str | None = None) -> str:
    headers = {} if host is None else {"Host": host}
    with urllib.request.urlopen(urllib.request.Request(address, headers=headers)) as answer:
        return str(answer.read().decode())


def test_what_is_heard_is_shown_and_told() -> None:
    heard = Heard()
    page = LivePage("Tuning recipe.yaml", heard)
    assert "starting" in page.content()
    assert "<progress" not in page.content()
    page.stage("tuning", 9, "merges", 2)
    page.advance(1, "last <0.8>")
    page.note("a & b")
    text = page.content()
    assert "Tuning recipe.yaml" in text
    assert "tuning: 3 of 9 merges" in text
    assert '<progress value="0.3333" aria-label="tuning: 3 of 9 merges">' in text
    assert "now: last &lt;0.8&gt;" in text
    assert "a &amp; b" in text
    assert '<meta http-equiv="refresh" content="3">' in text
    assert heard.calls == [
        ("stage", "tuning", 9, "merges", 2), ("advance", 1, "last <0.8>"), ("note", "a & b"),
    ]  # fmt: skip


def broken() -> Report | None:
    raise DataError("half a file")


def made() -> Report | None:
    return suite_report(make_results(seeds=1))


@pytest.mark.parametrize(("make", "says"), [(made, "<h1>Use mats_kfac: "), (broken, "<h1>Mine<")])
def test_what_was_found_so_far_is_shown(make: Callable[[], Report | None], says: str) -> None:
    page = LivePage("Mine", Progress(), make)
    page.stage("steps", 9, "steps")
    text = page.content()
    assert says in text
    assert "steps: 0 of 9 steps" in text


def test_it_ends_when_the_end_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_page, "_SECONDS", 60)  # which nobody waits for
    page = LivePage("Mine", Progress(), made)
    page.end()  # nobody looked on
    page = LivePage("Mine", Progress(), made)
    page.content()
    ending = threading.Thread(target=page.end)
    ending.start()
    while "refresh" in (text := page.content()):
        pass
    ending.join()
    assert "Use mats_kfac" in text


def test_it_is_served_to_this_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.setattr(live_page, "_SECONDS", 0)
    said: list[str] = []
    with watched("Mine", Progress(), said.append) as progress:
        progress.stage("steps", 4, "steps", 1)
        (address,) = re.findall(r"http://127\.0\.0\.1:\d+/", said[0])
        assert "steps: 1 of 4 steps" in fetch(address)
        for place, host in ((f"{address}etc/passwd", None), (address, "evil.example:80")):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                fetch(place, host)
    assert opened == []  # nobody looks on
    with pytest.raises(urllib.error.URLError):
        fetch(address)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with watched("Mine", Progress(), said.append):
        pass
    assert opened == [said[1].removeprefix("watch it at ")]


def test_an_error_ends_it_at_once() -> None:
    def run(said: list[str]) -> None:
        with watched("Mine", Progress(), said.append):
            fetch(said[0].removeprefix("watch it at "))
            raise DataError("no")

    said: list[str] = []
    with pytest.raises(DataError):
        run(said)
    with pytest.raises(urllib.error.URLError):
        fetch(said[0].removeprefix("watch it at "))
