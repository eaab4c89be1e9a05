"""K-FAC in the models' task subspaces against whole second moments, a layer at a time.

    python benchmarks/task_subspaces.py
    python benchmarks/task_subspaces.py --layers 1024x1024 --ranks 32

Eight models with the statistics of benchmarks/solvers.py, whole or cut to their leading directions,
are solved for as `mats_kfac` does: a ridge of 0.03, all of one trace, ten iterations.
Each runs in a process of its own, in one thread, from its statistics in a file to the solution.
Printed are processor time and the peak of memory beyond that of an idle process, and their ratios;
and how far each solution brings down the whole objective, relative to that of the start.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from solvers import LAYERS, NUM_SAMPLES, Layer, make_layer
from torch import Tensor

from matsmerge.linalg.conjugate_gradients import solve_kronecker_sum
from matsmerge.linalg.operators import Kronecker, Operator, TruncatedProduct
from matsmerge.linalg.rounding import to_unit_size, without_rounding
from matsmerge.linalg.subspace_solutions import iterate_apart
from matsmerge.linalg.system import Limits, System, make_system
from matsmerge.linalg.truncated import Truncated, truncate

ITERATIONS, RIDGE = 10, 0.03
NUM_LAYERS = {"1024x1024": 288, "2816x1024": 96, "1024x2816": 48}  # of T5-Large
GOAL = 20.0

Stored = Tensor | Truncated
File = dict[str, Any]


def regular(moment: Stored) -> Stored:
    """A factor as the K-FAC objective makes it."""
    if isinstance(moment, Truncated):
        one = moment * (1 / moment.trace)
        return one.without_rounding(RIDGE * one.mean)
    unit, _ = to_unit_size(moment)
    return without_rounding(unit, torch.float32, RIDGE * unit.diagonal().mean())


def make_terms(file: File) -> Iterator[tuple[Operator, Tensor]]:
    for own, outputs, inputs in zip(file["weights"], file["outputs"], file["inputs"], strict=True):
        o, g = regular(outputs), regular(inputs)
        if isinstance(o, Tensor) and isinstance(g, Tensor):
            product: Kronecker | TruncatedProduct = Kronecker(o, g)
        else:
            product = TruncatedProduct(o, g)
        yield product * (1 / product.trace), own.double()


def load_system(path: Path) -> System:
    file = torch.load(path, mmap=True, weights_only=False)
    return make_system(make_terms(file), file["start"].double())


def solve(path: Path) -> None:
    """Solve by one file of statistics; write the solution and what it took."""
    torch.set_num_threads(1)
    idle = peak_kilobytes()
    before = time.process_time()
    system = load_system(path)
    is_whole = isinstance(system.operator.terms[0], Kronecker)  # type: ignore[attr-defined]
    solution = (solve_kronecker_sum if is_whole else iterate_apart)(system, Limits(ITERATIONS))
    seconds = time.process_time() - before
    peak = peak_kilobytes() - idle
    torch.save(solution.correction, path.with_suffix(".solution"))
    print(json.dumps({"seconds": seconds, "megabytes": peak / 1024}))


def peak_kilobytes() -> int:
    """Of this program; what the system counts for a process begins with its parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def write_files(layer: Layer, ranks: list[int], folder: Path) -> list[Path]:
    """The layer with whole second moments, and with those of each rank."""
    common = {"weights": layer.weights, "start": layer.start}
    paths = [folder / "whole"]
    torch.save({**common, "outputs": layer.outputs, "inputs": layer.inputs}, paths[0])
    outputs, inputs = (
        [truncate(m, max(ranks)) for m in ms] for ms in (layer.outputs, layer.inputs)
    )
    for rank in ranks:
        paths.append(folder / f"rank{rank}")
        cut = {"outputs": [shorten(m, rank) for m in outputs]}
        cut["inputs"] = [shorten(m, rank) for m in inputs]
        torch.save({**common, **cut}, paths[-1])
    return paths


def shorten(moment: Truncated, rank: int) -> Truncated:
    values = moment.values[:rank].clone()
    rest = (moment.trace - float(values.sum())) / (moment.dim - rank)
    return Truncated(moment.vectors[:, :rank].clone(), values, rest)


def run(path: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--solve", str(path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", nargs="+", metavar="OUTxIN", default=list(LAYERS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[32, 64])
    parser.add_argument("--solve", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.solve:
        solve(arguments.solve)
        return
    torch.set_num_threads(1)
    totals: dict[str, float] = {}
    for name in arguments.layers:
        print(f"== {name}, 8 models", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            num_out, num_in = map(int, name.split("x"))
            layer = make_layer(num_out, num_in, NUM_SAMPLES)
            paths = write_files(layer, arguments.ranks, Path(folder))
            del layer
            found = [run(path) for path in paths]
            whole = load_system(paths[0])
            for path, own in zip(paths, found, strict=True):
                correction = torch.load(path.with_suffix(".solution"))
                left = whole.residual - whole.operator(correction)
                reached = whole.objective_at(correction, left) / whole.objective
                faster, smaller = (found[0][key] / own[key] for key in ("seconds", "megabytes"))
                print(
                    f"  {path.name:7} {own['seconds']:7.2f} s ({faster:5.1f} times less)  "
                    f"{own['megabytes']:6.0f} MB ({smaller:4.1f} times less)  objective "
                    f"{reached:.4f}",
                    flush=True,
                )
                seconds = own["seconds"] * NUM_LAYERS.get(name, 1)
                totals[path.name] = totals.get(path.name, 0.0) + seconds
    if all(name in arguments.layers for name in NUM_LAYERS):
        for name, seconds in totals.items():
            ratio = totals["whole"] / seconds
            goal = "" if name == "whole" else f": {'met' if ratio >= GOAL else 'NOT MET'}"
            print(f"T5-Large, {name:7} {seconds / 60:7.1f} min, {ratio:5.1f} times less{goal}")


if __name__ == "__main__":
    main()
