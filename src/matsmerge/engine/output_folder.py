"""The output folder: complete or absent.

Everything is written into a hidden folder beside the output. Finished jobs are noted in a
journal after their bytes have reached the disk, so that a run that dies can be resumed. The
manifest `merge.json` is written last, and then the folder is renamed.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from matsmerge.engine.layout import Layout, Shard
from matsmerge.engine.machine import format_bytes
from matsmerge.engine.worker import Receipt
from matsmerge.errors import OutputError
from matsmerge.whole_folder import hold, is_vacant, name_problems, put_in_place, sync

MANIFEST = "merge.json"
_JOURNAL = "journal.jsonl"
_SYNC_JOBS = 4  # finished jobs are noted in the journal about this often


class ShardFiles:
    """The files with weights, open for writing at any place. A pickled copy opens its own."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        self.folder = folder
        self._shard_of = {name: shard for shard in layout.shards for name in shard.offsets}
        self._descriptors: dict[str, int] = {}

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Put a tensor's elements from `start` on where they belong."""
        shard = self._shard_of[name]
        offset = shard.offsets[name] + start * values.element_size()
        view = values.view(torch.uint8).numpy().data
        while len(view):
            count = os.pwrite(self.descriptor(shard), view, offset)
            view, offset = view[count:], offset + count

    def descriptor(self, shard: Shard) -> int:
        if shard.file_name not in self._descriptors:
            path = self.folder / shard.file_name
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            self._descriptors[shard.file_name] = os.open(path, flags, 0o666)
        return self._descriptors[shard.file_name]

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_descriptors": {}}


class OutputFolder:
    """A folder being written; only `finish` makes the output appear."""

    def __init__(
        self, target: Path, layout: Layout, identity: str, models: Sequence[str] = (".",)
    ) -> None:
        self.target = target
        self.layout = layout
        self.identity = identity
        self.path = staging_path(target)
        self.finished: dict[int, Receipt] = {}
        self.measured: dict[str, Any] | None = None
        # The folders with models: the output itself, or several within it.
        self.shards = {model: ShardFiles(self.path / model, layout) for model in models}
        self._syncer = ThreadPoolExecutor(1)
        self._syncing: Future[None] | None = None
        self._unsynced: list[int] = []
        self._journal: IO[str] | None = None
        self._lock: int | None = None

    def open(self, *, resume: bool) -> None:
        """Begin, or continue where a run with the same inputs and recipe was interrupted."""
        is_new = not self.path.exists()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = hold(self.path)
            if resume and not is_new:
                self._continue()
            else:
                self._begin()
        except BlockingIOError as error:
            self._close()
            raise OutputError(f"{self.target}: another merge is writing it just now") from error
        except OSError as error:
            self.discard() if is_new else self._close()
            raise OutputError(f"{self.path}: cannot be written ({error.strerror})") from error
        except OutputError:
            self._close()
            raise

    def _begin(self) -> None:
        for left_over in self.path.iterdir():
            shutil.rmtree(left_over) if left_over.is_dir() else left_over.unlink()
        for files, shard in self._files():
            files.folder.mkdir(exist_ok=True)
            file = files.descriptor(shard)
            # Not allocated in advance: writing into allocated blocks is several times slower.
            os.ftruncate(file, shard.num_bytes)
            os.pwrite(file, shard.header, 0)
            os.fsync(file)
        self._journal = (self.path / _JOURNAL).open("x")
        self._note({"identity": self.identity})

    def _continue(self) -> None:
        journal = self.path / _JOURNAL
        entries = []
        for line in journal.read_text().splitlines() if journal.exists() else []:
            try:
                entries.append(json.loads(line))
            except ValueError:  # the line that was being written when the run died
                break
        if not entries:
            self._begin()  # it was stopped before it had begun
            return
        if entries[0].get("identity") != self.identity:
            raise OutputError(
                f"{self.path}: the interrupted merge had other inputs, another recipe or another "
                "version of matsmerge; start anew with --overwrite"
            )
        for entry in entries:
            for job, (squares, solved, energies) in entry.get("jobs", {}).items():
                self.finished[int(job)] = Receipt(int(job), tuple(squares), solved, energies)
            self.measured = entry.get("measured", self.measured)
        for files, shard in self._files():
            if os.fstat(files.descriptor(shard)).st_size != shard.num_bytes:
                file = files.folder / shard.file_name
                raise OutputError(f"{file}: damaged; start with --overwrite")
        # Written anew, so that a torn last line does not swallow the next one.
        journal.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        self._journal = journal.open("a")

    def note_measured(self, measured: Mapping[str, Any]) -> None:
        """Remember measurements for a run that resumes this one."""
        self._note({"measured": measured})

    def note_finished(self, receipt: Receipt) -> None:
        """Note that all of a job's values have been written."""
        self.finished[receipt.job_index] = receipt
        self._unsynced.append(receipt.job_index)
        if len(self._unsynced) >= _SYNC_JOBS and (self._syncing is None or self._syncing.done()):
            self._start_sync()

    def _start_sync(self) -> Future[None]:
        """Wait for the disk beside the ongoing work, then note the jobs it has."""
        if self._syncing is not None:
            self._syncing.result()
        jobs, self._unsynced = self._unsynced, []
        self._syncing = self._syncer.submit(self._sync, jobs)
        return self._syncing

    def _sync(self, jobs: list[int]) -> None:
        for files, shard in self._files():
            os.fsync(files.descriptor(shard))
        done = [self.finished[job] for job in jobs]
        self._note({"jobs": {r.job_index: [r.squares, r.solved, r.energies] for r in done}})

    def _files(self) -> Iterator[tuple[ShardFiles, Shard]]:
        for files in self.shards.values():
            for shard in self.layout.shards:
                yield files, shard

    def finish(self, manifest: str) -> None:
        """Write the manifest, and let the output appear under its name."""
        self._start_sync().result()
        for files in self.shards.values():
            if self.layout.index_name and self.layout.index:
                (files.folder / self.layout.index_name).write_text(self.layout.index)
        (self.path / MANIFEST).write_text(manifest)
        for path in (*self.path.rglob("*"), self.path):
            sync(path)
        replaced = self.path.with_suffix(".replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        put_in_place(self.path, self.target, replaced)
        (self.target / _JOURNAL).unlink()
        self._close()  # holding the lock until here keeps others from emptying the folder
        shutil.rmtree(replaced, ignore_errors=True)

    def discard(self) -> None:
        """Leave nothing behind."""
        self._close()
        shutil.rmtree(self.path, ignore_errors=True)

    def close(self) -> None:
        """Leave everything for another run to resume."""
        if self._journal is None:
            return
        with contextlib.suppress(OSError):  # a full disk, say; those jobs are then done again
            self._start_sync().result()
        self._close()

    def _note(self, entry: Mapping[str, Any]) -> None:
        assert self._journal is not None
        self._journal.write(json.dumps(entry) + "\n")
        self._journal.flush()
        os.fsync(self._journal.fileno())

    def _close(self) -> None:
        self._syncer.shutdown()
        for files in self.shards.values():
            files.close()
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def staging_path(target: Path) -> Path:
    """Where an output is written until it is complete."""
    return target.with_name(f".{target.name}.partial")


def check_target(
    target: Path, num_bytes: int, inputs: Mapping[str, Path], *, overwrite: bool, resume: bool
) -> None:
    """Refuse an output that must not or cannot be written, before any work."""
    try:
        problems = list(_target_problems(target, num_bytes, inputs, overwrite, resume))
    except OSError as error:
        problems = [f"{target}: cannot be written to ({error.strerror}); choose another --out"]
    if problems:
        raise OutputError(problems)


def check_new_file(path: Path, *, overwrite: bool) -> None:
    """Refuse a file that cannot or must not be written."""
    if problems := name_problems(path):
        raise OutputError(problems)
    if path.is_dir() or (path.exists() and not overwrite):
        raise OutputError(
            f"{path}: exists already; choose another file, or replace it with --overwrite"
        )
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise OutputError(f"{path.parent}: is not a folder that can be written to")


def _target_problems(
    target: Path, num_bytes: int, inputs: Mapping[str, Path], overwrite: bool, resume: bool
) -> Iterator[str]:
    if problems := name_problems(target):
        yield from problems
        return
    if not target.name or target.is_symlink():
        yield f"{target}: is not the name of a folder to make; choose another --out"
        return
    place, staging = target.resolve(), staging_path(target)
    for label, used in inputs.items():
        if place.is_relative_to(used.resolve()) or used.resolve().is_relative_to(place):
            yield f"{target}: overlaps with the input {label}; choose another --out"
            return
    if not is_vacant(target):
        if not (target / MANIFEST).is_file():
            yield f"{target}: exists and is not a merge of ours; choose another --out"
        elif not overwrite:
            yield f"{target}: exists already; replace it with --overwrite"
    if staging.exists() and not (overwrite or resume):
        yield (
            f"{target}: an earlier merge was interrupted; continue it with --resume, "
            "or start anew with --overwrite"
        )
    parent = next(p for p in place.parents if p.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        yield f"{parent}: cannot be written to; choose another --out"
    elif not (resume and staging.exists()):
        free = shutil.disk_usage(parent).free
        if free < num_bytes:
            yield (
                f"{parent}: not enough disk space, {format_bytes(num_bytes)} needed and "
                f"{format_bytes(free)} free"
            )
