"""A report as one page that needs nothing else: no network, no other file.

The page is `page.html` with its parts filled in. Its security policy forbids it to fetch anything,
whatever the report says. Figures are drawn here, once for wide screens and once for narrow ones.
"""

import re
from dataclasses import replace
from html import escape
from importlib import resources
from string import Template

from matsmerge.lab.reports import document as doc
from matsmerge.lab.reports.chart_drawing import draw_chart
from matsmerge.lab.reports.palette import variables

_LONG = 13  # letters that fit beside numbers on a phone
_WIDE, _HALF, _NARROW = 860, 430, 330  # pixels


def to_page(report: doc.Report, refresh: int = 0) -> str:
    """The whole page; one that is read while it changes loads itself anew every few seconds."""
    is_one = len(report.verdicts) == 1
    headline = report.verdicts[0].headline if is_one else report.title
    links = "".join(f'<li><a href="#{s.slug}">{escape(s.title)}</a></li>' for s in report.shown)
    made_by = f"<footer>Made by {escape(report.made_by)}.</footer>" if report.made_by else ""
    again = f'<meta http-equiv="refresh" content="{refresh}">\n' if refresh else ""
    return Template(_shipped("page.html")).substitute(
        title=escape(report.title),
        refresh=again,
        kind=escape(report.kind if headline == report.title else f"{report.title} · {report.kind}"),
        headline=escape(headline),
        about=escape(report.about),
        warnings="".join(map(_warning, report.warnings)),
        verdicts="".join(_verdict(one, is_one) for one in report.verdicts),
        links=links,
        sections="\n".join(map(_section, report.shown)),
        made_by=made_by,
        style=variables() + _shipped("page.css"),
        theme_script=_shipped("theme.js"),
        page_script=_shipped("page.js"),
    )


def _shipped(name: str) -> str:
    return resources.files("matsmerge.lab.reports").joinpath(name).read_text("utf-8")


def _verdict(verdict: doc.Verdict, is_one: bool) -> str:
    """The first thing that is seen; of one alone the headline is that of the page."""
    name = f"{verdict.name}: " if verdict.name else ""
    head = "" if is_one else f"<h2>{escape(name + verdict.headline)}</h2>"
    figure = _figure(verdict.figure) if verdict.figure else ""
    code = _block(verdict.code) if verdict.code else ""
    return f'<div class="verdict">{head}<p>{escape(verdict.evidence)}</p>{figure}{code}</div>'


def _section(section: doc.ReportSection) -> str:
    blocks = "".join(map(_block, section.blocks))
    return (
        f'<section id="{section.slug}" aria-labelledby="{section.slug}-title">'
        f'<h2 id="{section.slug}-title">{escape(section.title)}</h2>'
        f'<div class="blocks">{blocks}</div></section>'
    )


def _block(block: doc.Block) -> str:
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
            return _figure(block)
        case doc.TableChoice():
            return _choice(block)


def _items(block: doc.Items) -> str:
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in block.items) + "</ul>"


def _warning(block: doc.Items) -> str:
    title, share = escape(block.title), block.share
    bar = "" if share is None else f'<progress value="{share:.4f}" aria-label="{title}"></progress>'
    return f'<div class="warning" role="note"><p>{title}</p>{bar}{_items(block)}</div>'


def _folded(title: str, content: str, is_open: bool = False) -> str:
    state = " open" if is_open else ""
    return f"<details{state}><summary>{escape(title)}</summary>{content}</details>"


def _table(table: doc.Table) -> str:
    title = escape(table.title)
    caption = f'<caption class="hidden">{title}</caption>' if title else ""
    # A caption is as wide as its table, which may scroll; what is seen stays where it is.
    above = f'<p class="caption" aria-hidden="true">{title}</p>' if title else ""
    kinds = [' class="words"' if are_words else "" for are_words in table.are_words]
    heads = "".join(
        f'<th scope="col"{kind}>{escape(head)}</th>' if head else "<td></td>"
        for head, kind in zip(table.heads, kinds, strict=True)
    )
    head = f"<thead><tr>{heads}</tr></thead>" if any(table.heads) else ""
    rows = ""
    for i, (first, *others) in enumerate(table.rows):
        cells = zip(others, kinds[1:], strict=True)
        cells_of_row = "".join(_cell(cell, kind) for cell, kind in cells)
        mark = ' class="marked"' if i in table.marked else ""
        rows += f'<tr{mark}><th scope="row">{_breakable(_value(first))}</th>{cells_of_row}</tr>'
    switch = (
        '<label class="switch"><input type="checkbox" data-errors> standard errors</label>'
        if table.has_errors
        and any(isinstance(c, doc.Cell) and c.error for r in table.rows for c in r)
        else ""
    )
    kind = "table map" if table.is_map else "table"
    below = f'<div class="below">{_shades(table)}{switch}</div>' if table.shades else ""
    return (
        f'<div class="{kind}">{"" if table.folded else above}<div class="scroll" role="region" '
        f'aria-label="{title or "Table"}" tabindex="0">'
        f"<table>{caption}{head}<tbody>{rows}</tbody></table></div>{below}</div>"
    )


def _breakable(name: str) -> str:
    """A long name that may go on in the next line after a part of it."""
    return re.sub(r"(?<=[._])(?=\w)", "<wbr>", name) if len(name) > _LONG else name


def _shades(table: doc.Table) -> str:
    """What the colours mean, those that are used."""
    looks = ("down", "", "up")
    shown = [
        f'<span><i class="{look}" style="--s:100%"></i>{escape(what)}</span>'
        for look, what in zip(looks, table.shades, strict=True)
        if what
    ]
    return f'<p class="shades">{"".join(shown)}</p>'


def _cell(cell: doc.Cell | str, kind: str) -> str:
    if isinstance(cell, str):
        return f"<td{kind}>{escape(cell)}</td>"
    title = f' title="{escape(cell.title)}"' if cell.title else ""
    if cell.shade is not None:
        strength = round(100 * min(abs(cell.shade), 1))
        look = "up" if cell.shade > 0 else "down"
        kind = f' class="{look}" style="--s:{strength}%"' if strength else ""
    return f"<td{kind}{title}>{_value(cell)}</td>"


def _value(cell: doc.Cell | str) -> str:
    if isinstance(cell, str):
        return escape(cell)
    text = escape(cell.text)
    text = f"<strong>{text}</strong>" if cell.best else text
    text = f'<span class="papers">{text}</span>' if cell.papers else text
    return text + (f' <span class="error">± {escape(cell.error)}</span>' if cell.error else "")


def _figure(figure: doc.Figure) -> str:
    name, caption = escape(figure.title), escape(figure.caption)
    label = f"{figure.title}. {figure.caption}"
    wide = draw_chart(figure.chart, _HALF if figure.half else _WIDE, label)
    narrow = draw_chart(figure.chart, _NARROW, label)
    table = _folded("Table", _table(replace(figure.table, folded=True))) if figure.table else ""
    kind = "figure half" if figure.half else "figure"
    return (
        f'<figure class="{kind}" data-name="{name}"><div class="top">'
        f'<span class="title">{name}</span><button type="button" data-save '
        f'aria-label="Save {name} as SVG">SVG</button></div>'
        f'<div class="wide">{wide}</div><div class="narrow">{narrow}</div>'
        f"<figcaption>{caption}</figcaption>{table}</figure>"
    )


def _choice(block: doc.TableChoice) -> str:
    options = "".join(f"<option>{escape(table.title)}</option>" for table in block.tables)
    tables = "".join(
        f"<div data-choice{' hidden' if i else ''}>{_table(replace(table, folded=True))}</div>"
        for i, table in enumerate(block.tables)
    )
    return (
        f'<div class="choice"><label>{escape(block.label)} <select data-choose>{options}</select>'
        f"</label><p>{escape(block.caption)}</p>{tables}</div>"
    )
