"""`mats tune`."""

import shlex
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from matsmerge.cli.display import JsonScreen, Screen
from matsmerge.cli.field_options import CommandOptions, argument, option, takes_options
from matsmerge.cli.shared_options import BatchSize, Execution, LogOptions, Resuming, parse_pairs
from matsmerge.limits import MOST_COMBINATIONS, MOST_COUNTED, NUM_SEEDS
from matsmerge.progress import Progress

if TYPE_CHECKING:
    from matsmerge.lab.tuning.search import Tuned

_SEARCH = "What to try"
_MAX_SHOWN = 20


class Tuning(CommandOptions):
    """What to tune, what on, and where to."""

    file: Path = argument(metavar="FILE")
    """A recipe (YAML), or a file with recipe, tasks and search."""

    out: Path = option(..., short="-o", metavar="FOLDER")
    """Folder for the chosen recipe, all trials and the model."""

    task: list[str] = option([], metavar="FILE")
    """A task file with a validation split. Repeatable."""

    lm_eval: list[str] | None = option(metavar="TASKS")
    """Tasks of lm-evaluation-harness, separated by commas: names or YAML files, with the metric
    after a colon if it is not the first, e.g. hellaswag:acc_norm."""

    search: list[str] = option([], panel=_SEARCH, metavar="KEY=VALUES")
    """What to try, e.g. scale=0:1:0.1, iterations=10:100:10 (all from one run),
    density=0.1,0.2,0.3, off_diagonal=0.1:1:0.1, weight.sst2=0.5,1,2, init.scale=0.1:0.5:0.1.
    Repeatable: all combinations."""

    allow_overlap: bool = False
    """Tune on the data that statistics were collected from."""

    watch: bool = False
    """Show how far it is as a page on this machine, which follows the search."""


class GivenOptions(CommandOptions):
    """What takes the place of keys of the same name in a file with a search."""

    split: str | None = None
    """Of the tasks. Default: validation. Never test, but of --lm-eval."""

    num_examples: int | None = option(ge=1, le=MOST_COUNTED)
    """The first so many of each task. Default: all."""

    unlabelled: bool | None = None
    """Choose without labels: by how far the merged model's answers are from those of each
    task's own model, which is the one of the recipe with the task's name."""

    strategy: str | None = option(panel=_SEARCH)
    """grid, or optuna, which may also try anything between two numbers (scale=0:1)."""

    trials: int | None = option(panel=_SEARCH, ge=1, le=MOST_COMBINATIONS)
    """optuna: merges to try. Default: 50."""

    seed: int | None = option(panel=_SEARCH, ge=0, lt=NUM_SEEDS)
    """Of the search."""


@takes_options
def tune(
    asked: Tuning,
    given: GivenOptions,
    batches: BatchSize,
    earlier: Resuming,
    running: Execution,
    logged: LogOptions,
    screen: JsonScreen,
) -> None:
    r"""Choose what a recipe leaves open by the merged model's validation score.

        mats tune recipe.yaml --task sst2.yaml --task trec.yaml \
            --search scale=0:1:0.1 --out tuned

    The score is the mean over tasks of each task's first metric, or with --unlabelled of the
    distance to the models' own answers. Test data is never looked at, but of --lm-eval if told.
    """
    from matsmerge.engine.local_executor import LocalExecutor
    from matsmerge.lab.tuning.search import tune
    from matsmerge.lab.tuning.search_space import SearchSpace
    from matsmerge.lab.tuning.trials import MODEL
    from matsmerge.lab.tuning.tuning_file import read_tuning_file

    on_ray = running.on_ray()
    described = read_tuning_file(asked.file, **dict(given))
    search = parse_pairs("--search", asked.search, "KEY=VALUES as in scale=0:1:0.1")
    space = SearchSpace.parse(described.plain_recipe(), {**described.search, **search})
    options = described.options(
        batch_size=batches.batch_size,
        allow_overlap=asked.allow_overlap,
        lm_eval=[*described.lm_eval, *(asked.lm_eval or [])],
    )
    with screen.bars() as bars, ExitStack() as stack:
        told: Progress = bars
        if asked.watch:
            from matsmerge.lab.reports.live_page import watched
            from matsmerge.lab.reports.tuning_progress import tuning_so_far

            title, lowest = f"Tuning {asked.file}", options.unlabelled
            so_far = partial(tuning_so_far, title, asked.out, lowest=lowest)
            told = stack.enter_context(watched(title, bars, bars.note, so_far))
        found = tune(
            space,
            [*described.tasks, *asked.task],
            asked.out,
            options,
            executor=None if on_ray else LocalExecutor(fork=True),
            of_trials=on_ray,
            **dict(earlier),
            log_to=logged.log_to,
            progress=told,
        )
    content = {
        "out": str(found.folder),
        "choice": dict(found.best.choice),
        "score": found.best.score,
        "scores": dict(found.best.scores),
        "num_trials": len(found.trials),
    }
    screen.result(content)
    _show(found, asked.out, screen)
    model = shlex.quote(str(asked.out / MODEL))
    tasks = shlex.join(f"--task={path}" for path in [*described.tasks, *asked.task])
    named = ",".join(task.partition(":")[0] for task in options.lm_eval)
    harness = f"--lm-eval {shlex.quote(named)}" if named else ""
    on = " ".join(part for part in (tasks, harness) if part)
    screen.next(f"mats evaluate {model} {on}", "how good it is on test data")


def _show(found: "Tuned", out: Path, screen: Screen) -> None:
    from matsmerge.lab.tuning.search_space import describe_choice

    best, tasks = found.best, list(found.best.scores)
    scored = [trial for trial in found.trials if trial.scores]
    order = sorted(scored, key=lambda trial: abs(trial.score - best.score))
    factor, digits = (100, 1) if found.in_percent else (1, 4)
    rows = [
        (
            ("* " if trial is best else "  ") + describe_choice(trial.choice),
            *(f"{factor * trial.scores[task]:.{digits}f}" for task in tasks),
            f"{factor * trial.score:.{digits}f}",
        )
        for trial in order[:_MAX_SHOWN]
    ]
    titles = [f"{task}, {found.metrics[task]}" for task in tasks]
    screen.table(("tried", *titles, "mean"), rows)
    if len(order) > _MAX_SHOWN:
        screen.say(f"and {len(order) - _MAX_SHOWN} more in tuning.json")
    screen.notes(
        f"{describe_choice(t.choice)}: {t.failure}" for t in found.trials if t.failure is not None
    )
    screen.notes(found.remarks)
    error = best.error
    close = sum(abs(trial.score - best.score) <= error for trial in scored) - 1
    others = f"{close} of {len(scored) - 1} others are" if close else "no other is"
    screen.say(
        f"best: {describe_choice(best.choice)}, {factor * best.score:.{digits}f} ± "
        f"{factor * error:.{digits}f} on validation data; {others} as good within that error",
        f"the recipe, the model and all trials are in {out}",
    )
