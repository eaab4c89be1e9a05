"""What the README says is true: its code runs, its recipe is one, its tree is the tree."""

import re
from pathlib import Path

import pytest
import yaml

from matsmerge.linalg.system import Status
from matsmerge.methods import METHODS
from matsmerge.methods.mats import Mats
from matsmerge.methods.objectives import OBJECTIVES
from matsmerge.methods.solvers import SOLVERS
from matsmerge.recipes.recipe import make_recipe
from matsmerge.statistics.kinds import KINDS
from matsmerge.tasks.kinds import TASKS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [README, *(page.read_text() for page in sorted((ROOT / "docs").glob("*.md")))]


def blocks(language: str) -> list[str]:
    return [b for page in PAGES for b in re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)]


@pytest.mark.filterwarnings("ignore:'pin_memory' argument")  # of machines without a GPU
@pytest.mark.parametrize("code", blocks("python"))
def test_python(code: str) -> None:
    exec(compile(code, "README.md", "exec"), {})


@pytest.mark.parametrize("text", blocks("yaml"))
def test_recipes(text: str) -> None:
    make_recipe(yaml.safe_load(text))


def test_there_is_something_to_run() -> None:
    assert blocks("python")
    assert blocks("yaml")


def test_methods_are_listed() -> None:
    table = [line for line in README.splitlines() if line.startswith("| `")]
    named = re.findall(r"`([\w+]+)`", "".join(line.split("|")[1] for line in table))
    assert set(named) == set(METHODS)
    page = (ROOT / "docs" / "mats.md").read_text()
    solving = [name for name, cls in METHODS.items() if issubclass(cls, Mats)]
    assert all(f"`{name}`" in page for name in (*solving, *OBJECTIVES, *SOLVERS))
    assert all(f"`{status.name.lower()}`" in page for status in Status)


def test_statistics_options_are_listed() -> None:
    page = (ROOT / "docs" / "statistics.md").read_text()
    assert all(f"| `{kind}` |" in page for kind in KINDS)
    assert all(f"| `{kind}` |" in page for kind in TASKS)


def test_every_package_is_in_the_tree() -> None:
    tree = README[README.index("## The tree") : README.index("tests/  ")]
    source = ROOT / "src" / "matsmerge"
    packages = [p.parent for p in source.rglob("__init__.py") if p.parent != source]
    shown = [p for p in packages if p.parent in (source, source / "lab")]
    named = re.findall(r"^ +(\w+)/", tree, re.MULTILINE)
    assert sorted(named) == sorted(p.name for p in shown)
