"""How a merge tells what it is doing; the command line draws it."""

from typing import Protocol


class Progress(Protocol):
    """Told of each stage, and of the input bytes it has dealt with."""

    def stage(self, title: str, num_bytes: int) -> None: ...
    def advance(self, num_bytes: int) -> None: ...


class Silent:
    """Tells nobody."""

    def stage(self, title: str, num_bytes: int) -> None:
        pass

    def advance(self, num_bytes: int) -> None:
        pass
