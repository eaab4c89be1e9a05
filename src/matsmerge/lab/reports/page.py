"""A report as one page that needs nothing else: no network, no other file.

The page is `page.html` with its parts filled in. Its security policy forbids it to fetch anything,
whatever the report says; figures are drawn into the page and saved from it.
"""

import json
from dataclasses import replace
from html import escape
from importlib import resources
from string import Template
from typing import Any

from matsmerge.lab.reports import document as doc
from matsmerge.lab.reports.figure_style import COLOURS, FONT, SERIES, TEMPLATE
from matsmerge.optional_import import import_optional


def to_page(report: doc.Report) -> str:
    """The whole page."""
    figures: list[dict[str, Any]] = []
    sections = "\n".join(_section(section, figures) for section in report.shown)
    links = "".join(f'<li><a href="#{s.slug}">{escape(s.title)}</a></li>' for s in report.shown)
    key_figures = "".join(map(_key_figure, report.key_figures))
    made_by = f"<footer>Made by {escape(report.made_by)}.</footer>" if report.made_by else ""
    return _filled(
        "page.html",
        title=escape(report.title),
        kind=escape(report.kind),
        about=escape(report.about),
        warnings="".join(map(_warning, report.warnings)),
        key_figures=f'<dl class="strip">{key_figures}</dl>' if key_figures else "",
        links=links,
        sections=sections,
        made_by=made_by,
        figures=_figures_data(figures),
        style=_variables() + _shipped("page.css"),
        theme_script=_shipped("theme.js"),
        plotly_script=import_optional("plotly.offline").get_plotlyjs(),
        page_script=_shipped("page.js"),
    )


def _shipped(name: str) -> str:
    return resources.files("matsmerge.lab.reports").joinpath(name).read_text("utf-8")


def _filled(name: str, **parts: object) -> str:
    return Template(_shipped(name)).substitute(parts)


def _figures_data(figures: list[dict[str, Any]]) -> str:
    """The figures and their colours, as the page's script reads them."""
    drawing = {
        "figures": figures,
        "template": TEMPLATE,
        "dark": dict(COLOURS.values()),
        "series": SERIES,
    }
    encoder = import_optional("plotly.utils").PlotlyJSONEncoder  # what is no number becomes null
    data = json.dumps(drawing, cls=encoder, separators=(",", ":"))
    return data.replace("<", "\\u003c")  # so that it cannot end the script it stands in


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


def _key_figure(figure: doc.KeyFigure) -> str:
    note = f'<dd class="note">{escape(figure.note)}</dd>' if figure.note else ""
    return f"<div><dt>{escape(figure.label)}</dt><dd>{escape(figure.value)}</dd>{note}</div>"


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
    figures.append(plot)
    switch = '<label><input type="checkbox" data-log="x" checked> logarithmic axis</label>'
    table = _folded("Table", _table(replace(figure.table, title="")))
    place = (len(figures) - 1, "half" if figure.half else "")
    return _frame(*place, figure.title, figure.caption, switch if figure.log_x else "", table)


def _convergence(block: doc.Convergence, figures: list[dict[str, Any]]) -> str:
    number = len(figures)
    figures.append({"convergence": block.merges})
    merges = "".join(f"<option>{escape(str(m['name']))}</option>" for m in block.merges)
    controls = _filled("convergence.html", merges=merges, number=number).rstrip()
    tables = "".join(_folded(f"Table, {t.title}", _table(t)) for t in block.tables)
    title = "Residuals, layer by layer"
    return _frame(number, "convergence", title, block.caption, controls, tables)


def _frame(number: int, kind: str, title: str, caption: str, controls: str, more: str) -> str:
    """The frame in which the page draws the figure of this number."""
    exports = "".join(
        f'<button type="button" data-export="{form}" aria-label="Save {escape(title)} as '
        f'{form.upper()}">{form.upper()}</button>'
        for form in ("png", "svg", "csv")
    )
    controls = f'<div class="controls">{controls}</div>' if controls else ""
    name, classes = escape(title), f"figure {kind}".strip()
    return f"""<figure class="{classes}" data-figure="{number}" data-name="{name}">
<div class="top"><span class="title">{name}</span>
<span class="exports">{exports}</span></div>
{controls}<div class="legend"></div>
<div class="plot" role="img" aria-label="{name}. {escape(caption)}"></div>
<figcaption>{escape(caption)}</figcaption>{more}</figure>"""
