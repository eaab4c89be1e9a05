"""The page in a real browser: charts, choices, files that are saved, themes, a phone."""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from made_up_results import make_results

from matsmerge.lab.reports.page import to_page
from matsmerge.lab.reports.suite_report import suite_report

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
if not (BROWSER and DRIVER):
    pytest.skip(
        "needs a browser: install chromium and its driver (Debian: chromium, chromium-driver)",
        allow_module_level=True,
    )
webdriver = pytest.importorskip("selenium.webdriver")

FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]
CONVERGENCE = "document.querySelector('.convergence .plot')"
LINES = f"return {CONVERGENCE}.querySelectorAll('.scatterlayer .trace').length"


class Page:
    """The page of a suite with everything in it, opened once: opening takes longest."""

    def __init__(self, driver: Any, path: Path, downloads: Path) -> None:
        self.driver = driver
        self.path = path
        self.downloads = downloads

    def look(self, *, width: int = 1200, theme: str = "light") -> None:
        """As on a screen of this width, on a system with this theme."""
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": theme}
        self.command("Emulation.setEmulatedMedia", features=[scheme])

    def scroll_through(self) -> None:
        """Past every figure, each of which is drawn then."""
        for i in range(self.run("return document.querySelectorAll('[data-figure]').length")):
            self.run(
                f"document.querySelector('[data-figure=\"{i}\"]').scrollIntoView({{behavior: 'instant'}})"
            )
            drawn = f"return !!document.querySelector('[data-figure=\"{i}\"] .main-svg')"
            wait_for(partial(self.run, drawn))

    def command(self, name: str, **arguments: Any) -> Any:
        return self.driver.execute_cdp_cmd(name, arguments)

    def run(self, script: str) -> Any:
        return self.driver.execute_script(script)

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def choose(self, selector: str, change: str, event: str) -> None:
        """Set something of a control as a user would."""
        self.run(
            f"const one = document.querySelector('{selector}'); one.{change};"
            f"one.dispatchEvent(new Event('{event}', {{bubbles: true}}));"
        )

    def downloaded(self, name: str) -> bytes:
        found = wait_for(lambda: next((p for p in self.downloads.glob(name)), None))
        assert isinstance(found, Path)
        return found.read_bytes()


def wait_for(look: Callable[[], Any]) -> Any:
    until = time.monotonic() + 120  # only so that a page that never comes ends
    while not (found := look()):
        assert time.monotonic() < until, "nothing came"
        time.sleep(0.05)
    return found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    folder = tmp_path_factory.mktemp("page")
    path = folder / "report.html"
    path.write_text(to_page(suite_report(make_results(seeds=2))), encoding="utf-8")
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in [*FLAGS, f"--user-data-dir={folder / 'profile'}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(executable_path=DRIVER)
    driver = webdriver.Chrome(options=options, service=service)
    try:
        made = Page(driver, path, folder / "downloads")
        made.command(
            "Browser.setDownloadBehavior", behavior="allow", downloadPath=str(made.downloads)
        )
        made.look()
        driver.get("about:blank")
        driver.get_log("performance")  # what the browser did by itself
        driver.get(path.as_uri())
        made.scroll_through()
        yield made
    finally:
        driver.quit()


def test_it_loads_alone_and_draws_everything(page: Page) -> None:
    assert page.driver.get_log("browser") == []
    events = [json.loads(e["message"])["message"] for e in page.driver.get_log("performance")]
    requests = [e["params"] for e in events if e["method"] == "Network.requestWillBeSent"]
    asked = {request["request"]["url"] for request in requests}
    # Another test may have downloaded figures, which are blobs of the page itself.
    asked = {url for url in asked if not url.startswith(("data:", "blob:"))}
    assert asked == {page.path.as_uri()}
    empty = page.run(
        "return [...document.querySelectorAll('.plot')].filter((plot) => "
        "!plot.querySelector('.trace path, .hm image, .contourlevel path'))"
        ".map((plot) => plot.ariaLabel)"
    )
    assert empty == []
    assert page.run("return document.querySelectorAll('.plot .main-svg').length") >= 9


def test_layers_are_chosen(page: Page) -> None:
    page.click("[data-quick=worst]")
    assert page.run(LINES) == 5
    page.click("[data-quick=all]")
    assert page.run(LINES) == 12
    page.click("[data-quick=none]")
    assert page.run(LINES) == 0
    page.click(".choices input[value='3']")
    names = page.run(f"return {CONVERGENCE}.data.map((trace) => trace.name)")
    assert names == ["encoder.layer.3.dense.weight"]
    page.choose("[data-filter]", "value = 'layer.1'", "input")
    page.click("[data-quick=all]")
    assert page.run(LINES) == 3  # layers 1, 10 and 11
    page.choose("[data-filter]", "value = ''", "input")


def test_quantities_axes_and_merges_are_chosen(page: Page) -> None:
    page.click("[data-quick=worst]")
    page.click("input[value=residual]")
    assert page.run(f"return {CONVERGENCE}.data[0].y[0]") == pytest.approx(0.1)
    page.click("input[value=objective]")
    assert page.run(f"return {CONVERGENCE}.data[0].y[0]") == 1
    types = f"const {{xaxis, yaxis}} = {CONVERGENCE}.layout; return [xaxis.type, yaxis.type]"
    assert page.run(types) == ["linear", "log"]
    page.click(".convergence [data-log=x]")
    page.click(".convergence [data-log=y]")
    assert page.run(types) == ["log", "linear"]
    page.click("[data-quick=none]")
    page.choose("[data-merge]", "selectedIndex = 1", "change")
    assert page.run(LINES) == 5


def test_a_legend_hides_and_shows(page: Page) -> None:
    traces = "return document.querySelector('[data-figure=\"0\"] .plot').data.length"
    before = page.run(traces)
    page.click("[data-figure='0'] .legend button")
    assert page.run(traces) == before - 1
    page.click("[data-figure='0'] .legend button")
    assert page.run(traces) == before


def test_figures_are_saved(page: Page) -> None:
    for kind in ("png", "svg", "csv"):
        page.click(f"[data-name='Merges compared'] [data-export={kind}]")
    assert page.downloaded("merges-compared.png").startswith(b"\x89PNG")
    svg = page.downloaded("merges-compared.svg").decode()
    assert svg.startswith("<svg")
    assert "mats_kfac" in svg
    lines = page.downloaded("merges-compared.csv").decode().splitlines()
    assert lines[0] == "series,label,x,y,error"
    assert lines[1].startswith("the best,mats_kfac,8")
    page.click("[data-name='Losses in a plane'] [data-export=csv]")
    rows = page.downloaded("losses-in-a-plane.csv").decode().splitlines()
    losses = [row.split(",") for row in rows if row.startswith("loss of paws")]
    assert len(losses) == 21 * 21
    lowest = min(float(row[rows[0].split(",").index("value")]) for row in losses)
    assert lowest == pytest.approx(0.2)  # losses, not the roots that are drawn


def test_a_recipe_is_copied(page: Page) -> None:
    page.click("[data-copy]")
    text = "return document.querySelector('[data-copy]').textContent"
    wait_for(lambda: page.run(text) == "Copied")


def test_nothing_scrolls_sideways(page: Page) -> None:
    page.run("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    widths = "[...document.querySelectorAll('.main-svg')].map((plot) => plot.clientWidth)"
    for width in (360, 768, 1200):
        page.look(width=width)
        fits = f"return Math.max(...{widths}) < {width}"
        wait_for(partial(page.run, fits))  # they follow a little later
        assert page.run("return document.documentElement.scrollWidth") <= width


def test_themes_differ_and_switch(page: Page) -> None:
    colours = (
        "return [getComputedStyle(document.body).backgroundColor,"
        "document.querySelector('.plot .xtick text').style.fill]"
    )
    light = page.run(colours)
    page.look(theme="dark")
    dark = wait_for(lambda: (found := page.run(colours))[0] != light[0] and found)
    assert dark[1] != light[1]
    page.look(theme="light")
    wait_for(lambda: page.run(colours) == light)
    page.click("#theme")
    assert page.run(colours) == dark
    page.driver.refresh()
    page.run(
        "scrollTo(0, 0)"
    )  # a browser goes back to where it was, which may be below all figures
    wait_for(partial(page.run, "return !!document.querySelector('.plot .xtick')"))
    assert page.run(colours) == dark  # it is remembered
    page.run("chooseTheme('light'); localStorage.clear()")
    page.scroll_through()


def test_the_keyboard_reaches_everything(page: Page) -> None:
    page.run(
        "window.seen = new Set();"
        "document.addEventListener('focusin', ({target}) => window.seen.add(target.tagName));"
        "document.querySelector('.skip').focus();"
    )
    for _ in range(45):
        page.command("Input.dispatchKeyEvent", type="keyDown", key="Tab", code="Tab",
                     windowsVirtualKeyCode=9)  # fmt: skip
    assert {"A", "BUTTON", "DIV", "SUMMARY"} <= set(page.run("return [...window.seen]"))
    assert page.run("return getComputedStyle(document.activeElement).outlineStyle") == "solid"
