"""From a run's folder to files that are written whole or not at all."""

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matsmerge.errors import DataError, OutputError
from matsmerge.experiments.results import RESULTS, SuiteResults, read_results
from matsmerge.reports.document import Report
from matsmerge.reports.markdown import to_markdown
from matsmerge.reports.merge_report import MERGE, merge_report
from matsmerge.reports.page import check_page, to_page
from matsmerge.reports.picture import check_picture, draw_comparison
from matsmerge.reports.suite_report import suite_report
from matsmerge.whole_folder import name_problems

Subspaces = Callable[[Path], Mapping[str, Any] | str | None]


@dataclass(frozen=True)
class Outputs:
    """What to write; None: not that."""

    page: Path | None = None
    markdown: Path | None = None
    picture: Path | None = None

    def check(self, *, overwrite: bool) -> None:
        """Refuse what must not or cannot be written, before any work."""
        problems = []
        kinds = {".html": self.page, ".md": self.markdown, ".png": self.picture}
        for suffix, path in kinds.items():
            if path is None:
                continue
            if too_long := name_problems(path):
                problems += too_long
                continue
            if path.suffix != suffix:
                problems.append(f"{path}: the name of this file ends in {suffix}")
            elif path.is_dir():
                problems.append(f"{path}: is a folder, expected the name of a file to write")
            elif path.exists() and not overwrite:
                problems.append(f"{path}: exists already; replace it with --overwrite")
            folder = path.absolute().parent
            if not folder.is_dir():
                problems.append(f"{folder}: no such folder to write into")
            elif not os.access(folder, os.W_OK):
                problems.append(f"{folder}: cannot be written to")
        if problems:
            raise OutputError(problems)
        if self.page is not None:
            check_page()
        if self.picture is not None:
            check_picture()


def write_report(
    run: Path,
    outputs: Outputs,
    *,
    scores: Sequence[Path] = (),
    overwrite: bool = False,
    subspaces: Subspaces = lambda _: None,
) -> None:
    """Write what was asked for about a suite's or a merge's folder.

    `subspaces` finds those of a merge's tasks; they take a while to decompose.
    """
    outputs.check(overwrite=overwrite)
    results = _suite_results(run)
    if results is not None and scores:
        raise DataError(f"{run}: a suite has its own scores; --scores is for a merged model")
    if results is None and outputs.picture is not None:
        raise DataError(f"{run}: a picture of the comparison is made of a suite's results")
    report = suite_report(results) if results else merge_report(run, scores, subspaces(run))
    for path, content in _contents(report, results, outputs).items():
        _write_whole(path, content)


def _suite_results(run: Path) -> SuiteResults | None:
    """None for a merge."""
    if not run.exists():
        raise DataError(f"{run}: no such folder")
    if (run / MERGE).exists():
        return None
    if run.is_file() or (run / RESULTS).exists():
        try:
            return read_results(run)
        except DataError as error:
            if run.is_dir() and (run / "results.md").exists():
                raise DataError(
                    f"{run}: holds scores of `mats evaluate`; give the merged model's folder, and "
                    f"this one with --scores"
                ) from error
            raise
    raise DataError(
        f"{run}: is no run: expected {RESULTS} of `mats experiment run`, or {MERGE} of "
        "`mats merge` or `mats tune`"
    )


def _contents(report: Report, results: SuiteResults | None, outputs: Outputs) -> dict[Path, bytes]:
    """All files, before any is written."""
    contents = {}
    if outputs.page is not None:
        contents[outputs.page] = to_page(report).encode()
    if outputs.markdown is not None:
        contents[outputs.markdown] = to_markdown(report).encode()
    if outputs.picture is not None and results is not None:
        contents[outputs.picture] = draw_comparison(results)
    return contents


def _write_whole(path: Path, content: bytes) -> None:
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with partial.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror})") from error
    finally:
        partial.unlink(missing_ok=True)
