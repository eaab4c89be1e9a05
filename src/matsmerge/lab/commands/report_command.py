"""`mats report`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from matsmerge.cli import display
from matsmerge.cli.shared_options import RUNNING, Quiet

_DEFAULT = Path("report.html")


def report(
    run: Annotated[
        Path,
        typer.Argument(help="A suite's folder, or a merged or tuned model's.", metavar="RUN"),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="The page. Default: report.html, if nothing else is asked for."
        ),
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(help="Also as Markdown, for a model card: a .md file.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Also the comparison of scores as a .png or .svg file.")
    ] = None,
    scores: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FOLDER", help="What `mats evaluate --out` wrote about a merge. Repeatable."
        ),
    ] = None,
    subspaces: Annotated[
        bool | None,
        typer.Option(
            help="Decompose a merge's statistics. Default: if they are there and it is quick."
        ),
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite", help="Replace what was written before.", rich_help_panel=RUNNING
        ),
    ] = False,
    quiet: Quiet = False,
) -> None:
    """One page about a merge or a suite, which needs no network: scores, convergence, cost, recipe.

    mats report merged --scores scores --out report.html
    """
    from matsmerge.checkpoints.source import local_path
    from matsmerge.lab.reports.merge_subspaces import find_subspaces
    from matsmerge.lab.reports.report_files import Outputs, write_report

    page = out or (None if markdown or picture else _DEFAULT)
    chosen = [None if path is None else local_path(path) for path in (page, markdown, picture)]

    def find(folder: Path) -> Mapping[str, Any] | str | None:
        if subspaces is False:
            return None
        with display.progress_bars(quiet=quiet) as bars:
            return find_subspaces(folder, whatever_it_takes=bool(subspaces), progress=bars)

    write_report(
        local_path(run),
        Outputs(*chosen),
        scores=[local_path(folder) for folder in scores or []],
        overwrite=overwrite,
        subspaces=find,
    )
    if not quiet:
        for path in chosen:
            if path is not None:
                display.stdout.print(f"written: {path}", soft_wrap=True)
