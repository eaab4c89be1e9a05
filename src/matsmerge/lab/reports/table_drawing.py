"""A coloured table as SVG, for pictures; on pages it is a table."""

from matsmerge.lab.reports.chart_drawing import FONT_SIZE, shortened_to, svg, text
from matsmerge.lab.reports.document import Cell, Table

_ROW = 32


def draw_table(table: Table, width: float) -> str:
    """Names of rows on the left and of columns above, a cell for each value."""
    left = min(0.62 * FONT_SIZE * max(len(str(row[0])) for row in table.rows) + 14, 0.4 * width)
    size = (width - left) / (len(table.heads) - 1)
    parts = [
        text(left + (j + 0.5) * size, _ROW / 2, shortened_to(head, size), "middle", colour="muted")
        for j, head in enumerate(table.heads[1:])
    ]
    for i, (name, *cells) in enumerate(table.rows):
        y = (i + 1) * _ROW
        parts.append(text(left - 10, y + _ROW / 2, shortened_to(str(name), left), "end"))
        for j, cell in enumerate(cells):
            x, shade = left + j * size, cell.shade if isinstance(cell, Cell) else None
            if shade:
                tint = "better" if shade > 0 else "worse"
                parts.append(
                    f'<rect x="{x + 1:.1f}" y="{y + 1}" width="{size - 2:.1f}" '
                    f'height="{_ROW - 2}" fill="var(--{tint})" fill-opacity="{abs(shade):.2f}"/>'
                )
            parts.append(text(x + size / 2, y + _ROW / 2, str(cell), "middle"))
    return svg(parts, width, (len(table.rows) + 1) * _ROW + 4)
