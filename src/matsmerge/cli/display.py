"""What the commands show: progress, tables, notes, errors."""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console, JustifyMethod
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

from matsmerge.cli.field_options import RUNNING, Options, option
from matsmerge.files.remote_names import with_urls
from matsmerge.progress import BYTES, Progress

# What users name is printed as it is: `:100:` is no emoji, and `[red]` no colour.
_PLAIN: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}
stdout = Console(**_PLAIN)
stderr = Console(stderr=True, **_PLAIN)
_MAX_PROBLEMS = 100


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


class ProgressBars(Progress):
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


class Screen(Options):
    """What a command shows, which is as much as its options want: all that it prints goes here."""

    panel = RUNNING

    quiet: bool = option(False, short="-q")
    """Show errors only."""

    @property
    def shows_result(self) -> bool:
        """Are results shown as text?"""
        return not self.quiet

    @contextmanager
    def bars(self) -> Iterator[ProgressBars]:
        """Show how far the block is, how fast it goes, and the time left."""
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            _AmountColumn(),
            _RateColumn(),
            TextColumn("{task.fields[doing]}", markup=False),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        with Bars(*columns, console=stderr, disable=self._hides_progress) as bars:
            yield ProgressBars(bars)

    @contextmanager
    def status(self, what: str) -> Iterator[None]:
        """Say what is going on while the block runs."""
        if self._hides_progress:
            yield
            return
        with stderr.status(Text(what)):
            yield

    @property
    def _hides_progress(self) -> bool:
        return self.quiet or not self.shows_result

    def notes(self, notes: Iterable[str]) -> None:
        """Say what was decided without being asked, on standard error."""
        if not self.quiet:
            for note in notes:
                stderr.print(f"note: {note}", soft_wrap=True)

    def say(self, *lines: str, style: str | None = None) -> None:
        if self.shows_result:
            for line in lines:
                stdout.print(with_urls(line), soft_wrap=True, style=style)

    def next(self, command: str) -> None:
        """Say which command comes next."""
        self.say(f"next: {command}")

    def table(
        self,
        columns: Sequence[str | Text],
        rows: Iterable[Sequence[str | Text]],
        title: str | None = None,
        *,
        fold: bool = True,
    ) -> None:
        """Show a table whose columns after the first are numbers, aligned to the right.

        On a screen what is too wide for it is folded, without `fold` in the first column alone;
        what other programs read is as wide as it likes.
        """
        if not self.shows_result:
            return
        table = Table(
            title=title, title_justify="left", box=None, pad_edge=False, header_style="bold"
        )
        for i, column in enumerate(columns):
            justify: JustifyMethod = "left" if i == 0 else "right"
            no_wrap = i > 0 and not fold
            table.add_column(column, justify=justify, overflow="fold", no_wrap=no_wrap)
        for row in rows:
            table.add_row(*row)
        console = stdout if stdout.is_terminal else Console(width=10_000, **_PLAIN)
        console.print(table)


class JsonScreen(Screen):
    """A screen for results that can also be shown as JSON, instead of as text."""

    as_json: bool = option(False, flag="--json")
    """Print the result as JSON."""

    @property
    def shows_result(self) -> bool:
        return not (self.quiet or self.as_json)

    def result(self, content: object) -> None:
        """Print the result, if it is wanted as JSON."""
        if self.as_json:
            print(with_urls(json.dumps(content, indent=2)))


def show_problems(problems: Sequence[str]) -> None:
    left = len(problems) - _MAX_PROBLEMS
    shown = [*problems[:_MAX_PROBLEMS], f"and {left} more like these"] if left > 0 else problems
    for problem in shown:
        stderr.print("error: ", style="bold red", end="")
        stderr.print(problem, soft_wrap=True)


def number(value: float, form: str = "{:.2f}") -> str:
    """A number in a table or figure; a dash where there is none."""
    return "-" if math.isnan(value) else form.format(value)
