"""A report as one page that needs nothing else: no network, no other file."""

import json
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from importlib import resources
from typing import Any

from matsmerge.lab.reports import document as doc
from matsmerge.lab.reports.figure_style import COLOURS, FONT, SERIES, TEMPLATE
from matsmerge.optional_import import import_optional

# Nothing may be fetched, whatever the page says; charts are drawn into it and saved from it.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)


def to_page(report: doc.Report) -> str:
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
    drawing = {
        "figures": figures,
        "template": TEMPLATE,
        "dark": dict(COLOURS.values()),
        "series": SERIES,
    }
    encoder = import_optional("plotly.utils").PlotlyJSONEncoder  # what is no number becomes null
    data = json.dumps(drawing, cls=encoder, separators=(",", ":"))
    data = data.replace("<", "\\u003c")  # so that it cannot end the script it stands in
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
<style>{_variables()}{_shipped("page.css")}</style>
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
<script type="application/json" id="figures">{data}</script>
<script>{import_optional("plotly.offline").get_plotlyjs()}</script>
<script>{_shipped("page.js")}</script>
</body>
</html>
"""


def _shipped(name: str) -> str:
    return resources.files("matsmerge.lab.reports").joinpath(name).read_text("utf-8")


def _variables() -> str:
    """Colours of both themes and the font, for the style sheet."""
    light, dark = (
        "".join(f"--{name}: {both[i]}; " for name, both in COLOURS.items()) for i in (0, 1)
    )
    return f':root {{ --font: {FONT}; {light}}} :root[data-theme="dark"] {{ {dark}}}\n'


def _section(section: doc.Section, figures: list[dict[str, Any]]) -> str:
    blocks = "".join(_block(block, figures) for block in section.blocks)
    return (
        f'<section id="{section.slug}"><h2>{escape(section.title)}</h2>'
        f'<div class="blocks">{blocks}</div></section>'
    )


def _block(block: doc.Block, figures: list[dict[str, Any]]) -> str:
    match block:
        case doc.Heading():
            return f"<h3>{escape(block.text)}</h3>"
        case doc.Paragraph():
            return f"<p>{escape(block.text)}</p>"
        case doc.Items():
            title = f"{block.title} ({len(block.items)})"
            return _folded(title, _items(block), not block.folded)
        case doc.Table():
            return _folded(block.title, _table(block)) if block.folded else _table(block)
        case doc.Code():
            code = f'<pre tabindex="0"><code>{escape(block.text)}</code></pre>'
            button = '<button type="button" data-copy>Copy</button>'
            return _folded(block.title, f'<div class="code">{button}{code}</div>', not block.folded)
        case doc.Figure():
            return _figure(block, figures)
        case doc.Convergence():
            return _convergence(block, figures)


def _items(block: doc.Items) -> str:
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in block.items) + "</ul>"


def _warning(block: doc.Items) -> str:
    return f'<div class="warning" role="note"><p>{escape(block.title)}</p>{_items(block)}</div>'


def _folded(title: str, content: str, is_open: bool = False) -> str:
    state = " open" if is_open else ""
    return f"<details{state}><summary>{escape(title)}</summary>{content}</details>"


def _table(table: doc.Table) -> str:
    title = "" if table.folded else table.title
    caption = f'<p class="caption">{escape(title)}</p>' if title else ""
    kinds = [' class="words"' if are_words else "" for are_words in table.are_words]
    heads = "".join(
        f'<th scope="col"{kind}>{escape(head)}</th>'
        for head, kind in zip(table.heads, kinds, strict=True)
    )
    head = f"<thead><tr>{heads}</tr></thead>" if any(table.heads) else ""
    rows = ""
    for i, (first, *others) in enumerate(table.rows):
        cells = zip(others, kinds[1:], strict=True)
        cells_of_row = "".join(f"<td{kind}>{_value(cell)}</td>" for cell, kind in cells)
        mark = ' class="marked"' if i in table.marked else ""
        rows += f'<tr{mark}><th scope="row">{_value(first)}</th>{cells_of_row}</tr>'
    name = escape(table.title or "Table")
    return (
        f'<div class="table">{caption}<div class="scroll" role="region" aria-label="{name}" '
        f'tabindex="0"><table>{head}<tbody>{rows}</tbody></table></div></div>'
    )


def _value(cell: doc.Cell | str) -> str:
    if isinstance(cell, str):
        return escape(cell)
    text = escape(cell.text)
    text = f"<strong>{text}</strong>" if cell.best else text
    text = f'<span class="papers">{text}</span>' if cell.papers else text
    return text + (f' <span class="error">± {escape(cell.error)}</span>' if cell.error else "")


def _figure(figure: doc.Figure, figures: list[dict[str, Any]]) -> str:
    plot = figure.plot.to_plotly_json()
    del plot["layout"]["template"]  # the page has it once
    switch = '<label><input type="checkbox" data-log="x" checked> logarithmic axis</label>'
    table = _folded("Table", _table(replace(figure.table, title="")))
    half = " half" if figure.half else ""
    figures.append(plot)
    return _frame(
        figures, figure.title, figure.caption, switch if figure.log_x else "", table, half
    )


def _convergence(block: doc.Convergence, figures: list[dict[str, Any]]) -> str:
    figures.append({"convergence": block.merges})
    number = len(figures) - 1
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
    return _frame(figures, title, block.caption, controls, tables, " convergence")


def _frame(
    figures: Sequence[Any], title: str, caption: str, controls: str, more: str, kind: str
) -> str:
    """The frame in which the page draws the last figure."""
    exports = "".join(
        f'<button type="button" data-export="{kind}" aria-label="Save {escape(title)} as '
        f'{kind.upper()}">{kind.upper()}</button>'
        for kind in ("png", "svg", "csv")
    )
    controls = f'<div class="controls">{controls}</div>' if controls else ""
    number, name = len(figures) - 1, escape(title)
    return f"""<figure class="figure{kind}" data-figure="{number}" data-name="{name}">
<div class="top"><span class="title">{name}</span>
<span class="exports">{exports}</span></div>
{controls}<div class="legend"></div>
<div class="plot" role="img" aria-label="{name}. {escape(caption)}"></div>
<figcaption>{escape(caption)}</figcaption>{more}</figure>"""
