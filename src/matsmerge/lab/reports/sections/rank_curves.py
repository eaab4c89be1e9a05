"""Scores against the rank of second moments, and against the bytes that they take."""

import math
from statistics import fmean

from matsmerge.byte_sizes import format_bytes
from matsmerge.lab.experiments.score_tables import grouped, mean_and_error
from matsmerge.lab.reports.chart import Axis, Chart, curve
from matsmerge.lab.reports.document import Block, Cell, Figure, Table
from matsmerge.lab.reports.numbers import fixed, percent
from matsmerge.lab.reports.variant import Variant

_FULL = "full"
_CLOSE = 0.3  # points


def rank_curves(variant: Variant) -> list[Block]:
    """By rank and by size, means over seeds; `full` are whole second moments."""
    found = variant.found.ranks
    if not found:
        return []
    all_ranks = sorted({one.rank for one in found}, key=lambda rank: rank or math.inf)
    names = [_FULL if rank is None else str(rank) for rank in all_ranks]
    size_axis = Axis("size of all models' statistics", log=True, as_bytes=True)
    by_rank_series, by_size_series = [], []
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
        spread = [None if error is None else 100 * error for error in errors]
        titles = [
            f"{name}, rank {rank}, {format_bytes(size)}: {fixed(mean)}"
            for rank, size, mean in zip(ranks, sizes, shown, strict=True)
        ]
        places = [float(names.index(rank)) for rank in ranks]
        by_rank_series.append(curve(i, name, zip(places, shown, strict=True), titles, spread))
        by_size_series.append(curve(i, name, zip(sizes, shown, strict=True), titles, spread))
    caption = ". ".join([*said, "Mean test scores over tasks, tuned at every rank."])
    y = Axis("score, percent")
    return [
        Figure(
            "Accuracy against the rank of statistics",
            caption,
            Chart(240, Axis("rank", names=names), y, by_rank_series),
            half=True,
        ),
        Figure(
            "Accuracy against their size",
            "The same scores by what the statistics take on disk.",
            Chart(240, size_axis, y, by_size_series),
            half=True,
        ),
        Table(["", "rank", "size", "score, percent"], rows, "Scores by rank", folded=True),
    ]
