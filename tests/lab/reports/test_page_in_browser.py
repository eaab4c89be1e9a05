"""The page in a real browser: both themes, a phone, the keyboard, what is chosen and saved."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from browsers import Browser, started_browser, wait_for
from made_up_results import make_results

from matsmerge.lab.experiments.suite_results import SuiteResults
from matsmerge.lab.reports.page import to_page
from matsmerge.lab.reports.suite_report import suite_report

OPEN_ALL = "document.querySelectorAll('details').forEach((one) => { one.open = true; })"
HEADINGS = "return [...document.querySelectorAll('h1, h2, h3')].map((one) => +one.tagName[1])"


class Pages:
    """Reports as files, and the browser that shows them."""

    def __init__(self, browser: Browser, folder: Path) -> None:
        self.browser = browser
        self.folder = folder

    def show(self, name: str = "everything", *, width: int = 1400, theme: str = "light") -> Browser:
        self.browser.look(width, theme)
        self.browser.requests()
        self.browser.open((self.folder / f"{name}.html").as_uri())
        return self.browser


def suites() -> dict[str, SuiteResults]:
    return {
        "everything": make_results(seeds=2),
        "variants": make_results(seeds=1, variants=("full", "ia3"), paper=False),
        "unfinished": make_results(variants=(), missing=["train wsc, seed 2"]),
    }


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    folder = tmp_path_factory.mktemp("pages")
    for name, results in suites().items():
        (folder / f"{name}.html").write_text(to_page(suite_report(results)), encoding="utf-8")
    with started_browser(folder) as browser:
        yield Pages(browser, folder)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400])
@pytest.mark.parametrize("name", suites())
def test_it_loads_alone_fits_and_can_be_read(
    pages: Pages, name: str, width: int, theme: str
) -> None:
    path = pages.folder / f"{name}.html"
    assert path.stat().st_size < 400_000
    page = pages.show(name, width=width, theme=theme)
    page.run(OPEN_ALL)
    page.check_page(width)
    assert page.requests() == {path.as_uri()}
    assert page.faint_texts() == []
    assert page.run("return document.documentElement.dataset.theme") == theme
    # Either the wide or the narrow drawing of each figure, and none that is wider than its frame.
    shown = (
        "return [...document.querySelectorAll('figure')].map((figure) => "
        "[...figure.querySelectorAll('svg')].filter((one) => one.checkVisibility()"
        " && one.getBoundingClientRect().right <= innerWidth).length)"
    )
    assert set(page.run(shown)) <= {1}


def test_contrast_is_really_measured(pages: Pages) -> None:
    page = pages.show()
    page.run("document.querySelector('h1').style.color = '#cccccc'")
    page.run("document.querySelector('figure svg text').setAttribute('fill', '#dddddd')")
    assert len(page.faint_texts()) == 2


@pytest.mark.parametrize("name", suites())
def test_a_reader_who_does_not_see_finds_everything(pages: Pages, name: str) -> None:
    page = pages.show(name)
    levels = page.run(HEADINGS)
    assert levels.count(1) == 1
    assert levels[0] == 1
    assert all(b <= a + 1 for a, b in itertools.pairwise(levels))  # none is left out
    for landmark in ("header", "main", "nav[aria-label]", "footer"):
        assert page.run(f"return document.querySelectorAll('{landmark}').length") == 1
    unnamed = (
        "return [...document.querySelectorAll('figure svg')].filter((one) => "
        "one.getAttribute('role') !== 'img' || one.ariaLabel.length < 20).length"
        " + [...document.querySelectorAll('tbody tr > :first-child')].filter((one) => "
        "one.scope !== 'row').length"
        " + [...document.querySelectorAll('section')].filter((one) => "
        "!document.getElementById(one.getAttribute('aria-labelledby'))).length"
    )
    assert page.run(unnamed) == 0


def test_the_keyboard_reaches_everything(pages: Pages) -> None:
    page = pages.show()
    page.run(
        "window.seen = new Set();"
        "document.addEventListener('focusin', ({target}) => window.seen.add(target.tagName));"
        "document.querySelector('.skip').focus();"
    )
    for _ in range(60):
        page.command("Input.dispatchKeyEvent", type="keyDown", key="Tab", code="Tab",
                     windowsVirtualKeyCode=9)  # fmt: skip
        if page.run("return document.activeElement.matches('[data-choose]')"):
            break
    assert {"A", "BUTTON", "DIV", "SUMMARY", "SELECT", "INPUT"} <= set(
        page.run("return [...window.seen]")
    )
    assert page.run("return getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_the_winner_is_seen_first_and_another_can_be_chosen(pages: Pages) -> None:
    page = pages.show()
    seen = (
        "return [...document.querySelectorAll('[data-choice]')].filter((one) => "
        "one.checkVisibility()).map((one) => one.querySelector('caption').textContent)"
    )
    assert page.run(seen) == ["mats_kfac"]
    page.run(
        "const one = document.querySelector('[data-choose]'); one.selectedIndex = 1;"
        "one.dispatchEvent(new Event('change'));"
    )
    assert page.run(seen) == ["mats (Gram)"]


def test_errors_are_shown_when_asked_for(pages: Pages) -> None:
    page = pages.show()
    seen = "return document.querySelector('#scores .error').checkVisibility()"
    assert page.run(seen) is False
    page.click("#scores [data-errors]")
    assert page.run(seen) is True
    assert page.run("return document.querySelector('#cost .error').checkVisibility()") is True


def test_a_figure_is_saved_with_its_colours(pages: Pages) -> None:
    page = pages.show(theme="dark")
    page.click("[data-name='Merges compared'] [data-save]")
    svg = page.downloaded("merges-compared.svg").decode()
    assert svg.startswith("<svg")
    assert "mats_kfac" in svg
    assert "var(" not in svg
    assert "#1c2024" in svg  # the ground of the dark theme


def test_a_recipe_is_copied(pages: Pages) -> None:
    page = pages.show()
    page.run(  # it says so for two seconds, in which nobody may look
        "window.said = []; const button = document.querySelector('[data-copy]');"
        "new MutationObserver(() => window.said.push(button.textContent))"
        ".observe(button, {childList: true, characterData: true, subtree: true});"
    )
    page.click("[data-copy]")
    assert wait_for(lambda: page.run("return window.said"))[0] == "Copied"


def test_themes_differ_switch_and_are_remembered(pages: Pages) -> None:
    page = pages.show()
    colours = (
        "return [getComputedStyle(document.body).backgroundColor,"
        "getComputedStyle(document.querySelector('figure svg text')).fill]"
    )
    light = page.run(colours)
    page.look(theme="dark")
    dark = wait_for(lambda: (found := page.run(colours))[0] != light[0] and found)
    assert dark[1] != light[1]
    page.look(theme="light")
    wait_for(lambda: page.run(colours) == light)
    page.click("#theme")
    assert page.run(colours) == dark

    def is_dark_again() -> bool:
        page.driver.refresh()
        return bool(page.run(colours) == dark)

    wait_for(is_dark_again)  # the browser writes what is remembered when it has time
    page.run("localStorage.clear()")

    def is_light_again() -> bool:
        page.driver.refresh()
        return bool(page.run(colours) == light)

    wait_for(is_light_again)  # or the next page may be dark


def test_on_paper_everything_is_there(pages: Pages) -> None:
    page = pages.show()
    page.command("Emulation.setEmulatedMedia", media="print")
    for selector, is_seen in (("nav", False), ("#theme", False), ("figure svg", True)):
        shown = f"return document.querySelector('{selector}').checkVisibility()"
        assert page.run(shown) is is_seen
    tall = "return [...document.querySelectorAll('.scroll')].some((one) => one.scrollHeight > one.clientHeight + 1)"
    assert page.run(tall) is False
    page.command("Emulation.setEmulatedMedia", media="")
