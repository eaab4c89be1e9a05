"""A base that stays in memory from one adapter to the next."""

from collections.abc import Callable

from torch import nn


class KeptBase:
    """The last base that was loaded; `undo` takes the adapter off again."""

    def __init__(self) -> None:
        self.undo: Callable[[], object] | None = None
        self._key: object = None
        self._model: nn.Module | None = None

    def take(
        self, key: object, load: Callable[[], tuple[nn.Module, list[str]]]
    ) -> tuple[nn.Module, list[str]]:
        """The base with this key as it is stored, and notes on loading it if it was not kept.

        One with another key is let go before the next is loaded.
        """
        model, undo = self._model if key == self._key else None, self.undo
        self._model, self.undo = None, None
        notes: list[str] = []
        if model is None:
            model, notes = load()
        elif undo is not None:
            undo()
        self._key, self._model = key, model
        return model, notes
