"""`mats tune`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from matsmerge.cli import display
from matsmerge.cli.shared_options import RUNNING, AsJson, BatchSize, Quiet
from matsmerge.errors import RecipeError
from matsmerge.limits import MOST_COMBINATIONS, MOST_COUNTED, NUM_SEEDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from matsmerge.lab.tuning.search import Tuned

_SEARCH = "What to try"
_MAX_SHOWN = 20


def tune(
    file: Annotated[
        Path,
        typer.Argument(
            help="A recipe (YAML), or a file with recipe, tasks and search.", metavar="FILE"
        ),
    ],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="Folder for the chosen recipe, all trials and the model."),
    ],
    task: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="A task file with a validation split. Repeatable."),
    ] = None,
    search: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUES",
            help="What to try, e.g. scale=0:1:0.1, iterations=10:100\\:10 (all from one run), "
            "density=0.1,0.2,0.3, off_diagonal=0.1:1:0.1, weight.sst2=0.5,1,2, "
            "init.scale=0.1:0.5:0.1. "
            "Repeatable: all combinations.",
            rich_help_panel=_SEARCH,
        ),
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            help="grid, or optuna, which may also try anything between two numbers (scale=0:1).",
            rich_help_panel=_SEARCH,
        ),
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_COMBINATIONS,
            help="optuna: merges to try. Default: 50.",
            rich_help_panel=_SEARCH,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, max=NUM_SEEDS - 1, help="Of the search.", rich_help_panel=_SEARCH),
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="Of the tasks. Default: validation. Never test.")
    ] = None,
    num_examples: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_COUNTED, help="The first so many of each task. Default: all."),
    ] = None,
    allow_overlap: Annotated[
        bool,
        typer.Option(
            "--allow-overlap", help="Tune on the data that statistics were collected from."
        ),
    ] = False,
    batch_size: BatchSize = 32,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace an earlier search.", rich_help_panel=RUNNING),
    ] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Continue a search that was interrupted.", rich_help_panel=RUNNING
        ),
    ] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Choose what a recipe leaves open by the merged model's validation score.

        mats tune recipe.yaml --task sst2.yaml --task trec.yaml --search scale=0:1:0.1 --out tuned

    The score is the mean over tasks of each task's first metric. Test data is never looked at.
    """
    from matsmerge.checkpoints.source import local_path
    from matsmerge.engine.local_executor import LocalExecutor
    from matsmerge.lab.tuning.search import tune
    from matsmerge.lab.tuning.search_space import SearchSpace
    from matsmerge.lab.tuning.tuning_file import read_tuning_file

    described = read_tuning_file(
        file, strategy=strategy, trials=trials, seed=seed, split=split, num_examples=num_examples
    )
    given = {**described.search, **_parse_search(search or [])}
    space = SearchSpace.parse(described.plain_recipe(), given)
    with display.progress_bars(quiet=quiet or as_json) as bars:
        found = tune(
            space,
            [*described.tasks, *(task or [])],
            local_path(out),
            described.options(batch_size=batch_size, allow_overlap=allow_overlap),
            executor=LocalExecutor(fork=True),
            overwrite=overwrite,
            resume=resume,
            progress=bars,
        )
    if as_json:
        print(
            json.dumps(
                {
                    "out": str(found.folder),
                    "choice": dict(found.best.choice),
                    "score": found.best.score,
                    "scores": dict(found.best.scores),
                    "num_trials": len(found.trials),
                }
            )
        )
    elif not quiet:
        _show(found)
        display.stdout.print(f"the recipe, the model and all trials are in {found.folder}")


def _parse_search(given: list[str]) -> dict[str, str]:
    values: dict[str, str] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not (key.strip() and equals and value.strip()):
            raise RecipeError(f"--search '{text}': expected KEY=VALUES as in scale=0:1:0.1")
        if key.strip() in values:
            raise RecipeError(f"--search: '{key.strip()}' is given twice")
        values[key.strip()] = value.strip()
    return values


def _show(found: "Tuned") -> None:
    from matsmerge.lab.tuning.search_space import describe

    best, tasks = found.best, list(found.best.scores)
    scored = [trial for trial in found.trials if trial.scores]
    order = sorted(scored, key=lambda trial: abs(trial.score - best.score))
    shown: Callable[[float], str] = lambda v: (  # noqa: E731
        f"{100 * v:.1f}" if found.in_percent else f"{v:.4f}"
    )
    rows: list[Any] = [
        (
            ("* " if trial is best else "  ") + describe(trial.choice),
            *(shown(trial.scores[task]) for task in tasks),
            shown(trial.score),
        )
        for trial in order[:_MAX_SHOWN]
    ]
    titles = [f"{task}, {found.metrics[task]}" for task in tasks]
    display.show_table(("tried", *titles, "mean"), rows)
    if len(order) > _MAX_SHOWN:
        display.stdout.print(f"and {len(order) - _MAX_SHOWN} more in tuning.json")
    display.show_notes(
        [f"{describe(t.choice)}: {t.failure}" for t in found.trials if t.failure is not None]
    )
