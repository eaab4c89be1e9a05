"""A report as Markdown, for a model card: its text and tables."""

from collections.abc import Sequence

from matsmerge.lab.reports import document as doc
from matsmerge.markdown_text import escape, fenced

Rows = Sequence[Sequence[doc.Cell | str]]


def to_markdown(report: doc.Report) -> str:
    """Everything but pictures and long lists."""
    parts = [f"# {escape(report.title)}", escape(report.about), *map(_items, report.warnings)]
    parts += [part for verdict in report.verdicts for part in _verdict(verdict)]
    for section in report.shown:
        parts += _section(section)
    parts.append(f"Made by {escape(report.made_by)}." if report.made_by else "")
    return "\n\n".join(part for part in parts if part) + "\n"


def _verdict(verdict: doc.Verdict) -> list[str]:
    name = f"{escape(verdict.name)}: " if verdict.name else ""
    code = _block(verdict.code, []) if verdict.code else ""
    return [f"**{name}{escape(verdict.headline)}.** {escape(verdict.evidence)}", code]


def _section(section: doc.ReportSection) -> list[str]:
    """A section's texts; none if all of it is pictures, nor a heading above nothing."""
    shown = [block.rows for block in section.blocks if isinstance(block, doc.Table)]
    texts: list[str] = []
    heading = ""
    for block in section.blocks:
        if isinstance(block, doc.Heading):
            heading = f"### {escape(block.text)}"
        elif text := _block(block, shown):
            texts += [heading, text] if heading else [text]
            heading = ""
    return [f"## {escape(section.title)}", *texts] if texts else []


def _block(block: doc.Block, shown: list[Rows]) -> str:
    """A figure's table stands for it, unless the same rows are shown anyway."""
    match block:
        case doc.Paragraph():
            return escape(block.text)
        case doc.Items():
            return "" if block.folded else _items(block)
        case doc.Table():
            return _table(block) if block.in_markdown else ""
        case doc.Figure():
            if not block.table or not block.table.in_markdown or block.table.rows in shown:
                return ""
            shown.append(block.table.rows)
            return f"{escape(block.caption)}\n\n{_table(block.table)}"
        case doc.TableChoice():
            return escape(block.caption)
        case doc.Code():
            code = f"{escape(block.title)}:\n\n{fenced(block.text, block.language)}"
            return "" if block.folded else code
    return ""


def _table(table: doc.Table) -> str:
    lines = [
        "| " + " | ".join(escape(head) or " " for head in table.heads) + " |",
        "|" + "|".join("---" if are_words else "---:" for are_words in table.are_words) + "|",
        *("| " + " | ".join(map(_cell, row)) + " |" for row in table.rows),
    ]
    title = f"{escape(table.title)}:\n\n" if table.title else ""
    return title + "\n".join(lines)


def _items(block: doc.Items) -> str:
    return f"{escape(block.title)}:\n\n" + "\n".join(f"- {escape(item)}" for item in block.items)


def _cell(cell: doc.Cell | str) -> str:
    text = escape(str(cell))
    if isinstance(cell, str):
        return text or " "
    return f"**{text}**" if cell.best else f"*{text}*" if cell.papers else text
