"""`mats experiment`: suites of experiments, and `mats demo`, which is one of them."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from matsmerge.cli import display
from matsmerge.cli.shared_options import RUNNING, Quiet
from matsmerge.limits import MOST_COUNTED
from matsmerge.optional_import import import_optional

if TYPE_CHECKING:
    from matsmerge.lab.experiments.suite import Suite
    from matsmerge.lab.experiments.suite_results import SuiteResults

experiment = typer.Typer(
    help="Suites of experiments: fine-tune, collect, merge, tune, score, in one go.",
    no_args_is_help=True,
)

_Workers = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=MOST_COUNTED,
        help="Steps at once. Default: as many as there are cores.",
        rich_help_panel=RUNNING,
    ),
]
REPORT = "report.html"


@experiment.command("list")
def list_suites() -> None:
    """The suites there are, and what they need."""
    from matsmerge.lab.experiments.suite import read_suite, suite_files

    rows = []
    for name, path in suite_files().items():
        suite = read_suite(path)
        needs = "packages" if suite.offline else "Hugging Face hub"
        rows.append((name, suite.title, ", ".join(suite.variants), str(len(suite.seeds)), needs))
    display.show_table(("suite", "what it is", "variants", "seeds", "needs"), rows)
    display.stdout.print("run one with: mats experiment run SUITE")


@experiment.command()
def run(
    suite: Annotated[str, typer.Argument(help="A suite's name, or a YAML file.", metavar="SUITE")],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder. Default: runs/SUITE.", metavar="FOLDER"),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Only these, e.g. 0,1.", metavar="NUMBERS")
    ] = None,
    variants: Annotated[
        str | None, typer.Option(help="Only these, e.g. full.", metavar="NAMES")
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option(help="A local model instead of the suite's base.", metavar="FOLDER"),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Local data instead of the suite's: TASK.jsonl, or TASK/train.jsonl and so on.",
            metavar="FOLDER",
        ),
    ] = None,
    workers: _Workers = None,
    quiet: Quiet = False,
) -> None:
    """Run a suite. What an earlier run in the same folder has done is not done again.

    mats experiment run text-small

    mats experiment run paper-t0-8 --base t5-large-lm-adapt --data folder
    """
    from matsmerge.lab.experiments.suite import find_suite
    from matsmerge.lab.experiments.suite_run import run_suite
    from matsmerge.lab.reports.paper_numbers import paper_column

    found = restrict(find_suite(suite), seeds, variants)
    for column in found.paper.values():
        paper_column(column)  # that it is one is said before anything is done
    folder = out or Path("runs") / found.name
    import_optional("plotly")  # for the report at the end
    with display.progress_bars(quiet=quiet) as bars:
        results = run_suite(found, folder, base=base, data=data, num_workers=workers, progress=bars)
    finish(results, folder, quiet=quiet)


@experiment.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="A run that was interrupted.", metavar="FOLDER")],
    workers: _Workers = None,
    quiet: Quiet = False,
) -> None:
    """Continue a run where it was left."""
    from matsmerge.lab.experiments.suite_run import resume_suite

    import_optional("plotly")  # for the report at the end
    with display.progress_bars(quiet=quiet) as bars:
        results = resume_suite(folder, num_workers=workers, progress=bars)
    finish(results, folder, quiet=quiet)


@experiment.command()
def compare(
    folders: Annotated[list[Path], typer.Argument(help="Two or more runs.", metavar="FOLDER...")],
) -> None:
    """Scores of runs side by side: what changed between them, and by how much."""
    from matsmerge.errors import DataError
    from matsmerge.lab.experiments.score_tables import compare_runs
    from matsmerge.lab.experiments.suite_results import read_results

    if len(folders) < 2:
        raise DataError("give two runs or more to compare")
    for title, header, rows in compare_runs({str(f): read_results(f) for f in folders}):
        display.stdout.print(title, style="bold")
        display.show_table(header, rows)


def demo(
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for everything.", metavar="FOLDER")
    ] = Path("runs/demo"),
    workers: _Workers = None,
    quiet: Quiet = False,
) -> None:
    """Merge four models of real tasks in seven ways, in a few minutes, and look at the result."""
    from matsmerge.lab.experiments.suite import find_suite
    from matsmerge.lab.experiments.suite_run import run_suite

    suite = find_suite("demo")
    if not quiet:
        display.stdout.print(f"{suite.title}. {suite.about}")
    begin = time.perf_counter()
    import_optional("plotly")  # for the report at the end
    with display.progress_bars(quiet=quiet) as bars:
        results = run_suite(suite, out, num_workers=workers, progress=bars)
    finish(results, out, quiet=quiet)
    if not quiet:
        display.stdout.print(f"took {time.perf_counter() - begin:.0f} s")


def restrict(suite: "Suite", seeds: str | None, variants: str | None) -> "Suite":
    """A suite with some of its seeds and variants."""
    from matsmerge.errors import RecipeError, closest
    from matsmerge.lab.experiments.suite import make_suite

    content = suite.model_dump(mode="json", exclude_unset=True)
    if seeds is not None:
        try:
            chosen = [int(part) for part in seeds.split(",")]
        except ValueError:
            raise RecipeError(f"--seeds '{seeds}': expected numbers as in 0,1,2") from None
        content["seeds"] = chosen
        _narrow(content, "seeds", chosen)
        for variant in content["variants"].values():
            variant.pop("seeds", None)
    if variants is not None:
        names = [part.strip() for part in variants.split(",")]
        unknown = [name for name in names if name not in suite.variants]
        if unknown:
            hint = closest(unknown[0], suite.variants)
            raise RecipeError(f"--variants: there is no '{unknown[0]}'{hint}")
        content["variants"] = {name: content["variants"][name] for name in names}
        content["paper"] = {k: v for k, v in content.get("paper", {}).items() if k in names}
        _narrow(content, "variants", names)
        for method in content["methods"].values():
            if method.get("variants"):
                method["variants"] = [v for v in method["variants"] if v in names]
    return make_suite(suite.name, content)


def _narrow(content: dict[str, Any], key: str, chosen: Sequence[Any]) -> None:
    """Studies of what is left; those of nothing are left out."""
    studies = content.get("studies", {})
    for name, study in list(studies.items()):
        if study and study.get(key) is not None:
            study[key] = [value for value in study[key] if value in chosen]
            if not study[key]:
                del studies[name]


def finish(results: "SuiteResults", folder: Path, *, quiet: bool) -> None:
    """The table on the screen, the report in the folder."""
    from matsmerge.lab.experiments.score_tables import score_tables
    from matsmerge.lab.reports.report_files import Outputs, write_report

    write_report(folder, Outputs(page=folder / REPORT), overwrite=True)
    if quiet:
        return
    for title, header, rows in score_tables(results):
        display.stdout.print(title, style="bold")
        display.show_table(header, rows)
    display.stdout.print(f"report: {folder / REPORT}", soft_wrap=True)
