"""A base that stays in memory from one adapter to the next."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from matsmerge.adapters.adapted_checkpoint import AdaptedCheckpoint


class KeptBase:
    """The last base that was loaded, and how to get the last adapter off it again."""

    def __init__(self) -> None:
        self._key: object = None
        self._model: nn.Module | None = None
        self._undo: Callable[[], Any] | None = None

    def take(self, key: object) -> nn.Module | None:
        """The base as it was loaded, if it is the one with this key; else it is let go."""
        model = self._model if key == self._key else None
        if model is not None and self._undo is not None:
            self._undo()
        self._model, self._undo = None, None
        return model

    def keep(self, key: object, model: nn.Module) -> None:
        """Keep a base as it was loaded."""
        self._key, self._model, self._undo = key, model, None

    def undo_with(self, undo: Callable[[], Any]) -> None:
        """Say how to get an adapter off the base again."""
        self._undo = undo


def unfold(model: nn.Module, adapted: AdaptedCheckpoint, names: dict[str, str]) -> None:
    """Give a model its base's values again."""
    base = adapted.base
    with torch.no_grad():
        for name, stored in names.items():
            if stored in adapted.changed and stored in base.specs:
                parameter = model.get_parameter(name)
                if parameter.shape == base.specs[stored].shape:
                    parameter.copy_(base[stored])
