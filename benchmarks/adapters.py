"""Merging eight (IA)^3 adapters of T5-Large by MaTS: us, and dense blocks in float32.

    python benchmarks/adapters.py            # 144 vectors of 1,024 and 48 of 2,816; 25 GB of disk
    python benchmarks/adapters.py --quick    # a small setting, some seconds
    python benchmarks/adapters.py --json adapters.json

The adapters are folders as PEFT saves them, with vectors near one, and statistics of 1,000 examples
each: correlated gradients, a few large directions that the models share in part, and noise that
differs between elements. Blocks of the Fisher information are stored as we store them, the triangle
of a block or the gradients themselves, whichever is smaller. The merge is the paper's for (IA)^3,
`mats merge --method mats` with its defaults: from task arithmetic 0.3, starting from all ones,
conjugate gradients on block Fisher.

Beside it, the way of the reference implementation: a full block in float32 for every vector and
model, read from files, added up over models, and as many iterations of plain conjugate gradients,
with as many threads as we have workers. Unlike ours it does not check what it reads. The reference
holds all blocks of all models at once. Where that takes more than half of the memory that is free,
the blocks are read vector by vector, and the memory that holding them takes is computed; the output
says so. --hold holds them anyway.

Both are commands of their own. Times include starting up, and reading files that are not in the
system's cache when a command begins (--cached: that may be there). Memory is that of a command and
all its processes (proportional set sizes added up, looked at 20 times a second), the interpreter
included. Some vectors of both results are compared with dense conjugate gradients in float64 after
the same number of iterations: plain ones, and ones whose residuals are kept orthogonal as they are
in exact arithmetic. Distances are relative to the way from the start.
"""

import argparse
import json
import math
import os
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from merge_throughput import run
from safetensors.torch import load_file, save_file
from torch import Tensor

from matsmerge.byte_sizes import format_bytes
from matsmerge.checkpoints.fingerprint import fingerprint
from matsmerge.checkpoints.source import open_checkpoint
from matsmerge.checkpoints.stored import StoredCheckpoint
from matsmerge.engine.machine import available_bytes
from matsmerge.statistics.collection_options import CollectionOptions
from matsmerge.statistics.kinds.fisher_block import BLOCK_FISHER, BlockSum
from matsmerge.statistics.kinds.statistic import Form
from matsmerge.statistics.statistics import Header, Origin, Set, Statistics, in_memory
from matsmerge.statistics.statistics_file import open_statistics, save_statistics

NUM_MODELS = 8
SCALE = 0.3  # of task arithmetic, the start
NUM_DIRECTIONS = 128  # that stand out of the noise of gradients
GOAL_SECONDS, GOAL_BYTES = 60, 2_000_000_000
ADAPTER, STATISTICS, BLOCKS = "adapter_model.safetensors", "statistics.safetensors", "blocks"

Result = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """The shape of a T5, and the number of examples."""

    width: int
    inner: int
    num_layers: int
    num_examples: int

    def vectors(self) -> dict[str, tuple[int, int]]:
        """Names and shapes of an adapter's tensors, as PEFT saves them."""
        shapes: dict[str, tuple[int, int]] = {}
        for stack, attentions in (
            ("encoder", ("SelfAttention",)),
            ("decoder", ("SelfAttention", "EncDecAttention")),
        ):
            for i in range(self.num_layers):
                block = f"base_model.model.{stack}.block.{i}.layer"
                for j, attention in enumerate(attentions):
                    for part in "kv":
                        shapes[f"{block}.{j}.{attention}.{part}.ia3_l"] = (self.width, 1)
                # Of a feed-forward layer the inputs are scaled.
                shapes[f"{block}.{len(attentions)}.DenseReluDense.wo.ia3_l"] = (1, self.inner)
        return shapes

    @property
    def num_block_bytes(self) -> int:
        """Of the full blocks of one model."""
        return sum(4 * math.prod(shape) ** 2 for shape in self.vectors().values())


FULL = Size(width=1024, inner=2816, num_layers=24, num_examples=1000)
QUICK = Size(width=256, inner=704, num_layers=2, num_examples=250)


def make_inputs(folder: Path, size: Size) -> None:
    """All adapters with their statistics, and the same as full blocks."""
    for m, path in enumerate(model_folders(folder)):
        if (path / BLOCKS).exists():
            continue  # made by an earlier run
        path.mkdir(parents=True, exist_ok=True)
        make_adapter(path, size, m)
        made = make_statistics(path, size, m)
        save_statistics(made, path / STATISTICS)
        blocks = {name: made.block_fisher(name).contiguous() for name in size.vectors()}
        save_file(blocks, path / f"{BLOCKS}.tmp")
        (path / f"{BLOCKS}.tmp").rename(path / BLOCKS)
        print(f"made {path.name}", file=sys.stderr, flush=True)


def model_folders(folder: Path) -> list[Path]:
    return [folder / f"adapter_{m}" for m in range(NUM_MODELS)]


def make_adapter(path: Path, size: Size, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    state = {
        name: 1 + 0.05 * torch.randn(shape, generator=generator)
        for name, shape in size.vectors().items()
    }
    save_file(state, path / ADAPTER, metadata={"format": "pt"})
    config = {
        "auto_mapping": None,
        "base_model_name_or_path": None,
        "fan_in_fan_out": False,
        "feedforward_modules": ["wo"],
        "inference_mode": True,
        "init_ia3_weights": True,
        "modules_to_save": None,
        "peft_type": "IA3",
        "revision": None,
        "target_modules": ["k", "v", "wo"],
        "task_type": "SEQ_2_SEQ_LM",
    }
    (path / "adapter_config.json").write_text(json.dumps(config, indent=2))


def make_statistics(path: Path, size: Size, number: int) -> Statistics:
    """Block Fisher of every vector, added up by what collecting uses."""
    arrays: dict[str, Tensor] = {}
    forms: dict[str, Form] = {}
    for i, (name, shape) in enumerate(size.vectors().items()):
        block = BlockSum(math.prod(shape), torch.float32)
        block.add(make_gradients(i, number, size.num_examples, math.prod(shape)))
        [(values, form)] = block.sums()
        key = f"main/{BLOCK_FISHER.array}/{name}"
        arrays[key] = values if form == "rows" else values / size.num_examples
        forms[key] = form
    header = Header(
        model=Origin(name=path.name, fingerprint=fingerprint(open_checkpoint(path))),
        data=(Origin(name="made", fingerprint=""),),
        options=CollectionOptions(statistics=("block_fisher",)),
        versions={},
        maps=(),
        sets={"main": Set(num_examples=size.num_examples, num_rows={})},
        forms=forms,
        aliases={},
        without={},
    )
    return in_memory(header, arrays)


def make_gradients(vector: int, number: int, num_examples: int, d: int) -> Tensor:
    """One gradient for each example: sizes of directions fall as 1/k."""
    shared = torch.Generator().manual_seed(1000 + vector)
    own = torch.Generator().manual_seed(1_000_000 * (1 + number) + vector)
    directions = torch.randn(NUM_DIRECTIONS, d, generator=shared)
    directions += 0.5 * torch.randn(NUM_DIRECTIONS, d, generator=own)
    sizes = torch.arange(1, NUM_DIRECTIONS + 1).float() ** -1
    noise_sizes = 0.03 * torch.arange(1, d + 1).float()[torch.randperm(d, generator=shared)] ** -0.5
    gradients = (torch.randn(num_examples, NUM_DIRECTIONS, generator=own) * sizes) @ directions
    gradients += torch.randn(num_examples, d, generator=own) * noise_sizes
    return gradients.mul_(1e-3)


def task_arithmetic(vectors: Sequence[Tensor]) -> Tensor:
    """Where the solvers start, in float64."""
    return 1 + SCALE * torch.stack([v.double() - 1 for v in vectors]).sum(0)


def merge_dense(folder: Path, out: Path, num_threads: int, hold: bool) -> Result:
    """The way of the reference implementation; in a process of its own.

    A vector gets as many iterations as it has in our result.
    """
    torch.set_num_threads(num_threads)
    iterations = read_iterations(folder)
    adapters = [load_file(path / ADAPTER) for path in model_folders(folder)]
    clock = Clock()
    files = [StoredCheckpoint(path.name, [path / BLOCKS], None) for path in model_folders(folder)]
    blocks: Sequence[StoredCheckpoint | dict[str, Tensor]] = files
    if hold:
        blocks = [{name: file[name] for name in file.specs} for file in files]
        clock.lap("reading")
    merged: dict[str, Tensor] = {}
    for name, first in adapters[0].items():
        vectors = [adapter[name].flatten() for adapter in adapters]
        d = first.numel()
        total, right = torch.zeros(d, d), torch.zeros(d)
        for own, vector in zip(blocks, vectors, strict=True):
            block = own[name]
            clock.lap("reading")
            total += block
            right += block @ vector
            clock.lap("adding up")
        start = task_arithmetic(vectors).float()
        merged[name] = plain_cg(total, right, start, iterations[name]).view_as(first)
        clock.lap("iterating")
    save_file(merged, out)
    return clock.seconds


class Clock:
    """Adds up the time between laps, by what was done in it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, what: str) -> None:
        now = time.perf_counter()
        self.seconds[what] = self.seconds.get(what, 0.0) + now - self._last
        self._last = now


def plain_cg(matrix: Tensor, right: Tensor, start: Tensor, iterations: int) -> Tensor:
    """Textbook conjugate gradients, everything in the precision of what is given."""
    x = start.clone()
    r = right - matrix @ x
    p, rr = r.clone(), r @ r
    for _ in range(iterations):
        q = matrix @ p
        alpha = rr / (p @ q)
        x += alpha * p
        r -= alpha * q
        previous, rr = rr, r @ r
        p = r + rr / previous * p
    return x


def read_iterations(folder: Path) -> dict[str, int]:
    """How many iterations each vector had in our merge, by its tensor's name."""
    manifest = json.loads((folder / "merged" / "merge.json").read_text())
    return {name: p["solved"][-1]["iterations"] for name, p in manifest["parameters"].items()}


def exact_cg(matrix: Tensor, residual: Tensor, iterations: int) -> Tensor:
    """The correction after so many iterations, all residuals kept orthogonal to each other."""
    d = torch.zeros_like(residual)
    r, p, rr = residual, residual, residual @ residual
    past = torch.empty(0, len(residual), dtype=residual.dtype)
    for _ in range(iterations):
        past = torch.cat([past, (r / rr.sqrt())[None]])
        q = matrix @ p
        alpha = rr / (p @ q)
        d, r = d + alpha * p, r - alpha * q
        for _ in range(2):
            r = r - (past @ r) @ past
        previous, rr = rr, r @ r
        p = r + rr / previous * p
    return d


def compare(folder: Path, names: Sequence[str]) -> list[Result]:
    """Distances of both results from float64."""
    ours, dense = load_file(folder / "merged" / ADAPTER), load_file(folder / "dense.safetensors")
    adapters = [load_file(path / ADAPTER) for path in model_folders(folder)]
    statistics = [open_statistics(path / STATISTICS) for path in model_folders(folder)]
    iterations = read_iterations(folder)
    rows = []
    for name in names:
        vectors = [adapter[name].double().flatten() for adapter in adapters]
        start = task_arithmetic(vectors)
        d = len(start)
        total = torch.zeros(d, d, dtype=torch.float64)
        residual = torch.zeros(d, dtype=torch.float64)
        for one, vector in zip(statistics, vectors, strict=True):
            block = dense_block(one, name)
            total += block
            residual += block @ (vector - start)
        correction = exact_cg(total, residual, iterations[name])
        plain = plain_cg(total, residual, torch.zeros_like(residual), iterations[name])
        found = {
            "ours": ours[name].double().flatten() - start,
            "dense": dense[name].double().flatten() - start,
        }
        moved = correction.norm()
        rows.append(
            {
                "vector": name,
                "size": d,
                "stored": statistics[0].header.forms[f"main/block_fisher/{name}"],
                "iterations": iterations[name],
                "moved": float(moved / start.norm()),
                **{f"{k}_exact": float((v - correction).norm() / moved) for k, v in found.items()},
                **{f"{k}_plain": float((v - plain).norm() / moved) for k, v in found.items()},
                "plain_exact": float((plain - correction).norm() / moved),
            }
        )
    return rows


def dense_block(statistics: Statistics, name: str) -> Tensor:
    """A block in float64, as far as what is stored says it."""
    key = f"block_fisher/{name}"
    if statistics.header.forms[f"main/{key}"] == "rows":
        rows = statistics.stored(key).double()
        return rows.T @ rows / statistics.header.sets["main"].num_examples
    return statistics.array(key).double()


def measure(command: list[str], read: Sequence[Path], is_cached: bool) -> Result:
    """Run a command on files that are out of the system's cache, unless they may be there."""
    for path in () if is_cached else read:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)  # only what is on disk is let go
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds, peak_bytes, _ = run(command)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "seconds": seconds,
        "cpu_seconds": busy,
        "peak_bytes": peak_bytes,
        "read_bytes": sum(path.stat().st_size for path in read),
    }


def compare_ways(folder: Path, size: Size, arguments: argparse.Namespace) -> Result:
    """Run ours, then the dense way, and look at both results."""
    paths = model_folders(folder)
    command = [sys.executable, "-m", "matsmerge", "merge", "--method", "mats"]
    for path in paths:
        command += ["--model", str(path), "--statistics", str(path / STATISTICS)]
    command += ["--out", str(folder / "merged"), "--overwrite", "--workers", str(arguments.workers)]
    ours = measure(command, [path / STATISTICS for path in paths], arguments.cached)

    needed = NUM_MODELS * size.num_block_bytes
    hold = arguments.hold or 2 * needed < available_bytes()
    command = [sys.executable, __file__, "--child", "--folder", str(folder)]
    command += ["--workers", str(arguments.workers), *(["--hold"] if hold else [])]
    dense = measure(command, [path / BLOCKS for path in paths], arguments.cached)
    dense["parts"] = json.loads((folder / "dense.json").read_text())
    dense["is_held"] = hold
    dense["held_bytes"] = needed

    names = list(size.vectors())
    attention = [name for name in names if "Attention" in name]
    feedforward = [name for name in names if "DenseReluDense" in name]
    shown = [attention[0], attention[-1], feedforward[0], feedforward[-1]]
    return {"ours": ours, "dense": dense, "vectors": compare(folder, shown)}


def verdict(value: float, goal: float, is_quick: bool) -> str:
    if is_quick:
        return "no goal at this size"
    return "met" if value < goal else "NOT MET"


def show(result: Result, size: Size, is_quick: bool) -> None:
    ours, dense = result["ours"], result["dense"]
    vectors = size.vectors()
    num_inner = 2 * size.num_layers
    print(
        f"{NUM_MODELS} adapters: {len(vectors) - num_inner} vectors of {size.width}, {num_inner} "
        f"of {size.inner}; {size.num_examples} examples each"
    )
    print(f"{'':30}{'ours':>12}{'dense':>12}  dense/ours")
    for label, key in (("time, s", "seconds"), ("time of processors, s", "cpu_seconds")):
        ratio = dense[key] / ours[key]
        print(f"{label:30}{ours[key]:12.1f}{dense[key]:12.1f}{ratio:12.2f}")
    held = dense["peak_bytes"] if dense["is_held"] else dense["held_bytes"]
    rows = [("statistics on disk", ours["read_bytes"], dense["read_bytes"])]
    if dense["is_held"]:
        rows += [("peak memory", ours["peak_bytes"], held)]
    else:
        rows += [
            ("peak memory, one by one", ours["peak_bytes"], dense["peak_bytes"]),
            ("peak memory, all held", ours["peak_bytes"], held),
        ]
    for label, a, b in rows:
        print(f"{label:30}{format_bytes(a):>12}{format_bytes(b):>12}{b / a:12.2f}")
    if not dense["is_held"]:
        print(
            "The blocks were read vector by vector: holding all, as the reference does, would take "
            "more\nthan half of the free memory. What that takes is computed: the blocks alone."
        )
    parts = ", ".join(f"{what} {seconds:.1f} s" for what, seconds in dense["parts"].items())
    print(f"of the dense way: {parts}")
    print(
        f"ours: under {GOAL_SECONDS} s {verdict(ours['seconds'], GOAL_SECONDS, is_quick)}, under "
        f"{format_bytes(GOAL_BYTES)} {verdict(ours['peak_bytes'], GOAL_BYTES, is_quick)}"
    )
    print(
        f"distance, relative to the way from the start\n{'':40}"
        f"{'to exact':^20}{'to plain float64':^20}{'plain float64':>14}\n"
        f"  {'size':>5}{'stored':>11}{'iterations':>12}{'way/norm':>10}"
        f"{'ours':>10}{'dense':>10}{'ours':>10}{'dense':>10}{'to exact':>14}   vector"
    )
    for row in result["vectors"]:
        print(
            f"  {row['size']:5}{row['stored']:>11}{row['iterations']:12}{row['moved']:10.1e}"
            f"{row['ours_exact']:10.1e}{row['dense_exact']:10.1e}{row['ours_plain']:10.1e}"
            f"{row['dense_plain']:10.1e}{row['plain_exact']:14.1e}   "
            f"{row['vector'].removeprefix('base_model.model.').removesuffix('.ia3_l')}"
        )


def main() -> None:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="256 wide, two layers; some seconds")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cached", action="store_true", help="files may be in the system's cache")
    parser.add_argument("--folder", type=Path, help="make inputs here, and keep them")
    parser.add_argument("--json", type=Path, help="write the numbers here, too")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--hold", action="store_true", help="hold all blocks, free memory or not")
    arguments = parser.parse_args()
    if arguments.child:
        folder = arguments.folder
        seconds = merge_dense(
            folder, folder / "dense.safetensors", arguments.workers, arguments.hold
        )
        (folder / "dense.json").write_text(json.dumps(seconds))
        return

    size = QUICK if arguments.quick else FULL
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).absolute() / f"width_{size.width}"
        make_inputs(folder, size)
        result = compare_ways(folder, size, arguments)
    show(result, size, arguments.quick)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
