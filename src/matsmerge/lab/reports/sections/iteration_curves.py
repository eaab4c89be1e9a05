"""Score and residual against iterations of the solver."""

from statistics import fmean

from matsmerge.lab.experiments.score_tables import grouped, mean_and_error
from matsmerge.lab.reports.chart import Axis, Chart, curve
from matsmerge.lab.reports.document import Block, Cell, Figure, Table
from matsmerge.lab.reports.numbers import percent, power
from matsmerge.lab.reports.variant import Variant


def iteration_curves(variant: Variant) -> list[Block]:
    """Scores and residuals side by side, means over seeds."""
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
    title = "Scores and residuals by iteration"
    table = Table(heads, rows, title, folded=True, in_markdown=len(rows) < 60)
    highest = {name: max(points, key=lambda p: p[1]) for name, points in series.items()}
    said = "; ".join(
        f"{name} is best after {p[0]} iterations ({percent(p[1])})" for name, p in highest.items()
    )
    places = sorted({at for points in series.values() for at, *_ in points})
    axis = Axis("iterations", names=[f"{at:,}" for at in places])
    accuracy, error = [], []
    for i, (name, points) in enumerate(series.items()):
        xs = [float(places.index(at)) for at, *_ in points]
        titles = [f"{name}, {at} iterations: {percent(score)}" for at, score, *_ in points]
        ys = [100 * score for _, score, *_ in points]
        errors = [None if e is None else 100 * e for _, _, e, _ in points]
        accuracy.append(curve(i, name, zip(xs, ys, strict=True), titles, errors))
        ys = [residual for *_, residual in points]
        titles = [f"{name}, {at} iterations: {power(residual)}" for at, *_, residual in points]
        error.append(curve(i, name, zip(xs, ys, strict=True), titles))
    caption = f"{said}. Mean validation score over tasks."
    below = "The residual of the linear system, median over layers."
    return [
        Figure(
            "Accuracy against iterations",
            caption,
            Chart(260, axis, Axis("score, percent"), accuracy),
            half=True,
        ),
        Figure(
            "Error against iterations",
            below,
            Chart(260, axis, Axis("residual", log=True), error),
            half=True,
        ),
        table,
    ]
