"""`mats experiment`: suites of experiments, and `mats demo`, which is one of them."""

import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from matsmerge.cli.display import Screen
from matsmerge.cli.field_options import CommandOptions, argument, option, takes_options
from matsmerge.cli.shared_options import Execution, LogOptions
from matsmerge.errors import DataError, RecipeError, closest
from matsmerge.limits import MOST_COUNTED
from matsmerge.optional_import import import_optional
from matsmerge.problems import noted
from matsmerge.progress import Progress

if TYPE_CHECKING:
    from matsmerge.lab.experiments.score_tables import TextTable
    from matsmerge.lab.experiments.suite import Suite
    from matsmerge.lab.experiments.suite_results import SuiteResults

experiment = typer.Typer(
    help="Suites of experiments: fine-tune, collect, merge, tune, score, in one go.",
    no_args_is_help=True,
)

REPORT = "report.html"
_NEEDED = ("transformers", "accelerate")
# Looked up here for shells that complete them, without importing what reads suites.
_SUITES = sorted(path.stem for path in Path(__file__).parents[1].glob("experiments/suites/*.yaml"))


class SuiteRunOptions(Execution, LogOptions):
    """How a suite runs."""

    workers: int | None = option(ge=1, le=MOST_COUNTED)
    """Steps at once. Default: as many as there are cores."""
    watch: bool = False
    """Show what is found so far as a page on this machine, which follows the run."""

    @property
    def given(self) -> dict[str, Any]:
        """As `run_suite` takes it."""
        starter = self.on_ray(num_workers=self.workers)
        return {"num_workers": self.workers, "starter": starter, "log_to": self.log_to}


class Restriction(CommandOptions):
    """What of a suite to run, where, and with what."""

    suite: str = argument(metavar="SUITE", values=_SUITES)
    """A suite's name, or a YAML file."""

    out: Path | None = option(short="-o", metavar="FOLDER")
    """Folder. Default: runs/SUITE."""

    seeds: str | None = option(metavar="NUMBERS")
    """Only these, e.g. 0,1."""

    variants: str | None = option(metavar="NAMES")
    """Only these, e.g. full."""

    base: Path | None = option(metavar="FOLDER")
    """A local model instead of the suite's base."""

    data: Path | None = option(metavar="FOLDER")
    """Local data instead of the suite's: TASK.jsonl, or TASK/train.jsonl and so on."""


@experiment.command("list")
def list_suites() -> None:
    """The suites there are, and what they need."""
    from matsmerge.lab.experiments.suite import read_suite, suite_files

    rows = []
    for name, path in suite_files().items():
        suite = read_suite(path)
        needs = "packages" if suite.offline else "Hugging Face hub"
        rows.append((name, suite.title, ", ".join(suite.variants), str(len(suite.seeds)), needs))
    Screen().table(("suite", "what it is", "variants", "seeds", "needs"), rows)
    Screen().next("mats experiment run SUITE")


@experiment.command()
@takes_options
def run(asked: Restriction, running: SuiteRunOptions, screen: Screen) -> None:
    """Run a suite. What an earlier run in the same folder has done is not done again.

    mats experiment run text-small

    mats experiment run paper-t0-8 --base t5-large-lm-adapt --data folder
    """
    _check_needs()
    from matsmerge.lab.experiments.suite import find_suite
    from matsmerge.lab.experiments.suite_run import run_suite
    from matsmerge.lab.reports.paper_numbers import paper_column

    found = _restrict(find_suite(asked.suite), asked.seeds, asked.variants)
    for column in found.paper.values():
        paper_column(column)  # that it is one is said before anything is done
    folder = asked.out or Path("runs") / found.name
    work = partial(run_suite, found, folder, base=asked.base, data=asked.data)
    _run(partial(work, **running.given), folder, screen, running.watch)


@experiment.command()
@takes_options
def resume(
    folder: Annotated[Path, typer.Argument(help="A run that was interrupted.", metavar="FOLDER")],
    running: SuiteRunOptions,
    screen: Screen,
) -> None:
    """Continue a run where it was left."""
    _check_needs()
    from matsmerge.lab.experiments.suite_run import resume_suite

    _run(partial(resume_suite, folder, **running.given), folder, screen, running.watch)


@experiment.command()
def compare(
    folders: Annotated[list[Path], typer.Argument(help="Two or more runs.", metavar="FOLDER...")],
) -> None:
    """Scores of runs side by side: what changed between them, and by how much."""
    from matsmerge.lab.experiments.score_tables import compare_runs, verdicts
    from matsmerge.lab.experiments.suite_results import read_results

    if len(folders) < 2:
        raise DataError("give two runs or more to compare")
    runs = {str(folder): read_results(folder) for folder in folders}
    _show(compare_runs(runs), Screen())
    for folder, results in runs.items():
        Screen().say(*(f"{folder}, {line}" for line in verdicts(results)))
    Screen().next(f"mats report {shlex.quote(str(folders[-1]))}")


class DemoFolder(CommandOptions):
    """Where a demo goes."""

    out: Path = option(Path("runs/demo"), short="-o", metavar="FOLDER")
    """Folder for everything."""


@takes_options
def demo(folder: DemoFolder, running: SuiteRunOptions, screen: Screen) -> None:
    """Merge four models of real tasks in seven ways, in a few minutes, and look at the result."""
    _check_needs()
    from matsmerge.lab.experiments.suite import find_suite
    from matsmerge.lab.experiments.suite_run import run_suite

    suite = find_suite("demo")
    screen.say(f"{suite.title}. {suite.about}")
    begin = time.perf_counter()
    work = partial(run_suite, suite, folder.out, **running.given)
    _run(work, folder.out, screen, running.watch)
    screen.say(f"took {time.perf_counter() - begin:.0f} s")


def _run(
    work: "Callable[..., SuiteResults]", folder: Path, screen: Screen, is_watched: bool
) -> None:
    """Do the work; then the table on the screen, the report in the folder."""
    from matsmerge.lab.experiments.score_tables import score_tables, verdicts
    from matsmerge.lab.reports.live_page import watched
    from matsmerge.lab.reports.report_files import Outputs, suite_so_far, write_report

    with screen.bars() as bars, ExitStack() as stack:
        told: Progress = bars
        if is_watched:
            so_far = partial(suite_so_far, folder)
            told = stack.enter_context(watched(f"Run in {folder.name}", bars, bars.note, so_far))
        results = work(progress=told)
    write_report(folder, Outputs(page=folder / REPORT), overwrite=True)
    _show(score_tables(results), screen)
    screen.say(*verdicts(results), f"everything is in {folder}")
    screen.next(f"open {folder / REPORT} in a browser")


def _check_needs() -> None:
    """Refuse to begin where a library lacks that some step needs."""
    problems: list[str] = []
    for module in _NEEDED:
        with noted(problems, DataError):
            import_optional(module)
    DataError.raise_all(problems)


def _show(tables: "Iterable[TextTable]", screen: Screen) -> None:
    for title, header, rows in tables:
        screen.say(title, style="bold")
        screen.table(header, rows)


def _restrict(suite: "Suite", seeds: str | None, variants: str | None) -> "Suite":
    """A suite with some of its seeds and variants."""
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
