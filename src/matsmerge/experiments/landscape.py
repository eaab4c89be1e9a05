"""Losses in a plane of one layer's weights, and where merging in that plane leads.

A plane has two parameters, so that all that merging methods do can be seen: models are points,
the Fisher information of each is a 2 x 2 matrix, and so the average, the merge by its diagonal,
the merge by the whole of it and the steps of conjugate gradients are points of the plane, too.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from matsmerge.checkpoints.opening import open_checkpoint
from matsmerge.experiments.inputs import Needs, Settings, base_of, read_tasks
from matsmerge.tasks.batching import make_batches
from matsmerge.tasks.model_loading import LoadedModel, load_model
from matsmerge.tasks.splits import read_split
from matsmerge.tasks.task import Encoded, encode_all

_MARGIN = 0.8  # of the models' distance, shown around them
_START = 0.3  # the scale of task arithmetic


def draw_landscape(settings: Settings, needs: Needs, _: Path) -> dict[str, Any]:
    """Losses on a grid, and every merge's place."""
    tasks = {str(task.name): task for task in read_tasks(settings, needs)}
    names = settings["plane"]
    loaded, weights, shown = {}, {}, {}
    for name in names:
        task = tasks[name]
        loaded[name] = load_model(
            str(needs[f"model:{name}"] / "model"),
            task=task.task, head=task.head, tokenizer=task.tokenizer, options=task.options(),
        )  # fmt: skip
        weights[name] = _weight(loaded[name], settings["layer"])
        rows = read_split(task, settings["split"])
        numbers = range(min(settings["num_examples"], len(rows)))
        encoded = encode_all(
            loaded[name].task, rows, task.columns, list(numbers), wordings=task.wordings
        )
        shown[name] = encoded
    start = _base_weight(base_of(settings, needs), settings["layer"])
    plane = Plane.through(start, [weights[n].detach().double() for n in names])
    models = torch.stack([plane.place(weights[n].detach().double()) for n in names])
    fisher = torch.stack([_fisher(loaded[n], weights[n], shown[n], plane) for n in names])
    merges, path = merge_in_plane(models, fisher, plane.place(start))
    places = torch.cat([models, torch.stack(list(merges.values())), plane.place(start)[None]])
    low, high = places.min(0).values - _MARGIN, places.max(0).values + _MARGIN
    sides = zip(low.tolist(), high.tolist(), strict=True)
    xs, ys = (torch.linspace(a, b, settings["size"]) for a, b in sides)
    losses = {
        name: [
            [_loss(loaded[name], weights[name], shown[name], plane.weight(x, y)) for x in xs]
            for y in ys
        ]
        for name in names
    }
    return {
        "layer": settings["layer"],
        "xs": xs.tolist(),
        "ys": ys.tolist(),
        "losses": losses,
        "models": [_point(n, p) for n, p in zip(names, models, strict=True)]
        + [_point("base", plane.place(start))],
        "merges": [_point(n, p) for n, p in merges.items()],
        "paths": {"MaTS": [_point(str(i), p) for i, p in enumerate(path)]},
    }


class Plane:
    """Points `origin + x u + y v` among weights; u and v are orthogonal, of equal length."""

    def __init__(self, origin: Tensor, u: Tensor, v: Tensor) -> None:
        self.origin, self.u, self.v = origin, u, v

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


def _batches(loaded: LoadedModel, examples: list[Encoded], size: int) -> Iterator[Any]:
    lengths = [example.length for example in examples]
    for batch in make_batches(lengths, size, 4096):
        yield loaded.task.collate([examples[i] for i in batch])


@torch.no_grad()
def _loss(loaded: LoadedModel, weight: Tensor, examples: list[Encoded], value: Tensor) -> float:
    """The mean over examples, with another weight in the model's place."""
    own = weight.detach().clone()
    weight.copy_(value.to(weight.dtype))
    losses = [
        loaded.task.predict(loaded.model, batch).losses()
        for batch in _batches(loaded, examples, 64)
    ]
    weight.copy_(own)
    return float(torch.cat(losses).double().mean())


def _fisher(loaded: LoadedModel, weight: Tensor, examples: list[Encoded], plane: Plane) -> Tensor:
    """The true Fisher information of the two parameters, example by example."""
    total = torch.zeros(2, 2, dtype=torch.float64)
    weight.requires_grad_(True)
    for number, batch in enumerate(_batches(loaded, examples, 1)):
        prediction = loaded.task.predict(loaded.model, batch)
        for term in prediction.fisher_terms("true", "sum", [number]):
            (gradient,) = torch.autograd.grad(term.sum(), weight, retain_graph=True)
            g = torch.stack([(gradient.double() * d).sum() for d in (plane.u, plane.v)])
            total += torch.outer(g, g)
    return total / len(examples)


def _point(name: str, place: Tensor) -> dict[str, Any]:
    return {"name": name, "x": float(place[0]), "y": float(place[1])}
