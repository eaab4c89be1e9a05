"""Losses in a plane of one layer's weights, and where merging in that plane leads.

A plane has two parameters, so that all that merging methods do can be seen: models are points,
the Fisher information of each is a 2 x 2 matrix, and so the average, the merge by its diagonal,
the merge by the whole of it and the steps of conjugate gradients are points of the plane, too.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from matsmerge.checkpoints.source import open_checkpoint
from matsmerge.lab.experiments.step import Places, Step, StepSource, TaskInput
from matsmerge.lab.experiments.studies.study import Asked, Names, Study
from matsmerge.lab.experiments.suite_results import Landscape, Point
from matsmerge.lab.experiments.suite_setup import Setup
from matsmerge.limits import MOST_COUNTED, MOST_KEPT
from matsmerge.tasks.batch_order import make_batches
from matsmerge.tasks.loaded_model import LoadedModel, load_model
from matsmerge.tasks.splits import read_split
from matsmerge.tasks.task import Encoded, encode_all

if TYPE_CHECKING:
    from matsmerge.lab.experiments.suite import Suite

_MARGIN = 0.8  # of the models' distance, shown around them
_START = 0.3  # the scale of task arithmetic


@dataclass(frozen=True, kw_only=True)
class Draw(Step[Landscape], kind="landscape"):
    """Losses on a grid, and every merge's place."""

    base: StepSource
    models: Mapping[str, StepSource]  # those that span the plane
    tasks: list[TaskInput]  # of the models, in the same order
    layer: str
    size: int
    split: str | None
    num_examples: int

    def run(self, places: Places, _: Path, /) -> Landscape:
        names = list(self.models)
        subjects = {task.name: self._load(task, places) for task in self.tasks}
        start = _base_weight(places.name(self.base), self.layer)
        own = [subjects[n].weight.detach().double() for n in names]
        plane = Plane.through(start, own)
        models = torch.stack([plane.place(weight) for weight in own])
        fisher = torch.stack([subjects[n].fisher(plane) for n in names])
        merges, path = merge_in_plane(models, fisher, plane.place(start))
        shown = torch.stack([*models, *merges.values(), plane.place(start)])
        low, high = shown.min(0).values - _MARGIN, shown.max(0).values + _MARGIN
        sides = zip(low.tolist(), high.tolist(), strict=True)
        xs, ys = (torch.linspace(a, b, self.size) for a, b in sides)
        losses = {
            n: [[subjects[n].loss(plane.weight(x, y)) for x in xs] for y in ys] for n in names
        }
        return Landscape(
            layer=self.layer,
            xs=xs.tolist(),
            ys=ys.tolist(),
            losses=losses,
            models=[_point(n, p) for n, p in zip(names, models, strict=True)]
            + [_point("base", plane.place(start))],
            merges=[_point(n, p) for n, p in merges.items()],
            paths={"MaTS": [_point(str(i), p) for i, p in enumerate(path)]},
        )

    def _load(self, task: TaskInput, places: Places) -> "_Subject":
        file = task.read(places)
        loaded = load_model(places.name(self.models[task.name]), file)
        rows = read_split(file, self.split)
        numbers = list(range(min(self.num_examples, len(rows))))
        examples = encode_all(loaded.task, rows, file.columns, numbers, wordings=file.wordings)
        return _Subject(loaded, _weight(loaded, self.layer), examples)


class LandscapeStudy(Study):
    """A plane through the base and two models, or through three models, in one layer."""

    of_one_seed: ClassVar[bool] = True

    layer: str
    tasks: list[str] = Field(min_length=2, max_length=3)
    size: int = Field(default=25, ge=3, le=MOST_KEPT)  # points on a side
    num_examples: int = Field(default=200, ge=1, le=MOST_COUNTED)

    def names(self, suite: "Suite", /) -> Iterator[Names]:
        yield "tasks", self.tasks, suite.tasks

    def ask(self, setup: Setup) -> Iterator[Asked]:
        step = Draw(
            name=f"landscape {setup.name}",
            base=setup.base(),
            models=setup.models(self.tasks),
            tasks=setup.tasks(self.tasks),
            layer=self.layer,
            size=self.size,
            split=setup.variant.split,
            num_examples=self.num_examples,
        )
        yield Asked.of(step, lambda found: found)


@dataclass(frozen=True)
class _Subject:
    """A task's model, one of its weights, and examples of the task."""

    loaded: LoadedModel
    weight: Tensor
    examples: list[Encoded]

    def _batches(self, size: int) -> Iterator[Any]:
        lengths = [example.length for example in self.examples]
        for batch in make_batches(lengths, size, 4096):
            yield self.loaded.task.collate([self.examples[i] for i in batch])

    @torch.no_grad()
    def loss(self, value: Tensor) -> float:
        """The mean over examples, with another value in the weight's place."""
        loaded, own = self.loaded, self.weight.detach().clone()
        self.weight.copy_(value.to(self.weight.dtype))
        losses = [loaded.task.predict(loaded.model, b).losses() for b in self._batches(64)]
        self.weight.copy_(own)
        return float(torch.cat(losses).double().mean())

    def fisher(self, plane: "Plane") -> Tensor:  # (2, 2)
        """The true Fisher information of the plane's two parameters, example by example."""
        total = torch.zeros(2, 2, dtype=torch.float64)
        self.weight.requires_grad_(True)
        for number, batch in enumerate(self._batches(1)):
            prediction = self.loaded.task.predict(self.loaded.model, batch)
            for term in prediction.fisher_terms("true", "sum", [number]):
                (gradient,) = torch.autograd.grad(term.sum(), self.weight, retain_graph=True)
                g = torch.stack([(gradient.double() * d).sum() for d in (plane.u, plane.v)])
                total += torch.outer(g, g)
        return total / len(self.examples)


@dataclass(frozen=True)
class Plane:
    """Points `origin + x u + y v` among weights; u and v are orthogonal, of equal length."""

    origin: Tensor
    u: Tensor
    v: Tensor

    @classmethod
    def through(cls, base: Tensor, models: list[Tensor]) -> "Plane":
        """The base and two models, or three models."""
        origin, a, b = (base, *models) if len(models) == 2 else models
        u = a - origin
        v = (b - origin) - ((b - origin) * u).sum() / (u * u).sum() * u
        return cls(origin, u, v * (u.norm() / v.norm()))

    def place(self, weight: Tensor) -> Tensor:  # (2,)
        """Where a weight is, or the nearest point to it."""
        change = weight - self.origin
        return torch.stack([(change * d).sum() / (d * d).sum() for d in (self.u, self.v)])

    def weight(self, x: Tensor, y: Tensor) -> Tensor:
        return self.origin + x.double() * self.u + y.double() * self.v


def merge_in_plane(
    models: Tensor, fisher: Tensor, base: Tensor
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Merges of two-parameter models (M, 2) by their Fisher information (M, 2, 2).

    Also the way of conjugate gradients, from task arithmetic to the last of the merges.
    """
    diagonals = torch.diagonal(fisher, dim1=1, dim2=2)
    total, right = fisher.sum(0), (fisher @ models[..., None]).sum(0)[:, 0]
    merges = {
        "average": models.mean(0),
        "diagonal Fisher": (diagonals * models).sum(0) / diagonals.sum(0),
        "block Fisher": torch.linalg.pinv(total, hermitian=True) @ right,
    }
    x = base + _START * (models - base).sum(0)
    path, residual = [x], right - total @ x
    direction = residual
    for _ in range(2):  # exact after as many steps as there are parameters
        if float(residual.norm()) == 0:
            break
        moved = total @ direction
        step = (residual @ residual) / (direction @ moved)
        x, after = x + step * direction, residual - step * moved
        direction = after + (after @ after) / (residual @ residual) * direction
        residual = after
        path.append(x)
    return {"task arithmetic": path[0], **merges}, path


def _weight(loaded: LoadedModel, layer: str) -> Tensor:
    for name, parameter in loaded.model.named_parameters():
        if loaded.names.get(name, name) == layer or name == layer:
            return parameter
    raise KeyError(layer)


def _base_weight(base: str, layer: str) -> Tensor:
    checkpoint = open_checkpoint(base)
    names = [n for n in checkpoint.specs if n == layer or layer.endswith(f".{n}")]
    return checkpoint[names[0]].double()


def _point(name: str, place: Tensor) -> Point:
    return Point(name=name, x=float(place[0]), y=float(place[1]))
