"""Charts as SVG that stands in a page or alone: text, lines and symbols, no script.

Colours are the page's variables, so that a drawing follows the page's theme.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

from matsmerge.byte_sizes import format_bytes
from matsmerge.lab.reports.chart import Axis, Chart, Series
from matsmerge.lab.reports.numbers import exponent_text, fixed

FONT_SIZE = 13.0
_ROW = 30  # pixels between names of a y axis
_LINE = 18  # of text
_LETTER = 0.6 * FONT_SIZE  # the width of one, on average
_SQUARE = 620  # pixels, the most of a chart whose axes have the same scale
_ROOM = 0.06  # beside the outermost points, of what lies between them


@dataclass(frozen=True)
class _Scale:
    """From values to pixels, with ticks."""

    low: float
    high: float
    start: float  # the pixel of `low`
    end: float
    log: bool
    ticks: Sequence[tuple[float, str]]

    def __call__(self, value: float) -> float:
        if self.log:
            value = math.log10(value) if value > 0 else self.low
        share = (value - self.low) / ((self.high - self.low) or 1.0)
        return self.start + share * (self.end - self.start)

    def has(self, value: float) -> bool:
        where = (math.log10(value) if value > 0 else -math.inf) if self.log else value
        slack = 1e-9 * (self.high - self.low)
        return self.low - slack <= where <= self.high + slack


def draw_chart(chart: Chart, width: float, label: str = "") -> str:
    """The chart as an `<svg>`; `label` is what a reader who does not see it is told."""
    width = min(width, _SQUARE) if chart.same_scale else width
    legend, legend_height = _legend(chart.series, width)
    rows = chart.y.names
    most = 0.42 * width
    left = min(12 + _LETTER * max(map(len, rows)), most) if rows else 52.0
    right = 14.0 + (_LETTER * max(map(len, chart.ends), default=0) + 6 if chart.ends else 0)
    top = legend_height + (_LINE + 6 if chart.y.title else 8)
    inner = width - left - right
    height = len(rows) * _ROW if rows else chart.height or min(inner, 560)
    x = _scale(chart.x, [s for one in chart.series for s in _all(one, "x")], left, left + inner)
    values = [s for one in chart.series for s in _all(one, "y")]
    y = _scale(chart.y, values, *((top, top + height) if rows else (top + height, top)))
    if chart.same_scale:
        x, y = _equal(x, y)
    bottom = top + height
    parts = [legend, *_frame(chart, x, y, width, (left, left + inner, top, bottom))]
    labels = _Labels(left, width)
    for one in chart.series:
        parts += _drawn(one, x, y, labels)
    parts += labels.drawn
    below = 22 + (_LINE if chart.x.title else 0)
    return svg(parts, width, bottom + below + 4, label)


def svg(parts: Iterable[str], width: float, height: float, label: str = "") -> str:
    name = f' role="img" aria-label="{escape(label)}"' if label else ""
    size = f'width="{_n(width)}" height="{_n(height)}" viewBox="0 0 {_n(width)} {_n(height)}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}{name} font-size="{FONT_SIZE:g}" '
        f'fill="var(--ink)">{"".join(parts)}</svg>'
    )


def text(
    x: float, y: float, what: str, anchor: str = "start", *, colour: str = "ink", bold: bool = False
) -> str:
    """Text whose middle is at this height."""
    look = f' text-anchor="{anchor}"' if anchor != "start" else ""
    look += f' fill="var(--{colour})"' if colour != "ink" else ""
    look += ' font-weight="600"' if bold else ""
    return f'<text x="{_n(x)}" y="{_n(y + 4.5)}"{look}>{escape(what, quote=False)}</text>'


def shortened_to(what: str, width: float) -> str:
    """A name that fits into a width, in pixels; of one that does not, both ends."""
    most = max(int(width / _LETTER), 4)
    return what if len(what) <= most else f"{what[: most - most // 3 - 1]}…{what[-(most // 3) :]}"


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


# --- scales -----------------------------------------------------------------------------------


def _all(one: Series, axis: str) -> list[float]:
    values, spans = (one.xs, one.x_spans) if axis == "x" else (one.ys, one.y_spans)
    return [*values, *(end for span in spans if span for end in span)]


def _scale(axis: Axis, values: Sequence[float], start: float, end: float) -> _Scale:
    if axis.names:
        ticks = [(float(i), name) for i, name in enumerate(axis.names)]
        return _Scale(-0.5, len(axis.names) - 0.5, start, end, False, ticks)
    known = [v for v in values if math.isfinite(v) and (v > 0 or not axis.log)]
    known = [math.log10(v) for v in known] if axis.log else known
    low, high = min(known, default=0.0), max(known, default=1.0)
    room = _ROOM * (high - low) or (0.5 if axis.log else 0.05 * abs(high) or 0.5)
    low = low - room if axis.low is None else axis.low
    high = high + room if axis.high is None else axis.high
    num = max(int(abs(end - start) / (85 if end > start else 55)), 2)
    return _Scale(low, high, start, end, axis.log, _ticks(low, high, num, axis))


def _ticks(low: float, high: float, num: int, axis: Axis) -> list[tuple[float, str]]:
    if axis.log:
        decades = max(math.ceil((high - low) / num), 1)
        exponents = range(math.ceil(low), math.floor(high) + 1, decades)
        places = [10.0**e for e in exponents]
        if len(places) < 2:  # less than a decade or two
            places = [
                m * 10.0**e for e in range(math.floor(low), math.ceil(high)) for m in (1, 2, 5)
            ]
            places = [place for place in places if low <= math.log10(place) <= high]
        show: Callable[[float], str] = format_bytes if axis.as_bytes else exponent_text
        return [(place, show(place)) for place in places]
    if high <= low:
        return []
    rough = (high - low) / num
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(m * unit for m in (1, 2, 5, 10) if m * unit >= rough)
    digits = max(-math.floor(math.log10(step)), 0)
    first = math.ceil(low / step)
    return [
        (i * step, fixed(i * step, digits).replace("-", "−"))
        for i in range(first, math.floor(high / step) + 1)
    ]


def _equal(x: _Scale, y: _Scale) -> tuple[_Scale, _Scale]:
    """The same number of pixels for one on both axes, about their middles."""
    size = max((s.high - s.low) / abs(s.end - s.start) for s in (x, y))

    def wider(s: _Scale) -> _Scale:
        middle, half = (s.low + s.high) / 2, size * abs(s.end - s.start) / 2
        ticks = _ticks(middle - half, middle + half, 5, Axis())
        return _Scale(middle - half, middle + half, s.start, s.end, False, ticks)

    return wider(x), wider(y)


# --- what is drawn ----------------------------------------------------------------------------


def _frame(chart: Chart, x: _Scale, y: _Scale, width: float, area: "_Box") -> list[str]:
    left, right, top, bottom = area
    parts = []
    names = chart.y.names
    grid = [f"M{_n(x(v))} {_n(top)}V{_n(bottom)}" for v, _ in x.ticks if not chart.x.names]
    if not names:
        grid += [f"M{_n(left)} {_n(y(v))}H{_n(right)}" for v, _ in y.ticks]
    parts.append(f'<path d="{"".join(grid)}" stroke="var(--grid)" fill="none"/>')
    parts.append(f'<path d="M{_n(left)} {_n(bottom)}H{_n(right)}" stroke="var(--line)"/>')
    end = -math.inf  # of the last name or number, which the next must not cover
    for v, shown in x.ticks:
        half = _LETTER * len(shown) / 2
        at = min(x(v), width - half - 4)
        if at - half > end:
            parts.append(text(at, bottom + 14, shown, "middle", colour="muted"))
            end = at + half + 4
    if names:
        for i, name in enumerate(names):
            shown = shortened_to(name, left - 10)
            drawn = text(left - 10, y(i), shown, "end", bold=i in chart.marked)
            parts.append(drawn if shown == name else f"<g>{_title(name)}{drawn}</g>")
        parts += [
            text(right + 8, y(i), end, bold=i in chart.marked) for i, end in enumerate(chart.ends)
        ]
    else:
        parts += [text(left - 7, y(v), shown, "end", colour="muted") for v, shown in y.ticks]
    if chart.y.title:
        parts.append(text(4, top - 15, chart.y.title, colour="muted"))
    if chart.x.title:
        parts.append(text(right, bottom + 16 + _LINE, chart.x.title, "end", colour="muted"))
    return parts


def _drawn(one: Series, x: _Scale, y: _Scale, labels: "_Labels") -> list[str]:
    tint = f"var(--{one.colour})"
    faint = f' opacity="{one.opacity:g}"' if one.opacity != 1 else ""
    points = [(x(a), y(b)) for a, b in zip(one.xs, one.ys, strict=True)]
    # What a logarithmic axis has no place for is not drawn.
    there = [x.has(a) and y.has(b) for a, b in zip(one.xs, one.ys, strict=True)]
    parts = []
    if one.filled and points:
        parts.append(f'<path d="{_path(points)}Z" fill="{tint}"{faint}/>')
    elif one.line and len(points) > 1:
        shown = [p for p, is_there in zip(points, there, strict=True) if is_there]
        dash = f' stroke-dasharray="{one.dash}"' if one.dash else ""
        parts.append(
            f'<path d="{_path(shown)}" fill="none" stroke="{tint}" stroke-width="{one.line:g}" '
            f'stroke-linejoin="round"{dash}{faint}/>'
        )
    for spans, is_x in ((one.x_spans, True), (one.y_spans, False)):
        for (a, b), span in zip(points, spans, strict=False):
            if span:
                parts.append(_bar(span, x if is_x else y, b if is_x else a, tint, is_x=is_x))
    if one.symbol:
        for i, ((a, b), is_there) in enumerate(zip(points, there, strict=True)):
            if is_there:
                title = _title(one.titles[i]) if one.titles else ""
                parts.append(_symbol(one.symbol, a, b, one.size, tint, title))
                labels.keep_free(a, b, one.size)
    for (a, b), label in zip(points, one.labels, strict=False):
        labels.add(a, b, label)
    return parts


def _bar(span: tuple[float, float], scale: _Scale, at: float, tint: str, *, is_x: bool) -> str:
    ends = (min(scale.start, scale.end), max(scale.start, scale.end))
    low, high = (min(max(scale(v), ends[0]), ends[1]) for v in span)
    a, b = _n(min(low, high)), _n(max(low, high))
    path = f"M{a} {_n(at)}H{b}" if is_x else f"M{_n(at)} {a}V{b}"
    return f'<path d="{path}" stroke="{tint}" stroke-width="2"/>'


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{_n(a)} {_n(b)}" for a, b in points)


def _title(what: str) -> str:
    return f"<title>{escape(what, quote=False)}</title>"


def _symbol(kind: str, x: float, y: float, size: float, tint: str, title: str = "") -> str:
    s, edge = size, 'stroke="var(--surface)" stroke-width="1"'
    if kind in ("circle", "ring"):
        look = f'fill="{tint}" {edge}'
        if kind == "ring":
            look = f'fill="var(--surface)" stroke="{tint}" stroke-width="2"'
        return f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{_n(s)}" {look}>{title}</circle>'
    shape = {
        "square": f"m{-s:g} {-s:g}h{2 * s:g}v{2 * s:g}h{-2 * s:g}z",
        "triangle": f"m0 {-1.2 * s:g}l{1.15 * s:g} {2 * s:g}h{-2.3 * s:g}z",
        "diamond": f"m0 {-1.3 * s:g}l{1.3 * s:g} {1.3 * s:g}l{-1.3 * s:g} {1.3 * s:g}"
        f"l{-1.3 * s:g} {-1.3 * s:g}z",
        "plus": f"m{-s / 2.5:g} {-1.2 * s:g}h{s / 1.25:g}v{0.8 * s:g}h{0.8 * s:g}v{s / 1.25:g}"
        f"h{-0.8 * s:g}v{0.8 * s:g}h{-s / 1.25:g}v{-0.8 * s:g}h{-0.8 * s:g}v{-s / 1.25:g}"
        f"h{0.8 * s:g}z",
    }[kind]
    return f'<path d="M{_n(x)} {_n(y)}{shape}" fill="{tint}" {edge}>{title}</path>'


def _legend(series: Sequence[Series], width: float) -> tuple[str, float]:
    """Names with their symbols in as many lines as they take, and how high that is."""
    named = [one for one in series if one.name]
    if not named:
        return "", 0.0
    parts, x, y = [], 4.0, 11.0
    for one in named:
        shown = shortened_to(one.name, width - 40)
        size = 26 + _LETTER * len(shown)
        if x > 4 and x + size > width:
            x, y = 4.0, y + 21
        tint = f"var(--{one.colour})"
        if one.line and not one.filled:
            dash = f' stroke-dasharray="{one.dash}"' if one.dash else ""
            parts.append(f'<path d="M{_n(x)} {_n(y)}h16" stroke="{tint}" stroke-width="2"{dash}/>')
        if one.symbol:
            parts.append(_symbol(one.symbol, x + 8, y, min(one.size, 5), tint))
        parts.append(text(x + 21, y, shown))
        x += size + 14
    return "".join(parts), y + 12


# --- names beside points ----------------------------------------------------------------------

_Box = tuple[float, float, float, float]  # left, right, top, bottom


class _Labels:
    """Names beside points, each where it covers least of what is there already."""

    def __init__(self, left: float, right: float) -> None:
        self._ends = left, right  # where there is room
        self._taken: list[_Box] = [(-1e6, left, -1e6, 1e6), (right, 1e6, -1e6, 1e6)]
        self._asked: list[tuple[float, float, str]] = []

    def keep_free(self, x: float, y: float, size: float) -> None:
        self._taken.append((x - size, x + size, y - size, y + size))

    def add(self, x: float, y: float, label: str) -> None:
        self._asked.append((x, y, label))

    @property
    def drawn(self) -> list[str]:
        parts = []
        for x, y, label in self._asked:
            width, half = _LETTER * len(label), FONT_SIZE / 2 + 1
            left = min(max(x - width / 2, self._ends[0]), self._ends[1] - width)
            boxes = {
                "start": (x + 10, x + 10 + width, y - half, y + half),
                "end": (x - 10 - width, x - 10, y - half, y + half),
                "above": (left, left + width, y - 10 - 2 * half, y - 10),
                "below": (left, left + width, y + 10, y + 10 + 2 * half),
            }
            side = min(boxes, key=lambda s: sum(_common(boxes[s], other) for other in self._taken))
            box = boxes[side]
            self._taken.append(box)
            anchor = side if side in ("start", "end") else "middle"
            at = {"start": box[0], "end": box[1], "middle": (box[0] + box[1]) / 2}[anchor]
            parts.append(text(at, (box[2] + box[3]) / 2, label, anchor))
        return parts


def _common(a: _Box, b: _Box) -> float:
    """The area two boxes share."""
    width, height = min(a[1], b[1]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[2], b[2])
    return max(width, 0.0) * max(height, 0.0)
