"""What a report says, before it is a page or Markdown: sections of paragraphs, tables, figures.

All text is plain; pages and Markdown escape it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Cell:
    """A value in a table."""

    text: str
    error: str = ""  # shown smaller, after ±
    best: bool = False
    papers: bool = False  # not ours

    def __str__(self) -> str:
        return f"{self.text} ± {self.error}" if self.error else self.text


Column = tuple[str, Sequence[Cell | str]]  # its head, and a cell for each row


@dataclass(frozen=True)
class Table:
    """Rows of cells; the first column names the row. `marked` rows stand out."""

    heads: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]
    title: str = ""
    marked: frozenset[int] = frozenset()
    folded: bool = False
    in_markdown: bool = True  # a long one is only on the page

    @classmethod
    def of_columns(cls, columns: Sequence[Column], title: str = "", **more: Any) -> "Table":
        heads, cells = zip(*columns, strict=True)
        return cls(list(heads), list(map(list, zip(*cells, strict=True))), title, **more)

    @property
    def are_words(self) -> list[bool]:
        """Of each column: whether it holds words, which stand on the left, or numbers."""
        columns = range(len(self.heads))
        num_words = [sum(str(row[i])[:1].isalpha() for row in self.rows) for i in columns]
        return [i == 0 or 2 * num > len(self.rows) for i, num in enumerate(num_words)]


@dataclass(frozen=True)
class Figure:
    """A plotly figure, a sentence on what is seen, and the table behind it."""

    title: str
    caption: str
    plot: Any  # a plotly.graph_objects.Figure with the template of figure_style
    table: Table
    log_x: bool = False  # with a switch for the x axis
    half: bool = False  # of the page's width, where it is wide


@dataclass(frozen=True)
class Convergence:
    """Residuals and objectives of merges' layers, to choose from.

    A merge is `{name, layers: [{name, x, residual, objective}]}`.
    """

    caption: str
    merges: Sequence[Mapping[str, Any]]
    tables: Sequence[Table]


@dataclass(frozen=True)
class Paragraph:
    text: str


@dataclass(frozen=True)
class Heading:
    """Of a part within a section, say a variant."""

    text: str


@dataclass(frozen=True)
class Items:
    """A list with a title; a `folded` one is closed until the reader opens it."""

    title: str
    items: Sequence[str]
    folded: bool = False


@dataclass(frozen=True)
class Code:
    """Text to copy."""

    title: str
    text: str
    folded: bool = False


Block = Paragraph | Heading | Items | Table | Figure | Convergence | Code


@dataclass(frozen=True)
class KeyFigure:
    """A number that matters, what it is, and what to compare it with."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Section:
    """A part of a report; without blocks it is left out."""

    title: str
    blocks: Sequence[Block]

    @property
    def slug(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")


@dataclass(frozen=True)
class Report:
    """A whole report."""

    title: str
    about: str
    sections: Sequence[Section]
    key_figures: Sequence[KeyFigure] = ()
    warnings: Sequence[Items] = ()  # what a reader must know before reading on
    made_by: str = ""
    kind: str = "Merge report"

    @property
    def shown(self) -> list[Section]:
        return [section for section in self.sections if section.blocks]

    def plots(self, title: str) -> dict[str, Any]:
        """All figures of this title, by the heading above each, such as the name of a variant."""
        found, heading = {}, ""
        for section in self.sections:
            for block in section.blocks:
                if isinstance(block, Heading):
                    heading = block.text
                elif isinstance(block, Figure) and block.title == title:
                    found[heading] = block.plot
        return found
