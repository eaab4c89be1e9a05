"""The files that a merge reads, and whether any has changed since it began.

A file counts as unchanged if its size, its time of modification and its inode are what they were.
That costs nothing, and misses only a change that hides itself (one that sets the time back). With
digests of every byte nothing is missed, and a file that was copied or touched counts as unchanged.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from matsmerge.adapters.adapter import CONFIG
from matsmerge.checkpoints.input_file import InputFile, digest, look_at
from matsmerge.engine.executor import Executor, Piece, map_pieces
from matsmerge.engine.prepared_merge import PreparedMerge
from matsmerge.errors import CheckpointError, OutputError, ResourceError
from matsmerge.files.mirror import each_at_once
from matsmerge.problems import reworded
from matsmerge.progress import Progress

_DIGEST_BYTES = 2_000_000  # of memory, whatever the file's size


class FileNote(BaseModel):
    """A file as a journal describes it; without its path, since a folder may be moved."""

    model_config = ConfigDict(extra="forbid")

    name: str
    size: int
    modified_ns: int
    inode: int
    digest: str | None = None


@dataclass(frozen=True)
class InputFiles:
    """The files of all inputs, as they were when they were opened."""

    files: tuple[InputFile, ...]
    digests: dict[Path, str] = field(default_factory=dict)

    def read_digests(self, executor: Executor, progress: Progress) -> None:
        """Read every file and keep its digest, by which changes are noticed from here on."""
        self.digests.update(self._digest_all(executor, progress))

    def check(self, executor: Executor, progress: Progress) -> None:
        """Refuse files that have changed; a merge of them may be of the old and the new content."""
        if self.digests:
            found = self._digest_all(executor, progress)
            changed = [
                file.path for file in self.files if found[file.path] != self.digests[file.path]
            ]
        else:
            advice = "; what was done is kept; continue with --resume when it can be read"
            with reworded(after=advice, error_type=ResourceError):  # nothing need be lost for that
                found_now = each_at_once(look_at, [file.path for file in self.files])
                changed = [
                    file.path
                    for file, look in zip(self.files, found_now, strict=True)
                    if look() != file
                ]
        CheckpointError.raise_all(
            f"{path}: was changed while it was in use; nothing was written, since it would be a "
            "mixture. Merge again when the file is complete"
            for path in changed
        )

    def notes(self) -> list[FileNote]:
        """What to note in a journal."""
        return [
            FileNote(
                name=file.path.name,
                size=file.size,
                modified_ns=file.modified_ns,
                inode=file.inode,
                digest=self.digests.get(file.path),
            )
            for file in self.files
        ]

    def check_noted(self, noted: Sequence[FileNote]) -> None:
        """Refuse to continue with other files than those that were noted."""
        problems = []
        for file, now, before in zip(self.files, self.notes(), noted, strict=False):
            is_touched = now.model_copy(update={"digest": before.digest}) != before
            if now.size != before.size:
                what = f"has {now.size} bytes, and had {before.size} when the merge began"
            elif is_touched and before.digest is None:
                what = (
                    "was modified, or replaced by a copy, since the merge began. If its content is "
                    "the same, only a merge that is begun with --verify can tell"
                )
            elif before.digest is not None and (now.digest or digest(file.path)) != before.digest:
                what = "has another content than when the merge began"
            else:
                if before.digest is not None:
                    self.digests[file.path] = before.digest  # compared at the end as well
                continue
            problems.append(f"{file.path}: {what}; start anew with --overwrite")
        if len(noted) != len(self.files):
            problems.append(
                f"the interrupted merge read {len(noted)} files, and this one {len(self.files)}; "
                "start anew with --overwrite"
            )
        OutputError.raise_all(problems)

    def _digest_all(self, executor: Executor, progress: Progress) -> dict[Path, str]:
        title = "reading inputs to verify them"
        pieces = [Piece(file.path, file.size, _DIGEST_BYTES) for file in self.files]
        return dict(map_pieces(executor, progress, title, _digest, pieces))


def _digest(path: Path) -> tuple[Path, str]:
    return path, digest(path)


def find_input_files(prepared: PreparedMerge) -> InputFiles:
    """All files of models, base, adapters and statistics, and those to copy; none of objects."""
    found: dict[Path, InputFile] = {}  # as each was when it was opened first
    for checkpoint in prepared.checkpoints:
        for file in checkpoint.files:
            found.setdefault(file.path, file)
    configs = [c.folder / CONFIG for c in prepared.checkpoints if c.folder is not None]
    for path in (*(path for path in configs if path.is_file()), *prepared.companions):
        found.setdefault(path, look_at(path))
    return InputFiles(tuple(found.values()))
