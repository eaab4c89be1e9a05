"""What `mats tune` tried, and what it chose."""

from collections.abc import Callable, Mapping
from typing import Any

from matsmerge.lab.reports.chart import Axis, Chart, Series
from matsmerge.lab.reports.document import Block, Cell, Figure, Items, Table
from matsmerge.lab.reports.numbers import NOTHING, percent


def tuning_trials(tuning: Mapping[str, Any]) -> list[Block]:
    """A table of all trials, the nearest to the best first; a curve where one number was tuned."""
    trials = [t for t in tuning.get("trials", ()) if t.get("score") is not None]
    if not trials:
        return []
    chosen, best = tuning["best"]["choice"], tuning["best"]["score"]
    tasks = list(trials[0]["scores"])
    in_percent = all(0 <= t["score"] <= 1 for t in trials)
    show: Callable[[float], str] = percent if in_percent else "{:.4f}".format
    rows: list[list[Cell | str]] = [
        [
            ", ".join(f"{key} = {value}" for key, value in t["choice"].items()) or "as given",
            Cell(show(t["score"]), best=t["choice"] == chosen),
            *(NOTHING if (s := t["scores"].get(task)) is None else show(s) for task in tasks),
        ]
        for t in sorted(trials, key=lambda t: abs(t["score"] - best))
    ]
    unit = "percent" if in_percent else "score"
    split = tuning.get("options", {}).get("split", "validation")
    title = f"Tried on {split} data, {unit}; the nearest to the chosen first"
    table = Table(["", "mean", *tasks], rows, title)
    blocks: list[Block] = [table]
    keys = {key for t in trials for key in t["choice"]}
    key = next(iter(keys), "")
    if len(keys) == 1 and len(trials) > 2 and all(_is_number(t["choice"].get(key)) for t in trials):
        factor = 100 if in_percent else 1
        xs, ys = zip(*sorted((t["choice"][key], factor * t["score"]) for t in trials), strict=True)
        best = next(factor * t["score"] for t in trials if t["choice"] == chosen)
        score = f"mean {split} {unit}"
        titles = [f"{key} = {x:g}: {y:.2f}" for x, y in zip(xs, ys, strict=True)]
        tried = Series("", xs, ys, size=4, line=2, titles=titles)
        ring = Series("chosen", [chosen[key]], [best], "accent", "ring", 7)
        chart = Chart(260, Axis(key), Axis(score), [tried, ring])
        caption = f"{key} = {chosen[key]} has the best mean score on {split} data."
        blocks.insert(0, Figure("What was tried", caption, chart))
    failed = [f"{t['choice']}: {t['failure']}" for t in tuning["trials"] if t.get("failure")]
    return [*blocks, Items("Could not be merged", failed, folded=True)] if failed else blocks


def _is_number(value: Any) -> bool:
    """A number that can be drawn."""
    return isinstance(value, (int, float)) and type(value) is not bool and abs(value) < 1e300
