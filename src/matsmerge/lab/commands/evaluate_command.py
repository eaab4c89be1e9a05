"""`mats evaluate`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from matsmerge.cli import display
from matsmerge.cli.shared_options import RUNNING, AsJson, BatchSize, MaxTokens, Quiet
from matsmerge.limits import MOST_COUNTED

if TYPE_CHECKING:
    from matsmerge.lab.evaluation.results import Results


def evaluate(
    models: Annotated[
        list[str],
        typer.Argument(
            help="A model: folder or hub id, or a PEFT adapter's; NAME=FOLDER to name it.",
            metavar="MODEL...",
        ),
    ],
    task: Annotated[
        list[Path] | None,
        typer.Option(help="Task file (YAML). Repeat for several tasks.", metavar="FILE"),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            help="Which part of the data. Default: test; of a single file without splits, all."
        ),
    ] = None,
    ensemble: Annotated[
        bool,
        typer.Option("--ensemble", help="Also score the mean of all models' probabilities."),
    ] = False,
    individual: Annotated[
        list[str] | None,
        typer.Option(
            help="The model that was trained for a task, e.g. sst2=tuned/sst2; scored on its own "
            "task, and averages are normalised to its score. Repeat for each task.",
            metavar="TASK=MODEL",
        ),
    ] = None,
    lm_eval: Annotated[
        str | None,
        typer.Option(
            "--lm-eval",
            help="Tasks of lm-evaluation-harness, separated by commas, e.g. hellaswag,arc_easy.",
            metavar="TASKS",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Folder for results.json, results.md and the predictions.",
            metavar="FOLDER",
        ),
    ] = None,
    num_examples: Annotated[
        int,
        typer.Option(
            min=0,
            max=MOST_COUNTED,
            help="The first so many of each task; 0: all.",
            rich_help_panel=RUNNING,
        ),
    ] = 0,
    batch_size: BatchSize = 32,
    max_tokens: MaxTokens = 4096,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1, ...", rich_help_panel=RUNNING)
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Dtype to run the models in. Default: as stored.", rich_help_panel=RUNNING
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the folder.", rich_help_panel=RUNNING)
    ] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Score models on tasks: every model on every task, one table.

        mats evaluate merged --task sst2.yaml --task rte.yaml --out scores

    Beside the models that were merged, and what they score together:

        mats evaluate merged --task sst2.yaml --task rte.yaml \
            --individual sst2=tuned/sst2 --individual rte=tuned/rte
    """
    from matsmerge.checkpoints.source import local_path
    from matsmerge.errors import DataError
    from matsmerge.lab.evaluation.comparison import prepare
    from matsmerge.lab.evaluation.contestants import parse_named
    from matsmerge.lab.evaluation.harness import Harness
    from matsmerge.lab.evaluation.results_folder import check_target, write_folder
    from matsmerge.lab.evaluation.task_evaluation import Settings

    silent = quiet or as_json
    named = parse_named(models)
    target = None if out is None else local_path(out)
    if target is not None:
        check_target(target, overwrite=overwrite)
    trained = _individual(individual or [])
    settings = Settings(num_examples or None, batch_size, max_tokens, device, dtype)
    if not task and lm_eval is None:
        raise DataError("say what to score the models on: --task FILE, or --lm-eval TASKS")
    if not task and (ensemble or trained):
        raise DataError("--ensemble and --individual are for tasks given with --task FILE")
    results: Results | None = None
    with display.status("reading tasks and models", quiet=silent):
        names = [name.strip() for name in (lm_eval or "").split(",") if name.strip()]
        harness = None if lm_eval is None else Harness(names)
        if task:
            prepared = prepare(named, task, split, trained, ensemble=ensemble, settings=settings)
    if task:
        if not silent:
            display.show_notes(prepared.notes)
        with display.progress_bars(quiet=silent) as bars:
            results = prepared.run(bars)
        del prepared  # and the last model with it
    if harness is not None:
        found = harness.run(named, settings)
        results = found if results is None else results.beside(found)
    assert results is not None
    if target is not None:
        write_folder(results, target, overwrite=overwrite)
    if as_json:
        print(json.dumps(results.to_json(), indent=2, ensure_ascii=False))
    elif not quiet:
        _show(results, target)


def _individual(given: list[str]) -> dict[str, str]:
    from matsmerge.errors import DataError

    found: dict[str, str] = {}
    for text in given:
        name, equals, source = (part.strip() for part in text.partition("="))
        if not (name and equals and source):
            raise DataError(f"--individual '{text}': expected TASK=MODEL, e.g. sst2=tuned/sst2")
        if name in found:
            raise DataError(f"--individual: '{name}' is given twice")
        found[name] = source
    return found


def _show(results: "Results", target: Path | None) -> None:
    # As a table's title it would be folded to the table's width.
    display.stdout.print(results.title, soft_wrap=True)
    display.show_table(*results.cells())
    if target is not None:
        display.stdout.print(f"results and predictions in {target}", soft_wrap=True)
