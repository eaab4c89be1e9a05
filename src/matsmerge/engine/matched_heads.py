"""Heads that are matched to the merged model.

A task's head is not merged, but it was trained on the features of its own model, and those of the
merged model are others. Each linear map of a head becomes the one that makes of the merged model's
features what the head makes of its own model's for the same example, as nearly as it can:

    X E[z zᵀ] + λ X = W E[z* zᵀ] + λ W

with z what the map receives in the merged model, z* in the task's own, and a constant 1 joined to
both where there is a bias. It needs data, no labels. Maps are matched in the order in which they
run, so that each sees what those before it have become.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from matsmerge.checkpoints.safetensors_file import write_tensors
from matsmerge.checkpoints.safetensors_header import read_header
from matsmerge.engine.prefix_task import AskedModel, naming
from matsmerge.errors import DataError
from matsmerge.models.pretrained import choose_dtype
from matsmerge.progress import Progress
from matsmerge.statistics.statistics import MAIN
from matsmerge.tasks.batch import Batch
from matsmerge.tasks.head_record import HEADS
from matsmerge.tasks.loaded_model import LoadedModel, load_model

# λ as a share of the mean of the diagonal of E[z zᵀ]. Validation scores differed by half a point
# between 0.001 and 0.1 (vision-small, first seed); it has to hold what no example shows.
STRENGTH = 0.02


@dataclass(frozen=True)
class HeadMatching:
    """The models whose heads are to be matched, with their data."""

    models: tuple[AskedModel, ...]

    def check(self) -> list[str]:
        """Load the models one after the other and encode their data: what is wrong is said now.

        Returns what will stay as it is.
        """
        problems: list[str] = []
        notes: list[str] = []
        for asked in self.models:
            label = asked.model.checkpoint.label
            loaded = asked.load(choose_dtype(None, asked.model.checkpoint))
            (_, examples), *_ = asked.prepare(loaded).batches
            stored = self._stored(asked, loaded)
            maps = _head_maps(loaded.model, stored)
            if not maps:
                problems.append(
                    f"{label}: match_heads is for linear layers of heads, and none of "
                    f"{', '.join(asked.model.heads)} is one; leave it out"
                )
                continue
            called = _in_order(loaded.model, maps, loaded.task.collate(examples[:2]))
            modules = {f"{m}.": m in called for m in maps}
            for name, tensor in stored.items():
                is_called_once = next((c for m, c in modules.items() if name.startswith(m)), None)
                if not is_called_once:
                    no_map = "it is not of a linear layer"
                    why = no_map if is_called_once is None else "its layer does not run once a pass"
                    notes.append(f"{asked.model.name}: '{tensor}' is not matched, since {why}")
        DataError.raise_all(problems)
        return notes

    def run(self, folder: Path, progress: Progress) -> None:
        """Replace the heads in a folder that holds the merged model."""
        progress.stage("matching heads", len(self.models), "heads")
        for asked in self.models:
            with naming(asked.model.checkpoint.label):
                self._match(asked, folder)
            progress.advance(1, asked.model.name)

    def _match(self, asked: AskedModel, folder: Path) -> None:
        dtype = choose_dtype(None, asked.model.checkpoint)
        own = asked.load(dtype)
        file = folder / HEADS / f"{asked.model.name}.safetensors"
        merged = load_model(
            folder, asked.described, head=file, need_targets=False, dtype=str(dtype).split(".")[-1]
        )
        batches = [
            own.task.collate(examples) for to, examples in asked.prepare(own).batches if to == MAIN
        ]
        stored = load_file(file)
        maps = _in_order(own.model, _head_maps(merged.model, merged.head_names), batches[0])
        wanted = [_own_outputs(own.model, maps, batch) for batch in batches]
        for name in maps:
            module = _linear(merged.model, name)
            weight, bias = matched(*_moments(merged.model, name, batches, wanted), module)
            for part, value in (("weight", weight), ("bias", bias)):
                if value is not None:
                    parameter = module.get_parameter(part)
                    parameter.data.copy_(value)
                    tensor = merged.head_names[f"{name}.{part}"]
                    stored[tensor] = value.to(stored[tensor].dtype).contiguous()
        header = read_header(file)
        write_tensors(file, {name: stored[name] for name in header.specs}, header.metadata)

    @staticmethod
    def _stored(asked: AskedModel, loaded: LoadedModel) -> Mapping[str, str]:
        """The parameters of a model that are its head's."""
        heads = set(asked.model.heads)
        names = {**loaded.names, **loaded.head_names}
        return {parameter: tensor for parameter, tensor in names.items() if tensor in heads}


def matched(second: Tensor, cross: Tensor, head: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """The weight and bias that are nearest to the outputs of a head, and held at what it is.

    `second` is the sum of z zᵀ (in, in), `cross` that of y* zᵀ (out, in) with y* the outputs in
    the model of its own; with a bias, z ends with the constant 1.
    """
    weight = head.weight.detach().double().cpu()
    if head.bias is not None:
        weight = torch.cat([weight, head.bias.detach().double().cpu()[:, None]], 1)
    strength = STRENGTH * second.diagonal().mean() * torch.eye(len(second), dtype=torch.float64)
    # In residual form, so that rounding of the solver leaves a head alone that fits already.
    residual = cross - weight @ second
    weight = weight + torch.linalg.solve(second + strength, residual.mT).mT
    if head.bias is None:
        return weight, None
    return weight[:, :-1], weight[:, -1]


def _moments(
    merged: nn.Module, name: str, batches: Sequence[Batch], wanted: Sequence[Mapping[str, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Sums of z zᵀ and y* zᵀ over all rows that a map of the head receives."""
    module = _linear(merged, name)
    size = module.in_features + (module.bias is not None)
    second = torch.zeros(size, size, dtype=torch.float64)
    cross = torch.zeros(module.out_features, size, dtype=torch.float64)
    for batch, outputs in zip(batches, wanted, strict=True):
        z = _received(merged, [name], batch)[name]
        if module.bias is not None:
            z = torch.cat([z, z.new_ones(len(z), 1)], 1)
        second += z.mT @ z
        cross += outputs[name].mT @ z
    return second, cross


def _own_outputs(
    model: nn.Module, maps: Sequence[str], batch: Batch
) -> dict[str, Tensor]:  # (rows, out)
    """y*, what maps give for a batch in the model of their own, in one pass."""
    found = {}
    for name, z in _received(model, maps, batch).items():
        module = _linear(model, name)
        found[name] = z @ module.weight.detach().double().cpu().mT
        if module.bias is not None:
            found[name] += module.bias.detach().double().cpu()
    return found


def _received(
    model: nn.Module, maps: Sequence[str], batch: Batch
) -> dict[str, Tensor]:  # (rows, in)
    """What maps receive of a batch, padding left out."""
    device = next(model.parameters()).device
    with _inputs_of(model, maps) as seen, torch.no_grad():
        model(**batch.to(device).inputs)
    found = {}
    for name, received in seen:
        value = received.detach().double().cpu()
        mask = next((m for m in batch.row_masks if m.shape == value.shape[:-1]), None)
        found[name] = value.reshape(-1, value.shape[-1]) if mask is None else value[mask]
    return found


def _linear(model: nn.Module, name: str) -> nn.Linear:
    module: Any = model.get_submodule(name)
    if not isinstance(module, nn.Linear):  # an adapter has its own beside that of the base
        (adapter,) = module.active_adapters
        module = module.modules_to_save[adapter]
    assert isinstance(module, nn.Linear)
    return module


def _head_maps(model: nn.Module, head: Mapping[str, str]) -> list[str]:
    """The linear modules whose parameters are all of the head's."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and all(f"{name}.{part}" in head for part, _ in module.named_parameters())
    ]


def _in_order(model: nn.Module, maps: Sequence[str], batch: Batch) -> list[str]:
    """Maps in the order in which a model calls them; those that it calls once."""
    device = next(model.parameters()).device
    with _inputs_of(model, maps) as seen, torch.no_grad():
        model(**batch.to(device).inputs)
    called = [name for name, _ in seen]
    return [name for name in called if called.count(name) == 1]


@contextmanager
def _inputs_of(model: nn.Module, maps: Sequence[str]) -> Iterator[list[tuple[str, Tensor]]]:
    """Record what maps receive, call by call."""
    seen: list[tuple[str, Tensor]] = []
    handles = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, args, name=name: seen.append((name, args[0]))
        )
        for name in maps
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
