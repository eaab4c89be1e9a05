"""`mats`: commands, and what their exit codes mean.

0: done. 1: something the user can put right (also a wrong option). 2: a bug of ours.
130: interrupted.
"""

import sys
from typing import Annotated, Any

import typer

from matsmerge.cli import (
    collect_command,
    cost_command,
    display,
    evaluate_command,
    experiment_command,
    extract_command,
    inspect_command,
    merge_command,
    report_command,
    stats_command,
    train_command,
    tune_command,
)
from matsmerge.errors import MatsError, machine_gave_out
from matsmerge.version import __version__

# The root of what typer raises for a wrong command line: click's class, or that of typer's own
# copy of click, depending on its version.
_CommandError: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

_INTERRUPTED = 130

app = typer.Typer(
    name="mats",
    help="Merge fine-tuned models into one, without training again.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("train")(train_command.train)
app.command("collect")(collect_command.collect)
app.command("merge")(merge_command.merge)
app.command("evaluate")(evaluate_command.evaluate)
app.command("tune")(tune_command.tune)
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

    from matsmerge.recipes.schema import recipe_schema

    print(json.dumps(recipe_schema(), indent=2))


def main() -> None:
    """Run a command and exit."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run a command; returns its exit code."""
    try:
        result = app(arguments or ["--help"], prog_name="mats", standalone_mode=False)
        if result == _INTERRUPTED:  # how newer versions of typer report Ctrl-C
            raise KeyboardInterrupt
        return result if isinstance(result, int) else 0
    except MatsError as error:
        display.show_problems(error.problems)
    except (KeyboardInterrupt, typer.Abort):
        display.show_problems([f"interrupted{_how_to_continue(arguments)}"])
        return _INTERRUPTED
    except _CommandError as error:
        display.show_problems([error.format_message()])
        display.stderr.print("see mats --help or mats COMMAND --help")
    except Exception as error:
        if machine_gave_out(error):
            display.show_problems([f"{_gave_out(error)}{_how_to_continue(arguments)}"])
            return 1
        import traceback

        display.stderr.print(traceback.format_exc(), markup=False)
        display.show_problems(
            ["this is a bug in matsmerge, please report it with the lines above; nothing was lost"]
        )
        return 2
    return 1


def _gave_out(error: Exception) -> str:
    reason = " ".join(str(error).split()) or type(error).__name__
    return (
        f"the machine, or a limit on this process, gave out ({reason[:200]}); end other programs, "
        "raise the limit (ulimit), or give it less to do at once (--workers, --batch-size)"
    )


def _how_to_continue(arguments: list[str]) -> str:
    match arguments[:2]:
        case ["merge" | "collect" | "train" | "tune", *_]:
            return "; continue with --resume"
        case ["demo"] | ["demo", _] | ["experiment", "run" | "resume"]:
            return "; the same command continues"
    return ""


if __name__ == "__main__":
    main()
