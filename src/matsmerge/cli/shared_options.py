"""Options that several commands have."""

from typing import Annotated, Any

import typer

from matsmerge.limits import MOST_AT_ONCE

RUNNING = "Running"  # the panel of options that change how, not what


def option(text: str, *names: str, panel: str | None = None, **details: Any) -> Any:
    """An option of a command: what its help says, its names if not the parameter's own."""
    return typer.Option(*names, help=text, rich_help_panel=panel, **details)


Quiet = Annotated[bool, option("Show errors only.", "--quiet", "-q", panel=RUNNING)]
AsJson = Annotated[bool, option("Print the result as JSON.", "--json", panel=RUNNING)]
BatchSize = Annotated[
    int, option("Examples at once, at most.", min=1, max=MOST_AT_ONCE, panel=RUNNING)
]
MaxTokens = Annotated[
    int,
    option("Tokens at once, at most, with padding.", min=1, max=MOST_AT_ONCE, panel=RUNNING),
]
