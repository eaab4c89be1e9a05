"""A store in the memory of this process that counts requests, and fails when it is told to."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

Fault = Callable[[str, str], bytes | None]  # operation and path; may raise, or cut what is read


class FaultyStore(MemoryFileSystem):  # type: ignore[misc]
    """`memory://` with faults; all instances are the same store."""

    cachable = False
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    # No Counter: its first count of a kind calls Python code, in which threads may change.
    requests: ClassVar[dict[str, int]] = defaultdict(int)
    ranges: ClassVar[list[tuple[str, int, int]]] = []
    fault: ClassVar[Fault | None] = None
    order: ClassVar[list[str]] = []  # what was written and removed

    @classmethod
    def reset(cls) -> None:
        cls.store.clear()
        cls.pseudo_dirs[:] = [""]
        cls.requests.clear()
        cls.ranges.clear()
        cls.order.clear()
        cls.fault = None

    def _meet(self, operation: str, path: str) -> bytes | None:
        FaultyStore.requests[operation] += 1
        return FaultyStore.fault(operation, path) if FaultyStore.fault else None

    def info(self, path: str, **kwargs: Any) -> Any:
        self._meet("info", path)
        found = dict(super().info(path, **kwargs))
        if found["type"] == "file":  # of the memory store the time alone, and that rarely changes
            found["ETag"] = str(hash(self.store[self._strip_protocol(path)].getvalue()))
        return found

    def find(self, path: str, **kwargs: Any) -> Any:
        return {name: self.info(name) for name in super().find(path, **{**kwargs, "detail": True})}

    def cat_file(self, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> bytes:
        FaultyStore.ranges.append((path, start, end))
        instead = self._meet("read", path)
        found: bytes = super().cat_file(path, start, end, **kwargs)
        return found if instead is None else instead

    def put_file(self, lpath: str, rpath: str, *args: Any, **kwargs: Any) -> None:
        self._meet("put", rpath)
        super().put_file(lpath, rpath, *args, **kwargs)
        FaultyStore.order.append(f"put {rpath}")

    def rm_file(self, path: str) -> None:
        self._meet("remove", path)
        super().rm_file(path)
        FaultyStore.order.append(f"remove {path}")

    def put(self, name: str, content: bytes) -> None:
        """Put content there, without counting."""
        self.pipe_file(name, content)


def use_faulty_store() -> FaultyStore:
    fsspec.register_implementation("memory", FaultyStore, clobber=True)
    FaultyStore.reset()
    store = fsspec.filesystem("memory")
    assert isinstance(store, FaultyStore)
    return store


def failing(times: int, error: Exception, operation: str = "read") -> Fault:
    """Fail so many times, then work."""
    left = [times]

    def fault(found: str, path: str) -> None:
        if found == operation and left[0]:
            left[0] -= 1
            raise error

    return fault
