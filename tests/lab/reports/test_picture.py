"""Pictures: figures of a report put together as SVG that stands alone, and as PNG."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from made_up_results import make_results

from matsmerge.errors import OutputError
from matsmerge.lab.reports import picture
from matsmerge.lab.reports.document import Cell, Figure, Table
from matsmerge.lab.reports.suite_report import suite_report
from matsmerge.lab.reports.table_drawing import draw_table


def panels(*variants: str) -> dict[str, Figure]:
    report = suite_report(make_results(seeds=1, variants=variants or ("full",), paper=False))
    return {said.name: said.figure for said in report.verdicts if said.figure}


def test_a_picture_stands_alone_and_is_the_same_each_time() -> None:
    drawn = picture.draw_panels(panels(), ".svg")
    assert drawn == picture.draw_panels(panels(), ".svg")
    text = drawn.decode()
    ElementTree.fromstring(text)
    assert "var(" not in text
    assert "mats_kfac" in text
    assert "font-family" in text


def test_variants_stand_below_each_other_with_their_names() -> None:
    text = picture.draw_panels(panels("full", "<b>"), ".svg").decode()
    assert ">full<" in text
    assert ">&lt;b&gt;<" in text
    places = re.findall(r'<svg x="([\d.]+)" y="([\d.]+)"', text)
    assert len(places) == 2
    assert places[0][0] == places[1][0]
    assert float(places[1][1]) > float(places[0][1])
    beside = picture.draw_panels(panels("full", "ia3"), ".svg", side_by_side=True).decode()
    places = re.findall(r'<svg x="([\d.]+)" y="([\d.]+)"', beside)
    assert places[0][1] == places[1][1]
    assert float(places[1][0]) > float(places[0][0])


def test_a_coloured_table() -> None:
    cells: list[list[Cell | str]] = [
        [Cell("1.00", shade=1.0), "–"],
        [Cell("0.5", shade=-0.5), Cell("0", shade=0.0)],
    ]
    rows: list[list[Cell | str]] = [[name, *row] for name, row in zip("ab", cells, strict=True)]
    drawn = draw_table(Table(["", "x", "y"], rows), 300)
    found = re.findall(r'fill="var\(--(better|worse)\)" fill-opacity="([\d.]+)"', drawn)
    assert found == [("better", "1.00"), ("worse", "0.50")]
    texts = [one.text for one in ElementTree.fromstring(drawn).iter() if one.text]
    assert texts == ["x", "y", "a", "1.00", "–", "b", "0.5", "0"]


def test_heads_of_a_table_have_several_lines_where_they_need_them() -> None:
    rows: list[list[Cell | str]] = [["a", Cell("1", best=True), "2"]]
    drawn = ElementTree.fromstring(draw_table(Table(["", "K-FAC with a ridge", "y"], rows), 200))
    assert [one.text for one in drawn.iter() if one.text] == [
        "K-FAC with", "a ridge", "y", "a", "1", "2",
    ]  # fmt: skip
    first, second, beside, *_, best, _ = (
        float(one.get("y", "")) for one in drawn.iter() if one.text
    )
    assert first < second == beside < best
    assert [one.text for one in drawn.iter() if one.get("font-weight")] == ["1"]


def test_png(browser: str) -> None:
    drawn = picture.draw_panels(panels(), ".png")
    assert drawn.startswith(b"\x89PNG")
    width, height = (int.from_bytes(drawn[i : i + 4]) for i in (16, 20))
    svg = ElementTree.fromstring(picture.draw_panels(panels(), ".svg").decode())
    assert width == 2 * round(float(svg.attrib["width"]))
    assert height == 2 * round(float(svg.attrib["height"]))


def test_a_browser_that_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "browser"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("BROWSER_PATH", str(broken))
    assert picture.find_browser() == str(broken)
    with pytest.raises(OutputError, match=r"\(CalledProcessError: .*status 3.*\); try again"):
        picture.draw_panels(panels(), ".png")


def test_without_a_browser_nothing_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BROWSER_PATH", raising=False)
    monkeypatch.setenv("PATH", "")
    picture.check_picture(".svg")
    with pytest.raises(OutputError, match="or write a .svg file"):
        picture.check_picture(".png")
