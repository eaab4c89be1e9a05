"""Every tutorial is walked from top to bottom, on the models that it makes itself."""

from collections.abc import Callable
from pathlib import Path

import pytest
from walked_pages import steps, walk

from matsmerge.cli import main

LONG = ("paper",)
PAGES = sorted((Path(__file__).parents[1] / "docs" / "tutorials").glob("*.md"))


@pytest.fixture
def give(capsys: pytest.CaptureFixture[str]) -> Callable[[list[str]], None]:
    """Run a command in this process."""

    def run(command: list[str]) -> None:
        code = main.run(command)
        assert code == 0, f"mats {' '.join(command)}\n{capsys.readouterr().err}"

    return run


@pytest.mark.filterwarnings("ignore:'pin_memory' argument")  # of machines without a GPU
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.stem, marks=[pytest.mark.long] if page.stem in LONG else [])
        for page in PAGES
    ],
)
def test_it_can_be_followed(
    page: Path,
    give: Callable[[list[str]], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    walk(page.read_text(), give, name=page.name)


def test_there_is_something_to_follow() -> None:
    assert len(PAGES) >= 5
    for page in PAGES:
        assert sum(len(step.commands) for step in steps(page.read_text())) >= 3
