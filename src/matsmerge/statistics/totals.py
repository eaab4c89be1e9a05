"""Running sums of one set of statistics, and their way into arrays and back."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from matsmerge.linalg.triangle import UpperSketch, UpperSum, pack_upper, unpack_upper
from matsmerge.statistics.statistics import Form, Set, Statistics


class RowSum:
    """Sums over the input rows of a linear map: of zzᵀ, and of z if a bias may be joined."""

    def __init__(self, total: UpperSum, num_rows: int = 0) -> None:
        self._sum = total  # (d, d) or (groups, d, d)
        self.num_rows = num_rows

    def add(self, rows: Tensor, keep: Tensor | None = None) -> None:  # (rows, d), (groups, rows, d)
        self._sum.add(rows, keep)
        self.num_rows += rows.shape[-2] if keep is None else len(keep)

    def add_sum(self, other: "RowSum") -> None:
        first, others = self._sum.first, other._sum.first
        joined = None if first is None or others is None else first + others
        self._sum = UpperSum(self._sum.upper + other._sum.upper, joined)
        self.num_rows += other.num_rows

    def clone(self) -> "RowSum":
        return RowSum(self._sum.clone(), self.num_rows)

    def comparable(self) -> Tensor:
        """What must be the same for sums of the same rows."""
        return self._sum.comparable()

    def parts(self) -> dict[str, Tensor]:
        """What it is made of, exactly."""
        return self._sum.parts()

    def sums(self) -> Iterator[tuple[str, Tensor, Form]]:
        yield "inputs", pack_upper(self._sum.upper), "symmetric"
        if self._sum.first is not None:
            yield "mean", self._sum.first, "full"


class TokenSum:
    """The same for one-hot rows, an embedding's: how often each comes up."""

    def __init__(self, counts: Tensor, num_rows: int = 0) -> None:
        self.counts = counts  # (d,)
        self.num_rows = num_rows

    def add(self, indices: Tensor, keep: Tensor | None = None) -> None:  # (rows,)
        indices = indices if keep is None else indices[keep]
        counts = torch.bincount(indices, minlength=len(self.counts))
        self.counts = self.counts.to(counts.device) + counts
        self.num_rows += len(indices)

    def add_sum(self, other: "TokenSum") -> None:
        self.counts = self.counts + other.counts
        self.num_rows += other.num_rows

    def clone(self) -> "TokenSum":
        return TokenSum(self.counts.clone(), self.num_rows)

    def comparable(self) -> Tensor:
        return self.counts.double()

    def parts(self) -> dict[str, Tensor]:
        return {"counts": self.counts}

    def sums(self) -> Iterator[tuple[str, Tensor, Form]]:
        yield "inputs", self.counts.double(), "diagonal"


class BlockSum:
    """Sum of ggᵀ over gradients, kept as the gradients themselves while they take less room."""

    def __init__(self, dim: int) -> None:
        self._dim = dim
        self._rows: list[Tensor] = []
        self._sum: UpperSum | None = None

    def add(self, gradients: Tensor) -> None:  # (rows, d)
        if self._sum is not None:
            self._sum.add(gradients)
            return
        self._rows.append(gradients.clone())
        if 2 * sum(map(len, self._rows)) > self._dim + 1:
            self._sum = UpperSum(gradients.new_zeros(self._dim, self._dim))
            # At once: in what portions they came does not matter then.
            self._sum.add(torch.cat(self._rows))
            self._rows = []

    def add_upper(self, upper: Tensor) -> None:
        """Add a sum that was made elsewhere."""
        self._sum = UpperSum(upper if self._sum is None else self._sum.upper + upper)
        for rows in self._rows:
            self._sum.add(rows)
        self._rows = []

    def add_sum(self, other: "BlockSum") -> None:
        if other._sum is not None:
            self.add_upper(other._sum.upper)
        for rows in other._rows:
            self.add(rows)

    def comparable(self) -> Tensor:
        if self._sum is not None:
            return self._sum.upper.diagonal()
        return torch.cat(self._rows).square().sum(0)

    def parts(self) -> dict[str, Tensor]:
        """What it is made of, exactly; `of_parts` goes back."""
        return {"gradients": torch.cat(self._rows)} if self._sum is None else self._sum.parts()

    @classmethod
    def of_parts(cls, dim: int, parts: Mapping[str, Tensor]) -> "BlockSum":
        block = cls(dim)
        if "gradients" in parts:
            block._rows = [parts["gradients"]]
        else:
            block._sum = UpperSum.of_parts(parts)
        return block

    def sum(self) -> tuple[Tensor, Form]:
        if self._sum is None:
            return torch.cat(self._rows), "rows"
        return pack_upper(self._sum.upper), "symmetric"


@dataclass
class Totals:
    """Everything summed up so far for one set."""

    dtype: torch.dtype
    num_examples: int = 0
    inputs: dict[str, RowSum | TokenSum] = field(default_factory=dict)  # by leading map
    outputs: dict[str, UpperSum] = field(default_factory=dict)  # by map
    squares: dict[str, Tensor] = field(default_factory=dict)  # by parameter
    blocks: dict[str, BlockSum] = field(default_factory=dict)  # by parameter
    is_sketch: bool = False  # only to be compared: no second moment is held as a matrix

    def new_sum(
        self, shape: Sequence[int], device: torch.device, *, with_first: bool = False
    ) -> UpperSum:  # shape: (d,) or (groups, d)
        """An empty sum of second moments."""
        first = torch.zeros(*shape, dtype=self.dtype, device=device)
        if self.is_sketch:
            return UpperSketch(first)
        sums = torch.zeros(*shape, shape[-1], dtype=self.dtype, device=device)
        return UpperSum(sums, first if with_first else None)

    def arrays(self) -> tuple[dict[str, Tensor], dict[str, Form]]:
        """Means, by key, and what form each has."""
        arrays: dict[str, Tensor] = {}
        forms: dict[str, Form] = {}

        def put(key: str, summed: Tensor, form: Form, count: int) -> None:
            arrays[key], forms[key] = (summed if form == "rows" else summed / count).cpu(), form

        for name, total in self._nonempty_inputs():
            for kind, summed, form in total.sums():
                put(f"{kind}/{name}", summed, form, total.num_rows)
        for name, outputs in self.outputs.items():
            put(f"outputs/{name}", pack_upper(outputs.upper), "symmetric", self.num_examples)
        for name, summed in self.squares.items():
            put(f"fisher/{name}", summed, "full", self.num_examples)
        for name, block in self.blocks.items():
            put(f"block_fisher/{name}", *block.sum(), self.num_examples)
        return arrays, forms

    def _nonempty_inputs(self) -> Iterator[tuple[str, RowSum | TokenSum]]:
        """A module may have been called without a single row."""
        return ((name, total) for name, total in self.inputs.items() if total.num_rows)

    def description(self) -> Set:
        rows = {f"inputs/{name}": total.num_rows for name, total in self._nonempty_inputs()}
        return Set(num_examples=self.num_examples, num_rows=rows)

    def differences(self, other: "Totals", precision: float) -> list[str]:
        """What is not the same but for rounding, when both are sums over the same examples."""
        found = []
        kinds: list[tuple[str, Mapping[str, Any], Mapping[str, Any]]] = [
            ("inputs of", self.inputs, other.inputs),
            ("output gradients of", self.outputs, other.outputs),
            ("gradients of", self.squares, other.squares),
            ("gradients of", self.blocks, other.blocks),
        ]
        for what, ours, theirs in kinds:
            mine = {name: _comparable(total) for name, total in ours.items()}
            yours = {name: _comparable(total) for name, total in theirs.items()}
            largest = max((float(v.norm()) for v in (*mine.values(), *yours.values())), default=0.0)
            for name in dict.fromkeys([*mine, *yours]):
                a, b = mine.get(name), yours.get(name)
                size = max(float(v.norm()) for v in (a, b) if v is not None)
                if a is not None and b is not None:
                    error = float((a - b).norm())
                else:
                    error = size  # one has it, and the other has nothing
                if error > 3 * precision**0.5 * size + precision * largest:
                    found.append(f"{what} '{name}'")
        return found

    def add(self, other: "Totals") -> None:
        """Add the sums of other examples of the same model."""
        for name, theirs in other.inputs.items():
            ours = self.inputs.setdefault(name, theirs)
            if ours is not theirs:
                ours.add_sum(theirs)  # type: ignore[arg-type]
        for name, outputs in other.outputs.items():
            own = self.outputs.setdefault(name, outputs)
            if own is not outputs:
                self.outputs[name] = UpperSum(own.upper + outputs.upper)
        for name, squares in other.squares.items():
            if name in self.squares:
                squares = self.squares[name] + squares
            self.squares[name] = squares
        for name, block in other.blocks.items():
            mine = self.blocks.setdefault(name, block)
            if mine is not block:
                mine.add_sum(block)
        self.num_examples += other.num_examples


def _comparable(total: Any) -> Tensor:
    if isinstance(total, Tensor):
        return total.double()
    values: Tensor = total.comparable()
    return values.double()


def totals_of(statistics: Statistics, of: str, dtype: torch.dtype) -> Totals:
    """The sums that a set of statistics was made from."""
    described = statistics.header.sets[of]
    num = described.num_examples
    totals = Totals(dtype, num)

    def summed(key: str, count: int) -> Tensor:
        values = statistics.stored(key, of).double() * count
        if statistics.header.forms[f"{of}/{key}"] == "symmetric":
            values = unpack_upper(values)
        return values.to(dtype)

    for full_key, form in statistics.header.forms.items():
        name_of_set, kind, name = full_key.split("/", 2)
        key = f"{kind}/{name}"
        if name_of_set != of:
            continue
        if kind == "inputs":
            rows = described.num_rows[key]
            if form == "diagonal":
                counts = statistics.stored(key, of).double() * rows
                totals.inputs[name] = TokenSum(counts.round().long(), rows)
            else:
                mean = f"mean/{name}"
                first = summed(mean, rows) if statistics.has(mean, of) else None
                totals.inputs[name] = RowSum(UpperSum(summed(key, rows), first), rows)
        elif kind == "outputs":
            totals.outputs[name] = UpperSum(summed(key, num))
        elif kind == "fisher":
            totals.squares[name] = summed(key, num)
        elif kind == "block_fisher":
            stored = statistics.stored(key, of)
            if form == "rows":
                block = BlockSum(stored.shape[1])
                block.add(stored.to(dtype))
            else:
                upper = summed(key, num)
                block = BlockSum(len(upper))
                block.add_upper(upper)
            totals.blocks[name] = block
    return totals
