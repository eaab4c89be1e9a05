"""Every objective from every init, and what it gains (figure 2 of the paper)."""

import math
from statistics import fmean

from matsmerge.lab.experiments.score_tables import grouped
from matsmerge.lab.reports.document import Block, Cell, Paragraph, Table
from matsmerge.lab.reports.numbers import NOTHING, fixed, percent, signed
from matsmerge.lab.reports.variant import Variant


def init_gains(variant: Variant) -> list[Block]:
    """A table of scores, coloured by the gain over the init's own."""
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
    largest = max(abs(s - own[init]) for init, row in scores.items() for s in row if s is not None)
    rows: list[list[Cell | str]] = []
    for init, row in scores.items():
        shown: list[Cell | str] = [variant.label(init), percent(own[init])]
        for s in row:
            if s is None:
                shown.append(NOTHING)
            else:
                gain = s - own[init]
                text, shade = f"{percent(s)} ({signed(gain)})", gain / (largest or 1.0)
                shown.append(Cell(text, best=s == best, shade=shade))
        rows.append(shown)
    text = (
        f"The objective {objectives[scores[winner].index(best)]} from {variant.label(winner)} is "
        f"best, at {percent(best)} ({signed(best - own[winner])} over the init)."
    )
    size = fixed(100 * largest)
    table = Table(
        ["init", "alone", *objectives],
        rows,
        "Mean test score in percent, and the gain over the init in points",
        shades=[f"{size} worse", "as the init", f"{size} better"],
    )
    return [Paragraph(text), table]
