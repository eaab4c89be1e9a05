"""What a merge.json tells: how layers converged, what went to `otherwise`, and the recipe."""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from statistics import median
from typing import Any

import yaml

from matsmerge.checkpoints.public_names import without_paths
from matsmerge.lab.experiments.score_tables import grouped
from matsmerge.lab.reports.document import Block, Cell, Code, Table, TableChoice
from matsmerge.lab.reports.numbers import NOTHING, count, power

_MOST_TITLES = 1500  # cells of heat maps that say more on the mouse, which takes room
_MOST_ROWS = 40  # of a heat map; beyond, numbers within names stand together
_LOW, _HIGH = -6.0, 0.0  # powers of ten between which residuals are coloured


def convergence(merges: Mapping[str, Mapping[str, Any]]) -> list[Block]:
    """By the name of each merge, from its merge.json, in this order; of what was solved."""
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
    rows = [_summary(name, layers) for name, layers in stages.items()]
    summary = Table(heads, rows, "How merges were solved")
    drawn = {
        name: {layer: r for layer, r in layers.items() if r.get("residual") is not None}
        for name, layers in stages.items()
    }
    has_titles = sum(map(len, drawn.values())) <= _MOST_TITLES
    maps = [_heat_map(name, layers, has_titles) for name, layers in drawn.items() if layers]
    caption = (
        "How near each layer came to the solution of its linear system: what is left of the "
        "residual, relative to that of zero weights. The stronger the colour, the more would "
        "change with further iterations."
    )
    return [TableChoice("Merge", caption, maps), summary] if maps else [summary]


def _heat_map(name: str, layers: Mapping[str, Mapping[str, Any]], has_titles: bool) -> Table:
    """A row for every kind of module and a column for every layer."""
    places = {parameter: _place(parameter) for parameter in layers}
    if len({module for module, _ in places.values()}) > _MOST_ROWS:
        places = {p: (re.sub(r"\d+", "*", module), at) for p, (module, at) in places.items()}
    modules = list(dict.fromkeys(module for module, _ in places.values()))
    numbers = sorted({at for _, at in places.values()}, key=lambda at: (at is None, at or 0))
    found = grouped((places[parameter], report) for parameter, report in layers.items())
    rows: list[list[Cell | str]] = [
        [
            _short_module(module, modules),
            *(
                _heat_cell(found[module, at], has_titles) if (module, at) in found else ""
                for at in numbers
            ),
        ]
        for module in modules
    ]
    heads = ["module, by layer", *("none" if at is None else str(at) for at in numbers)]
    shades = ["1: not solved", "10⁻⁶: solved", ""]
    return Table(heads, rows, name, in_markdown=False, shades=shades, is_map=True)


def _place(parameter: str) -> tuple[str, int | None]:
    """The kind of module, and the number of its layer, the first in its name."""
    name = parameter.removesuffix(".weight")
    found = re.search(r"\.(\d+)\.", name)
    if found is None:
        return name, None
    return f"{name[: found.start()]}.{name[found.end() :]}", int(found[1])


def _short_module(module: str, modules: Sequence[str]) -> str:
    """Without the parts that all names begin with; one name alone is left as it is."""
    parts = [m.split(".") for m in modules]
    same = 0
    while len(modules) > 1 and all(p[: same + 1] == parts[0][: same + 1] for p in parts):
        same += 1
    return ".".join(module.split(".")[same:])


def _heat_cell(reports: Sequence[Mapping[str, Any]], has_title: bool) -> Cell:
    """The worst of a cell's layers."""
    worst = max(reports, key=lambda report: report["residual"])
    value, ratio = worst["residual"], _ratio(worst)
    exponent = math.log10(value) if value > 0 else _LOW
    share = (min(max(exponent, _LOW), _HIGH) - _LOW) / (_HIGH - _LOW)
    title = f"{power(value)} after {count(worst['iterations'], 'iteration')}"
    title += "" if ratio is None else f", objective {100 * ratio:.0f} %"
    return Cell(_brief(value), shade=-share, title=title if has_title else "")


def _brief(value: float) -> str:
    """In a few characters: 0.4, .03, 2e-5."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else NOTHING
    digits, exponent = f"{value:.0e}".split("e")
    return f"{value:.1g}".removeprefix("0") if value >= 0.01 else f"{digits}e{int(exponent)}"


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
        heads = ["parameters", "tensors", "numbers", "share"]
        blocks.append(Table(heads, rows, title, folded=True))
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
