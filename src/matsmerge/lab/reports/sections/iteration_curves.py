"""Score and residual against iterations of the solver."""

from statistics import fmean

from matsmerge.lab.experiments.score_tables import grouped, mean_and_error
from matsmerge.lab.reports import figure_style as style
from matsmerge.lab.reports.document import Block, Cell, Figure, Table
from matsmerge.lab.reports.numbers import percent, power
from matsmerge.lab.reports.variant import Variant


def iteration_curves(variant: Variant) -> list[Block]:
    """Scores above, residuals below, means over seeds."""
    curves = variant.found.curves
    series: dict[str, list[tuple[int, float, float | None, float]]] = {}
    for name, seen in grouped((c.name, point) for c in curves for point in c.points).items():
        found = grouped((point.iterations, point) for point in seen)
        series[variant.label(name)] = [
            (at, *mean_and_error([p.score for p in same]), fmean(p.residual for p in same))
            for at, same in sorted(found.items())
        ]
    if not series:
        return []
    rows: list[list[Cell | str]] = [
        [name, str(at), Cell(percent(score), percent(error) if error else ""), power(residual)]
        for name, points in series.items()
        for at, score, error, residual in points
    ]
    heads = ["", "iterations", "score, percent", "residual"]
    table = Table(heads, rows, in_markdown=len(rows) < 60)
    highest = {name: max(points, key=lambda p: p[1]) for name, points in series.items()}
    said = "; ".join(
        f"{name} is best after {p[0]} iterations ({percent(p[1])})" for name, p in highest.items()
    )
    caption = (
        f"{said}. Above the mean validation score, below the residual of the linear system "
        "(median over layers). The start, 0 iterations, has no place on a logarithmic axis."
    )
    plot = style.plot(
        470,
        x={"title": "iterations", "anchor": "y2", "type": "log"},
        y={"title": "score, percent", "domain": [0.47, 1]},
        yaxis2={"title": "residual", "domain": [0, 0.4], **style.LOG},
        showlegend=True,
    )
    for i, (name, points) in enumerate(series.items()):
        at, scores, errors, residuals = zip(*points, strict=True)
        aside = f"<extra>{style.plain(name)}</extra>"
        hover = "%{x} iterations: %{y:.1f}" + aside
        look = style.series(i, errors)
        plot.add_trace(style.points(name, at, (100 * s for s in scores), hover, **look))
        hover = "%{x} iterations: %{y:.2e}" + aside
        look = {**style.series(i), "yaxis": "y2", "showlegend": False}
        plot.add_trace(style.points(f"{name}, residual", at, residuals, hover, **look))
    return [Figure("Accuracy and error against iterations", caption, plot, table, log_x=True)]
