"""Merging eight T5-Large-shaped models by MaTS: how much memory and time it takes.

    python benchmarks/larger_than_memory.py            # 783 million parameters, 8 models
    python benchmarks/larger_than_memory.py --quick    # a small setting, under a minute
    python benchmarks/larger_than_memory.py --method mats_kfac --rank 64

With a rank, second moments are sketches, and one layer of each stack, and none, are merged by whole
statistics as well: all layers are alike, so that the difference says what all of them would take.

Models (float32) and statistics are not on disk: each block of a tensor is made when it is read, the
same every time, so that inputs of any size can be merged on any disk. It is a stretch of a table of
random numbers, which takes about as long as reading a file that was read before. The output is
written to disk as always. Times include making the inputs. Memory is that of the merge and all its
processes (proportional set sizes added up, sampled), the interpreter included.
The reference implementation holds everything at once: what its inputs alone take is printed beside.
"""

import argparse
import json
import math
import resource
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from merge_throughput import peak_memory
from torch import Tensor

from matsmerge.byte_sizes import format_bytes, parse_bytes
from matsmerge.checkpoints.checkpoint import Buffer, Checkpoint, TensorSpec
from matsmerge.checkpoints.fingerprint import fingerprint
from matsmerge.engine.local_executor import LocalExecutor
from matsmerge.engine.machine import keep_freed_memory
from matsmerge.engine.merge_run import RunOptions, merge_to_folder
from matsmerge.engine.prepared_merge import prepare_merge
from matsmerge.progress import Progress
from matsmerge.recipes.recipe import make_recipe
from matsmerge.statistics.collection_options import CollectionOptions
from matsmerge.statistics.statistics import Header, Map, Origin, Set, Sketching, Statistics

TABLE_ELEMENTS = 1 << 22
GOAL_BYTES = 6_000_000_000
SKETCH_GOAL_BYTES = 4_000_000_000
SKETCH_GOAL_RATIO = 20


class Shape:
    """A T5 v1.1: two stacks of layers, gated feed-forward, an output layer of its own."""

    def __init__(self, width: int, inner: int, num_layers: int, vocabulary: int) -> None:
        self.weights: dict[str, tuple[int, ...]] = {"shared.weight": (vocabulary, width)}
        self.leaders: dict[str, str] = {}  # module -> the module whose input it shares
        for stack in ("encoder", "decoder"):
            for i in range(num_layers):
                self._add_layer(stack, i, width, inner)
            self.weights[f"{stack}.final_layer_norm.weight"] = (width,)
        self._add("lm_head", (vocabulary, width), "lm_head")

    def _add_layer(self, stack: str, i: int, width: int, inner: int) -> None:
        block = f"{stack}.block.{i}.layer"
        attention = f"{block}.0.SelfAttention"
        for part in "qkv":
            self._add(f"{attention}.{part}", (width, width), f"{attention}.q")
        self._add(f"{attention}.o", (width, width), f"{attention}.o")
        last = 1
        if stack == "decoder":
            last = 2
            cross = f"{block}.1.EncDecAttention"
            self._add(f"{cross}.q", (width, width), f"{cross}.q")
            for part in "kv":  # they all see the encoder's output
                leader = "decoder.block.0.layer.1.EncDecAttention.k"
                self._add(f"{cross}.{part}", (width, width), leader)
            self._add(f"{cross}.o", (width, width), f"{cross}.o")
        dense = f"{block}.{last}.DenseReluDense"
        for part in ("wi_0", "wi_1"):
            self._add(f"{dense}.{part}", (inner, width), f"{dense}.wi_0")
        self._add(f"{dense}.wo", (width, inner), f"{dense}.wo")
        for j in range(last + 1):
            self.weights[f"{block}.{j}.layer_norm.weight"] = (width,)

    def _add(self, module: str, shape: tuple[int, int], leader: str) -> None:
        self.weights[f"{module}.weight"] = shape
        self.leaders[module] = leader

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.weights.values())


class MadeModel(Checkpoint):
    """A fine-tuned model whose values are made when they are read: a base plus noise."""

    def __init__(self, label: str, weights: Mapping[str, tuple[int, ...]], number: int) -> None:
        self.label = label
        self.number = number
        self.specs = {name: TensorSpec(torch.float32, shape) for name, shape in weights.items()}
        self.aliases = {}

    def read_into(self, buffer: Buffer, name: str, start: int) -> None:
        num = len(buffer.tensor)
        buffer.tensor.copy_(_noise(name, num, start).mul_(0.05))
        if self.number:
            buffer.tensor.add_(_noise(f"{name} {self.number}", num, start), alpha=0.005)


@lru_cache
def _table() -> Tensor:
    return torch.empty(TABLE_ELEMENTS).uniform_(-1, 1, generator=torch.Generator().manual_seed(0))


def _noise(name: str, num: int, start: int = 0) -> Tensor:
    """A stretch of the table, from a place that the name says; after its end it begins anew."""
    found = torch.empty(num)
    at = (zlib.crc32(name.encode()) + start) % TABLE_ELEMENTS
    done = 0
    while done < num:
        some = _table()[at : at + num - done]
        found[done : done + len(some)] = some
        done, at = done + len(some), 0
    return found


class MadeArrays(Checkpoint):
    """Second moments that are made when they are read: a decaying diagonal plus low rank."""

    def __init__(self, label: str, dims: Mapping[str, int], number: int) -> None:
        self.label = label
        self.number = number
        self.dims = dims
        self.specs = {n: TensorSpec(torch.float32, (d * (d + 1) // 2,)) for n, d in dims.items()}
        self.aliases = {}

    def read_into(self, buffer: Buffer, name: str, start: int) -> None:
        """Make the rows of the upper triangle that the elements lie in."""
        d = self.dims[name]
        rank = min(128, d)
        scale = torch.arange(1, d + 1).float() ** -0.5
        z = _noise(f"{name} {self.number}", rank * d).view(rank, d) * scale
        begins = torch.arange(d + 1) * d - torch.arange(d + 1) * (torch.arange(d + 1) - 1) // 2
        stop = start + len(buffer.tensor)
        first = int(torch.searchsorted(begins, start, right=True)) - 1
        last = int(torch.searchsorted(begins, stop))
        rows = z[:, first:last].mT @ z[:, first:] / rank  # (rows, d - first)
        rows.diagonal().add_(0.01 * scale[first:last].square())
        packed = torch.cat([row[i:] for i, row in enumerate(rows)])
        offset = start - int(begins[first])
        buffer.tensor.copy_(packed[offset : offset + len(buffer.tensor)])


class MadeSketches(Checkpoint):
    """Sketches that are made when they are read: decaying columns, and the diagonal."""

    def __init__(self, label: str, dims: Mapping[str, int], number: int, num: int) -> None:
        self.label = label
        self.number = number
        self.specs = {n: TensorSpec(torch.float32, (d, num + 1)) for n, d in dims.items()}
        self.aliases = {}

    def read_into(self, buffer: Buffer, name: str, start: int) -> None:
        flat = _sketch(f"{name} {self.number}", *self.specs[name].shape)
        buffer.tensor.copy_(flat[start : start + len(buffer.tensor)])


@lru_cache(maxsize=2)
def _sketch(name: str, dim: int, columns: int) -> Tensor:
    b = _noise(name, dim * (columns - 1)).view(dim, columns - 1)
    b *= torch.arange(1, columns).float() ** -0.5
    diagonal = b.square().sum(1, keepdim=True) * 1.2  # a sixth is in no direction that is known
    return torch.cat([b, diagonal], 1).flatten()


def make_statistics(
    shape: Shape, model: MadeModel, *, kfac: bool, rank: int | None = None
) -> Statistics:
    dims, rows = {}, {}
    for module, leader in shape.leaders.items():
        out, inside = shape.weights[f"{module}.weight"]
        dims[f"main/inputs/{leader}"] = inside
        rows[f"inputs/{leader}"] = 1000
        if kfac and module != "lm_head":
            dims[f"main/outputs/{module}"] = out
    label = f"{model.label}.statistics"
    arrays: Checkpoint = MadeArrays(label, dims, model.number)
    if rank is not None:
        arrays = MadeSketches(label, dims, model.number, rank)
    header = Header(
        model=Origin(name=model.label, fingerprint=fingerprint(model)),
        data=(Origin(name="made", fingerprint=""),),
        options=CollectionOptions(statistics=("kfac",) if kfac else ("gram",), rank=rank or "full"),
        versions={},
        maps=tuple(
            Map(
                module=module,
                layout="linear",
                weight=f"{module}.weight",
                bias=None,
                inputs=leader,
                outputs=f"main/outputs/{module}" in dims,
            )
            for module, leader in shape.leaders.items()
        ),
        sets={"main": Set(num_examples=1000, num_rows=rows)},
        forms=dict.fromkeys(dims, "symmetric" if rank is None else "sketch"),
        sketching=None if rank is None else Sketching(rank=rank),
        aliases={},
        without={},
    )
    return Statistics(header, arrays)


class Phases(Progress):
    """Notes when each phase of a merge begins."""

    def __init__(self) -> None:
        self.begins: list[tuple[str, float]] = [("planning", time.perf_counter())]

    def stage(self, title: str, total: int | None = None, *_: Any) -> None:
        print(f"  {title}: {format_bytes(total or 0)}", file=sys.stderr, flush=True)
        self.begins.append((title, time.perf_counter()))

    def seconds(self) -> dict[str, float]:
        ends = [*(at for _, at in self.begins[1:]), time.perf_counter()]
        return {name: end - at for (name, at), end in zip(self.begins, ends, strict=True)}


def merge(arguments: argparse.Namespace, out: Path) -> dict[str, object]:
    """Run in a process of its own, so that its memory can be watched."""
    torch.set_num_threads(1)
    keep_freed_memory()
    shape = make_shape(arguments)
    phases = Phases()
    base = MadeModel("base", shape.weights, 0)
    models = {f"m{i}": MadeModel(f"m{i}", shape.weights, i) for i in range(1, arguments.models + 1)}
    kfac = arguments.method in ("mats_kfac", "block_fisher")
    statistics = {
        name: make_statistics(shape, m, kfac=kfac, rank=arguments.rank)
        for name, m in models.items()
    }
    recipe = make_recipe(
        {
            "models": [{"model": name, "name": name} for name in models],
            "base": "base",
            "method": arguments.method,
        }
    )
    prepared = prepare_merge(recipe, {**models, "base": base}, statistics)
    memory = parse_bytes(arguments.max_memory)
    executor = LocalExecutor(arguments.workers, memory, fork=True)
    merge_to_folder(prepared, out, RunOptions(executor, phases))
    stored = sum(s.num_bytes for one in statistics.values() for s in one.arrays.specs.values())
    used = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {
        "seconds": phases.seconds(),
        "processor_seconds": sum(one.ru_utime + one.ru_stime for one in used),
        "parameters": shape.num_parameters,
        "model_bytes": 4 * shape.num_parameters * (len(models) + 1),
        "statistics_bytes": stored,
        "planned_bytes": min(prepared.plan.peak_bytes(executor.num_workers), memory),
        "reference_bytes": reference_bytes(shape, len(models), kfac=kfac),
    }


def reference_bytes(shape: Shape, num_models: int, *, kfac: bool) -> int:
    """What holding all inputs takes at least: models, and full matrices of every layer."""
    matrices = sum(
        inside**2 + (out**2 if kfac and out < 1 << 14 else 0)
        for out, inside in (shape.weights[f"{m}.weight"] for m in shape.leaders)
    )
    return 4 * ((num_models + 1) * shape.num_parameters + num_models * matrices)


def num_layers(arguments: argparse.Namespace) -> int:
    """Of each stack."""
    if arguments.layers is None:
        return 4 if arguments.quick else 24
    return int(arguments.layers)


def make_shape(arguments: argparse.Namespace) -> Shape:
    if arguments.quick:
        return Shape(256, 704, num_layers(arguments), vocabulary=4096)
    return Shape(1024, 2816, num_layers(arguments), vocabulary=32128)


def measure(arguments: argparse.Namespace, *changes: str) -> tuple[dict[str, Any], int, float]:
    """What a merge in a process of its own says, its most memory, and the seconds it took."""
    with tempfile.TemporaryDirectory(dir=arguments.out) as folder:
        command = [sys.executable, __file__, *sys.argv[1:], *changes]
        command += ["--child", "--out", f"{folder}/merged"]
        begin = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        most = peak_memory(process)
        total = time.perf_counter() - begin
        assert process.stdout is not None
        text = process.stdout.read()
        if process.returncode:
            sys.exit(process.returncode)
    return json.loads(text), most, total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model, under a minute")
    parser.add_argument("--method", default="mats", help="mats, mats_kfac, regmean, ...")
    parser.add_argument("--models", type=int, default=8)
    parser.add_argument("--layers", type=int, help="of each stack; all, if not given")
    parser.add_argument("--rank", type=int, help="second moments are sketches of this rank")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--max-memory", default="4GB")
    parser.add_argument("--out", type=Path, help="folder for the merged model, then deleted")
    parser.add_argument("--whole", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.whole:
        arguments.rank = None
    if arguments.child:
        print(json.dumps(merge(arguments, arguments.out)))
        return
    found, most, total = measure(arguments)
    print(f"{arguments.models} models of {found['parameters'] / 1e6:.0f} million parameters")
    print(f"models and base   {format_bytes(found['model_bytes'])}")
    print(f"statistics        {format_bytes(found['statistics_bytes'])}")
    for name, seconds in found["seconds"].items():
        print(f"{name:20}{seconds:8.1f} s")
    print(f"{'all, with start-up':20}{total:8.1f} s")
    print(f"{'processor time':20}{found['processor_seconds']:8.1f} s")
    print(f"memory planned for  {format_bytes(found['planned_bytes'])} beyond the interpreter")
    goal = GOAL_BYTES if arguments.rank is None else SKETCH_GOAL_BYTES
    met = "met" if most < goal else "missed"
    print(f"peak memory         {format_bytes(most)} (goal {format_bytes(goal)}: {met})")
    needed = found["reference_bytes"]
    print(f"holding all inputs  at least {format_bytes(needed)}, {needed / most:.0f} times as much")
    if arguments.rank is not None:
        compare_with_whole(arguments, found)


def compare_with_whole(arguments: argparse.Namespace, found: dict[str, Any]) -> None:
    """Print what whole statistics would take, from one layer of each stack and none.

    Where there are no layers nothing has statistics, and all is averaged as `mats` does it.
    """
    none = measure(arguments, "--whole", "--layers", "0", "--method", "average")[0]
    one = measure(arguments, "--whole", "--layers", "1")[0]
    layer = one["processor_seconds"] - none["processor_seconds"]
    whole = none["processor_seconds"] + num_layers(arguments) * layer
    ratio = whole / found["processor_seconds"]
    met = "met" if ratio >= SKETCH_GOAL_RATIO else "missed"
    print(f"whole statistics    {whole:8.0f} s of processor time, from {layer:.0f} s a layer")
    print(f"ratio               {ratio:.0f} (goal {SKETCH_GOAL_RATIO}: {met})")


if __name__ == "__main__":
    main()
