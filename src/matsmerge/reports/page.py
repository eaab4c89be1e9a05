"""A report as one page that needs nothing else: no network, no other file."""

import importlib
import json
import math
from collections.abc import Sequence
from html import escape
from importlib import resources
from typing import Any

from matsmerge.errors import OutputError
from matsmerge.reports.document import (
    Block,
    Caution,
    Cell,
    Code,
    Convergence,
    Figure,
    Heading,
    Items,
    Paragraph,
    Report,
    Section,
    Table,
)

# Nothing may be fetched, whatever the page says; charts are drawn into it and saved from it.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)


def check_page() -> None:
    """Refuse to begin without plotly."""
    _plotly_script()


def to_page(report: Report) -> str:
    """The whole page."""
    figures: list[dict[str, Any]] = []
    body = "\n".join(_section(section, figures) for section in report.shown)
    links = "".join(f'<li><a href="#{s.slug}">{escape(s.title)}</a></li>' for s in report.shown)
    strip = "".join(
        f"<div><dt>{escape(k.label)}</dt><dd>{escape(k.value)}</dd>"
        + (f'<dd class="note">{escape(k.note)}</dd>' if k.note else "")
        + "</div>"
        for k in report.key_figures
    )
    strip = f'<dl class="strip">{strip}</dl>' if strip else ""
    warnings = "".join(map(_warning, report.warnings))
    made_by = f"<footer>Made by {escape(report.made_by)}.</footer>" if report.made_by else ""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="referrer" content="no-referrer">
<link rel="icon" href="data:,">
<title>{escape(report.title)}</title>
<style>{_shipped("page.css")}</style>
<script>{_shipped("theme.js")}</script>
</head>
<body>
<a class="skip" href="#main">Skip to the content</a>
<header>
<div class="bar"><span class="kind">{escape(report.kind)}</span>
<button type="button" id="theme">Dark</button></div>
<h1>{escape(report.title)}</h1>
<p class="about">{escape(report.about)}</p>
{warnings}{strip}
</header>
<div class="columns">
<nav aria-label="Contents"><ol>{links}</ol></nav>
<main id="main">
<noscript><p class="warning">Figures need JavaScript; the tables behind them do not.</p></noscript>
{body}
{made_by}
</main>
</div>
<p id="said" role="status" class="hidden"></p>
<script type="application/json" id="figures">{_json(figures)}</script>
<script>{_plotly_script()}</script>
<script>{_shipped("page.js")}</script>
</body>
</html>
"""


def _shipped(name: str) -> str:
    return resources.files("matsmerge.reports").joinpath(name).read_text("utf-8")


def _plotly_script() -> str:
    try:
        offline = importlib.import_module("plotly.offline")
    except ImportError as error:
        raise OutputError(
            f"a page needs plotly, which cannot be imported ({error}); install it with "
            "`pip install 'matsmerge[report]'`, or write --markdown alone"
        ) from error
    return str(offline.get_plotlyjs())


def _json(content: Any) -> str:
    """JSON that cannot end the script it stands in; what is no number is null."""
    return json.dumps(_finite(content), separators=(",", ":")).replace("<", "\\u003c")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _section(section: Section, figures: list[dict[str, Any]]) -> str:
    blocks = [_block(block, figures) for block in section.blocks]
    return (
        f'<section id="{section.slug}"><h2>{escape(section.title)}</h2>'
        f'<div class="blocks">{"".join(blocks)}</div></section>'
    )


def _block(block: Block, figures: list[dict[str, Any]]) -> str:
    match block:
        case Heading():
            return f"<h3>{escape(block.text)}</h3>"
        case Paragraph():
            return f"<p>{escape(block.text)}</p>"
        case Caution():
            return _warning(block)
        case Items():
            items = "".join(f"<li>{escape(item)}</li>" for item in block.items)
            listed = f"<ul>{items}</ul>"
            return _folded(f"{block.title} ({len(block.items)})", listed, not block.folded)
        case Table():
            table = _table(block)
            return _folded(block.title, table) if block.folded else table
        case Code():
            return _folded(block.title, _code(block), not block.folded)
        case Figure():
            return _figure(block, figures)
        case Convergence():
            return _convergence(block, figures)


def _warning(block: Caution) -> str:
    items = "".join(f"<li>{escape(item)}</li>" for item in block.items)
    return f'<div class="warning" role="note"><p>{escape(block.title)}</p><ul>{items}</ul></div>'


def _folded(title: str, content: str, is_open: bool = False) -> str:
    state = " open" if is_open else ""
    return f"<details{state}><summary>{escape(title)}</summary>{content}</details>"


def _code(block: Code) -> str:
    button = '<button type="button" data-copy>Copy</button>'
    return (
        f'<div class="code">{button}<pre tabindex="0"><code>{escape(block.text)}</code></pre></div>'
    )


def _table(table: Table) -> str:
    title = "" if table.folded else table.title
    caption = f'<p class="caption">{escape(title)}</p>' if title else ""
    kinds = [' class="words"' if are_words else "" for are_words in table.are_words]
    heads = "".join(
        f'<th scope="col"{kind}>{escape(head)}</th>'
        for head, kind in zip(table.heads, kinds, strict=True)
    )
    head = f"<thead><tr>{heads}</tr></thead>" if any(table.heads) else ""
    rows = "".join(
        f'<tr class="marked">{_row(row, kinds)}</tr>'
        if i in table.marked
        else f"<tr>{_row(row, kinds)}</tr>"
        for i, row in enumerate(table.rows)
    )
    name = escape(table.title or "Table")
    return (
        f'<div class="table">{caption}<div class="scroll" role="region" aria-label="{name}" '
        f'tabindex="0"><table>{head}<tbody>{rows}</tbody></table></div></div>'
    )


def _row(row: Sequence[Cell | str], kinds: Sequence[str]) -> str:
    first, *others = row
    cells = zip(others, kinds[1:], strict=True)
    return f'<th scope="row">{_value(first)}</th>' + "".join(
        f"<td{kind}>{_value(cell)}</td>" for cell, kind in cells
    )


def _value(cell: Cell | str) -> str:
    if isinstance(cell, str):
        return escape(cell)
    text = escape(cell.text)
    text = f"<strong>{text}</strong>" if cell.best else text
    text = f'<span class="papers">{text}</span>' if cell.papers else text
    return text + (f' <span class="error">± {escape(cell.error)}</span>' if cell.error else "")


def _figure(figure: Figure, figures: list[dict[str, Any]]) -> str:
    number = _add(figures, {"data": figure.data, "layout": figure.layout})
    switch = ""
    if figure.log_x:
        switch = '<label><input type="checkbox" data-log="x" checked> logarithmic axis</label>'
    table = _folded("Table", _table(figure.table))
    half = " half" if figure.half else ""
    return _frame(number, figure.title, figure.caption, switch, table, half)


def _convergence(block: Convergence, figures: list[dict[str, Any]]) -> str:
    number = _add(figures, {"convergence": block.merges})
    merges = "".join(f"<option>{escape(str(m['name']))}</option>" for m in block.merges)
    controls = f"""<label class="field">Merge <select data-merge>{merges}</select></label>
<fieldset><legend>Show</legend>
<label><input type="radio" name="quantity-{number}" value="residual" checked> residual</label>
<label><input type="radio" name="quantity-{number}" value="objective"> objective</label></fieldset>
<fieldset><legend>Logarithmic</legend>
<label><input type="checkbox" data-log="x"> iterations</label>
<label><input type="checkbox" data-log="y" checked> values</label></fieldset>
<fieldset class="layers"><legend>Layers <span data-count></span></legend>
<div class="quick"><button type="button" data-quick="worst">Worst 5</button>
<button type="button" data-quick="best">Best 5</button>
<button type="button" data-quick="all">All shown</button>
<button type="button" data-quick="none">None</button></div>
<label class="field">Filter <input type="search" data-filter placeholder="part of a name"></label>
<div class="choices" data-choices></div></fieldset>"""
    tables = "".join(_folded(f"Table, {t.title}", _table(t)) for t in block.tables)
    title = "Residuals, layer by layer"
    return _frame(number, title, block.caption, controls, tables, " convergence")


def _add(figures: list[dict[str, Any]], content: dict[str, Any]) -> int:
    figures.append(content)
    return len(figures) - 1


def _frame(number: int, title: str, caption: str, controls: str, more: str, kind: str) -> str:
    exports = "".join(
        f'<button type="button" data-export="{kind}" aria-label="Save {escape(title)} as '
        f'{kind.upper()}">{kind.upper()}</button>'
        for kind in ("png", "svg", "csv")
    )
    controls = f'<div class="controls">{controls}</div>' if controls else ""
    return f"""<figure class="figure{kind}" data-figure="{number}" data-name="{escape(title)}">
<div class="top"><span class="title">{escape(title)}</span>
<span class="exports">{exports}</span></div>
{controls}<div class="legend"></div>
<div class="plot" role="img" aria-label="{escape(title)}. {escape(caption)}"></div>
<figcaption>{escape(caption)}</figcaption>{more}</figure>"""
