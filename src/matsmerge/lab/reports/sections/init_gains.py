"""Every objective from every init, and what it gains (figure 2 of the paper)."""

import math
from statistics import fmean

from matsmerge.lab.experiments.score_tables import grouped
from matsmerge.lab.reports import figure_style as style
from matsmerge.lab.reports.document import Block, Cell, Figure, Table
from matsmerge.lab.reports.figure_style import go, plain
from matsmerge.lab.reports.numbers import NOTHING, percent, signed
from matsmerge.lab.reports.variant import Variant


def init_gains(variant: Variant) -> list[Block]:
    """A heat map: scores in cells, coloured by the gain over the init's own score."""
    cells = [
        c for c in variant.found.heat_map if math.isfinite(c.score) and math.isfinite(c.of_init)
    ]
    if not cells:
        return []
    found = grouped(((c.init, c.objective), c.score) for c in cells)
    own = {init: fmean(v) for init, v in grouped((c.init, c.of_init) for c in cells).items()}
    objectives = list(dict.fromkeys(cell.objective for cell in cells))
    means = {key: fmean(values) for key, values in found.items()}
    scores = {init: [means.get((init, o)) for o in objectives] for init in own}
    best = max(s for row in scores.values() for s in row if s is not None)
    winner = next(init for init, row in scores.items() if best in row)
    table = Table(
        ["init", "alone", *objectives],
        [
            [
                variant.label(init),
                percent(own[init]),
                *(
                    NOTHING
                    if s is None
                    else Cell(f"{percent(s)} ({signed(s - own[init])})", best=s == best)
                    for s in row
                ),
            ]
            for init, row in scores.items()
        ],
    )
    differences = [
        [None if s is None else 100 * (s - own[init]) for s in row] for init, row in scores.items()
    ]
    largest = max(abs(d) for row in differences for d in row if d is not None) or 1.0
    heat = go.Heatmap(
        name="gain over the init",
        x=[plain(objective) for objective in objectives],
        y=[f"{plain(variant.label(init))}<br>{percent(alone)}" for init, alone in own.items()],
        z=differences,
        text=[
            ["" if s is None else f"<b>{percent(s)}</b><br>{signed(s - own[i])}" for s in row]
            for i, row in scores.items()
        ],
        texttemplate="%{text}",
        zmin=-largest,
        zmax=largest,
        colorscale=style.DIVERGING,
        colorbar_title={"text": "gain, points", "side": "top", "font": {"size": 12}},
        hovertemplate="objective %{x}<br>init %{y}<br>gain %{z:.1f}<extra></extra>",
    )
    plot = style.plot(
        170 + 52 * len(own),
        [heat],
        x={"title": "objective", "side": "top", "showgrid": False},
        y={"autorange": "reversed", "showgrid": False},
        margin={"r": 10, "t": 40, "b": 10},
    )
    caption = (
        f"The objective {objectives[scores[winner].index(best)]} from {variant.label(winner)} is "
        f"best, at {percent(best)} ({signed(best - own[winner])} over the init). In each cell the "
        "score in percent and, as its colour says, the gain over the init, whose own score stands "
        "beside its name."
    )
    return [Figure("Every objective from every init", caption, plot, table)]
