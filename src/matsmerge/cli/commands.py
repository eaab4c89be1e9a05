"""The commands of `mats`. Only the one that is called is imported, with its options."""

import importlib
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from matsmerge.cli.help_page import HelpedCommand, HelpedGroup
from matsmerge.version import __version__

# The root of what typer raises for a wrong command line: click's class, or that of typer's own
# copy of click, depending on its version.
CommandError: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


class Command(NamedTuple):
    """Where a command is, a function or a `typer.Typer`, and what the list of commands says."""

    module: str
    name: str
    summary: str
    kind: str | None = None  # its class, if it is no plain command


_LAB = "matsmerge.lab.commands"
COMMANDS = {
    "init": Command(
        "matsmerge.cli.init_command",
        "init",
        "Write a recipe to begin with: asks a few questions, or takes the answers as options.",
    ),
    "train": Command(
        f"{_LAB}.train_command",
        "train",
        "Fine-tune a model on a task: AdamW with the paper's settings, the best checkpoint kept.",
    ),
    "collect": Command(
        "matsmerge.cli.collect_command",
        "collect",
        "Measure what a model does on its data, once, into one file that others can merge with.",
    ),
    "advise": Command(
        "matsmerge.cli.advise_command",
        "advise",
        "Say whether models fit together, what to expect, and how to merge them.",
    ),
    "merge": Command(
        "matsmerge.cli.merge_command",
        "merge",
        "Merge models into one.",
        "MergeCommand",
    ),
    "mergekit": Command(
        "matsmerge.cli.mergekit_command",
        "mergekit",
        "Merge as mergekit does, from its YAML with its flags.",
    ),
    "evaluate": Command(
        f"{_LAB}.evaluate_command",
        "evaluate",
        "Score models on tasks: every model on every task, one table.",
    ),
    "tune": Command(
        f"{_LAB}.tune_command",
        "tune",
        "Choose what a recipe leaves open by the merged model's validation score.",
    ),
    "export": Command(
        "matsmerge.cli.export_command",
        "export",
        "Write a model as a folder that transformers understands by itself.",
    ),
    "extract-lora": Command(
        "matsmerge.cli.extract_command",
        "extract_lora",
        "Write the difference of two full models as a LoRA that PEFT loads.",
    ),
    "cost": Command(
        f"{_LAB}.cost_command",
        "cost",
        "What merging takes by the paper's formulas, and what a merge really took.",
    ),
    "inspect": Command(
        "matsmerge.cli.inspect_command",
        "inspect",
        "Show what is in a checkpoint or a file of statistics, or how two checkpoints differ.",
    ),
    "push": Command(
        "matsmerge.cli.push_command",
        "push",
        "Publish a model or statistics on the Hugging Face hub.",
    ),
    "report": Command(
        f"{_LAB}.report_command",
        "report",
        "One page about a merge or a suite, which needs no network: scores, convergence, "
        "cost, recipe.",
    ),
    "demo": Command(
        f"{_LAB}.experiment_command",
        "demo",
        "Merge four models of real tasks in seven ways, in a few minutes, and look at the result.",
    ),
    "schema": Command(
        "matsmerge.cli.schema_command",
        "schema",
        "Print the JSON Schema of recipes, for editors that check YAML as you type.",
    ),
    "experiment": Command(
        f"{_LAB}.experiment_command",
        "experiment",
        "Suites of experiments: fine-tune, collect, merge, tune, score, in one go.",
    ),
    "stats": Command(
        "matsmerge.cli.stats_command",
        "app",
        "Work with files of statistics.",
    ),
}


def make_app(*loaded: str) -> typer.Typer:
    """All commands; of those that are not loaded there is the summary alone."""
    app = typer.Typer(
        name="mats",
        cls=HelpedGroup,
        help="Merge fine-tuned models into one, without training again.",
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    for name, command in COMMANDS.items():
        if name not in loaded:
            app.command(name, cls=HelpedCommand, help=command.summary)(_options)
            continue
        module = importlib.import_module(command.module)
        found = getattr(module, command.name)
        if isinstance(found, typer.Typer):
            for info in found.registered_commands:
                info.cls = HelpedCommand
            app.add_typer(found, name=name, cls=HelpedGroup)
        else:
            app.command(name, cls=getattr(module, command.kind or "", HelpedCommand))(found)
    return app


def _version(value: bool) -> None:
    if value:
        print(__version__)
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Merge fine-tuned models into one, without training again."""


_COMPLETING = "_MATS_COMPLETE"  # is set by a shell that asks what could follow


def call(arguments: Sequence[str]) -> int:
    """Run a command; returns its exit code, and raises what goes wrong as it is."""
    is_completing = _COMPLETING in os.environ
    if not is_completing:
        _check_recipe(arguments)
    loaded = _typed_words()[1:2] if is_completing else arguments[:1]
    command = _made(*(name for name in loaded if name in COMMANDS))
    try:
        if is_completing:
            command._main_shell_completion({}, "mats")
        with command.make_context("mats", list(arguments)) as context:
            command.invoke(context)
    except typer.Exit as done:
        return done.exit_code
    except SystemExit as done:  # how typer ends what is about completion
        return int(done.code or 0)
    except typer.Abort as abort:
        raise KeyboardInterrupt from abort
    return 0


@cache
def _made(*loaded: str) -> Any:
    """What typer makes of all commands, once: it takes longer than many of them run."""
    return typer.main.get_command(make_app(*loaded))


def _typed_words() -> list[str]:
    """What stands on the line that a shell asks to be completed: bash says it so, others so."""
    return (os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS") or "").split()


def _check_recipe(arguments: Sequence[str]) -> None:
    """Refuse a wrong recipe before the options of `mats merge` are made, which takes longer."""
    match arguments:
        case ["merge", str(path), *others] if path.endswith((".yaml", ".yml")):
            if Path(path).is_file() and not {"-h", "--help"} & set(others):
                from matsmerge.recipes.known_options import check_early

                check_early(path)
