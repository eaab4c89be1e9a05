"""What notebooks show of results."""

from html.parser import HTMLParser

import torch

import matsmerge
from matsmerge.advice.advice import ModelFigures
from matsmerge.notebook_table import notebook_table


class Texts(HTMLParser):
    """The texts of a page, and its tags."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_names_are_text() -> None:
    found = Texts(notebook_table("<i>", {"a & b": "<script>x</script>", "n": 3}))
    assert found.tags == {"table", "caption", "b", "tr", "th", "td"}
    assert found.texts == ["<i>", "a & b", "<script>x</script>", "n", "3"]


def test_results_of_merging() -> None:
    base = {"w": torch.zeros(2, 2)}
    models = {"one": {"w": torch.ones(2, 2)}, "two": {"w": torch.eye(2)}}
    planned = matsmerge.plan(models, base, "ties")
    assert repr(planned) == "<PlannedMerge one, two by ties: 4 parameters>"
    assert repr(matsmerge.open_checkpoint(base)) == "<Checkpoint dict: 1 tensor>"
    texts = Texts(planned.merge()._repr_html_()).texts
    assert texts[:5] == ["Merged", "models", "one, two", "method", "ties"]
    assert "in memory" in texts


def test_advice() -> None:
    models = {"one": {"w": torch.ones(2, 2)}, "two": {"w": torch.eye(2)}}
    recipe = matsmerge.plan(models).recipe
    findings = (matsmerge.Finding("size", "warning", "moved far"),)
    figures = {name: ModelFigures(0.1, 1.0, 1.0) for name in models}
    advice = matsmerge.Advice("go on", findings, recipe, figures, (), (), (), {})
    assert repr(advice) == "<Advice one, two: average, 1 warning>"
    texts = Texts(advice._repr_html_()).texts
    assert texts[-2:] == ["1. size (warning)", "moved far"]
    assert "go on" in texts
