"""Outputs on their way to a remote store.

A store cannot rename a folder. So files are put under their final names, each of which appears when
all of it has arrived, in an order in which nothing is taken for a model before it is one: what a
reader looks for first (the index of shards or the only file with weights, then the manifest) comes
last, and of an output that is replaced it goes first. A journal notes what has arrived, for an
upload that is continued.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from matsmerge.files.journal_file import JournalFile, read_journal_lines
from matsmerge.files.mirror import fetch_path
from matsmerge.files.remote_names import url_of
from matsmerge.files.remote_store import RemoteState, delete, look, put
from matsmerge.progress import Progress

UPLOADS = "uploads.jsonl"
Put = Callable[[Path, str], RemoteState]

_NUM_AT_ONCE = 4  # files; the larger ones are sent in several parts at once
# What makes a folder look complete, from the first to the very last.
_LAST = (
    "adapter_model.safetensors",
    "model.safetensors",
    "adapter_model.safetensors.index.json",
    "model.safetensors.index.json",
    "training.json",
    "results.json",
    "merge.json",
)


def upload_file(file: Path, target: Path) -> None:
    """Store a file as what a path of the mirror stands for."""
    put(file, _url(target))
    fetch_path(target)


def upload_folder(
    folder: Path, target: Path, journal: Path, progress: Progress, put_file: Put = put
) -> None:
    """Store a folder in place of what is there; hidden files are private and stay here."""
    found = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    names = [str(path) for path in found if not any(p.startswith(".") for p in path.parts)]
    entries, num_bytes = read_journal_lines(journal)
    if entries:
        notes = JournalFile.resume(journal, num_bytes)
    else:
        notes = JournalFile.begin(journal, {"target": _url(target)})
    noted = {entry["name"]: entry["as"] for entry in entries if "name" in entry}
    arrived = _arrived(folder, _url(target), noted)
    sizes = {name: (folder / name).stat().st_size for name in names}
    done = sum(sizes[name] for name in arrived)
    progress.stage("uploading", sum(sizes.values()), done=done)
    for rank in range(len(_LAST) + 1):
        own = sorted(name for name in names if _rank(name) == rank and name not in arrived)
        # Deeper ones first: the folder around several models is complete when they are.
        for depth in sorted({name.count("/") for name in own}, reverse=True):
            together = [name for name in own if name.count("/") == depth]
            _put_all(folder, _url(target), together, notes, progress, put_file)
    fetch_path(target)


def _put_all(
    folder: Path,
    url: str,
    names: Sequence[str],
    notes: JournalFile,
    progress: Progress,
    put_file: Put,
) -> None:
    """Store files, several at once; where one fails, those on their way are still noted."""
    failures: list[BaseException] = []
    with ThreadPoolExecutor(_NUM_AT_ONCE) as pool:
        put_as = {pool.submit(put_file, folder / name, f"{url}/{name}"): name for name in names}
        try:
            for done in as_completed(put_as):
                if done.cancelled():
                    continue
                if failure := done.exception():
                    failures.append(failure)
                    for other in put_as:
                        other.cancel()
                    continue
                state = done.result()
                file = folder / put_as[done]
                notes.note({"name": put_as[done], "as": _identity(file, state)})
                progress.advance(state.size)
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise
    if failures:
        raise failures[0]


def _arrived(folder: Path, url: str, noted: Mapping[str, object]) -> set[str]:
    """The files that an earlier run has stored; all others that are there are removed."""
    there = look(url)
    stored = there if isinstance(there, dict) else {}
    arrived = {
        name
        for name, state in stored.items()
        if (folder / name).is_file() and noted.get(name) == _identity(folder / name, state)
    }
    # The manifest is made anew by every run, and only the last may speak for the rest.
    for name in sorted(stored.keys() - arrived, key=_rank, reverse=True):
        delete(f"{url}/{name}")
    return arrived


def _identity(file: Path, state: RemoteState) -> list[object]:
    """What tells that a file and what is stored of it are still the same."""
    found = file.stat()
    return [found.st_size, found.st_mtime_ns, state.size, state.version]


def _rank(name: str) -> int:
    last = name.rpartition("/")[2]
    return _LAST.index(last) + 1 if last in _LAST else 0


def _url(target: Path) -> str:
    url = url_of(target)
    assert url is not None, "it is remote"
    return url
