"""`mats evaluate`."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from matsmerge.cli.display import JsonScreen
from matsmerge.cli.field_options import CommandOptions, argument, option, takes_options
from matsmerge.cli.shared_options import Batches, Replacing, parse_pairs
from matsmerge.errors import DataError
from matsmerge.limits import MOST_COUNTED

if TYPE_CHECKING:
    from matsmerge.lab.evaluation.results import Results


class ScoringOptions(CommandOptions):
    """What to score, and where to."""

    models: list[str] = argument(metavar="MODEL...")
    """A model: folder or hub id, or a PEFT adapter's; NAME=FOLDER to name it."""

    task: list[Path] = option([], metavar="FILE")
    """Task file (YAML). Repeat for several tasks."""

    split: str | None = None
    """Which part of the data. Default: test; of a single file without splits, all."""

    ensemble: bool = False
    """Also score the mean of all models' probabilities."""

    individual: list[str] = option([], metavar="TASK=MODEL")
    """The model that was trained for a task, e.g. sst2=tuned/sst2; scored on its own task, and
    averages are normalised to its score. Repeat for each task."""

    lm_eval: list[str] | None = option(metavar="TASKS")
    """Tasks of lm-evaluation-harness, separated by commas: names or YAML files, e.g.
    hellaswag,arc_easy."""

    out: Path | None = option(short="-o", metavar="FOLDER")
    """Folder for results.json, results.md and the predictions."""


class EvaluationRunOptions(Batches):
    """How models are run: the fields of `Settings`."""

    num_examples: int | None = option(zero=True, ge=1, le=MOST_COUNTED)
    """The first so many of each task; 0: all."""

    device: str | None = None
    """cpu, cuda, cuda:1, ..."""

    dtype: str | None = None
    """Dtype to run the models in. Default: as stored."""


@takes_options
def evaluate(
    asked: ScoringOptions, running: EvaluationRunOptions, earlier: Replacing, screen: JsonScreen
) -> None:
    r"""Score models on tasks: every model on every task, one table.

        mats evaluate merged --task sst2.yaml --task rte.yaml --out scores

    Beside the models that were merged, and what they score together:

        mats evaluate merged --task sst2.yaml --task rte.yaml \
            --individual sst2=tuned/sst2 --individual rte=tuned/rte
    """
    from matsmerge.lab.evaluation.comparison import prepare_evaluation
    from matsmerge.lab.evaluation.contestants import parse_named
    from matsmerge.lab.evaluation.harness import Harness
    from matsmerge.lab.evaluation.results_folder import check_results_target, write_folder
    from matsmerge.lab.evaluation.task_evaluation import EvaluationSettings

    named = parse_named(asked.models)
    target = asked.out
    if target is not None:
        check_results_target(target, overwrite=earlier.overwrite)
    form = "TASK=MODEL, e.g. sst2=tuned/sst2"
    trained = parse_pairs("--individual", asked.individual, form)
    settings = EvaluationSettings(**dict(running))
    if not asked.task and asked.lm_eval is None:
        raise DataError("say what to score the models on: --task FILE, or --lm-eval TASKS")
    if not asked.task and (asked.ensemble or trained):
        raise DataError("--ensemble and --individual are for tasks given with --task FILE")
    results: Results | None = None
    with screen.status("reading tasks and models"):
        harness = (
            None if asked.lm_eval is None else Harness(asked.lm_eval, quiet=not screen.shows_result)
        )
        if asked.task:
            prepared = prepare_evaluation(
                named, asked.task, asked.split, trained, asked.ensemble, settings
            )
    if asked.task:
        screen.notes(prepared.notes)
        with screen.bars() as bars:
            results = prepared.run(bars)
        del prepared  # and the last model with it
    if harness is not None:
        found = harness.run(named, settings)
        results = found if results is None else results.beside(found)
    assert results is not None
    if target is not None:
        write_folder(results, target, overwrite=earlier.overwrite)
    screen.result(results.to_json())
    screen.say(results.title)  # as a table's title it would be folded to the table's width
    screen.table(*results.cells())
    if (verdict := results.verdict) is not None:
        screen.say(verdict)
    if target is not None:
        screen.say(f"results and predictions in {target}")
        merged = shlex.quote(next(iter(named.values())))
        screen.next(f"mats report {merged} --scores {shlex.quote(str(target))}")
    else:
        screen.next("the same command with --out scores keeps the scores, for mats report")
