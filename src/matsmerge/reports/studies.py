"""What a suite found besides its comparison, each as blocks of a report."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from matsmerge.experiments import results
from matsmerge.experiments.results import (
    INDIVIDUAL,
    REFERENCES,
    Cost,
    Curve,
    FisherScore,
    Intermediate,
    Landscape,
)
from matsmerge.experiments.summary import mean_and_error
from matsmerge.reports import score_figures, study_figures
from matsmerge.reports.document import Block, Cell, Table
from matsmerge.reports.numbers import (
    NOTHING,
    choice_text,
    duration,
    percent,
    power,
    seconds,
    signed,
)
from matsmerge.reports.paper_numbers import PaperColumn

Label = Callable[[str], str]
SEQUENTIAL = "sequential"  # training the donor's model further


def heat_map(cells: Sequence[results.Cell], label: Label) -> list[Block]:
    """Every objective from every init, and what it gains (figure 2 of the paper)."""
    cells = [c for c in cells if math.isfinite(c.score) and math.isfinite(c.of_init)]
    if not cells:
        return []
    inits = list(dict.fromkeys(cell.init for cell in cells))
    objectives = list(dict.fromkeys(cell.objective for cell in cells))
    found = _by_key(((c.init, c.objective), c.score) for c in cells)
    own = [fmean(cell.of_init for cell in cells if cell.init == init) for init in inits]
    scores = [[_mean(found.get((init, o))) for o in objectives] for init in inits]
    best = max(s for row in scores for s in row if s is not None)
    where = next((i, o) for i, row in enumerate(scores) for o, s in enumerate(row) if s == best)
    table = Table(
        ["init", "alone", *objectives],
        [
            [
                label(init),
                percent(alone),
                *(
                    NOTHING
                    if s is None
                    else Cell(f"{percent(s)} ({signed(s - alone)})", "", s == best)
                    for s in row
                ),
            ]
            for init, alone, row in zip(inits, own, scores, strict=True)
        ],
    )
    gain = signed(best - own[where[0]])
    caption = (
        f"The objective {objectives[where[1]]} from {label(inits[where[0]])} is best, at "
        f"{percent(best)} ({gain} over the init). In each cell the score in percent and, as its "
        "colour says, the gain over the init, whose own score stands beside its name."
    )
    names = [label(init) for init in inits]
    title = "Every objective from every init"
    return [score_figures.gains(title, caption, names, objectives, scores, own, table)]


def fisher(scores: Sequence[FisherScore], label: Label, paper: PaperColumn | None) -> list[Block]:
    """Empirical or true, from which split."""
    if not scores:
        return []
    methods = list(dict.fromkeys(score.method for score in scores))
    ways = list(dict.fromkeys((score.expectation, score.split) for score in scores))
    found = _by_key(((s.method, s.expectation, s.split), s.score) for s in scores)
    has_paper = paper is not None and any(m in paper.fisher for m in methods)
    best = {m: max(fmean(values) for key, values in found.items() if key[0] == m) for m in methods}
    heads = ["Fisher information", "from split"]
    for method in methods:
        heads += [label(method)] + ([f"{label(method)}, paper's"] if has_paper else [])
    rows: list[list[Cell | str]] = []
    for expectation, split in ways:
        row: list[Cell | str] = [expectation, split]
        for method in methods:
            values = found.get((method, expectation, split))
            row.append(_score_cell(values, best=_mean(values) == best[method]))
            if paper is not None and has_paper:
                row.append(_paper_cell(paper.of_fisher(method, expectation, split)))
        rows.append(row)
    return [Table(heads, rows, "Mean validation score over tasks, percent")]


def curves(found: Sequence[Curve], label: Label) -> list[Block]:
    """Score and residual against iterations."""
    found = [curve for curve in found if curve.points]
    if not found:
        return []
    series: dict[str, list[tuple[int, float, float | None, float]]] = {}
    for name in dict.fromkeys(curve.name for curve in found):
        points = [p for curve in found if curve.name == name for p in curve.points]
        series[label(name)] = [
            (
                at,
                *mean_and_error([p.score for p in points if p.iterations == at]),
                fmean(p.residual for p in points if p.iterations == at),
            )
            for at in sorted({p.iterations for p in points})
        ]
    rows: list[list[Cell | str]] = [
        [name, str(at), Cell(percent(score), percent(error) if error else ""), power(residual)]
        for name, points in series.items()
        for at, score, error, residual in points
    ]
    table = Table(
        ["", "iterations", "score, percent", "residual"], rows, in_markdown=len(rows) < 60
    )
    highest = {name: max(points, key=lambda p: p[1]) for name, points in series.items()}
    said = "; ".join(
        f"{name} is best after {p[0]} iterations ({percent(p[1])})" for name, p in highest.items()
    )
    caption = (
        f"{said}. Above the mean validation score, below the residual of the linear system "
        "(median over layers). The start, 0 iterations, has no place on a logarithmic axis."
    )
    return [study_figures.curves("Accuracy and error against iterations", caption, series, table)]


def costs(
    found: Sequence[Cost], scores: Mapping[str, float], label: Label, paper: PaperColumn | None
) -> list[Block]:
    """Operations and seconds, and what they buy; `scores` are mean test scores by method."""
    if not found:
        return []
    table = _cost_table(found, label, paper)
    blocks: list[Block] = []
    kinds: list[tuple[str, str, Callable[[Cost], float | None]]] = [
        ("Operations against accuracy", "operations", lambda c: c.operations),
        ("Seconds against accuracy", "seconds, statistics included", _total_seconds),
    ]
    for title, unit, value in kinds:
        shown = [(c.method, v) for c in found if c.method in scores and (v := value(c))]
        if len(shown) < 2:
            continue
        cheapest = min(shown, key=lambda pair: pair[1])[0]
        highest = max(shown, key=lambda pair: scores[pair[0]])[0]
        caption = f"{label(cheapest)} is cheapest, {label(highest)} scores highest; {unit} on a "
        caption += "logarithmic axis, up and to the left is better."
        blocks.append(
            study_figures.cost_against_score(
                title,
                caption,
                [label(m) for m, _ in shown],
                [v for _, v in shown],
                [scores[m] for m, _ in shown],
                unit,
                table,
            )
        )
    title = "Operations by the paper's formulas; seconds are those of this machine"
    return [*blocks, Table(table.heads, table.rows, title)]


def _total_seconds(cost: Cost) -> float | None:
    return fmean(cost.seconds) + (cost.statistics_seconds or 0) if cost.seconds else None


def _cost_table(found: Sequence[Cost], label: Label, paper: PaperColumn | None) -> Table:
    has_paper = paper is not None and bool(paper.operations)
    heads = ["", "operations", *(["operations, paper's"] if has_paper else [])]
    heads += ["merging, seconds", "all statistics, seconds", "together, seconds"]
    heads += ["together, paper's (A6000)"] if has_paper else []
    rows: list[list[Cell | str]] = []
    for cost in found:
        row: list[Cell | str] = [label(cost.method), power(cost.operations)]
        if paper is not None and has_paper:
            row.append(Cell(power(paper.operations.get(cost.method)), papers=True))
        spread = mean_and_error(cost.seconds) if cost.seconds else None
        row.append(
            Cell(seconds(spread[0]), seconds(spread[1]) if spread[1] else "") if spread else NOTHING
        )
        row += [seconds(cost.statistics_seconds), seconds(_total_seconds(cost))]
        if paper is not None and has_paper:
            taken = paper.seconds.get(cost.method)
            row.append(Cell(seconds(taken[0] if taken else None), papers=True))
        rows.append(row)
    return Table(heads, rows)


def landscape(found: Landscape | None, label: Label) -> list[Block]:
    """Losses in a plane through the models of one layer (figure 1 of the paper)."""
    if found is None:
        return []
    merges = [(label(p.name), p.x, p.y) for p in found.merges]
    rows = [
        *([p.name, "model", f"{p.x:.3f}", f"{p.y:.3f}"] for p in found.models),
        *([name, "merge", f"{x:.3f}", f"{y:.3f}"] for name, x, y in merges),
        *(
            [f"{label(name)}, iteration {i}", "path", f"{p.x:.3f}", f"{p.y:.3f}"]
            for name, path in found.paths.items()
            for i, p in enumerate(path)
        ),
    ]
    caption = (
        f"Level sets of each task's loss in a plane of {found.layer}, on held-out examples, all "
        "else as in the task's own model. The merges are those of the plane's two parameters."
    )
    return [
        study_figures.level_sets(
            "Losses in a plane",
            caption,
            found.xs,
            found.ys,
            found.losses,
            [(p.name, p.x, p.y) for p in found.models],
            merges,
            {label(name): [(p.x, p.y) for p in path] for name, path in found.paths.items()},
            Table(["", "kind", "x", "y"], rows, in_markdown=False),
        )
    ]


def subspaces(found: Mapping[str, Any] | None) -> list[Block]:
    """Overlaps of tasks' subspaces, and where the merge is, as `mats inspect --subspace` has it."""
    if not found:
        return []
    tasks = [str(task["name"]) for task in found["tasks"]]
    values, expected = (
        [[None if v is None or math.isnan(v) else v for v in row] for row in found[key]]
        for key in ("overlap", "overlap_at_random")
    )
    blocks: list[Block] = []
    if len(tasks) > 1:
        pairs = [(a, b) for a in range(len(tasks)) for b in range(a) if values[a][b] is not None]
        highest = max(pairs, key=lambda p: values[p[0]][p[1]] or 0.0, default=None)
        size = f"{found['rank']} directions" if found.get("rank") else f"{found['energy']:.0%}"
        size += "" if found.get("rank") else " of the trace"
        caption = f"Overlap of the tasks' subspaces ({size} of each layer's inputs), mean over "
        caption += "layers: 1 is the same subspace."
        if highest is not None:
            a, b = highest
            caption += f" {tasks[b]} and {tasks[a]} share most, {values[a][b]:.2f}"
            caption += f" ({expected[a][b]:.2f} at random)." if expected[a][b] is not None else "."
        rows = [[tasks[a], *(_two_digits(value) for value in row)] for a, row in enumerate(values)]
        table = Table(["overlap", *tasks], rows)
        blocks.append(study_figures.overlaps("Overlap of subspaces", caption, tasks, values, table))
    distances = found.get("distances") or {}
    if distances:
        size = "|W − W_base|" if found.get("relative_to") == "base" else "|W|"
        heads = ["", "inside", "outside", "share inside", "at random", "change of outputs"]
        rows = [
            [
                name,
                _two_digits(d.get("inside")),
                _two_digits(d.get("outside")),
                f"{percent(d.get('inside_share'))} %",
                f"{percent(d.get('inside_share_at_random'))} %",
                f"{percent(d.get('at_outputs'))} %",
            ]
            for name, d in distances.items()
        ]
        title = f"How far the merge is from each model, in and out of its subspace, in {size}"
        blocks.append(Table(heads, rows, title))
    return blocks


def intermediate(
    found: Sequence[Intermediate], target: str | None, label: Label, paper: PaperColumn | None
) -> list[Block]:
    """A target task's model merged with others'."""
    if not found:
        return []
    donors = list(dict.fromkeys(one.donor for one in found))
    methods = list(dict.fromkeys(one.method for one in found))
    others = [method for method in methods if method in (*REFERENCES, SEQUENTIAL)]
    what = f"score of {target or 'the target task'}, percent"
    table = Table(
        *_target_scores(found, donors, methods, others, label, paper),
        f"Test {what}, after merging with a model of each other task",
    )
    scores = _by_key(((one.method, one.donor), 100 * one.score) for one in found)
    means = {m: [_mean(scores.get((m, donor))) for donor in donors] for m in methods}
    merges = {m: fmean(v or 0.0 for v in means[m]) for m in methods if m not in others}
    if not merges:
        return [table]
    best = label(max(merges, key=lambda method: merges[method]))
    figure = score_figures.dots_by_task(
        "Merged with each donor",
        f"Every donor's row: {best}, the best on average, in colour; {label(INDIVIDUAL)} is the "
        "target's own model, not merged.",
        donors,
        {label(method): values for method, values in means.items()},
        best,
        [label(method) for method in others],
        f"test {what}",
        table,
    )
    return [figure, table, *_chosen_with(found, donors, label)]


def _target_scores(
    found: Sequence[Intermediate],
    donors: Sequence[str],
    methods: Sequence[str],
    others: Sequence[str],
    label: Label,
    paper: PaperColumn | None,
) -> tuple[list[str], list[list[Cell | str]]]:
    """Heads and rows: the target's score with each method and donor, the paper's beside it."""
    scores = _by_key(((one.method, one.donor), one.score) for one in found)
    errors = {(one.method, one.donor): one.error for one in found}
    has_paper = paper is not None and bool(paper.donors)
    heads = ["", *(h for d in donors for h in ([d, f"{d}, paper's"] if has_paper else [d]))]
    rows: list[list[Cell | str]] = []
    for method in methods:
        row: list[Cell | str] = [label(method)]
        for donor in donors:
            values = scores.get((method, donor))
            merges = [fmean(v) for (m, d), v in scores.items() if d == donor and m not in others]
            best = method not in others and bool(values) and _mean(values) == max(merges)
            row.append(_score_cell(values, best=best, error=errors.get((method, donor))))
            if paper is not None and has_paper:
                row.append(_paper_cell(paper.of_donor(method, donor)))
        rows.append(row)
    return heads, rows


def _chosen_with(found: Sequence[Intermediate], donors: Sequence[str], label: Label) -> list[Block]:
    """What validation chose with each donor, where there was a choice."""
    first = min(one.seed for one in found)
    chosen = {(one.method, one.donor): one.chosen for one in found if one.seed == first}
    methods = dict.fromkeys(method for (method, _), choice in chosen.items() if choice)
    rows = [
        [label(method), *(choice_text(chosen.get((method, d), {})) or NOTHING for d in donors)]
        for method in methods
    ]
    seed = f" (seed {first})" if len({one.seed for one in found}) > 1 else ""
    return [Table(["", *donors], rows, f"Chosen by validation{seed}")] if rows else []


def step_times(steps: Iterable[tuple[str, float]]) -> Table | None:
    """What the work was, by kind."""
    by_kind = _by_key(steps)
    rows = [[kind, str(len(t)), duration(sum(t))] for kind, t in by_kind.items()]
    return Table(["step", "times", "took"], rows, "Time by kind of step") if rows else None


def _by_key(pairs: Iterable[tuple[Any, float]]) -> dict[Any, list[float]]:
    found: dict[Any, list[float]] = defaultdict(list)
    for key, value in pairs:
        found[key].append(value)
    return found


def _mean(values: Sequence[float] | None) -> float | None:
    return fmean(values) if values else None


def _score_cell(
    values: Sequence[float] | None, *, best: bool = False, error: float | None = None
) -> Cell:
    """Mean and standard error over seeds; of one seed, the error over examples if given."""
    if not values:
        return Cell(NOTHING)
    mean, over_seeds = mean_and_error(values)
    spread = error if over_seeds is None else over_seeds
    return Cell(percent(mean), "" if spread is None else percent(spread), best)


def _paper_cell(value: float | None) -> Cell:
    return Cell(NOTHING if value is None else f"{value:.1f}", papers=True)


def _two_digits(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}"
