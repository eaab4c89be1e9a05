"""Figures of scores: models compared by their mean, and task by task."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matsmerge.lab.experiments.suite_results import BASE, ENSEMBLE, INDIVIDUAL, JOINT
from matsmerge.lab.reports import figure_style as style
from matsmerge.lab.reports.document import Block, Figure, Paragraph, Table
from matsmerge.lab.reports.scores import Score, ScoreRow, ScoreTable, paper_rows, score_rows
from matsmerge.lab.reports.variant import Variant

COMPARISON = "Merges compared"
_REFERENCES = {
    INDIVIDUAL: "each task's own model",
    JOINT: "one model trained on all tasks",
    ENSEMBLE: "the mean of all models' probabilities",
    BASE: "the model before fine-tuning",
}


def suite_scores(variant: Variant) -> list[Block]:
    """Scores of a variant's methods, with the paper's where the setting is the same."""
    if (table := variant.table) is None:
        return []
    blocks = score_blocks(table, f"Test scores in percent, with standard errors {table.errors}")
    if said := [f"{name}: {what}" for name, what in _REFERENCES.items() if name in variant.rows]:
        blocks.append(Paragraph(f"Not merged: {'; '.join(said)}."))
    if variant.paper.setting:
        text = f"The paper's numbers are from its own setting: {variant.paper.setting}."
        blocks.append(Paragraph(text))
    return blocks


def score_blocks(table: ScoreTable, title: str) -> list[Block]:
    """The figures and the tables."""
    ours, papers = score_rows(table, title), paper_rows(table)
    return [
        *([comparison(table, ours)] if any(row.mean for row in table.rows) else []),
        *([by_task(table, ours)] if len(table.tasks) > 1 else []),
        ours,
        *([papers] if papers else []),
    ]


def comparison(table: ScoreTable, behind: Table) -> Figure:
    """A dot with its error for every model, the first at the top; the best one stands out.

    What is far below all else gets an arrow, for it would squeeze the rest.
    """
    rows = [(row, row.mean) for row in table.ordered if row.mean]
    top = table.best
    low = _lowest_shown([row for row, _ in rows])
    this = any(row.is_this for row, _ in rows)
    groups: list[list[tuple[ScoreRow, Score, int]]] = [[], [], []]
    plot = style.plot(
        70 + 30 * len(rows),
        x={"title": table.unit, "zeroline": False},
        y=style.names_axis([row.name for row, _ in rows]),
        margin={"r": 52},
        showlegend=True,
    )
    beside = {"showarrow": False, "xref": "x domain", "xanchor": "left", "yanchor": "middle"}
    for i, (row, mean) in enumerate(rows):
        y, text = len(rows) - i, table.show(mean.value)
        stands_out = row.is_this if this else row is top
        text = f"<b>{text}</b>" if stands_out else text
        plot.add_annotation(beside, text=text, x=1, xshift=8, y=y)
        if mean.value < low:
            plot.add_annotation(beside, text="◂", x=0, xshift=2, y=y)
        else:
            groups[0 if stands_out else 2 if row.is_reference else 1].append((row, mean, y))
        if row.name == INDIVIDUAL:
            line = {"color": style.MUTED, "width": 1.5, "dash": "dot"}
            ends = {"x0": mean.value, "x1": mean.value, "y0": 0, "y1": 1, "yref": "y domain"}
            plot.add_shape(type="line", layer="below", line=line, **ends)
    looks = {
        "this merge" if this else "the best": (style.ACCENT, "circle", 13),
        "merges": (style.colour(0), "circle", 10),
        "references": (style.MUTED, "diamond", 10),
    }
    for (name, (tint, symbol, size)), members in zip(looks.items(), groups, strict=True):
        if members:
            errors = [mean.error or 0.0 for _, mean, _ in members]
            dots = style.points(
                name,
                (mean.value for _, mean, _ in members),
                (y for _, _, y in members),
                "%{text}: %{x:.1f}",
                text=[style.plain(row.name) for row, _, _ in members],
                error_x={"array": errors, "thickness": 2, "width": 5, "color": tint},
                marker={"size": size, "symbol": symbol, "color": tint},
            )
            plot.add_trace(dots)
    papers = [(row, len(rows) - i) for i, (row, _) in enumerate(rows) if row.paper is not None]
    if papers:
        dots = style.points(
            "the paper's",
            (row.paper for row, _ in papers),
            (y for _, y in papers),
            "%{text}, the paper's: %{x:.1f}",
            text=[style.plain(row.name) for row, _ in papers],
            marker={"size": 10, "symbol": "square-open", "color": style.PAPERS},
        )
        plot.add_trace(dots)
    seen = f"{top.name} is the best merge on test data" if top else "No merge was scored"
    num = f"the mean over {len(table.tasks)} tasks" if len(table.tasks) > 1 else table.tasks[0]
    caption = f"{seen}; {table.unit}, {num}, with standard errors {table.errors}."
    if any(row.is_reference for row, _ in rows):
        caption += " Grey diamonds are references; the dotted line is the individual models'."
    return Figure(COMPARISON, caption, plot, behind)


def by_task(table: ScoreTable, behind: Table) -> Figure:
    """Every task's scores, of all models that are not far below the others."""
    low = _lowest_shown(table.rows)
    rows = [row for row in table.ordered if _mean(row) >= low]
    left_out = [row.name for row in table.ordered if _mean(row) < low]
    also = f" Left out, far below: {', '.join(left_out)}." if left_out else ""
    merges = [row for row in rows if not row.is_reference]
    best = [*rows[:1], *merges[:1], *(row for row in rows if row.is_this)][-1].name
    caption = (
        f"Every task's scores: {best} in colour, individual models as diamonds, all others small; "
        f"a name in the legend hides or shows its points.{also}"
    )
    scores = {
        row.name: [score.value if (score := row.tasks.get(t)) else None for t in table.tasks]
        for row in rows
    }
    references = [row.name for row in rows if row.is_reference]
    plot = dots_by_task(table.tasks, scores, best, references, table.unit)
    return Figure("Task by task", caption, plot, behind)


def dots_by_task(
    tasks: Sequence[str],
    scores: Mapping[str, Sequence[float | None]],
    best: str,
    references: Sequence[str],
    unit: str,
) -> Any:
    """A plot with a row for every task and a dot in it for each model."""
    traces = []
    others = [name for name in scores if name not in (best, INDIVIDUAL)]
    for i, (name, values) in enumerate(scores.items()):
        marker: dict[str, Any]
        if name == best:
            marker = {"size": 13, "color": style.ACCENT, "symbol": "circle"}
        elif name == INDIVIDUAL:
            line = {"width": 1.6}
            marker = {"size": 12, "color": style.INK, "symbol": "diamond-open", "line": line}
        elif name in references:
            marker = {"size": 7, "color": style.MUTED, "symbol": "diamond"}
        else:
            j = others.index(name)
            symbol = style.SYMBOLS[1 + j % (len(style.SYMBOLS) - 1)]
            marker = {"size": 7, "color": style.colour(1 + j), "symbol": symbol}
        shown = [(v, j) for j, v in enumerate(values) if v is not None]
        dots = style.points(
            name,
            (value for value, _ in shown),
            (len(tasks) - j for _, j in shown),
            "%{text}, " + style.plain(name) + ": %{x:.1f}",
            legendrank=i + (1 if name == best else 2),
            text=[style.plain(tasks[j]) for _, j in shown],
            marker=marker,
        )
        traces.append(dots)
    return style.plot(
        80 + 34 * len(tasks),
        sorted(traces, key=lambda trace: trace.marker.size),  # the largest is drawn last
        x={"title": unit, "zeroline": False},
        y=style.names_axis(tasks),
        margin={"r": 16},
        showlegend=True,
    )


def _lowest_shown(rows: Sequence[ScoreRow]) -> float:
    """Where a chart of mean scores begins; the worst merge is always in."""
    merges = [_mean(row) for row in rows if not row.is_reference]
    if not merges:
        return -math.inf
    return min(merges) - max(max(map(_mean, rows)) - min(merges), 1e-9)


def _mean(row: ScoreRow) -> float:
    return row.mean.value if row.mean else 0.0
