"""`mats push`."""

from matsmerge.cli.display import JsonScreen
from matsmerge.cli.field_options import CommandOptions, argument, option, takes_options


class Publishing(CommandOptions):
    """What to publish, and as what."""

    source: str = argument(metavar="FOLDER")
    """A model's folder, or a file of statistics."""

    repo: str = argument(metavar="OWNER/NAME")
    """The repository on the hub; it is made if it is not there."""

    statistics: str | None = option(metavar="FILE")
    """What `mats collect` wrote, to be put beside the model."""

    public: bool = False
    """Let everyone see it. Default: only you."""


@takes_options
def push(asked: Publishing, screen: JsonScreen) -> None:
    """Publish a model or statistics on the Hugging Face hub.

        mats push merged owner/name

        mats push tuned/sst2 owner/sst2 --statistics sst2.safetensors --public

    Log in with `hf auth login` before.
    """
    import matsmerge

    # The hub's client shows how far it is.
    address = matsmerge.push(
        asked.source, asked.repo, statistics=asked.statistics, public=asked.public
    )
    screen.result({"repo": asked.repo, "commit": address})
    seen = "for everyone" if asked.public else "for you alone; --public lets everyone see it"
    screen.say(f"{asked.source} is on the hub as {asked.repo}, {seen}")
    screen.next(f"mats inspect {asked.repo}", "all commands take it by this name")
