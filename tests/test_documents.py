"""What documents say is true: code runs, recipes are recipes, commands exist, the tree is the tree."""

import re
from pathlib import Path
from typing import Any

import pytest
import typer
from documented_models import make_documented_models
from walked_pages import Step, steps, walk

from matsmerge.cli import main
from matsmerge.cli.commands import COMMANDS, make_app
from matsmerge.linalg.system import Status
from matsmerge.methods import METHODS
from matsmerge.methods.mats import Mats
from matsmerge.methods.objectives import OBJECTIVES
from matsmerge.methods.solvers import SOLVERS
from matsmerge.recipes.recipe_file import read_recipes
from matsmerge.statistics.kinds import KINDS
from matsmerge.tasks.kinds import TASKS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [page.read_text() for page in FILES]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))


def blocks(language: str) -> list[str]:
    return [b for page in PAGES for b in re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models and tasks that documents name."""
    folder = tmp_path_factory.mktemp("documented")
    make_documented_models(folder)
    return folder


@pytest.mark.filterwarnings("ignore:.*its names were read with")  # a note of the example itself
@pytest.mark.filterwarnings("ignore:'pin_memory' argument")  # of machines without a GPU
@pytest.mark.parametrize("code", blocks("python"))
def test_python(code: str, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(models)
    exec(compile(code, "README.md", "exec"), {})


@pytest.mark.parametrize("text", blocks("yaml"))
def test_recipes(text: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    read_recipes(tmp_path / "recipe.yaml")


def test_the_readme_can_be_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def give(command: list[str]) -> None:
        code = main.run(command)
        assert code == 0, f"mats {' '.join(command)}\n{capsys.readouterr().err}"

    make_documented_models(tmp_path)
    monkeypatch.chdir(tmp_path)
    walk(README, give, name="README.md")


@pytest.mark.parametrize("page", [*FILES, *TUTORIALS], ids=lambda page: page.name)
def test_commands_have_these_options(page: Path) -> None:
    """Also of the commands that no test runs, since they would take too long or need the hub."""
    for words in commands(page.read_text()):
        command, rest = typer.main.get_command(make_app(*COMMANDS)), words
        while hasattr(command, "commands"):
            command, rest = command.commands[rest[0]], rest[1:]
        context: Any = command.make_context(rest[0] if rest else "", list(rest))
        context.close()


def commands(text: str) -> list[list[str]]:
    found = [Step("", "", step.code).commands for step in steps(text) if step.language != "python"]
    return [[w for w in words if w != "..."] for block in found for words in block]


def test_there_is_something_to_run() -> None:
    assert sum(len(commands(page)) for page in PAGES) > 50
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
    page = (ROOT / "CONTRIBUTING.md").read_text()
    tree = page[page.index("## The tree") : page.index("tests/  ")]
    source = ROOT / "src" / "matsmerge"
    packages = [p.parent for p in source.rglob("__init__.py") if p.parent != source]
    shown = [p for p in packages if p.parent in (source, source / "lab")]
    named = re.findall(r"^ +(\w+)/", tree, re.MULTILINE)
    assert sorted(named) == sorted(p.name for p in shown)
