"""The output folder: complete or absent.

Beside the output there is a hidden folder while it is made (see `files.whole_outputs`), in it

    journal.jsonl  what this is a merge of; finished jobs, once their bytes have reached the disk
    output/        becomes the output; its manifest `merge.json` is written last

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
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from matsmerge.engine.executor import Distant
from matsmerge.engine.input_files import InputFiles
from matsmerge.engine.journal import read_journal
from matsmerge.engine.layout import Layout, Shard, ShardFiles
from matsmerge.engine.prepared_merge import PreparedMerge
from matsmerge.engine.sent_pieces import SentPieces, forget_pieces, shipping
from matsmerge.engine.worker import FINAL, Receipt, Sinks
from matsmerge.errors import MatsError, OutputError
from matsmerge.files.journal_file import JournalFile
from matsmerge.files.output_place import check_folder, check_room
from matsmerge.files.remote_names import url_of
from matsmerge.files.whole_outputs import StagedFolder, staging_path, writing
from matsmerge.progress import Progress

MANIFEST = "merge.json"
_JOURNAL = "journal.jsonl"
_SYNC_JOBS = 4  # finished jobs are noted in the journal about this often


class OutputFolder:
    """A folder being written; only `finish` makes the output appear."""

    def __init__(
        self,
        target: Path,
        prepared: PreparedMerge,
        layout: Layout,
        identity: str,
        inputs: InputFiles,
        distant: Distant | None = None,
    ) -> None:
        self.target = target
        self.layout = layout
        self.identity = identity
        self.inputs = inputs
        self._num_pieces = {job.index: len(job.names) for job in prepared.plan.jobs}
        self._staged = StagedFolder(target, "merge")
        self.staging, self.path = self._staged.path, self._staged.output
        self._journal_path = self.staging / _JOURNAL
        self.is_there = False  # a run that was killed had come to the end
        self.finished: dict[int, Receipt] = {}
        self.measured: dict[str, Any] | None = None
        # By iteration, in the output itself or in several folders within it.
        self.shards = {
            at: ShardFiles(self.path / name, layout) for at, name in prepared.models.items()
        }
        # Workers that do not see these files send what they have merged to the store.
        self._distant, self._pieces = distant, ""
        self.sinks: Sinks = self.shards
        if distant is not None:
            self._pieces = f"{(url_of(target) or '').rpartition('/')[0]}/{self.staging.name}"
            self.identity = f"{identity} in pieces"
            self.sinks = {
                at: SentPieces(self._url(at), own.shard_of) for at, own in self.shards.items()
            }
        self._syncer = ThreadPoolExecutor(1)
        self._syncing: Future[None] | None = None
        self._unsynced: list[int] = []
        self._journal: JournalFile | None = None

    def open(self, *, resume: bool) -> None:
        """Begin, or continue where a run with the same inputs and recipe was interrupted."""
        is_new = not self.staging.exists()
        try:
            self._staged.open()
            with writing(self.staging):
                self._continue() if resume and not is_new else self._begin()
        except MatsError:
            # Of a run that has just begun there is nothing to continue.
            self.discard() if is_new and self._staged.is_open else self._close()
            raise

    def _url(self, at: int | None) -> str:
        """Where the pieces of a model are."""
        return f"{self._pieces}/{'final' if at is FINAL else at}"

    def _begin(self) -> None:
        self._staged.clear(first=_JOURNAL)
        self._forget_pieces()
        self.path.mkdir()
        for files in self.shards.values():
            files.create()
        notes = [note.model_dump() for note in self.inputs.notes()]
        first = {"identity": self.identity, "inputs": notes}
        self._journal = JournalFile.begin(self._journal_path, first)

    def _continue(self) -> None:
        noted = read_journal(self._journal_path)
        if noted is None:
            self._begin()  # it was stopped before it had begun
            return
        if noted.identity != self.identity:
            raise OutputError(
                f"{self.staging}: the interrupted merge had other inputs, another recipe, "
                "another executor (Ray or not, where the output is remote) or another version of "
                "matsmerge; start anew with --overwrite"
            )
        if is_finished(self.target):
            self.is_there = True
            self._close(tidy=True)
            return
        self.inputs.check_noted(noted.inputs)
        for files, shard in self._files():
            file = files.folder / shard.file_name
            if not file.is_file() or file.stat().st_size != shard.num_bytes:
                raise OutputError(f"{file}: damaged; start with --overwrite")
        for job, receipt in noted.finished.items():
            if len(receipt.squares) != self._num_pieces.get(job):
                raise OutputError(
                    f"{self._journal_path}: job {job} does not fit the merge; start with "
                    "--overwrite"
                )
        self.finished, self.measured = noted.finished, noted.measured
        self._journal = JournalFile.resume(self._journal_path, noted.num_bytes)

    def note_measured(self, measured: Mapping[str, Any]) -> None:
        """Remember measurements for a run that resumes this one."""
        assert self._journal is not None
        self._journal.note({"measured": measured})

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
        receipts = [self.finished[job] for job in jobs]
        self._journal.note(
            {"jobs": {r.job_index: [r.squares, r.reports, r.energies] for r in receipts}}
        )

    def _files(self) -> Iterator[tuple[ShardFiles, Shard]]:
        for files in self.shards.values():
            for shard in self.layout.shards:
                yield files, shard

    def finish(self, manifest: str, progress: Progress) -> None:
        """Write the manifest, and let the output appear under its name."""
        self._start_sync().result()
        for files in self.shards.values():
            for name, text in self.layout.index.items():
                (files.folder / name).write_text(text)
        (self.path / MANIFEST).write_text(manifest)
        if self._distant is None:
            self._staged.put_in_place(progress)
        else:
            shards = {
                files.folder / shard.file_name: (shard, f"{self._url(at)}/{shard.file_name}")
                for at, files in self.shards.items()
                for shard in self.layout.shards
            }
            with shipping(self._distant, shards) as put_file:
                self._staged.put_in_place(progress, put_file)
        self._close(tidy=True)

    def discard(self) -> None:
        """Leave nothing behind."""
        self._syncer.shutdown()  # so that nothing is noted any more
        with contextlib.suppress(OSError):
            self._journal_path.unlink(missing_ok=True)
        self._close(tidy=True)

    def close(self) -> None:
        """Leave everything for another run to resume."""
        if self._journal is None:
            return
        # A full disk, or no memory for a thread, say; those jobs are then done again.
        with contextlib.suppress(OSError, MemoryError, RuntimeError):
            self._start_sync().result()
        self._close()

    def _close(self, *, tidy: bool = False) -> None:
        self._syncer.shutdown()
        for files in self.shards.values():
            files.close()
        self._journal = None
        if tidy:
            with contextlib.suppress(OSError):
                self._forget_pieces()
        # The journal goes last: it says of which output the rest is.
        self._staged.discard(last=_JOURNAL) if tidy else self._staged.close()

    def _forget_pieces(self) -> None:
        if self._pieces:
            forget_pieces(self._pieces)


def is_finished(target: Path) -> bool:
    """Has a run put its output in place, and was killed before it could tidy up?"""
    staged = StagedFolder(target, "merge")
    is_ours = (staged.path / _JOURNAL).is_file() and not staged.output.exists()
    return is_ours and is_merge(target)


def is_merge(folder: Path) -> bool:
    """Does a folder hold the output of a merge?"""
    return (folder / MANIFEST).is_file()


def check_target(
    target: Path,
    *,
    overwrite: bool,
    resume: bool,
    inputs: Mapping[str, Path] | None = None,
    num_bytes: int = 0,
) -> None:
    """Refuse an output that must not or cannot be written, before any work."""
    check_folder(
        target,
        "merge",
        is_merge,
        inputs=inputs,
        overwrite=overwrite,
        resume=resume,
        is_finished=is_finished,
    )
    if not (resume and staging_path(target).exists()):
        check_room(target, num_bytes)
