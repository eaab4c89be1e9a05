"""A report as Markdown, for a model card: its text and tables."""

from collections.abc import Sequence

from matsmerge.markdown_text import escape, fenced
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

Rows = Sequence[Sequence[Cell | str]]


def to_markdown(report: Report) -> str:
    """Everything but pictures and long lists."""
    parts = [f"# {escape(report.title)}", escape(report.about)]
    parts += [_items(escape(w.title), w.items) for w in report.warnings]
    if report.key_figures:
        lines = (
            f"- {escape(k.label)}: **{escape(k.value)}**"
            + (f" ({escape(k.note)})" if k.note else "")
            for k in report.key_figures
        )
        parts.append("\n".join(lines))
    for section in report.shown:
        parts += _section(section)
    parts.append(f"Made by {escape(report.made_by)}." if report.made_by else "")
    return "\n\n".join(part for part in parts if part) + "\n"


def _section(section: Section) -> list[str]:
    """A section's texts; none if all of it is pictures, nor a heading above nothing."""
    shown = [block.rows for block in section.blocks if isinstance(block, Table)]
    texts: list[str] = []
    heading = ""
    for block in section.blocks:
        text = _block(block, shown)
        if isinstance(block, Heading):
            heading = text
        elif text:
            texts += [heading, text] if heading else [text]
            heading = ""
    return [f"## {escape(section.title)}", *texts] if texts else []


def table_to_markdown(table: Table) -> str:
    lines = [
        "| " + " | ".join(escape(head) or " " for head in table.heads) + " |",
        "|" + "|".join("---" if are_words else "---:" for are_words in table.are_words) + "|",
        *("| " + " | ".join(map(_cell, row)) + " |" for row in table.rows),
    ]
    title = f"{escape(table.title)}:\n\n" if table.title else ""
    return title + "\n".join(lines)


def _block(block: Block, shown: list[Rows]) -> str:
    """A figure's table stands for it, unless the same rows are shown anyway."""
    match block:
        case Heading():
            return f"### {escape(block.text)}"
        case Paragraph():
            return escape(block.text)
        case Caution() | Items():
            folded = isinstance(block, Items) and block.folded
            return "" if folded else _items(escape(block.title), block.items)
        case Table():
            return table_to_markdown(block) if block.in_markdown else ""
        case Figure():
            if not block.table.in_markdown or block.table.rows in shown:
                return ""
            shown.append(block.table.rows)
            return f"{escape(block.caption)}\n\n{table_to_markdown(block.table)}"
        case Convergence():
            return escape(block.caption)
        case Code():
            if block.folded:
                return ""
            return f"{escape(block.title)}:\n\n{fenced(block.text, 'yaml')}"


def _items(title: str, items: Sequence[str]) -> str:
    return f"{title}:\n\n" + "\n".join(f"- {escape(item)}" for item in items)


def _cell(cell: Cell | str) -> str:
    if isinstance(cell, str):
        return escape(cell) or " "
    text = escape(str(cell))
    return f"**{text}**" if cell.best else f"*{text}*" if cell.papers else text
