"""Embeddings with their rows in another order, as models of different vocabularies need it.

    output row    0  1  2  3  4  5
    own           0  2  1  -  -  -      the row of the model's own table that is seen, if any
    given         -  -  -  9  -  -      else the mean of rows that are given, perhaps other models'
    padding                      x      or, where there is no token, the mean of the rows before

What has neither is zero. Only the rows of a stretch are read, in one piece where they lie together.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from matsmerge.checkpoints.alignment import is_by_token
from matsmerge.checkpoints.checkpoint import Buffer, Checkpoint, TensorSpec
from matsmerge.checkpoints.fused_experts import SeparatedExperts
from matsmerge.checkpoints.input_file import InputFile
from matsmerge.checkpoints.scaled_floats import Scaled
from matsmerge.errors import AlignmentError

_BLOCK_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class TokenRows:
    """The rows of merged embeddings, by the rows of every model's own."""

    names: tuple[str, ...]  # of the models, perhaps with the base
    sizes: tuple[int, ...]  # rows that each model's embeddings have
    own: Tensor  # (models, rows), -1 where a model has none
    given: Tensor  # (models, rows), for all that have none; -1 where a model gives nothing
    is_padding: Tensor  # (rows,)

    @property
    def num_rows(self) -> int:
        return len(self.is_padding)

    @property
    def changes_nothing(self) -> bool:
        """Whether every model's embeddings are as they should be."""
        is_same = torch.equal(self.own, torch.arange(self.num_rows).expand_as(self.own))
        return is_same and set(self.sizes) == {self.num_rows}

    def view(
        self,
        everyone: Mapping[str, Checkpoint],
        tables: Mapping[str, Mapping[str, str]],
        files: Sequence[InputFile] = (),
    ) -> dict[str, Checkpoint]:
        """All models with these rows; `tables` are their tensors, by the names that all share."""
        problems: list[str] = []
        found = {}
        for number, model in enumerate(self.names):
            checkpoint, own = everyone[model], self.own[number]
            givers = {
                other: given
                for other, given in zip(self.names, self.given, strict=True)
                if bool((given[own < 0] >= 0).any())
            }
            changed: dict[str, RowOrigins] = {}
            for name, tensor in tables[model].items():
                shape = resized(tensor, checkpoint.specs[tensor], self.sizes[number], self.num_rows)
                if shape is None:
                    continue
                problems += [
                    f"{checkpoint.label}: lacks rows of '{name}' that {other} should give, which "
                    "has no such tensor; choose another source with tokenizer: tokens:"
                    for other in givers
                    if name not in tables[other]
                ]
                given = tuple(
                    (everyone[other], tables[other].get(name, ""), rows)
                    for other, rows in givers.items()
                )
                table = RowOrigins(own, given, self.is_padding, shape)
                if tensor in changed and changed[tensor].sources != table.sources:
                    problems.append(
                        f"{checkpoint.label}: '{name}' is tied to another tensor, and is not where "
                        "it gets rows from; store the models alike"
                    )
                changed[tensor] = table
            found[model] = (checkpoint, changed)
        AlignmentError.raise_all(problems)
        return {model: _view(*view, files) for model, view in found.items()}


def resized(name: str, spec: TensorSpec, size: int, num_rows: int) -> tuple[int, ...] | None:
    """The shape of a tensor by token with another number of rows; None if it is another tensor."""
    at = 1 if spec.shape[:1] == (1,) else 0  # a bias may be stored as a row
    if not is_by_token(name, spec.shape) or spec.shape[at : at + 1] != (size,):
        return None
    return (*spec.shape[:at], num_rows, *spec.shape[at + 1 :])


def num_embedded(checkpoint: Checkpoint) -> int | None:
    """How many rows a model's embeddings have."""
    tables = [s.shape for n, s in checkpoint.specs.items() if is_by_token(n, s.shape)]
    return max((shape[0] for shape in tables if len(shape) == 2), default=None)


def _view(
    checkpoint: Checkpoint, tables: Mapping[str, "RowOrigins"], files: Sequence[InputFile]
) -> Checkpoint:
    if isinstance(checkpoint, SeparatedExperts):  # which must stay outside, to be written again
        return SeparatedExperts(_view(checkpoint.fused, tables, files), checkpoint.pieces)
    return PermutedRows(checkpoint, tables, files)


@dataclass(frozen=True)
class RowOrigins:
    """One tensor's rows: where each of them comes from."""

    own: Tensor  # (rows,)
    given: tuple[tuple[Checkpoint, str, Tensor], ...]  # tensors, and which of their rows (rows,)
    is_padding: Tensor  # (rows,)
    shape: tuple[int, ...]

    @property
    def sources(self) -> list[tuple[int, str]]:
        """The tensors that give rows."""
        return [(id(checkpoint), name) for checkpoint, name, _ in self.given]

    @property
    def is_computed(self) -> bool:
        """Whether any row is a mean."""
        num_given = sum((rows >= 0).long() for _, _, rows in self.given)
        means = torch.as_tensor(num_given).expand_as(self.own) > 1
        return bool(self.is_padding.any() or (means & (self.own < 0)).any())

    @property
    def width(self) -> int:
        return TensorSpec(torch.int8, self.shape).num_elements // len(self.own)


class PermutedRows(Checkpoint):
    """A checkpoint whose `tables` have other rows than stored; `files` say which."""

    def __init__(
        self, of: Checkpoint, tables: Mapping[str, RowOrigins], files: Sequence[InputFile] = ()
    ) -> None:
        self.of, self.tables = of, tables
        self.label, self.aliases = of.label, of.aliases
        self.folder, self.place, self.files = of.folder, of.place, [*of.files, *files]
        self.specs = {
            name: TensorSpec(spec.dtype, tables[name].shape) if name in tables else spec
            for name, spec in of.specs.items()
        }
        self._dtypes = {name: self._dtype(name) for name in tables}
        self._means: dict[str, Tensor] = {}

    @property
    def origin(self) -> Checkpoint:
        return self.of.origin

    def _dtype(self, name: str) -> torch.dtype:
        table, found = self.tables[name], self.of.read_dtype(name)
        for other, own, _ in table.given:
            found = torch.promote_types(found, other.read_dtype(own))
        if not table.is_computed:
            return found
        return torch.promote_types(found, torch.float64 if found.itemsize > 2 else torch.float32)

    def scaled_as(self, name: str) -> Scaled | None:
        return self.of.scaled_as(name)

    def read_dtype(self, name: str) -> torch.dtype:
        return self._dtypes[name] if name in self.tables else self.of.read_dtype(name)

    def read_into(self, buffer: Buffer, name: str, start: int) -> None:
        if name not in self.tables:
            self.of.read_into(buffer, name, start)
            return
        width = self.tables[name].width
        stop, position = start + len(buffer.tensor), start
        while position < stop:
            first = position // width
            last = min(first + max(1, _BLOCK_ELEMENTS // width), -(-stop // width))
            end = min(last * width, stop)
            rows = self._rows(name, first, last).view(-1)[position - first * width :]
            buffer.tensor[position - start : end - start] = rows[: end - position]
            position = end

    def prefetch(self, name: str, start: int, stop: int) -> None:
        if name not in self.tables:
            self.of.prefetch(name, start, stop)
            return
        width = self.tables[name].width
        for i, j, row in _runs(self.tables[name].own[start // width : -(-stop // width)]):
            self.of.prefetch(name, row * width, (row + j - i) * width)

    def _rows(self, name: str, first: int, last: int) -> Tensor:  # (last - first, width)
        rows = self._token_rows(name, first, last)
        is_padding = self.tables[name].is_padding[first:last]
        if bool(is_padding.any()):
            if name not in self._means:
                self._means[name] = self._mean(name)
            rows[is_padding] = self._means[name]
        return rows

    def _token_rows(self, name: str, first: int, last: int) -> Tensor:  # (last - first, width)
        """The same with zeros in place of padding."""
        table = self.tables[name]
        own = table.own[first:last]
        rows = torch.zeros(last - first, table.width, dtype=self._dtypes[name])
        _copy_rows(self.of, name, own, rows)
        lacks = (own < 0) & ~table.is_padding[first:last]
        if table.given and bool(lacks.any()):
            total = torch.zeros_like(rows[lacks])
            count = torch.zeros(len(total), 1, dtype=total.dtype)
            for other, other_name, given in table.given:
                theirs = given[first:last][lacks]
                part = torch.zeros_like(total)
                _copy_rows(other, other_name, theirs, part)
                total += part
                count += (theirs >= 0)[:, None]
            rows[lacks] = total / count.clamp(min=1)
        return rows

    def _mean(self, name: str) -> Tensor:  # (width,)
        """The mean of all rows that have a token."""
        table = self.tables[name]
        num_rows, step = len(table.own), max(1, _BLOCK_ELEMENTS // table.width)
        total = torch.zeros(table.width, dtype=torch.float64)
        for first in range(0, num_rows, step):
            total += self._token_rows(name, first, min(first + step, num_rows)).double().sum(0)
        return (total / int((~table.is_padding).sum())).to(self._dtypes[name])


def _runs(rows: Tensor) -> Iterator[tuple[int, int, int]]:
    """Places from i to j whose rows follow each other, and the first of them; none that are -1."""
    apart = (rows[1:] != rows[:-1] + 1) | (rows[:-1] < 0)
    places = rows.tolist()
    for i, j in pairwise([0, *(apart.nonzero().flatten() + 1).tolist(), len(places)]):
        if j > i and places[i] >= 0:
            yield i, j, places[i]


def _copy_rows(checkpoint: Checkpoint, name: str, rows: Tensor, into: Tensor) -> None:
    width, dtype = into.shape[1], checkpoint.read_dtype(name)
    buffers: dict[int, Buffer] = {}  # making one takes longer than reading a row
    for i, j, row in _runs(rows):
        if j - i not in buffers:
            buffers[j - i] = Buffer((j - i) * width, dtype)
        checkpoint.read_into(buffers[j - i], name, row * width)
        into[i:j] = buffers[j - i].tensor.view(j - i, width)
