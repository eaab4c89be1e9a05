"""What a comparison comes to: one sentence, what says so, and one chart."""

from collections.abc import Sequence

from matsmerge.engine.model_card import load_call
from matsmerge.lab.reports.chart import Axis, Chart, Series
from matsmerge.lab.reports.document import Code, Figure, Verdict
from matsmerge.lab.reports.numbers import points
from matsmerge.lab.reports.paired_interval import Interval
from matsmerge.lab.reports.scores import ScoreRow, ScoreTable

COMPARISON = "Merges compared"
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_SHARES = ("half", "a third", "a quarter", "a fifth", "a sixth", "a seventh", "an eighth")
_LEVEL = 2.5  # points: where the whole interval is this near to zero, two are level


def verdict(
    table: ScoreTable, num_models: int, average: str, *, smaller: bool = True, name: str = ""
) -> Verdict | None:
    """Of the merge the table is about, or the best; `smaller`: than the models it replaces."""
    subject = table.subject
    if subject is None or subject.mean is None:
        return None
    own = table.row(table.individual)
    apart = table.interval(subject, own)
    shown = table.show(subject.mean.value)
    models = f"{_count(num_models)} models" if num_models > 1 else "the task's own model"
    if own and own.mean:
        gap = apart.difference if apart else subject.mean.value - own.mean.value
        said = _compared(gap, apart, table)
        size = f" at {_share(num_models)} of the size" if smaller and num_models > 1 else ""
        against = f"{said} {models}{size}"
    elif len(table.merges) > 1:
        against = f"the best of {_count(len(table.merges))} merges"
    else:
        against = table.unit
    begin = subject.name if subject.is_this else f"Use {subject.name}"
    return Verdict(
        f"{begin}: {shown}, {against}",
        _evidence(table, subject, apart, average),
        comparison(table),
        name=name,
    )


def _compared(gap: float, apart: Interval | None, table: ScoreTable) -> str:
    better = gap > 0 if table.higher_is_better else gap < 0
    if apart and apart.has_zero:
        if table.factor == 100 and max(-apart.low, apart.high) <= _LEVEL:
            return "level with"
        return f"not clearly {'better' if better else 'worse'} than"
    unit = " points" if table.factor == 100 else ""
    return f"{table.show(abs(gap))}{unit} {'better' if better else 'worse'} than"


def _evidence(table: ScoreTable, subject: ScoreRow, apart: Interval | None, average: str) -> str:
    num = len(table.tasks)
    said = f"Mean test {table.unit}, over {num} tasks" if num > 1 else f"Test {table.unit}"
    plain = table.row(average)
    parts: list[str] = []
    against = {"each task's own model": apart, "plain averaging": table.interval(subject, plain)}
    for what, found in against.items():
        if found:
            # What an interval is, is said of the first.
            kind, over = ("", "") if parts else ("95\u00a0% interval ", f", {found.over}")
            text = f"{points(found.difference, table.digits)} against {what}"
            parts.append(f"{text} ({kind}{table.show_interval(found)}{over})")
    said += f": {'; '.join(parts)}." if parts else "."
    own = table.row(table.individual)
    if own and plain and subject.mean and own.mean and plain.mean and plain is not subject:
        gap = own.mean.value - plain.mean.value
        if gap > 0 if table.higher_is_better else gap < 0:
            share = (subject.mean.value - plain.mean.value) / gap
            said += f" It closes {100 * share:.0f}\u00a0% of the gap between the two."
    others = [row for row in table.merges if row is not subject]
    if others and others[0].mean and others[0].name != average:
        what = "Better was" if table.merges[0] is not subject else "The next is"
        said += f" {what} {others[0].name} with {table.show(others[0].mean.value)}."
    return said


def loading(place: str, tasks: Sequence[str]) -> Code:
    """Where a model is, and the lines that load it."""
    others = f"  # or {', '.join(tasks[1:])}" if tasks[1:] else ""
    code = f"import matsmerge\n\nmodel = {load_call(place, tasks)}{others}\n"
    where = "the folder of this page" if place == "." else place
    return Code(f"The model is in {where}", code, language="python")


def comparison(table: ScoreTable) -> Figure | None:
    """A dot for every model, the best merge at the top, with its interval.

    An interval is that of the difference to the task's own models, about the row's mean: where it
    reaches their line, the two are not told apart. What is far below all else is not on the axis.
    """
    rows = [(row, row.mean) for row in table.ordered if row.mean]
    if not rows:
        return None
    own, subject = table.row(table.individual), table.subject
    means = [mean.value for _, mean in rows]
    merges = [mean.value for row, mean in rows if not row.is_reference] or means
    if table.higher_is_better:
        shown = [v >= 2 * min(merges) - max(means) - 1e-9 for v in means]
    else:
        shown = [v <= 2 * max(merges) - min(means) + 1e-9 for v in means]
    groups: dict[str, list[int]] = {"accent": [], "series-1": [], "muted": []}
    for i, (row, _) in enumerate(rows):
        if shown[i]:
            kind = "accent" if row is subject else "muted" if row.is_reference else "series-1"
            groups[kind].append(i)
    spans = [_span(table, row, own) for row, _ in rows]
    names = {"accent": "", "series-1": "", "muted": "not merged"}
    series = [
        Series(
            names[colour],
            [means[i] for i in members],
            members,
            colour,
            "diamond" if colour == "muted" else "circle",
            7 if colour == "accent" else 5.5,
            titles=[_title(table, rows[i][0], own) for i in members],
            x_spans=[spans[i] for i in members],
        )
        for colour, members in groups.items()
        if members
    ]
    papers = [(i, row) for i, (row, _) in enumerate(rows) if row.paper is not None]
    if papers:
        values = [float(row.paper or 0) for _, row in papers]
        titles = [f"{row.name}, the paper's: {table.show(row.paper)}" for _, row in papers]
        places = [i for i, _ in papers]
        dots = Series("the paper's", values, places, "papers", "ring", 4.5, titles=titles)
        series.append(dots)
    num = len(table.tasks)
    caption = f"Mean {table.unit}, over {num} tasks. " if num > 1 else ""
    if own and own.mean:
        ends = [-0.5, len(rows) - 0.5]
        line = Series("", 2 * [own.mean.value], ends, "muted", "", line=1.5, dash="2 3")
        series.insert(0, line)
        caption += "The dotted line is that of each task's own model. "
        if any(spans):
            caption += (
                "Bars are 95\u00a0% intervals of the difference to it: where one reaches the line, "
                "there may be none."
            )
    left_out = [row.name for (row, _), there in zip(rows, shown, strict=True) if not there]
    caption += f" Off the axis: {', '.join(left_out)}." if left_out else ""
    chart = Chart(
        0,
        Axis(table.unit),
        Axis(names=[row.name for row, _ in rows]),
        series,
        [table.show(mean) for mean in means],
        frozenset(i for i, (row, _) in enumerate(rows) if row is subject),
    )
    return Figure(COMPARISON, caption.strip(), chart)


def _span(table: ScoreTable, row: ScoreRow, own: ScoreRow | None) -> tuple[float, float] | None:
    """Of the difference to the tasks' own models, about the row's own mean."""
    found = table.interval(row, own)
    if found is None or row.mean is None:
        return None
    zero = row.mean.value - found.difference
    return zero + found.low, zero + found.high


def _title(table: ScoreTable, row: ScoreRow, own: ScoreRow | None) -> str:
    text = f"{row.name}: {table.show(row.mean.value if row.mean else None)}"
    if found := table.interval(row, own):
        text += f", {points(found.difference, table.digits)} against own models "
        text += f"({table.show_interval(found)})"
    return text


def _count(number: int) -> str:
    return _NUMBERS[number] if number < len(_NUMBERS) else str(number)


def _share(number: int) -> str:
    return _SHARES[number - 2] if number - 2 < len(_SHARES) else f"1/{number}"
