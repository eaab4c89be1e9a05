"""Charts as data: axes, and series of points on them. `chart_drawing` makes SVG of them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from matsmerge.lab.reports.palette import series as colour_of

SYMBOLS = ("circle", "square", "triangle", "diamond", "plus", "ring")
DASHES = ("", "6 4", "2 3", "8 3 2 3")
Span = tuple[float, float]


@dataclass(frozen=True)
class Axis:
    """An axis of numbers, or of `names` at 0, 1, 2, ..."""

    title: str = ""
    log: bool = False
    names: Sequence[str] = ()
    low: float | None = None  # None: what the series need, and some room
    high: float | None = None
    as_bytes: bool = False


@dataclass(frozen=True)
class Series:
    """Points, joined if `line` is their width; without a `name` they are not in the legend."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    colour: str = "series-1"
    symbol: str = "circle"  # "": none
    size: float = 5.0  # half of a symbol's width, in pixels
    line: float = 0.0
    dash: str = ""
    opacity: float = 1.0
    titles: Sequence[str] = ()  # what is said of each point, on the mouse
    labels: Sequence[str] = ()  # what stands beside each point
    x_spans: Sequence[Span | None] = ()  # intervals of each point
    y_spans: Sequence[Span | None] = ()
    filled: bool = False  # the area that the line encloses


@dataclass(frozen=True)
class Chart:
    """Series on a pair of axes; `ends` stand at the right end of each name of the y axis."""

    height: int  # of the area within the axes, in pixels; 0: as high as wide
    x: Axis
    y: Axis
    series: Sequence[Series]
    ends: Sequence[str] = ()
    marked: frozenset[int] = field(default_factory=frozenset)  # names that stand out
    same_scale: bool = False  # of both axes


def curve(
    index: int,
    name: str,
    points: Iterable[tuple[float, float]],
    titles: Sequence[str],
    errors: Sequence[float | None] = (),
) -> Series:
    """A line with points, as one of several; what is no number leaves it out."""
    kept = [
        (x, y, title, error)
        for (x, y), title, error in zip(points, titles, errors or [None] * len(titles), strict=True)
        if math.isfinite(x) and math.isfinite(y)
    ]
    return Series(
        name,
        [x for x, *_ in kept],
        [y for _, y, *_ in kept],
        colour_of(index),
        SYMBOLS[index % len(SYMBOLS)],
        4.0,
        2.0,
        DASHES[index // 8 % len(DASHES)],
        titles=[title for _, _, title, _ in kept],
        y_spans=[None if not e else (y - e, y + e) for _, y, _, e in kept],
    )
