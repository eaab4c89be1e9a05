"""`mats report`."""

from pathlib import Path

from matsmerge.cli.display import Screen
from matsmerge.cli.field_options import CommandOptions, argument, option, takes_options
from matsmerge.cli.shared_options import Replacing

_DEFAULT = Path("report.html")


class ReportOptions(CommandOptions):
    """What to write, and what about."""

    run: Path = argument(metavar="RUN")
    """A suite's folder, or a merged or tuned model's."""

    out: Path | None = option(short="-o", metavar="FILE")
    """The page. Default: report.html, if nothing else is asked for."""

    markdown: Path | None = None
    """Also as Markdown, for a model card: a .md file."""

    picture: Path | None = None
    """Also the comparison of scores as a .png or .svg file."""

    scores: list[Path] = option([], metavar="FOLDER")
    """What `mats evaluate --out` wrote about a merge. Repeatable."""

    subspaces: bool | None = None
    """Decompose a merge's statistics. Default: if they are there and it is quick."""


@takes_options
def report(asked: ReportOptions, earlier: Replacing, screen: Screen) -> None:
    """One page about a merge or a suite, which needs no network: scores, convergence, cost, recipe.

    mats report merged --scores scores --out report.html
    """
    from matsmerge.lab.reports.report_files import Outputs, write_report

    page = asked.out or (None if asked.markdown or asked.picture else _DEFAULT)
    chosen = (page, asked.markdown, asked.picture)

    with screen.bars() as bars:
        written = write_report(
            asked.run,
            Outputs(*chosen),
            scores=asked.scores,
            overwrite=earlier.overwrite,
            subspaces=asked.subspaces,
            progress=bars,
        )
    screen.say(
        *(verdict.headline for verdict in written.verdicts),
        *(f"written: {path}" for path in chosen if path is not None),
    )
    if page is not None:
        screen.next(f"open {page} in a browser; it needs no network")
