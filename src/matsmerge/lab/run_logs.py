"""Logs of searches and suites in TensorBoard or Weights & Biases, written by their own libraries.

A log is named as on the command line: `tensorboard:FOLDER` or `wandb:PROJECT`.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from matsmerge.errors import DataError
from matsmerge.markdown_text import table_of
from matsmerge.optional_import import import_optional


class RunLog(Protocol):
    """What is told while a search or a suite runs."""

    def trial(self, settings: Mapping[str, Any], scores: Mapping[str, float]) -> None:
        """Settings that were tried, and their scores by task."""

    def seconds(self, kind: str, value: float) -> None:
        """How long a step of a kind took."""

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """A table of results."""

    def close(self) -> None:
        """Write what has not been written yet."""


class NoLog:
    """Where nobody asked for a log."""

    def trial(self, settings: Mapping[str, Any], scores: Mapping[str, float]) -> None: ...

    def seconds(self, kind: str, value: float) -> None: ...

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None: ...

    def close(self) -> None: ...


class TensorBoardLog:
    """Scores and seconds as scalars, settings in the HPARAMS tab, tables as text."""

    def __init__(self, folder: str) -> None:
        import_optional("tensorboard")
        self._writer = import_optional("torch.utils.tensorboard").SummaryWriter(folder)
        self._num: Counter[str] = Counter()  # of trials, and of steps of each kind

    def trial(self, settings: Mapping[str, Any], scores: Mapping[str, float]) -> None:
        number = self._next("trial")
        named = {f"score/{name}": value for name, value in scores.items()}
        for name, value in named.items():
            self._writer.add_scalar(name, value, number)
        plain = {key: _plain(value) for key, value in settings.items()}
        self._writer.add_hparams(plain, named, run_name=f"trial-{number}", global_step=number)

    def seconds(self, kind: str, value: float) -> None:
        tag = f"seconds/{kind}"
        self._writer.add_scalar(tag, value, self._next(tag))

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self._writer.add_text(title, table_of(header, [list(map(_shown, row)) for row in rows]))

    def close(self) -> None:
        self._writer.close()

    def _next(self, what: str) -> int:
        self._num[what] += 1
        return self._num[what] - 1


class WandbLog:
    """A run of a project: a line for each trial and step, and tables."""

    def __init__(self, project: str) -> None:
        self._library = import_optional("wandb")
        self._run = self._library.init(project=project, job_type="matsmerge")

    def trial(self, settings: Mapping[str, Any], scores: Mapping[str, float]) -> None:
        line = {f"setting/{key}": _plain(value) for key, value in settings.items()}
        self._run.log(line | {f"score/{name}": value for name, value in scores.items()})

    def seconds(self, kind: str, value: float) -> None:
        self._run.log({f"seconds/{kind}": value})

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        content = [list(map(_shown, row)) for row in rows]
        self._run.log({title: self._library.Table(columns=list(header), data=content)})

    def close(self) -> None:
        self._run.finish()


def _shown(cell: Any) -> str:
    return f"{cell:.6g}" if isinstance(cell, float) else str(cell)


_LOGS: dict[str, Callable[[str], RunLog]] = {"tensorboard": TensorBoardLog, "wandb": WandbLog}


def open_log(log_to: str | None) -> RunLog:
    """The log that was asked for."""
    if log_to is None:
        return NoLog()
    kind, _, place = log_to.partition(":")
    if kind not in _LOGS or not place:
        raise DataError(
            f"--log-to '{log_to}': expected tensorboard:FOLDER or wandb:PROJECT, as in "
            "tensorboard:runs/log"
        )
    return _LOGS[kind](place)


def _plain(value: Any) -> bool | int | float | str:
    """A setting as both libraries take it."""
    return value if isinstance(value, bool | int | float | str) else json.dumps(value)
