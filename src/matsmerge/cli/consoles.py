"""Standard output and standard error as rich writes to them, and errors on the latter."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console

# What users name is printed as it is: `:100:` is no emoji, and `[red]` no colour.
PLAIN: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}
stdout = Console(**PLAIN)
stderr = Console(stderr=True, **PLAIN)
_MAX_PROBLEMS = 100


def show_problems(problems: Sequence[str]) -> None:
    left = len(problems) - _MAX_PROBLEMS
    shown = [*problems[:_MAX_PROBLEMS], f"and {left} more like these"] if left > 0 else problems
    for problem in shown:
        stderr.print("error: ", style="bold red", end="")
        stderr.print(problem, soft_wrap=True)
