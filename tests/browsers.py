"""A real browser for tests of pages: headless Chromium, and what is asked of every page.

A test that needs it is skipped where chromium or its driver is not installed.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_FLAGS = ("headless=new", "no-sandbox", "disable-gpu", "no-first-run", "disable-dev-shm-usage")
_QUIET = ("disable-background-networking", "disable-component-update", "disable-sync")

# Text whose contrast with what is behind it is less than WCAG's AA asks for: 4.5, of large text 3.
_FAINT = """
  const parse = (text) => {
    const canvas = window.aCanvas ??= document.createElement("canvas").getContext("2d", {willReadFrequently: true});
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = text; canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
  const light = (rgb) => rgb.slice(0, 3).map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (one) => one ? over(parse(getComputedStyle(one).backgroundColor), ground(one.parentElement)) : [255, 255, 255, 1];
  const found = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const one = walk.currentNode.parentElement;
    if (!walk.currentNode.data.trim() || !one.checkVisibility({visibilityProperty: true})) continue;
    if (one.closest("script, style, title, option, .hidden, .skip")) continue;
    const style = getComputedStyle(one);
    const behind = ground(one);
    const text = over(parse(one.closest("svg") ? style.fill : style.color), behind);
    const [low, high] = [light(text), light(behind)].sort((a, b) => a - b);
    const size = parseFloat(style.fontSize);
    const least = size >= 24 || (size >= 18.66 && style.fontWeight >= 700) ? 3 : 4.5;
    const contrast = (high + 0.05) / (low + 0.05);
    if (contrast < least) found.push(`${walk.currentNode.data.trim().slice(0, 30)}: ${contrast.toFixed(2)}`);
  }
  return found;
"""


class Browser:
    """Chromium with a fresh profile, which it starts with."""

    def __init__(self, driver: Any, downloads: Path) -> None:
        self.driver = driver
        self.downloads = downloads

    def open(self, address: str) -> None:
        self.driver.get(address)

    def look(self, width: int = 1400, theme: str = "light") -> None:
        """As on a screen of this width, on a system with this theme."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.command("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": theme}
        self.command("Emulation.setEmulatedMedia", features=[scheme])

    def command(self, name: str, **arguments: Any) -> Any:
        return self.driver.execute_cdp_cmd(name, arguments)

    def run(self, script: str) -> Any:
        return self.driver.execute_script(script)

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def requests(self) -> set[str]:
        """What was asked for since this was called last, but for what pages hold themselves."""
        events = [json.loads(e["message"])["message"] for e in self.driver.get_log("performance")]
        asked = [e["params"] for e in events if e["method"] == "Network.requestWillBeSent"]
        urls = {request["request"]["url"] for request in asked}
        return {url for url in urls if not url.startswith(("data:", "blob:"))}

    def check_page(self, width: int) -> None:
        """Nothing was complained about, and nothing scrolls sideways."""
        assert self.driver.get_log("browser") == []
        assert self.run("return document.documentElement.scrollWidth") <= width

    def faint_texts(self) -> list[str]:
        """Texts that are hard to read, with their contrast."""
        return list(self.run(_FAINT))

    def downloaded(self, name: str) -> bytes:
        """What was saved under a name, once it is whole."""
        path = self.downloads / name
        wait_for(lambda: path.exists() and not [*self.downloads.glob("*.crdownload")])
        return path.read_bytes()


def wait_for(look: Callable[[], Any]) -> Any:
    until = time.monotonic() + 120  # only so that a page that never comes ends
    while not (found := look()):
        assert time.monotonic() < until, "nothing came"
        time.sleep(0.05)
    return found


@contextmanager
def started_browser(folder: Path) -> Iterator[Browser]:
    """A browser that keeps its profile and what it downloads in a folder."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    service = shutil.which("chromedriver")
    if not (program and service):
        pytest.skip("needs a browser: install chromium and its driver (Debian: chromium-driver)")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in (*_FLAGS, *_QUIET, f"user-data-dir={folder / 'profile'}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(
        options=options, service=webdriver.ChromeService(executable_path=service)
    )
    try:
        made = Browser(driver, folder / "downloads")
        place = str(made.downloads)
        made.command("Browser.setDownloadBehavior", behavior="allow", downloadPath=place)
        made.open("about:blank")
        made.requests()  # what the browser did by itself
        yield made
    finally:
        driver.quit()
