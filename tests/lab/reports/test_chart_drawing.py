"""Charts as SVG: where things are drawn, what text says, and what is left out."""

import itertools
import math
import re
from xml.etree import ElementTree

import pytest

from matsmerge.lab.reports.chart import Axis, Chart, Series, curve
from matsmerge.lab.reports.chart_drawing import draw_chart
from matsmerge.lab.reports.contours import level_lines
from matsmerge.lab.reports.palette import COLOURS

NAMESPACE = "{http://www.w3.org/2000/svg}"
EVIL = '<img src=x onerror="alert(1)">&'


def parsed(drawn: str) -> ElementTree.Element:
    return ElementTree.fromstring(drawn)


def circles(drawn: str) -> list[tuple[float, float]]:
    found = parsed(drawn).iter(f"{NAMESPACE}circle")
    return [(float(one.attrib["cx"]), float(one.attrib["cy"])) for one in found]


def texts(drawn: str) -> list[str]:
    return [one.text or "" for one in parsed(drawn).iter(f"{NAMESPACE}text")]


def chart(series: Series, x: Axis | None = None, y: Axis | None = None, **more: object) -> Chart:
    return Chart(200, x or Axis(), y or Axis(), [series], **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [330, 860])
def test_places_are_linear_in_values(width: int) -> None:
    drawn = draw_chart(chart(Series("", [0, 5, 10], [1, 2, 3])), width)
    (x0, y0), (x1, y1), (x2, y2) = circles(drawn)
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.11)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.11)
    assert x0 < x2
    assert y0 > y2  # more is higher
    whole = parsed(drawn)
    assert float(whole.attrib["width"]) == width
    for x, y in circles(drawn):
        assert 0 < x < width
        assert 0 < y < float(whole.attrib["height"])


def test_places_on_a_logarithmic_axis() -> None:
    drawn = draw_chart(chart(Series("", [1, 10, 1000, 0], [1, 1, 1, 1]), Axis(log=True)), 500)
    (a, _), (b, _), (c, _) = circles(drawn)  # 0 has no place
    assert c - b == pytest.approx(2 * (b - a), abs=0.2)
    assert {"1", "10", "100", "1,000"} <= set(texts(drawn))


def test_names_are_rows_from_the_top() -> None:
    rows = Axis(names=["first", "second", "third"])
    one = chart(Series("", [1, 2, 3], [0, 1, 2]), y=rows, ends=["1.0", "2.0", "3.0"])
    drawn = draw_chart(one, 400)
    heights = [y for _, y in circles(drawn)]
    assert heights == sorted(heights)
    at = {t.text: float(t.attrib["y"]) for t in parsed(drawn).iter(f"{NAMESPACE}text")}
    for i, (name, end) in enumerate((("first", "1.0"), ("second", "2.0"), ("third", "3.0"))):
        assert at[name] == at[end] == pytest.approx(heights[i] + 4.5, abs=0.11)


def test_names_side_by_side_do_not_overlap() -> None:
    names = [f"{10**i:,}" for i in range(9)]
    drawn = draw_chart(chart(Series("", range(9), range(9)), Axis(names=names)), 330)
    shown = [t for t in parsed(drawn).iter(f"{NAMESPACE}text") if t.text in names]
    boxes = [(float(t.attrib["x"]), 7.5 * len(t.text or "") / 2) for t in shown]
    assert 1 < len(shown) < 9
    for (a, half), (b, other) in itertools.pairwise(boxes):
        assert a + half < b - other
    assert boxes[-1][0] + boxes[-1][1] <= 331


def test_a_long_name_is_shortened_and_said_in_full() -> None:
    name = "a_very_long_name_of_a_method_that_nobody_can_read_on_a_phone"
    drawn = draw_chart(chart(Series("", [1], [0]), y=Axis(names=[name])), 330)
    (shown,) = (t for t in texts(drawn) if "…" in t)
    assert name.startswith(shown.split("…")[0])
    assert name.endswith(shown.split("…")[1])
    assert name in [t.text for t in parsed(drawn).iter(f"{NAMESPACE}title")]


def test_spans_titles_and_labels() -> None:
    one = Series("", [2.0], [1.0], titles=["two"], labels=["here"], y_spans=[(0.5, 1.5)])
    drawn = draw_chart(chart(one, Axis("time"), Axis("score")), 400, "A chart. What it shows")
    whole = parsed(drawn)
    assert whole.attrib["role"] == "img"
    assert whole.attrib["aria-label"] == "A chart. What it shows"
    assert [t.text for t in whole.iter(f"{NAMESPACE}title")] == ["two"]
    assert {"here", "time", "score"} <= set(texts(drawn))
    ((x, y),) = circles(drawn)
    bar = re.search(rf'd="M{x:g} ([\d.]+)V([\d.]+)"', drawn)
    assert bar
    assert (float(bar[1]) + float(bar[2])) / 2 == pytest.approx(y, abs=0.11)


def test_labels_stay_within_and_do_not_cover_each_other() -> None:
    names = ["one", "another", "a third one"]
    one = Series("", [1, 1.01, 9], [1, 1, 1], labels=names)
    drawn = draw_chart(chart(one), 400)
    boxes = []
    for t in parsed(drawn).iter(f"{NAMESPACE}text"):
        if t.text in names:
            x, y, width = float(t.attrib["x"]), float(t.attrib["y"]), 7.5 * len(t.text)
            left = x - {"start": 0, "middle": 0.5, "end": 1}[t.get("text-anchor", "start")] * width
            assert left >= 0
            assert left + width <= 400
            boxes.append((left, left + width, y))
    for i, a in enumerate(boxes):
        for b in boxes[:i]:
            assert a[1] <= b[0] or b[1] <= a[0] or abs(a[2] - b[2]) > 12


def test_a_curve_leaves_out_what_is_no_number() -> None:
    made = curve(0, "c", [(0, 1), (1, math.nan), (2, 3)], ["a", "b", "c"], [0.1, None, None])
    assert (list(made.xs), list(made.ys), list(made.titles)) == ([0, 2], [1, 3], ["a", "c"])
    assert made.y_spans == [(0.9, 1.1), None]


def test_one_point_and_none() -> None:
    for series in (Series("", [5.0], [0.0]), Series("", [], [])):
        for axis in (Axis(), Axis(log=True)):
            parsed(draw_chart(chart(series, axis, axis), 330))
    same = Axis(low=1.0, high=1.0)
    parsed(draw_chart(chart(Series("", [1.0], [1.0]), same, same, same_scale=True), 330))


def test_text_stays_text_and_colours_are_the_pages() -> None:
    one = Series(EVIL, [1], [0], titles=[EVIL], labels=[EVIL])
    drawn = draw_chart(chart(one, Axis(EVIL), Axis(EVIL, names=[EVIL])), 500, EVIL)
    assert {e.tag.removeprefix(NAMESPACE) for e in parsed(drawn).iter()} <= {
        "svg", "path", "text", "circle", "title", "g",
    }  # fmt: skip
    assert set(re.findall(r"var\(--([\w-]+)\)", drawn)) <= set(COLOURS)
    assert "#" not in drawn


def test_lines_of_a_level_are_circles_around_a_bowl() -> None:
    grid = [-2 + 0.1 * i for i in range(41)]
    values = [[x * x + y * y for x in grid] for y in grid]
    (line,) = level_lines(grid, grid, values, 1.0)
    assert line[0] == line[-1]
    assert all(math.hypot(x, y) == pytest.approx(1.0, abs=0.01) for x, y in line)
    values[20][30] = math.nan  # at (1, 0), on the line
    (broken,) = level_lines(grid, grid, values, 1.0)
    assert broken[0] != broken[-1]
    assert level_lines(grid, grid, values, 100.0) == []


@pytest.mark.parametrize("middle", [0.4, -0.4])
def test_of_a_saddle_the_middle_says_what_belongs_together(middle: float) -> None:
    corners = [[1.0 + middle, -1.0 + middle], [-1.0 + middle, 1.0 + middle]]
    lines = level_lines([0.0, 1.0], [0.0, 1.0], corners, 0.0)
    assert len(lines) == 2
    # Where the middle is high, the two low corners, (1, 0) and (0, 1), are cut off.
    ends = [(1.0, 0.0), (0.0, 1.0)] if middle > 0 else [(0.0, 0.0), (1.0, 1.0)]
    for line in lines:
        centre = tuple(sum(p[i] for p in line) / 2 for i in (0, 1))
        assert min(math.dist(centre, end) for end in ends) < 0.5


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1])
def test_colours_can_be_told_from_their_ground(theme: int) -> None:
    colours = {name: both[theme] for name, both in COLOURS.items()}
    for ground in ("page", "surface"):
        for name in ("ink", "muted", "accent", "link", "papers"):
            assert contrast(colours[name], colours[ground]) >= 4.5, (name, ground)
        assert contrast(colours["focus"], colours[ground]) >= 3
    for name in ("warn", "better", "worse"):
        assert contrast(colours["ink"], colours[name]) >= 4.5, name
    for name in colours:
        if name.startswith("series"):
            assert contrast(colours[name], colours["surface"]) >= 3, name
