"""Numbers as people read them, and cells of tables that hold them."""

import math
from collections.abc import Mapping
from typing import Any

from matsmerge.lab.experiments.score_tables import without_noise
from matsmerge.lab.reports.document import Cell

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
NOTHING = "–"


def fixed(value: float | None, digits: int = 1) -> str:
    if value is None or not math.isfinite(value):
        return NOTHING
    return f"{without_noise(value):.{digits}f}"


def percent(share: float | None) -> str:
    return fixed(None if share is None else 100 * share)


def signed(share: float) -> str:
    """A difference of shares, in points."""
    return points(100 * share)


def power(value: float | None) -> str:
    """With a power of ten: 1.3×10¹⁴."""
    if value is None or not math.isfinite(value):
        return NOTHING
    if value == 0:
        return "0"
    digits, exponent = f"{value:.1e}".split("e")
    return f"{digits}×10{str(int(exponent)).translate(_SUPERSCRIPTS)}"


def exponent_text(value: float) -> str:
    """A number of an axis: 500, 0.01, 10⁵, 2×10⁻⁶."""
    if 1e-3 <= value < 1e5:
        return f"{value:,.10g}"
    digits, exponent = f"{value:.0e}".split("e")
    factor = "" if digits == "1" else f"{digits}×"
    return f"{factor}10{str(int(exponent)).translate(_SUPERSCRIPTS)}"


def points(value: float, digits: int = 1) -> str:
    """A difference with its sign, and no minus before zero."""
    return f"{round(value, digits) + 0.0:+.{digits}f}".replace("-", "−")


def seconds(value: float | None) -> str:
    if value is None:
        return NOTHING
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def duration(value: float) -> str:
    """In the unit that suits: 42 s, 3 min 10 s, 2 h 5 min."""
    if value < 60:
        return f"{seconds(value)} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def choice_text(choice: Mapping[str, Any]) -> str:
    """Parameters and their values: scale = 0.3, density = 0.2."""
    return ", ".join(
        f"{key} = {value:g}" if isinstance(value, float) else f"{key} = {value}"
        for key, value in choice.items()
    )


def paper_cell(text: str) -> Cell:
    return Cell(text, papers=True)
