"""Results as notebooks show them: a title and a table of two columns."""

from collections.abc import Mapping
from html import escape


def notebook_table(title: str, rows: Mapping[str, object]) -> str:
    """HTML of a small table; whatever names hold is shown as text."""
    cells = "".join(
        f"<tr><th style='text-align:left'>{escape(key)}</th>"
        f"<td style='text-align:left'>{escape(str(value))}</td></tr>"
        for key, value in rows.items()
    )
    return f"<table><caption><b>{escape(title)}</b></caption>{cells}</table>"
