"""Reports and figures as files, which are written whole or not at all."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matsmerge.checkpoints.source import local_path
from matsmerge.engine.output_folder import MANIFEST
from matsmerge.errors import DataError
from matsmerge.files.output_place import check_file
from matsmerge.files.whole_outputs import put_bytes
from matsmerge.lab.experiments.suite_results import RESULTS, SuiteResults, read_results
from matsmerge.lab.reports import picture
from matsmerge.lab.reports.document import Report, ReportSection
from matsmerge.lab.reports.markdown import to_markdown
from matsmerge.lab.reports.merge_report import merge_report
from matsmerge.lab.reports.merge_subspaces import find_subspaces
from matsmerge.lab.reports.page import to_page
from matsmerge.lab.reports.sections.subspace_figures import view_blocks
from matsmerge.lab.reports.suite_report import suite_report
from matsmerge.lab.subspaces.subspace_findings import SubspaceView
from matsmerge.progress import AnyProgress


@dataclass(frozen=True)
class Outputs:
    """What to write; None: not that."""

    page: Path | None = None
    markdown: Path | None = None
    picture: Path | None = None

    def check(self, *, overwrite: bool) -> None:
        """Refuse what must not or cannot be written, before any work."""
        kinds = {
            self.page: (".html",),
            self.markdown: (".md",),
            self.picture: picture.PICTURE_SUFFIXES,
        }
        for path, suffixes in kinds.items():
            if path is not None:
                _check(path, *suffixes, overwrite=overwrite)


def report(
    run: str | Path,
    out: str | Path | None = None,
    *,
    markdown: str | Path | None = None,
    picture: str | Path | None = None,
    scores: Sequence[str | Path] = (),
    overwrite: bool = False,
    subspaces: bool | None = None,
    progress: AnyProgress | None = None,
) -> list[Path]:
    """Write a page (`out`, .html) about a suite's folder, or a merged or tuned model's.

    Also, or instead, `markdown` for a model card and a `picture` of the scores. `scores` are
    folders that `evaluate` wrote about a merge. Returns what was written.
    """
    if out is None and markdown is None and picture is None:
        raise DataError("say what to write: out=, markdown= or picture=")
    chosen = [None if path is None else local_path(path) for path in (out, markdown, picture)]
    write_report(
        local_path(run),
        Outputs(*chosen),
        scores=[local_path(path) for path in scores],
        overwrite=overwrite,
        subspaces=subspaces,
        progress=progress,
    )
    return [path for path in chosen if path is not None]


def write_report(
    run: Path,
    outputs: Outputs,
    *,
    scores: Sequence[Path] = (),
    overwrite: bool = False,
    subspaces: bool | None = None,
    progress: AnyProgress | None = None,
) -> Report:
    """Write what was asked for about a suite's or a merge's folder, and return what it says.

    The `subspaces` of a merge's tasks take a while to decompose; None: if it is quick.
    """
    outputs.check(overwrite=overwrite)
    results = _suite_results(run)
    if results is not None and scores:
        raise DataError(f"{run}: a suite has its own scores; --scores is for a merged model")
    if results is None and outputs.picture is not None and not scores:
        raise DataError(f"{run}: a picture compares scores; give those of this merge with --scores")
    beside = _called(run, outputs.page or outputs.markdown)
    if results is not None:
        report = suite_report(results, run if run.is_dir() else None, beside)
    else:
        report = merge_report(run, scores, find_subspaces(run, subspaces, progress), beside)
    contents = {}  # all of them, before any is written
    if outputs.page is not None:
        contents[outputs.page] = to_page(report).encode()
    if outputs.markdown is not None:
        contents[outputs.markdown] = to_markdown(report).encode()
    if outputs.picture is not None:
        contents[outputs.picture] = _picture(report, outputs.picture.suffix)
    for path, content in contents.items():
        put_bytes(path, content)
    return report


def suite_so_far(run: Path) -> Report | None:
    """What a run that goes on has found; None before its first step is done."""
    return suite_report(read_results(run), run, "") if (run / RESULTS).exists() else None


def _called(run: Path, report: Path | None) -> str:
    """A run's folder from where its report is, if that is above it; else by its last name.

    So a report that is published has no paths of this machine.
    """
    above = None if report is None else report.absolute().parent
    folder = run.absolute()
    return (
        folder.relative_to(above).as_posix() if above and folder.is_relative_to(above) else run.name
    )


def check_figure(target: Path) -> None:
    """Refuse a file that cannot be written or drawn, before any work."""
    _check(target, ".html", *picture.PICTURE_SUFFIXES, overwrite=True)


def _check(path: Path, *suffixes: str, overwrite: bool) -> None:
    check_file(path, *suffixes, overwrite=overwrite)
    picture.check_picture(path.suffix)


def write_figure(view: SubspaceView, target: Path) -> None:
    """One figure below the other on a page; side by side in a picture."""
    blocks = view_blocks(view)
    if target.suffix == ".html":
        sections = [ReportSection(title, content) for title, content in blocks.items()]
        about = f"{', '.join(view.tasks)}, in {len(view.layers)} layers."
        report = Report("Task parameter subspaces", about, sections, kind="Subspaces")
        put_bytes(target, to_page(report).encode())
    else:
        panels = {title: content[0] for title, content in blocks.items()}
        put_bytes(target, picture.draw_panels(panels, target.suffix, side_by_side=True))


def _picture(report: Report, suffix: str) -> bytes:
    panels = {verdict.name: verdict.figure for verdict in report.verdicts if verdict.figure}
    if not panels:
        raise DataError(f"{report.title}: has compared nothing yet that could be drawn")
    return picture.draw_panels(panels, suffix)


def _suite_results(run: Path) -> SuiteResults | None:
    """None for a merge."""
    if not run.exists():
        raise DataError(f"{run}: no such folder")
    if (run / MANIFEST).exists():
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
        f"{run}: is no run: expected {RESULTS} of `mats experiment run`, or {MANIFEST} of "
        "`mats merge` or `mats tune`"
    )
