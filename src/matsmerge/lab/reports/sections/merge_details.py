"""What a merge.json tells: how layers converged, what went to `otherwise`, and the recipe."""

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import PurePath
from statistics import median
from typing import Any

import yaml

from matsmerge.checkpoints.public_names import without_paths
from matsmerge.lab.experiments.score_tables import grouped
from matsmerge.lab.reports.document import Block, Code, Convergence, Items, Table
from matsmerge.lab.reports.numbers import NOTHING, count, power

_NUM_POINTS = 60  # of a layer's curve


def convergence(merges: Mapping[str, Mapping[str, Any]]) -> list[Block]:
    """By the name of each merge, from its merge.json; nothing where nothing was solved."""
    stages: dict[str, dict[str, Mapping[str, Any]]] = {}
    for name, merge in merges.items():
        num_stages = 1 + max((r["stage"] for _, r in _solved(merge)), default=0)
        for parameter, report in _solved(merge):
            stage = f", stage {report['stage'] + 1}" if num_stages > 1 else ""
            stages.setdefault(f"{name}{stage}", {})[parameter] = report
    if not stages:
        return []
    heads = ["", "layers", "solver", "iterations", "median residual", "largest residual"]
    heads += ["objective, of the start's"]
    summary = Table(heads, [_summary(name, layers) for name, layers in stages.items()])
    heads = ["layer", "iterations", "status", "residual at the start", "at the end", "objective"]
    curves, tables = [], []
    for name, layers in stages.items():
        if drawn := [_curve(layer, r) for layer, r in layers.items() if "residuals" in r]:
            curves.append({"name": name, "layers": drawn})
            rows = [_layer_row(layer, report) for layer, report in layers.items()]
            tables.append(Table(heads, rows, name, in_markdown=False))
    caption = (
        "How near each layer came to the solution of its linear system, iteration by iteration; "
        "residuals are relative to that of zero, objectives to the start's."
    )
    return [Convergence(caption, curves, tables), summary] if curves else [summary]


def _solved(merge: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    return [
        (name, report)
        for name, parameter in merge.get("parameters", {}).items()
        for report in parameter.get("solved", ())
    ]


def _summary(name: str, layers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    reports = list(layers.values())
    residuals = [r["residual"] for r in reports if r.get("residual") is not None]
    ratios = [ratio for r in reports if (ratio := _ratio(r)) is not None]
    iterations = sorted({r["iterations"] for r in reports})
    shown = f"{iterations[0]}" if len(iterations) == 1 else f"{iterations[0]} to {iterations[-1]}"
    return [
        name,
        str(len(reports)),
        ", ".join(dict.fromkeys(r["solver"] for r in reports)),
        shown if iterations[-1] else "at once",
        power(median(residuals) if residuals else None),
        power(max(residuals, default=None)),
        f"{100 * median(ratios):.1f} %" if ratios else NOTHING,
    ]


def _ratio(report: Mapping[str, Any]) -> float | None:
    start, end = report.get("objective_of_start"), report.get("objective_value")
    return end / start if start and end is not None else None


def _curve(name: str, report: Mapping[str, Any]) -> dict[str, Any]:
    residuals, values = report["residuals"], report.get("objective_values") or []
    kept = _thinned(len(residuals))
    start = values[0] if values else None
    return {
        "name": name,
        "x": kept,
        "residual": [_short(residuals[i]) for i in kept],
        "objective": [_short(values[i] / start) for i in kept] if start else [],
    }


def _thinned(length: int) -> list[int]:
    """All iterations, or enough of them for a curve, denser at the start."""
    if length <= _NUM_POINTS:
        return list(range(length))
    steps = (length ** (i / (_NUM_POINTS - 1)) - 1 for i in range(_NUM_POINTS))
    return sorted({*(min(round(step), length - 1) for step in steps), length - 1})


def _short(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _layer_row(name: str, report: Mapping[str, Any]) -> list[str]:
    residuals = report.get("residuals") or [None]
    ratio = _ratio(report)
    return [
        name,
        str(report["iterations"]),
        str(report["status"]),
        power(residuals[0]),
        power(report.get("residual")),
        NOTHING if ratio is None else f"{100 * ratio:.1f} %",
    ]


def otherwise(merges: Mapping[str, Mapping[str, Any]]) -> list[Block]:
    """Parameters the objective had nothing for; merges that treat the same ones stand together."""
    found: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, merge in merges.items():
        parameters = merge.get("parameters", {})
        if left := tuple(p for p, about in parameters.items() if about.get("otherwise")):
            found[left].append(name)
    blocks: list[Block] = []
    for left, names in found.items():
        merge = merges[names[0]]
        sizes = {name: math.prod(about["shape"]) for name, about in merge["parameters"].items()}
        total = sum(sizes.values())
        how = {"average": "averaged", "init": "left as in the init"}
        rules = (rule["otherwise"] for rule in merge.get("rules", ()) if "otherwise" in rule)
        done = " or ".join(dict.fromkeys(how.get(rule, rule) for rule in rules))
        groups = grouped((re.sub(r"(?<=\.)\d+(?=\.)", "*", name), sizes[name]) for name in left)
        rows = [
            [kind, str(len(members)), f"{sum(members):,}", f"{sum(members) / total:.2%}"]
            for kind, members in sorted(groups.items(), key=lambda group: -sum(group[1]))
        ]
        title = f"{', '.join(names)}: {count(len(left), 'tensor')} of {len(sizes)}"
        title += f", {sum(sizes[name] for name in left) / total:.1%} of all parameters"
        title += f", {done}" if done else ""
        blocks.append(Table(["parameters", "tensors", "numbers", "share"], rows, title))
        blocks.append(Items("All of them", left, folded=True))
    return blocks


def recipe_code(title: str, recipe: Mapping[str, Any], *, folded: bool = False) -> Code:
    """A recipe to copy, without local paths: reports are published."""
    public = without_paths(dict(recipe), short_source)
    text = yaml.safe_dump(public, sort_keys=False, allow_unicode=True)
    return Code(title, text, folded)


def short_source(source: str) -> str:
    """Of a local path what tells it from others; a hub id as it is."""
    path = PurePath(source)
    if not (path.is_absolute() or source.startswith((".", "~"))):
        return source
    return path.parent.name if path.name == "model" else path.name


def describe_method(recipe: Mapping[str, Any]) -> str:
    """A recipe's method in a few words."""
    method = recipe.get("method")
    if isinstance(method, dict):
        options = ", ".join(f"{k} {v}" for k, v in method.items() if k != "name")
        return f"{method.get('name')}" + (f" ({options})" if options else "")
    return str(method)
