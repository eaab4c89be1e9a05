"""What the commands show: progress, tables, notes, errors."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from matsmerge.progress import BYTES

# What users name is printed as it is: `:100:` is no emoji, and `[red]` no colour.
_PLAIN: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}
stdout = Console(**_PLAIN)
stderr = Console(stderr=True, **_PLAIN)
_MAX_PROBLEMS = 100


class PlainColumn(TextColumn):
    """A progress bar's text, printed as it is."""

    def __init__(self, text: str) -> None:
        super().__init__(text, markup=False)


class _AmountColumn(ProgressColumn):
    """How much is done: `1.2/3.4 GB`, `3/10 examples`."""

    _bytes = DownloadColumn()

    def render(self, task: Task) -> Text:
        if task.fields["unit"] == BYTES:
            return self._bytes.render(task)
        of = "" if task.total is None else f"/{task.total:.0f}"
        return Text(f"{task.completed:.0f}{of} {task.fields['unit']}")


class _RateColumn(ProgressColumn):
    """How fast it goes: bytes, or units per second."""

    _bytes = TransferSpeedColumn()

    def render(self, task: Task) -> Text:
        if task.fields["unit"] == BYTES:
            return self._bytes.render(task)
        return Text(f"{task.speed:.1f}/s" if task.speed else "")


class ProgressBars:
    """Progress on standard error: a bar for each stage, and a line for each note."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._current: TaskID | None = None

    def stage(self, title: str, total: int | None = None, unit: str = BYTES, done: int = 0) -> None:
        self._current = self._bars.add_task(title, total=total, completed=done, unit=unit, doing="")

    def advance(self, amount: int, doing: str | None = None) -> None:
        if self._current is not None:
            self._bars.advance(self._current, amount)
            if doing is not None:
                self._bars.update(self._current, doing=doing)

    def note(self, text: str) -> None:
        if not self._bars.disable:
            self._bars.print(text)


@contextmanager
def progress_bars(*, quiet: bool) -> Iterator[ProgressBars]:
    """Show how far the block is, how fast it goes, and the time left."""
    columns = (
        PlainColumn("{task.description}"),
        BarColumn(),
        _AmountColumn(),
        _RateColumn(),
        PlainColumn("{task.fields[doing]}"),
        PlainColumn("left"),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=stderr, disable=quiet) as bars:
        yield ProgressBars(bars)


@contextmanager
def status(what: str, *, quiet: bool) -> Iterator[None]:
    """Say what is going on while the block runs."""
    if quiet:
        yield
        return
    with stderr.status(Text(what)):
        yield


def show_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None
) -> None:
    """Print a table whose columns after the first are numbers, aligned to the right.

    Long names are folded on a screen, but not in what other programs read.
    """
    table = Table(
        title=title,
        title_justify="left",
        box=None,
        pad_edge=False,
        header_style="bold",
    )
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    print_table(table)


def print_table(table: Table) -> None:
    """Print a table as wide as the screen, or as wide as it likes where there is none."""
    console = stdout if stdout.is_terminal else Console(width=10_000, **_PLAIN)
    console.print(table)


def show_notes(notes: Iterable[str]) -> None:
    for note in notes:
        stderr.print(f"note: {note}", soft_wrap=True)


def show_problems(problems: Sequence[str]) -> None:
    left = len(problems) - _MAX_PROBLEMS
    shown = [*problems[:_MAX_PROBLEMS], f"and {left} more like these"] if left > 0 else problems
    for problem in shown:
        stderr.print("error: ", style="bold red", end="")
        stderr.print(problem, soft_wrap=True)


def number(value: float, form: str = "{:.2f}") -> str:
    """A number in a table or figure; a dash where there is none."""
    return "-" if math.isnan(value) else form.format(value)


def show_energies(layers: Mapping[str, Mapping[str, Any]]) -> None:
    """What the layers of a LoRA keep of their change, where that is not all of it."""
    energies = sorted(float(layer["energy"]) for layer in layers.values())
    if not energies:
        return
    ranks = sorted({int(layer["rank"]) for layer in layers.values()})
    of = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
    if energies[0] > 0.9999:
        text = f"LoRA of {of}, {len(energies)} layers: all of the merged change"
    else:
        least = min(layers, key=lambda module: layers[module]["energy"])
        text = (
            f"LoRA of {of}, {len(energies)} layers: keeps {energies[len(energies) // 2]:.1%} of "
            f"the merged change (median over layers, squared norm), at least {energies[0]:.1%} "
            f"({least}); more with a larger --rank, all of it in a full model. Each layer is in "
            "merge.json"
        )
    stdout.print(text, soft_wrap=True)
