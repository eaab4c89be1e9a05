"""Files that stay open while they are read or written at any place."""

import os
import threading
from pathlib import Path


class OpenFiles:
    """Descriptors of files, each opened when it is first asked for, by any thread.

    A pickled copy opens the files for itself.
    """

    def __init__(self, flags: int) -> None:
        self._flags = flags
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()

    def descriptor(self, path: Path) -> int:
        found = self._descriptors.get(path)
        if found is None:
            with self._lock:
                found = self._descriptors.get(path)
                if found is None:
                    found = os.open(path, self._flags | os.O_CLOEXEC, 0o666)
                    self._descriptors[path] = found
        return found

    def sync(self) -> None:
        """Wait until what was written to them has reached the disk."""
        for descriptor in list(self._descriptors.values()):
            os.fsync(descriptor)

    def close(self) -> None:
        """Close all of them; asking for one opens it again."""
        with self._lock:
            while self._descriptors:
                os.close(self._descriptors.popitem()[1])

    def __del__(self) -> None:
        # At the end of the interpreter `os` may be gone, and the files are closed by then.
        if os is not None:
            self.close()

    def __reduce__(self) -> tuple[type["OpenFiles"], tuple[int]]:
        return OpenFiles, (self._flags,)
