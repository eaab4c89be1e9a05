"""The documentation as a site: it builds strictly, and its reference is that of the code."""

import importlib.util
import sys
from types import ModuleType

import pytest
import yaml
from built_site import ROOT, built_site

from matsmerge.methods import METHODS
from matsmerge.methods.objectives import OBJECTIVES
from matsmerge.methods.solvers import SOLVERS


@pytest.fixture(scope="module")
def site_pages() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "scripts" / "site_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_it_builds_strictly(tmp_path_factory: pytest.TempPathFactory) -> None:
    built = built_site(tmp_path_factory)
    for page in ("index", "mats", "tutorials/loras", "reference/python", "results/index"):
        assert (built / f"{page}.html").stat().st_size > 10_000
    text = (built / "reference" / "python.html").read_text()
    assert "matsmerge.merge" in text
    assert "Merge models given as paths, hub ids" in text  # its docstring


def test_every_page_is_in_the_navigation(site_pages: ModuleType) -> None:
    def pages(entries: object) -> list[str]:
        if isinstance(entries, str):
            return [entries]
        parts = entries.values() if isinstance(entries, dict) else entries
        assert not isinstance(parts, str)
        return [page for part in parts for page in pages(part)]  # type: ignore[attr-defined]

    listed = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    written = [p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*.md")]
    assert sorted(listed) == sorted([*written, *site_pages.make_pages()])


def test_commands_are_listed_with_their_options(site_pages: ModuleType) -> None:
    page = site_pages.commands_page()
    assert "\n    mats init\n" in page  # an example, set as code
    assert "mats merge [OPTIONS] [RECIPE | MODEL...]\n" in page
    assert "| `-o, --out FOLDER` | Folder to write the merged model to" in page
    for command in ("merge", "collect", "experiment run", "stats combine", "schema"):
        assert f"\n## mats {command}\n" in page
    merging = page[page.index("## mats merge") : page.index("## mats evaluate")]
    assert "| `--density NUMBER` |" in merging  # made from a method's field
    assert "| `--resume` |" in merging


def test_every_part_of_recipes_is_listed(site_pages: ModuleType) -> None:
    page = site_pages.recipes_page()
    headings = [line[4:] for line in page.splitlines() if line.startswith("### ")]
    assert headings == [*METHODS, *OBJECTIVES, *SOLVERS]
    ties = page[page.index("### ties\n") : page.index("### dare_linear\n")]
    assert "| `density` | number or list of number | `0.2` | share of" in ties
    assert "`global`, `parameter` | `global` |" in ties
    assert "`task_arithmetic (scale: 0.3)`" in page  # the default of a part


def test_files_have_the_comments_of_their_fields(site_pages: ModuleType) -> None:
    page = site_pages.files_page()
    assert "| `name` | text |  | by default the file's |" in page
    assert "| `forms` | mapping | required | of each array, named SET/KEY |" in page


def test_tables_survive_bars_and_line_breaks(site_pages: ModuleType) -> None:
    assert site_pages._table(["a"], [["x | y\n z"]]) == "| a |\n| --- |\n| x \\| y z |\n"
