"""The value that was computed last, for what is asked for several times in a row."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class RecentValue(threading.local, Generic[T]):
    """A value by its name; each thread holds its own, and a copy in another process none."""

    def __init__(self) -> None:
        self._held: tuple[str, T] | None = None

    def get(self, name: str, compute: Callable[[str], T]) -> T:
        if self._held is None or self._held[0] != name:
            self._held = name, compute(name)
        return self._held[1]

    def __reduce__(self) -> tuple[type["RecentValue[T]"], tuple[()]]:
        return type(self), ()
