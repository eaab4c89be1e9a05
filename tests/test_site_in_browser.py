"""The documentation in a real browser: no errors, no network, nothing scrolls sideways."""

import functools
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from built_site import built_site

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
if not (BROWSER and DRIVER):
    pytest.skip(
        "needs a browser: install chromium and its driver (Debian: chromium, chromium-driver)",
        allow_module_level=True,
    )
webdriver = pytest.importorskip("selenium.webdriver")

PAGES = ("index", "mats", "statistics", "reference/commands", "reference/recipes")
FLAGS = ("headless=new", "no-sandbox", "disable-gpu", "no-first-run", "disable-dev-shm-usage")
QUIET = ("disable-background-networking", "disable-component-update", "disable-sync")


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
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    profile = tmp_path_factory.mktemp("profile")
    for flag in (*FLAGS, *QUIET, f"user-data-dir={profile}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    made = webdriver.Chrome(
        options=options, service=webdriver.ChromeService(executable_path=DRIVER)
    )
    try:
        made.get("about:blank")
        made.get_log("performance")  # what the browser did by itself
        yield made
    finally:
        made.quit()


def look(driver: Any, width: int, theme: str) -> None:
    """As on a screen of this width, on a system with this theme."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": theme}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400])
@pytest.mark.parametrize("page", PAGES)
def test_a_page(driver: Any, address: str, page: str, width: int, theme: str) -> None:
    look(driver, width, theme)
    driver.get(f"{address}{page}.html")
    assert driver.get_log("browser") == []
    events = [json.loads(e["message"])["message"] for e in driver.get_log("performance")]
    asked = [e["params"] for e in events if e["method"] == "Network.requestWillBeSent"]
    urls = {request["request"]["url"] for request in asked}
    assert f"{address}{page}.html" in urls
    assert {url for url in urls if not url.startswith((address, "data:", "blob:"))} == set()
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width
    scheme = driver.execute_script("return document.body.dataset.mdColorScheme")
    assert scheme == {"light": "default", "dark": "slate"}[theme]
    broken = "return [...document.images].filter((i) => !i.naturalWidth && i.complete).length"
    assert driver.execute_script(broken) == 0


def test_pages_are_found_by_searching(driver: Any, address: str) -> None:
    look(driver, 1400, "light")
    driver.get(f"{address}index.html?q=KnOTS")
    from selenium.webdriver.support.ui import WebDriverWait

    found = "return [...document.querySelectorAll('.md-search-result__link')].map((a) => a.href)"
    links = WebDriverWait(driver, 120).until(lambda d: d.execute_script(found))
    assert any("adapters.html" in link for link in links)
