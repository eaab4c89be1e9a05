"""A coloured table as SVG, for pictures; on pages it is a table."""

import textwrap

from matsmerge.lab.reports.chart_drawing import FONT_SIZE, shortened_to, svg, text
from matsmerge.lab.reports.document import Cell, Table

_ROW, _LINE = 32, 17
_LETTER = 0.62 * FONT_SIZE


def draw_table(table: Table, width: float) -> str:
    """Names of rows on the left and of columns above, a cell for each value."""
    left = min(_LETTER * max(len(str(row[0])) for row in table.rows) + 14, 0.4 * width)
    size = (width - left) / (len(table.heads) - 1)
    heads = [textwrap.wrap(head, max(int(size / _LETTER), 4)) for head in table.heads[1:]]
    top = _ROW + _LINE * (max(map(len, heads)) - 1)
    parts = [
        text(
            left + (j + 0.5) * size,
            top - _ROW / 2 - _LINE * (len(lines) - 1 - k),
            shortened_to(line, size),
            "middle",
            colour="muted",
        )
        for j, lines in enumerate(heads)
        for k, line in enumerate(lines)
    ]
    for i, (name, *cells) in enumerate(table.rows):
        y = top + i * _ROW
        parts.append(text(left - 10, y + _ROW / 2, shortened_to(str(name), left), "end"))
        for j, cell in enumerate(cells):
            x, shade = left + j * size, cell.shade if isinstance(cell, Cell) else None
            if shade:
                tint = "better" if shade > 0 else "worse"
                parts.append(
                    f'<rect x="{x + 1:.1f}" y="{y + 1}" width="{size - 2:.1f}" '
                    f'height="{_ROW - 2}" fill="var(--{tint})" fill-opacity="{abs(shade):.2f}"/>'
                )
            is_best = isinstance(cell, Cell) and cell.best
            parts.append(text(x + size / 2, y + _ROW / 2, str(cell), "middle", bold=is_best))
    return svg(parts, width, top + len(table.rows) * _ROW + 4)
