"""What a report says, before it is a page or Markdown: sections of paragraphs, tables, figures.

All text is plain; pages and Markdown escape it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matsmerge.lab.reports.chart import Chart


@dataclass(frozen=True)
class Cell:
    """A value in a table."""

    text: str
    error: str = ""  # shown smaller, after ±
    best: bool = False
    papers: bool = False  # not ours
    shade: float | None = None  # its colour, from -1 (worse) over 0 (none) to 1 (better)
    title: str = ""  # said on the mouse

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
    shades: Sequence[str] = ()  # what the palest and the strongest colours mean, in their order
    has_errors: bool = False  # cells have errors, which the reader may show
    is_map: bool = False  # small coloured cells, side by side

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
    """A chart, a sentence on what is seen, and the table behind it, if it is not shown anyway."""

    title: str
    caption: str
    chart: Chart
    table: Table | None = None
    half: bool = False  # of the page's width, where it is wide


@dataclass(frozen=True)
class TableChoice:
    """Tables of which one is seen at a time; the first, unless another is chosen."""

    label: str  # of what is chosen
    caption: str
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
    share: float | None = None  # of work that is done, which a warning draws as a bar


@dataclass(frozen=True)
class Code:
    """Text to copy."""

    title: str
    text: str
    folded: bool = False
    language: str = "yaml"


Block = Paragraph | Heading | Items | Table | Figure | TableChoice | Code


@dataclass(frozen=True)
class Verdict:
    """What to do, in one sentence; what says so; and one chart."""

    headline: str
    evidence: str
    figure: Figure | None = None
    code: Code | None = None  # how to load the model
    name: str = ""  # of the variant, where there are several


@dataclass(frozen=True)
class ReportSection:
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
    sections: Sequence[ReportSection]
    verdicts: Sequence[Verdict] = ()
    warnings: Sequence[Items] = ()  # what a reader must know before reading on
    made_by: str = ""
    kind: str = "Merge report"

    @property
    def shown(self) -> list[ReportSection]:
        return [section for section in self.sections if section.blocks]
