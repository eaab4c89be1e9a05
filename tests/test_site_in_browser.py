"""The documentation in a real browser: no errors, no network, nothing scrolls sideways."""

import functools
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
from browsers import Browser, started_browser, wait_for
from built_site import built_site

PAGES = ("index", "mats", "statistics", "reference/commands", "reference/recipes")


class _Silent(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The site as a server gives it: from a file there is no search."""
    handler = functools.partial(_Silent, directory=str(built_site(tmp_path_factory)))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with started_browser(tmp_path_factory.mktemp("browser")) as started:
        yield started


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400])
@pytest.mark.parametrize("page", PAGES)
def test_a_page(browser: Browser, address: str, page: str, width: int, theme: str) -> None:
    browser.look(width, theme)
    browser.open(f"{address}{page}.html")
    browser.check_page(width)
    urls = browser.requests()
    assert f"{address}{page}.html" in urls
    assert {url for url in urls if not url.startswith(address)} == set()
    scheme = {"light": "default", "dark": "slate"}[theme]
    wait_for(lambda: browser.run("return document.body.dataset.mdColorScheme") == scheme)
    broken = "return [...document.images].filter((i) => !i.naturalWidth && i.complete).length"
    assert browser.run(broken) == 0


def test_pages_are_found_by_searching(browser: Browser, address: str) -> None:
    browser.look()
    browser.open(f"{address}index.html?q=KnOTS")
    found = "return [...document.querySelectorAll('.md-search-result__link')].map((a) => a.href)"
    links = wait_for(lambda: browser.run(found))
    assert any("adapters.html" in link for link in links)
