"""Scores against the rank of second moments, and against the bytes that they take."""

import math
from statistics import fmean

from matsmerge.byte_sizes import format_bytes
from matsmerge.lab.experiments.score_tables import grouped, mean_and_error
from matsmerge.lab.reports import figure_style as style
from matsmerge.lab.reports.document import Block, Cell, Figure, Table
from matsmerge.lab.reports.numbers import fixed, percent
from matsmerge.lab.reports.variant import Variant

_FULL = "full"
_CLOSE = 0.3  # points


def rank_curves(variant: Variant) -> list[Block]:
    """Ranks above, sizes below, means over seeds; `full` are whole second moments."""
    found = variant.found.ranks
    if not found:
        return []
    plot = style.plot(
        520,
        x={"title": "rank", "type": "category"},
        y={"title": "score, percent", "domain": [0.58, 1]},
        xaxis2={"title": "bytes of all models' statistics", "anchor": "y2", **style.LOG},
        yaxis2={"title": "score, percent", "domain": [0, 0.4]},
        showlegend=True,
    )
    rows: list[list[Cell | str]] = []
    said = []
    for i, (method, scores) in enumerate(grouped((one.method, one) for one in found).items()):
        name = variant.label(method)
        ranks, means, errors, sizes = [], [], [], []
        by_rank = grouped((one.rank, one) for one in scores)
        for rank in sorted(by_rank, key=lambda rank: rank or math.inf):
            same = by_rank[rank]
            mean, error = mean_and_error([one.score for one in same])
            ranks.append(_FULL if rank is None else str(rank))
            means.append(mean)
            errors.append(error)
            sizes.append(fmean(one.num_bytes for one in same))
            score = Cell(percent(mean), percent(error) if error else "")
            rows.append([name, ranks[-1], format_bytes(sizes[-1]), score])
        if ranks[-1] == _FULL:
            away = [100 * abs(mean - means[-1]) for mean in means]
            said += [
                f"{name} of rank {rank} is {fixed(points)} points from whole statistics, with "
                f"{100 * size / sizes[-1]:.3g} % of their bytes"
                for rank, points, size in zip(ranks[:-1], away, sizes, strict=False)
                if points <= _CLOSE
            ][:1]
        shown = [100 * mean for mean in means]
        aside = f"<extra>{style.plain(name)}</extra>"
        hover = "rank %{x}: %{y:.1f}" + aside
        look = style.series(i, errors)
        plot.add_trace(style.points(name, ranks, shown, hover, **look))
        hover = "rank %{text}, %{x:.3s}B: %{y:.1f}" + aside
        look |= {"xaxis": "x2", "yaxis": "y2", "showlegend": False, "text": ranks}
        plot.add_trace(style.points(f"{name}, by size", sizes, shown, hover, **look))
    caption = ". ".join([*said, "Mean test scores over tasks, tuned at every rank."])
    table = Table(["", "rank", "size", "score, percent"], rows)
    return [Figure("Accuracy against the rank of statistics", caption, plot, table)]
