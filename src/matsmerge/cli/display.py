"""What the commands show: progress, tables, notes, errors."""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

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
from rich.table import Column, Table
from rich.text import Text

from matsmerge.cli.consoles import PLAIN, stderr, stdout
from matsmerge.cli.field_options import RUNNING, CommandOptions, option
from matsmerge.files.remote_names import with_urls
from matsmerge.progress import BYTES, Progress


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
        if not task.speed:
            return Text("")
        if task.fields["unit"] == BYTES:
            return self._bytes.render(task)
        return Text(f"{task.speed:.1f}/s")


class _DoingColumn(ProgressColumn):
    """What is being done, the layer that is solved, say; cut where there is no room for it."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["doing"], no_wrap=True, overflow="ellipsis")


class ProgressBars(Progress):
    """Progress on standard error: a bar for each stage, and a line for each note."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._current: TaskID | None = None

    def stage(self, title: str, total: int | None = None, unit: str = BYTES, done: int = 0) -> None:
        self._bars.start()
        self._current = self._bars.add_task(title, total=total, completed=done, unit=unit, doing="")

    def advance(self, amount: int, doing: str | None = None) -> None:
        if self._current is not None:
            self._bars.advance(self._current, amount)
            if doing is not None:
                self._bars.update(self._current, doing=doing)

    def note(self, text: str) -> None:
        if not self._bars.disable:
            self._bars.print(text)


class Screen(CommandOptions):
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
        whole = partial(Column, no_wrap=True)  # on a narrow screen names give way to numbers
        columns = (
            TextColumn("{task.description}", markup=False, table_column=whole()),
            BarColumn(),
            _AmountColumn(whole()),
            _RateColumn(whole()),
            _DoingColumn(),
            TextColumn("left", table_column=whole()),
            TimeRemainingColumn(table_column=whole()),
        )
        bars = Bars(*columns, console=stderr, disable=self._hides_progress)
        try:
            yield ProgressBars(bars)
        finally:
            if bars.tasks:  # without any it would end with an empty line
                bars.stop()

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

    def next(self, command: str, why: str = "") -> None:
        """Say which command comes next, so that it can be copied together with what it is for."""
        self.say(f"next: {command}  # {why}" if why else f"next: {command}")

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
        console = stdout if stdout.is_terminal else Console(width=10_000, **PLAIN)
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


def number(value: float, form: str = "{:.2f}") -> str:
    """A number in a table or figure; a dash where there is none."""
    return "-" if math.isnan(value) else form.format(value)
