"""Options that several commands have."""

from typing import Annotated

import typer

from matsmerge.limits import MOST_AT_ONCE

RUNNING = "Running"  # the panel of options that change how, not what

Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Show errors only.", rich_help_panel=RUNNING)
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON.", rich_help_panel=RUNNING)
]
BatchSize = Annotated[
    int,
    typer.Option(
        min=1, max=MOST_AT_ONCE, help="Examples at once, at most.", rich_help_panel=RUNNING
    ),
]
MaxTokens = Annotated[
    int,
    typer.Option(
        min=1,
        max=MOST_AT_ONCE,
        help="Tokens at once, at most, with padding.",
        rich_help_panel=RUNNING,
    ),
]
