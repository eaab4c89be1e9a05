"""The result of a merge: tensors, what became of them, and where they lie."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from matsmerge.checkpoints.checkpoint import Checkpoint
from matsmerge.errors import OutputError
from matsmerge.notebook_table import notebook_table


@dataclass(frozen=True, eq=False)
class Merged(Mapping[str, Tensor]):
    """A merged model, or one for each iteration of a trajectory.

    It is a mapping from names to tensors, as a state dict is. Of a model in a folder, tensors are
    read when they are asked for. With a trajectory they are those after its last iteration.
    """

    report: Mapping[str, Any]  # the content of merge.json: recipe, inputs, rules, parameters
    notes: Sequence[str]  # what was decided without being asked
    seconds: Mapping[str, float]  # by stage of the work
    trajectory: "Mapping[int, Merged]"  # by number of iterations
    _tensors: Checkpoint
    _place: Path | None = None
    _write: Callable[[str | Path, bool], Path] | None = None

    @property
    def folder(self) -> Path:
        """Where it has been written."""
        if self._place is None:
            raise OutputError("the merged model is in memory only; write it with save(folder)")
        return self._place

    @property
    def parameters(self) -> Mapping[str, Mapping[str, Any]]:
        """Shape, rule, norm and more of every parameter; `solved` lists its systems."""
        found: Mapping[str, Mapping[str, Any]] = self.report["parameters"]
        return found

    @property
    def layers(self) -> dict[str, list[Mapping[str, Any]]]:
        """How the systems of every parameter ended that some were solved for."""
        return {n: list(p["solved"]) for n, p in self.parameters.items() if "solved" in p}

    def state_dict(self) -> dict[str, Tensor]:
        """All tensors in memory; tied weights are one tensor under several names."""
        return {name: self[name] for name in self}

    def save(self, folder: str | Path, *, overwrite: bool = False) -> Path:
        """Write it as a model folder, which appears when it is complete."""
        if self._write is None:
            raise OutputError(f"it has been written already, to {self.folder}; copy that folder")
        return self._write(folder, overwrite)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self._tied.get(name, name)]

    def __iter__(self) -> Iterator[str]:
        yield from self._tensors.specs
        yield from (other for other, kept in self._tied.items() if kept in self._tensors.specs)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        where = "in memory" if self._place is None else f"in {self._place}"
        models = f", {len(self.trajectory)} iterations" if self.trajectory else ""
        return f"<Merged {where}: {len(self)} tensors{models}>"

    def _repr_html_(self) -> str:
        recipe = self.report["recipe"]
        method = recipe["method"]
        names = [m["name"] if isinstance(m, Mapping) else m for m in recipe["models"]]
        return notebook_table(
            "Merged",
            {
                "models": ", ".join(map(str, names)),
                "method": method["name"] if isinstance(method, Mapping) else method,
                "where": "in memory" if self._place is None else self._place,
                "tensors": len(self),
                "heads": ", ".join(self.report["heads"]) or "none apart",
                "seconds": f"{sum(self.seconds.values()):.1f}",
            },
        )

    @property
    def _tied(self) -> Mapping[str, str]:
        tied: Mapping[str, str] = self.report["tied"] if "lora" not in self.report else {}
        return tied
