"""Experts of a mixture that are stored fused, read one by one.

Transformers 5 keeps the weights of all experts in one tensor, and some models are stored that way:

    experts.gate_up_proj  (experts, 2 inner, hidden)    experts.down_proj  (experts, hidden, inner)

Most models are stored with a tensor for each (`experts.3.gate_proj.weight`), and each expert is a
linear map with statistics of its own. A fused tensor is therefore read as its pieces, under these
names; each is a stretch of it. Where weights are transposed (gpt-oss), gate and up stay together.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod

import torch

from matsmerge.checkpoints.checkpoint import Buffer, Checkpoint, TensorSpec
from matsmerge.checkpoints.scaled_floats import Scaled

Shape = tuple[int, ...]

_FUSED = re.compile(r"(.*\bexperts\.)((?:gate_up|up|down)_proj(?:_bias)?)")
_GRANITE = re.compile(r"(.*\.)(input|output)_linear\.weight")  # the same under other names
_GRANITE_PARTS = {"input": "gate_up_proj", "output": "down_proj"}

_EXPERT = re.compile(r"(.*\.experts\.\d+\.)(\w+)(\.weight)")
_MIXTRAL = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_OTHERS = _MIXTRAL | {new: old for old, new in _MIXTRAL.items()}
_BLOCK = re.compile(r"\.(mlp|block_sparse_moe)\.")
_BLOCKS = {"mlp": "block_sparse_moe", "block_sparse_moe": "mlp"}


@dataclass(frozen=True)
class ExpertPart:
    """One expert's part of a fused tensor: the elements from `start` on."""

    tensor: str
    start: int
    shape: Shape


def pieces_of(shapes: Mapping[str, Shape]) -> dict[str, ExpertPart]:
    """The parts of an experts module's tensors, by name (`3.gate_proj.weight`).

    None if the module has other tensors, too, or sizes that do not go together.
    """
    inner = "gate_up_proj" if "gate_up_proj" in shapes else "up_proj"
    first, last = shapes.get(inner, ()), shapes.get("down_proj", ())
    is_known = shapes.keys() <= {inner, "down_proj", f"{inner}_bias", "down_proj_bias"}
    if not is_known or len(first) != 3 or len(last) != 3:
        return {}
    num_gates = 2 if inner == "gate_up_proj" else 1
    is_transposed = first[1:] == (last[2], num_gates * last[1])
    fits = is_transposed or first[1:] == (num_gates * last[2], last[1])
    if not fits or len({shape[0] for shape in shapes.values()}) > 1:
        return {}
    is_joint = is_transposed or num_gates == 1
    found = {}
    for tensor, (num_experts, *shape) in shapes.items():
        name = tensor.removesuffix("_bias")
        parts = [name] if is_joint or name == "down_proj" else ["gate_proj", "up_proj"]
        attribute = "weight" if tensor == name else "bias"
        own = (shape[0] // len(parts), *shape[1:])
        for i in range(num_experts * len(parts)):
            expert, part = divmod(i, len(parts))
            found[f"{expert}.{parts[part]}.{attribute}"] = ExpertPart(tensor, i * prod(own), own)
    return found


def fused_pieces(specs: Mapping[str, TensorSpec]) -> dict[str, ExpertPart]:
    """The parts of all fused tensors of a checkpoint."""
    modules: dict[str, dict[str, str]] = defaultdict(dict)  # prefix -> attribute -> tensor
    for name in specs:
        if match := _FUSED.fullmatch(name):
            modules[match[1]][match[2]] = name
        elif (match := _GRANITE.fullmatch(name)) and len(specs[name].shape) == 3:
            modules[f"{match[1]}experts."][_GRANITE_PARTS[match[2]]] = name
    return {
        f"{prefix}{name}": ExpertPart(tensors[piece.tensor], piece.start, piece.shape)
        for prefix, tensors in modules.items()
        for name, piece in pieces_of({a: specs[t].shape for a, t in tensors.items()}).items()
    }


class SeparatedExperts(Checkpoint):
    """A checkpoint with fused experts, which are read one by one.

    `pieces` says which part of which tensor of `fused` each of them is.
    """

    def __init__(self, fused: Checkpoint, pieces: Mapping[str, ExpertPart]) -> None:
        self.fused, self.pieces = fused, pieces
        self.label, self.aliases, self.note = fused.label, fused.aliases, fused.note
        self.folder, self.place, self.files = fused.folder, fused.place, fused.files
        of_tensor: dict[str, list[str]] = defaultdict(list)
        for name, piece in pieces.items():
            of_tensor[piece.tensor].append(name)
        self.specs = {
            name: TensorSpec(spec.dtype, pieces[name].shape) if name in pieces else spec
            for tensor, spec in fused.specs.items()
            for name in of_tensor.get(tensor, [tensor])
        }

    @property
    def origin(self) -> Checkpoint:
        return self.fused.origin

    def _place(self, name: str) -> tuple[str, int]:
        piece = self.pieces.get(name)
        return (name, 0) if piece is None else (piece.tensor, piece.start)

    def scaled_as(self, name: str) -> Scaled | None:
        return self.fused.scaled_as(self._place(name)[0])

    def read_dtype(self, name: str) -> torch.dtype:
        return self.fused.read_dtype(self._place(name)[0])

    def read_into(self, buffer: Buffer, name: str, start: int) -> None:
        tensor, first = self._place(name)
        self.fused.read_into(buffer, tensor, first + start)

    def prefetch(self, name: str, start: int, stop: int) -> None:
        tensor, first = self._place(name)
        self.fused.prefetch(tensor, first + start, first + stop)


def separate_experts(checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint with its experts one by one; itself if they are."""
    pieces = fused_pieces(checkpoint.specs)
    return SeparatedExperts(checkpoint, pieces) if pieces else checkpoint


def match_experts(wanted: Iterable[str], names: Iterable[str]) -> Callable[[str], str] | None:
    """A renaming of experts as Mixtral's are called (`w1`, in `block_sparse_moe`), or back.

    None if the experts among `names` are called as those that are `wanted`, or are other ones.
    """
    known = set(wanted)
    experts = [name for name in names if _EXPERT.fullmatch(name)]
    if not experts or any(name in known for name in experts):
        return None
    for rename in (_renamed, _renamed_within):
        if any(rename(name) in known for name in experts):
            return lambda name: rename(name) if rename(name) in known else name
    return None


def _renamed(name: str) -> str:
    """In the other spelling, the module around the experts as well."""
    return _BLOCK.sub(lambda m: f".{_BLOCKS[m[1]]}.", _renamed_within(name))


def _renamed_within(name: str) -> str:
    return _EXPERT.sub(lambda m: f"{m[1]}{_OTHERS.get(m[2], m[2])}{m[3]}", name)
