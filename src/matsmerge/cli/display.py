"""What the commands show: progress, tables, notes, errors."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
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

# What users name is printed as it is: `:100:` is no emoji, and `[red]` no colour.
_PLAIN: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}
stdout = Console(**_PLAIN)
stderr = Console(stderr=True, **_PLAIN)
_MAX_PROBLEMS = 100


class PlainColumn(TextColumn):
    """A progress bar's text, printed as it is."""

    def __init__(self, text: str) -> None:
        super().__init__(text, markup=False)


class ProgressBars:
    """A merge's progress, one bar per stage, on standard error."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._current: TaskID | None = None

    def stage(self, title: str, num_bytes: int) -> None:
        self._current = self._bars.add_task(title, total=num_bytes)

    def advance(self, num_bytes: int) -> None:
        if self._current is not None:
            self._bars.advance(self._current, num_bytes)


@contextmanager
def progress_bars(*, quiet: bool) -> Iterator[ProgressBars]:
    """Show bytes, rate and time left while the block runs."""
    columns = (
        PlainColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        PlainColumn("left"),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=stderr, disable=quiet) as bars:
        yield ProgressBars(bars)


class ExampleBar:
    """How many examples are done."""

    def __init__(self, bars: Bars, task: TaskID) -> None:
        self._bars = bars
        self._task = task

    def advance(self, num_examples: int) -> None:
        self._bars.advance(self._task, num_examples)


class _RateColumn(ProgressColumn):
    """Examples per second."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:.1f}/s" if task.speed else "")


@contextmanager
def example_bar(num_examples: int, *, quiet: bool) -> Iterator[ExampleBar]:
    """Show examples, their rate and the time left while the block runs."""
    columns = (
        PlainColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        PlainColumn("examples"),
        _RateColumn(),
        PlainColumn("left"),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=stderr, disable=quiet) as bars:
        yield ExampleBar(bars, bars.add_task("collecting", total=num_examples))


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


@contextmanager
def trial_bar(*, quiet: bool) -> Iterator[Callable[..., None]]:
    """A bar of trials; what it yields is told of each one."""
    bars = Bars(
        PlainColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=stderr,
        disable=quiet,
    )
    with bars:
        task = bars.add_task("tuning", total=None)

        def told(trial: Any, number: int, total: int) -> None:
            last = "failed" if trial.failure else f"{trial.score:.4g}"
            bars.update(task, completed=number, total=total, description=f"tuning, last {last}")

        yield told
