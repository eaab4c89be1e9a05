"""The output folder: complete or absent.

Beside the output there is a hidden folder `.NAME.partial` while it is made:

    journal.jsonl  what this is a merge of; finished jobs, once their bytes have reached the disk
    output/        becomes the output; its manifest `merge.json` is written last
    replaced/      what was under the output's name before, until the new one is there

A run that is killed can be resumed, whenever that was:

    before the first line of the journal is whole    nothing is done yet, it begins anew
    while jobs are done                              what the journal notes is not done again
    while `output` is completed or renamed           the journal has all jobs, only this is repeated
    after the rename                                 the output is whole and has no other files in
                                                     it; resuming sees that it is there, and tidies
    when only the empty hidden folder is left        the same, and nobody minds it

The journal is outside of what is renamed, so that no moment leaves it in a finished output. It is
the first to go where everything is deleted: a journal never speaks of files that are gone.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from matsmerge.engine.input_files import InputFiles
from matsmerge.engine.journal import JournalWriter, read_journal
from matsmerge.engine.layout import Layout, Shard
from matsmerge.engine.machine import format_bytes
from matsmerge.engine.worker import Receipt
from matsmerge.errors import MatsError, OutputError
from matsmerge.whole_folder import hold, is_vacant, name_problems, put_in_place, sync

MANIFEST = "merge.json"
_JOURNAL, _OUTPUT, _REPLACED = "journal.jsonl", "output", "replaced"
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
        self,
        target: Path,
        layout: Layout,
        identity: str,
        inputs: InputFiles,
        num_pieces: Mapping[int, int],
        models: Sequence[str] = (".",),
    ) -> None:
        self.target = target
        self.layout = layout
        self.identity = identity
        self.inputs = inputs
        self._num_pieces = num_pieces  # of each job
        self.staging = staging_path(target)
        self.path = self.staging / _OUTPUT
        self.is_there = False  # a run that was killed had come to the end
        self.finished: dict[int, Receipt] = {}
        self.measured: dict[str, Any] | None = None
        # The folders with models: the output itself, or several within it.
        self.shards = {model: ShardFiles(self.path / model, layout) for model in models}
        self._syncer = ThreadPoolExecutor(1)
        self._syncing: Future[None] | None = None
        self._unsynced: list[int] = []
        self._journal: JournalWriter | None = None
        self._lock: int | None = None

    def open(self, *, resume: bool) -> None:
        """Begin, or continue where a run with the same inputs and recipe was interrupted."""
        is_new = not self.staging.exists()
        try:
            self.staging.mkdir(parents=True, exist_ok=True)
            self._lock = hold(self.staging)
            if resume and not is_new:
                self._continue()
            else:
                self._begin()
        except BlockingIOError as error:
            self._close()
            raise OutputError(f"{self.target}: another merge is writing it just now") from error
        except OSError as error:
            self.discard() if is_new else self._close()
            raise OutputError(f"{self.staging}: cannot be written ({error.strerror})") from error
        except MatsError:
            self._close()
            raise

    def _begin(self) -> None:
        for left_over in sorted(self.staging.iterdir(), key=lambda path: path.name != _JOURNAL):
            is_folder = left_over.is_dir() and not left_over.is_symlink()
            shutil.rmtree(left_over) if is_folder else left_over.unlink()
        self.path.mkdir()
        for files, shard in self._files():
            files.folder.mkdir(exist_ok=True)
            file = files.descriptor(shard)
            # Not allocated in advance: writing into allocated blocks is several times slower.
            os.ftruncate(file, shard.num_bytes)
            os.pwrite(file, shard.header, 0)
            os.fsync(file)
        journal = self.staging / _JOURNAL
        self._journal = JournalWriter.begin(journal, self.identity, self.inputs.notes())

    def _continue(self) -> None:
        noted = read_journal(self.staging / _JOURNAL)
        if noted is None:
            self._begin()  # it was stopped before it had begun
            return
        if noted.identity != self.identity:
            raise OutputError(
                f"{self.staging}: the interrupted merge had other inputs, another recipe or "
                "another version of matsmerge; start anew with --overwrite"
            )
        if is_finished(self.target):
            self.is_there = True
            _tidy(self.staging)
            self._close()
            return
        self.inputs.check_noted(noted.inputs)
        for files, shard in self._files():
            file = files.folder / shard.file_name
            if not file.is_file() or file.stat().st_size != shard.num_bytes:
                raise OutputError(f"{file}: damaged; start with --overwrite")
        for job, receipt in noted.finished.items():
            if len(receipt.squares) != self._num_pieces.get(job):
                raise OutputError(
                    f"{self.staging / _JOURNAL}: job {job} does not fit the merge; start with "
                    "--overwrite"
                )
        self.finished, self.measured = noted.finished, noted.measured
        self._journal = JournalWriter.resume(self.staging / _JOURNAL, noted)

    def note_measured(self, measured: Mapping[str, Any]) -> None:
        """Remember measurements for a run that resumes this one."""
        assert self._journal is not None
        self._journal.note_measured(measured)

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
        assert self._journal is not None
        self._journal.note_jobs([self.finished[job] for job in jobs])

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
        replaced = self.staging / _REPLACED
        if replaced.exists():
            shutil.rmtree(replaced)
        put_in_place(self.path, self.target, replaced)
        _tidy(self.staging)
        self._close()  # holding the lock until here keeps others from emptying the folder

    def discard(self) -> None:
        """Leave nothing behind."""
        self._close()
        with contextlib.suppress(OSError):
            (self.staging / _JOURNAL).unlink(missing_ok=True)
        shutil.rmtree(self.staging, ignore_errors=True)

    def close(self) -> None:
        """Leave everything for another run to resume."""
        if self._journal is None:
            return
        # A full disk, or no memory for a thread, say; those jobs are then done again.
        with contextlib.suppress(OSError, MemoryError, RuntimeError):
            self._start_sync().result()
        self._close()

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


def is_finished(target: Path) -> bool:
    """Has a run put its output in place, and was killed before it could tidy up?"""
    staging = staging_path(target)
    is_ours = (staging / _JOURNAL).is_file() and not (staging / _OUTPUT).exists()
    return is_ours and (target / MANIFEST).is_file()


def _is_interrupted(target: Path) -> bool:
    """Is there anything that a run could continue, or that somebody might miss?"""
    staging = staging_path(target)
    if not staging.exists() or is_finished(target):
        return False
    return not staging.is_dir() or any(p.name != _REPLACED for p in staging.iterdir())


def _tidy(staging: Path) -> None:
    """Remove what is left when the output is in place; the journal last, it says of which."""
    shutil.rmtree(staging / _REPLACED, ignore_errors=True)
    with contextlib.suppress(OSError):
        (staging / _JOURNAL).unlink(missing_ok=True)
        staging.rmdir()


def check_target(
    target: Path, num_bytes: int, inputs: Mapping[str, Path], *, overwrite: bool, resume: bool
) -> None:
    """Refuse an output that must not or cannot be written, before any work."""
    try:
        problems = list(_target_problems(target, num_bytes, inputs, overwrite, resume))
    except (OSError, RuntimeError) as error:  # links in a circle are a RuntimeError
        reason = getattr(error, "strerror", None) or error
        problems = [f"{target}: cannot be written to ({reason}); choose another --out"]
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
        elif not (overwrite or (resume and is_finished(target))):
            yield f"{target}: exists already; replace it with --overwrite"
    if _is_interrupted(target) and not (overwrite or resume):
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
