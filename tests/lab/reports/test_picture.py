"""Pictures: figures of a report put together; what draws them is tested with the commands."""

import re

import pytest
from made_up_results import make_results
from matsmerge.lab.reports.sections.score_dots import COMPARISON

from matsmerge.errors import OutputError
from matsmerge.lab.reports import figure_style, picture
from matsmerge.lab.reports.suite_report import suite_report


def test_one_figure_is_the_picture() -> None:
    plots = suite_report(make_results(seeds=1)).plots(COMPARISON)
    assert list(plots) == [""]
    assert picture.panels(plots) is plots[""]


def test_variants_stand_below_each_other_on_one_axis() -> None:
    report = suite_report(make_results(seeds=1, variants=("full", "ia3"), paper=False))
    plots = report.plots(COMPARISON)
    assert list(plots) == ["full", "ia3"]
    whole = picture.panels(plots)
    assert [note.text for note in whole.layout.annotations[:2]] == ["full", "ia3"]
    assert whole.layout.xaxis.matches == "x2"
    assert whole.layout.xaxis2.title.text == "score, percent"
    assert whole.layout.xaxis.title.text is None
    shown = [trace.name for trace in whole.data if trace.showlegend]
    assert shown == ["the best", "merges", "references"]
    for i, plot in enumerate(plots.values()):
        part = [t for t in whole.data if t.yaxis == ("y", "y2")[i]]
        assert [list(t.x) for t in part] == [list(t.x) for t in plot.data]
    values = [n.text for n in whole.layout.annotations if n.xref == "x2 domain"]
    assert values == [note.text for note in plots["ia3"].layout.annotations]
    assert whole.layout.shapes[1].yref == "y2 domain"


def test_names_that_are_no_text_stay_text() -> None:
    report = suite_report(make_results(seeds=1, variants=("<b>", "ia3"), paper=False))
    whole = picture.panels(report.plots(COMPARISON))
    assert whole.layout.annotations[0].text == "&lt;b&gt;"


def test_every_colour_of_a_figure_has_a_dark_one() -> None:
    light = [light for light, _ in figure_style.COLOURS.values()]
    assert len(set(light)) == len(light)
    report = suite_report(make_results(seeds=2))
    found = {
        colour
        for section in report.shown
        for block in section.blocks
        if (plot := getattr(block, "plot", None))
        for colour in re.findall(r"#[0-9a-f]{6}", plot.to_json())
    }
    assert found
    assert found <= set(light)


def test_a_browser_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> bytes:
        raise RuntimeError("it closed\nand more")

    monkeypatch.setattr(picture, "check_picture", lambda: None)
    monkeypatch.setattr("kaleido.calc_fig_sync", fail)
    plots = suite_report(make_results(seeds=1)).plots(COMPARISON)
    with pytest.raises(OutputError, match=r"\(RuntimeError: it closed\); try again"):
        picture.draw(plots[""], ".png")
