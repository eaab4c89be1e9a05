"""Options that several commands have."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from matsmerge.cli.field_options import RUNNING, CommandOptions, option
from matsmerge.errors import RecipeError
from matsmerge.limits import MOST_AT_ONCE

if TYPE_CHECKING:
    from matsmerge import RayExecutor


class Replacing(CommandOptions):
    """What becomes of an earlier output in the same place."""

    panel = RUNNING

    overwrite: bool = False
    """Replace what an earlier run wrote there."""


class Resuming(Replacing):
    """What becomes of an earlier run, finished or not, in the same place."""

    resume: bool = False
    """Continue an earlier run that was interrupted."""


class LogOptions(CommandOptions):
    """Where else to log what is found."""

    panel = RUNNING

    log_to: str | None = option(metavar="PLACE")
    """Also log settings, scores and seconds: tensorboard:FOLDER, or wandb:PROJECT."""


class BatchSize(CommandOptions):
    """How many examples a model gets at once."""

    panel = RUNNING

    batch_size: int = option(32, ge=1, le=MOST_AT_ONCE)
    """Examples at once, at most."""


class Batches(BatchSize):
    """How much a model gets at once."""

    max_tokens: int = option(4096, ge=1, le=MOST_AT_ONCE)
    """Tokens at once, at most, with padding."""


class Execution(CommandOptions):
    """Where the work is done."""

    panel = RUNNING

    executor: Literal["local", "ray"] | None = option(metavar="NAME")
    """local: on this machine; ray: as tasks of a Ray cluster, whose nodes see the same files."""

    ray_address: str | None = option(metavar="ADDRESS")
    """Of the Ray cluster. Default: RAY_ADDRESS, else the one that runs here, else a new one."""

    def on_ray(
        self,
        default: str | None = None,
        num_workers: int | None = None,
        max_bytes: int | None = None,
    ) -> "RayExecutor | None":
        """The executor, if it is Ray; it may be the default of a recipe."""
        if (self.executor or default) != "ray":
            if self.ray_address is not None:
                raise RecipeError("--ray-address: is for --executor ray alone")
            return None
        from matsmerge import RayExecutor

        return RayExecutor(self.ray_address, num_workers, max_bytes)


def parse_pairs(flag: str, given: Iterable[str], form: str) -> dict[str, str]:
    """`{"text": "sentence", "label": "gold"}` from `["text=sentence", "label=gold"]`."""
    pairs: dict[str, str] = {}
    for text in given:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not (name and equals and value):
            raise RecipeError(f"{flag}: expected {form}, found '{text.strip()}'")
        if name in pairs:
            raise RecipeError(f"{flag}: '{name}' is given twice")
        pairs[name] = value
    return pairs
