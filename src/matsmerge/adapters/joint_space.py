"""LoRAs in one space: coordinates of their changes in the outputs that all of them span.

KnOTS (Stoica et al., 2024, arXiv:2410.19735): with U from the singular value decomposition

    [s_1 B_1 A_1, ..., s_M B_M A_M] = U S Vᵀ,    X_m = Uᵀ s_m B_m A_m

methods that look at single entries, such as TIES and DARE, are applied to X_1, ..., X_M, whose
entries mean the same in every model, and U X is the merged change.

Core Space (Panariello et al., 2025, arXiv:2509.17786) has a basis of the inputs too: with U the
left singular vectors of [s_1 B_1, ..., s_M B_M] and V the right ones of A_1, ..., A_M, one below
the other,

    X_m = Uᵀ s_m B_m A_m V

is as small as the ranks, nothing is lost, and methods of singular vectors are cheap.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from matsmerge.adapters.adapter import Adapter
from matsmerge.adapters.lora import LoraLayer, low_rank_of, rank_of
from matsmerge.checkpoints.checkpoint import Buffer, Checkpoint, TensorSpec
from matsmerge.checkpoints.recent_value import RecentValue
from matsmerge.errors import AlignmentError
from matsmerge.linalg.low_rank import shared_outputs


class _Coordinates(NamedTuple):
    outputs: Tensor  # U, (out, k)
    inputs: Tensor | None  # Vᵀ, (l, in), where inputs have a basis too
    of_models: list[Tensor | None]  # X_m, (k, in) or (k, l)


class JointSpace:
    """The changes of several LoRAs, (out, in) whichever way the weights are stored."""

    def __init__(self, adapters: Sequence[Adapter]) -> None:
        self.adapters = tuple(adapters)
        self._recent: RecentValue[_Coordinates] = RecentValue()
        self._shapes: dict[str, tuple[int, ...]] = {}
        problems = []
        for adapter in adapters:
            for module in adapter.modules:
                specs, change = adapter.checkpoint.specs, low_rank_of(adapter, module)
                shape = (specs[change.b].shape[0], *specs[change.a].shape[1:])
                if self._shapes.setdefault(module, shape) != shape:
                    problems.append(
                        f"{adapter.label}: '{module}' is of the shape {list(shape)}, "
                        f"{adapters[0].label} has {list(self._shapes[module])}"
                    )
        AlignmentError.raise_all(problems)

    @property
    def modules(self) -> list[str]:
        return list(self._shapes)

    def num_ranks(self, module: str) -> int:
        """The sum of the adapters' ranks."""
        return sum(rank_of(a.config, module) for a in self.adapters if module in a.modules)

    def num_outputs(self, module: str) -> int:
        """The dimension of the space: the sum of the ranks, or the layer's outputs if fewer."""
        return min(self.num_ranks(module), self._shapes[module][0])

    def layer(self, module: str, rank: int, dtype: torch.dtype) -> LoraLayer:
        is_embedding = any("embedding_A" in a.modules.get(module, ()) for a in self.adapters)
        return LoraLayer(module, self._shapes[module], rank, dtype, is_embedding=is_embedding)

    def spec(self, module: str) -> TensorSpec:
        """The shape and dtype of a model's coordinates."""
        return TensorSpec(torch.float64, (self.num_outputs(module), self.num_inputs(module)))

    def num_inputs(self, module: str) -> int:
        """The dimension of the coordinates' rows: the layer's inputs."""
        return math.prod(self._shapes[module][1:])

    def factors(self, module: str) -> list[tuple[Tensor, Tensor] | None]:
        """Each adapter's B, scaled, and A; None where it leaves the module alone."""
        return [
            a.kind.factors(a.checkpoint, low_rank_of(a, module), torch.float64)
            if module in a.modules
            else None
            for a in self.adapters
        ]

    def basis(self, module: str) -> Tensor:
        """U, (out, dimension of the space)."""
        return self._recent.get(module, self._find).outputs

    def coordinates(self, module: str, model: int) -> Tensor | None:
        """X_m, or None where it is zero."""
        return self._recent.get(module, self._find).of_models[model]

    def on_inputs(self, module: str, rows: Tensor) -> Tensor:
        """Rows of coordinates as rows of weights, (rows, in)."""
        inputs = self._recent.get(module, self._find).inputs
        return rows if inputs is None else rows @ inputs

    def _find(self, module: str) -> _Coordinates:
        factors = self.factors(module)
        present = [f for f in factors if f is not None]
        basis = shared_outputs([b for b, _ in present], [a for _, a in present])
        found = [None if f is None else basis.mT @ f[0] @ f[1] for f in factors]
        return _Coordinates(basis, None, found)


class CoreSpace(JointSpace):
    """The same with a basis of the inputs: coordinates are as small as the adapters' ranks."""

    def num_inputs(self, module: str) -> int:
        return min(self.num_ranks(module), super().num_inputs(module))

    def _find(self, module: str) -> _Coordinates:
        factors = self.factors(module)
        present = [f for f in factors if f is not None]
        u = torch.linalg.svd(torch.cat([b for b, _ in present], 1), full_matrices=False).U
        v = torch.linalg.svd(torch.cat([a for _, a in present]), full_matrices=False).Vh
        found = [None if f is None else (u.mT @ f[0]) @ (f[1] @ v.mT) for f in factors]
        return _Coordinates(u, v, found)


class JointCheckpoint(Checkpoint):
    """A LoRA's coordinates, by the names of the weights they change, and its other tensors."""

    def __init__(self, space: JointSpace, number: int, others: Checkpoint) -> None:
        adapter = space.adapters[number].checkpoint
        self.label, self.folder, self.place = adapter.label, adapter.folder, adapter.place
        self.files = [f for a in space.adapters for f in a.checkpoint.files] + [*others.files]
        self._space, self._number, self._others = space, number, others
        self._modules: Mapping[str, str] = {f"{m}.weight": m for m in space.modules}
        self.specs = {w: space.spec(m) for w, m in self._modules.items()} | dict(others.specs)
        self.aliases = {}

    @property
    def origin(self) -> Checkpoint:
        return self._space.adapters[self._number].checkpoint

    def read_into(self, buffer: Buffer, name: str, start: int) -> None:
        if name not in self._modules:
            self._others.read_into(buffer, name, start)
            return
        found = self._space.coordinates(self._modules[name], self._number)
        if found is None:
            buffer.tensor.zero_()
        else:
            buffer.tensor.copy_(found.reshape(-1)[start : start + len(buffer.tensor)])
