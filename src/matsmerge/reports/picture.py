"""The comparison of a suite as a PNG, for READMEs."""

import importlib
import io
from functools import partial
from typing import Any

from matsmerge.errors import DataError, OutputError
from matsmerge.experiments.results import INDIVIDUAL, SuiteResults
from matsmerge.reports.score_figures import lowest_shown
from matsmerge.reports.scores import ScoreRow, ScoreTable
from matsmerge.reports.suite_report import comparison_table, method_label

_INK, _MUTED, _GRID = "#1d2329", "#626b75", "#e4e6e7"
_MERGE, _BEST = "#0a6fb0", "#b4460a"
_INCHES, _DPI = 7.0, 200  # 1,400 pixels wide


def check_picture() -> None:
    """Refuse to begin without matplotlib."""
    import_matplotlib("a picture")


def draw_comparison(results: SuiteResults) -> bytes:
    """A panel for every variant: methods from the best to the worst, with standard errors."""
    label = partial(method_label, results)
    tables = {name: comparison_table(found, label) for name, found in results.variants.items()}
    panels = {name: table for name, table in tables.items() if table is not None}
    if not panels:
        raise DataError(f"{results.name}: has compared nothing yet that could be drawn")
    matplotlib = import_matplotlib("a picture")
    heights = [0.6 + 0.3 * len(_rows(table)) for table in panels.values()]
    drawn = io.BytesIO()
    with matplotlib.rc_context({"font.size": 9, "text.color": _INK, "axes.labelcolor": _INK}):
        figure = matplotlib.figure.Figure(
            figsize=(_INCHES, sum(heights) + 0.5), layout="constrained", facecolor="white"
        )
        axes = figure.subplots(
            len(panels), 1, squeeze=False, sharex=True, gridspec_kw={"height_ratios": heights}
        )[:, 0]
        for axis, (name, table) in zip(axes, panels.items(), strict=True):
            _draw_panel(axis, table, name if len(panels) > 1 else "")
        errors = next(iter(panels.values())).errors
        num_tasks = len(next(iter(panels.values())).tasks)
        axes[-1].set_xlabel(f"test score, percent; mean of {num_tasks} tasks ± error {errors}")
        figure.savefig(drawn, format="png", dpi=_DPI)
    return drawn.getvalue()


def _rows(table: ScoreTable) -> list[ScoreRow]:
    """What is far below all else is left out, for it would squeeze the rest."""
    scored = [(row, row.mean.value) for row in table.ordered if row.mean]
    low = lowest_shown([(value, row.is_reference) for row, value in scored])
    return [row for row, value in scored if value >= low]


def _draw_panel(axis: Any, table: ScoreTable, title: str) -> None:
    rows = _rows(table)
    best = table.best
    for place, row in enumerate(rows):
        assert row.mean is not None
        colour = _MUTED if row.is_reference else _BEST if row is best else _MERGE
        axis.errorbar(
            row.mean.value,
            place,
            xerr=row.mean.error,
            fmt="D" if row.is_reference else "o",
            color=colour,
            markersize=6 if row.is_reference else 7,
            elinewidth=1.6,
        )
        axis.annotate(
            table.show(row.mean.value),
            (1.01, place),
            xycoords=("axes fraction", "data"),
            va="center",
            color=colour,
            weight="bold" if row is best else "normal",
        )
        if row.name == INDIVIDUAL:
            axis.axvline(row.mean.value, color=_MUTED, linestyle=":", linewidth=1, zorder=0)
    axis.set_yticks(range(len(rows)), [row.name for row in rows])
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.set_title(title, loc="left", fontsize=9, color=_MUTED)
    axis.grid(axis="x", color=_GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(length=0, colors=_INK)
    axis.spines[:].set_visible(False)


def import_matplotlib(purpose: str) -> Any:
    """Only those who draw need it."""
    try:
        importlib.import_module("matplotlib.figure")
        return importlib.import_module("matplotlib")
    except ImportError as error:
        raise OutputError(
            f"{purpose} needs matplotlib, which cannot be imported ({error}); install it with "
            "`pip install 'matsmerge[figures]'`"
        ) from error
