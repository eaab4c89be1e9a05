"""A model whose weights are in memory only while they are used.

It is made without values. A weight that is not in memory is one NaN that is seen in all places of
its shape: names, shapes, dtypes and ties are as ever, and a pass that uses it by mistake shows.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from matsmerge.checkpoints.checkpoint import Checkpoint
from matsmerge.checkpoints.filled_checkpoint import Stored
from matsmerge.errors import DataError
from matsmerge.models.pretrained import quiet

EMPTY = {"": "meta"}  # the device map of a model that is loaded without values


class StreamedModel:
    """A model that was loaded without values, and where the values of its parameters are.

    Buffers are always in memory; they are small.
    """

    def __init__(
        self, model: nn.Module, sources: Mapping[str, Stored], device: torch.device
    ) -> None:
        missing = [name for name, _ in model.named_parameters() if name not in sources]
        DataError.raise_all(
            f"parameter '{name}': is computed when the model is loaded, so that its weights cannot "
            "be loaded a block at a time; allow more memory, or spread the model (--device-map "
            "auto)"
            for name in missing[:10]
        )
        self.model, self._sources, self.device = model, sources, device
        _fill_buffers(model, sources, device)
        _empty_parameters(model, device)
        self.parameters = dict(model.named_parameters())
        self.owners: dict[str, list[str]] = {name: [] for name in self.parameters}
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        for module_name, module in model.named_modules():
            for parameter in module.parameters(recurse=False):
                self.owners[names[id(parameter)]].append(module_name)
        self._pieces = dict(_pieces(model))

    def num_bytes(self, names: Collection[str] | None = None) -> int:
        """Of some parameters when they are in memory; of all without names."""
        return sum(self.parameters[n].nbytes for n in (self.parameters if names is None else names))

    def within(self, module: str) -> set[str]:
        """The parameters that a module and those in it hold."""
        return {n for n, held in self.owners.items() if any(is_within(m, module) for m in held)}

    def load(self, names: Collection[str]) -> None:
        """Have parameters in memory."""
        for name in names:
            parameter, source = self.parameters[name], self._sources[name]
            values = source.checkpoint[source.name]
            parameter.data = values.to(self.device, parameter.dtype)

    def release(self, names: Collection[str]) -> None:
        """Have no memory for parameters."""
        for name in names:
            self.parameters[name].data = _nothing_like(self.parameters[name], self.device)

    @contextmanager
    def loaded(self, names: Collection[str]) -> Iterator[None]:
        """Have parameters in memory for a while."""
        self.load(names)
        try:
            yield
        finally:
            self.release(names)

    @contextmanager
    def streaming(self) -> Iterator[None]:
        """Have whatever runs load its weights, and those of what ran before it let go.

        The weights of one item of a `nn.ModuleList` are in memory at a time.
        """
        of_pieces = {name: self.within(name) for name in self._pieces}
        always = self.parameters.keys() - {n for own in of_pieces.values() for n in own}
        current: list[str] = []

        def enter(piece: str) -> Callable[..., None]:
            def hook(*_: Any) -> None:
                if current != [piece]:
                    for other in current:
                        self.release(of_pieces[other])
                    current[:] = [piece]
                    self.load(of_pieces[piece])

            return hook

        with ExitStack() as hooks:
            hooks.enter_context(self.loaded(always))
            for piece, module in self._pieces.items():
                for part in module.modules():
                    hooks.callback(part.register_forward_pre_hook(enter(piece)).remove)
            try:
                yield
            finally:
                for piece in current:
                    self.release(of_pieces[piece])


def is_within(inner: str, outer: str) -> bool:
    """Is a module another one, or in it, by their names?"""
    return inner == outer or inner.startswith(f"{outer}.")


def _pieces(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Items of module lists, and the largest modules with weights that have no such list."""
    inside = [m for m in module.modules() if isinstance(m, nn.ModuleList) and len(m)]
    is_item_of_list = isinstance(module, nn.ModuleList)
    for child_name, child in module.named_children():
        full = f"{name}.{child_name}".lstrip(".")
        is_piece = (is_item_of_list and not isinstance(child, nn.ModuleList)) or not any(
            m in inside for m in child.modules()
        )
        if not is_piece:
            yield from _pieces(child, full)
        elif next(child.parameters(), None) is not None:
            yield full, child


def _nothing_like(parameter: Tensor, device: torch.device) -> Tensor:
    value = float("nan") if parameter.is_floating_point() else 0
    return torch.full((), value, dtype=parameter.dtype, device=device).expand(parameter.shape)


def _empty_parameters(model: nn.Module, device: torch.device) -> None:
    """Have parameters on a device, tied as they were, without memory."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in made:
                nothing = _nothing_like(parameter, device)
                made[id(parameter)] = nn.Parameter(nothing, parameter.requires_grad)
            if parameter is not None:
                module._parameters[name] = made[id(parameter)]


def _fill_buffers(model: nn.Module, sources: Mapping[str, Stored], device: torch.device) -> None:
    """Give buffers their values: those stored, else what the model's class makes them."""
    from transformers import PreTrainedModel

    fresh: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        is_known = any(name.startswith(prefix) for prefix in fresh)
        if isinstance(module, PreTrainedModel) and not is_known:
            config: Any = module.config
            with quiet(), _without_parameters():
                made = type(module)(config)
            fresh |= {f"{name}.{n}".lstrip("."): buffer for n, buffer in made.named_buffers()}
            if not name:
                break
    for module_name, module in model.named_modules():
        stored = _stored_prefix(module_name, module, sources)
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            values = fresh.get(f"{module_name}.{name}".lstrip("."), buffer)
            if stored is not None and f"{stored[1]}{name}" in stored[0].specs:
                values = stored[0][f"{stored[1]}{name}"]
            module._buffers[name] = values.to(device, buffer.dtype)


def _stored_prefix(
    name: str, module: nn.Module, sources: Mapping[str, Stored]
) -> tuple[Checkpoint, str] | None:
    """Where the tensors of a module are stored, and what their names begin with."""
    for attribute, _ in module.named_parameters(recurse=False):
        source = sources.get(f"{name}.{attribute}".lstrip("."))
        if source is not None:
            return source.checkpoint, source.name.removesuffix(attribute)
    return None


@contextmanager
def _without_parameters() -> Iterator[None]:
    """Have modules that are made register parameters without memory."""
    register = nn.Module.register_parameter

    def register_empty(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None:
            param = nn.Parameter(param.to("meta"), param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = register_empty  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
