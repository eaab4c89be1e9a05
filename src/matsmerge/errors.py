"""Everything that can go wrong because of what the user gave us.

MatsError
├── RecipeError        the recipe or the options do not say something that can be done
├── CheckpointError    a checkpoint is missing, damaged, or not safe to read
├── AlignmentError     the models do not fit together
├── DataError          the data is missing, damaged, or does not fit the task or the model
├── StatisticsError    statistics are damaged, or were measured on something else
├── NonFiniteError     NaN or Inf in an input or a result
├── OutputError        the output cannot be written where it was asked for
└── ResourceError      the machine gave out in the middle; what was done is kept

A message names the file and the tensor, what was expected and what was found, and what
to do about it. Where several things are wrong they are all in one error, one per line.
"""

import difflib
import errno
from collections.abc import Iterable, Sequence
from typing import Any

from matsmerge.files.remote_names import with_urls


class MatsError(Exception):
    """A problem the user can solve; the command line prints it and exits with 1."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        found = [problems] if isinstance(problems, str) else problems
        self.problems = [with_urls(problem) for problem in found]
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type["MatsError"], tuple[list[str]]]:
        return type(self), (self.problems,)

    @classmethod
    def raise_all(cls, problems: Iterable[str]) -> None:
        """Raise one error with all of the problems, if there are any."""
        if found := list(problems):
            raise cls(found)


class RecipeError(MatsError):
    """The recipe or the options do not describe a merge."""


class CheckpointError(MatsError):
    """A checkpoint cannot be read."""


class AlignmentError(MatsError):
    """The models differ where they must agree."""


class DataError(MatsError):
    """The data cannot be used for the task or with the model."""


class StatisticsError(MatsError):
    """Statistics cannot be read, or do not belong to what they are used with."""


class NonFiniteError(MatsError):
    """A tensor holds NaN or Inf."""


class OutputError(MatsError):
    """The output cannot be written."""


class AnotherRunError(OutputError):
    """An interrupted run is there, but of other inputs or options than the one to continue."""


class ResourceError(MatsError):
    """Memory, a disk or a file gave out in the middle of the work; it can be resumed."""


# What the system and libraries say when there is no memory, thread, process or file for them.
_GAVE_OUT = (errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE)
_NO_MEMORY = (
    "allocate memory",
    "out of memory",
    "not enough memory",
    "bad_alloc",
    "start new thread",
    "failed to map segment",
    "unable to mmap",
)


def machine_gave_out(error: BaseException) -> bool:
    """Does a foreign error mean that the machine, or a limit on this process, gave out?"""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _GAVE_OUT
    if not isinstance(error, (RuntimeError, OSError, ImportError)):
        return False
    return any(words in str(error).lower() for words in _NO_MEMORY)


def closest(name: str, known: Iterable[Any]) -> str:
    """`; did you mean 'x'?` if one is close, else what there is."""
    options = [str(option) for option in known]
    near = difflib.get_close_matches(name[:100], options, n=1, cutoff=0.5)
    if near:
        return f"; did you mean '{near[0]}'?"
    return f"; there is {', '.join(options[:20])}" if options else "; it takes none"
