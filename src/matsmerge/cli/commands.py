"""The commands of `mats`."""

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from matsmerge.cli import (
    advise_command,
    collect_command,
    display,
    export_command,
    extract_command,
    init_command,
    inspect_command,
    merge_command,
    stats_command,
)
from matsmerge.cli.method_flags import MergeCommand
from matsmerge.lab.commands import (
    cost_command,
    evaluate_command,
    experiment_command,
    report_command,
    train_command,
    tune_command,
)
from matsmerge.version import __version__

# The root of what typer raises for a wrong command line: click's class, or that of typer's own
# copy of click, depending on its version.
CommandError: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

app = typer.Typer(
    name="mats",
    help="Merge fine-tuned models into one, without training again.",
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("init")(init_command.init)
app.command("train")(train_command.train)
app.command("collect")(collect_command.collect)
app.command("advise")(advise_command.advise)
app.command("merge", cls=MergeCommand)(merge_command.merge)
app.command("evaluate")(evaluate_command.evaluate)
app.command("tune")(tune_command.tune)
app.command("export")(export_command.export)
app.command("extract-lora")(extract_command.extract_lora)
app.command("cost")(cost_command.cost)
app.command("inspect")(inspect_command.inspect)
app.command("report")(report_command.report)
app.command("demo")(experiment_command.demo)
app.add_typer(experiment_command.experiment, name="experiment")
app.add_typer(stats_command.app, name="stats")


def _version(value: bool) -> None:
    if value:
        display.stdout.print(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Merge fine-tuned models into one, without training again."""


@app.command()
def schema() -> None:
    """Print the JSON Schema of recipes, for editors that check YAML as you type."""
    import json

    from matsmerge.recipes.recipe import recipe_schema

    print(json.dumps(recipe_schema(), indent=2))


def call(arguments: Sequence[str]) -> int:
    """Run a command; returns its exit code, and raises what goes wrong as it is."""
    command: Any = typer.main.get_command(app)
    try:
        command._main_shell_completion({}, "mats")  # what a shell asks for by _MATS_COMPLETE
        with command.make_context("mats", list(arguments)) as context:
            command.invoke(context)
    except typer.Exit as done:
        return done.exit_code
    except SystemExit as done:  # how typer ends what is about completion
        return int(done.code or 0)
    except typer.Abort as abort:
        raise KeyboardInterrupt from abort
    return 0
