"""Two workers of Ray against two forked workers on `mats_kfac`; and what 8 x 70B take by the plan.

    python benchmarks/ray_scaling.py            # the ratio; needs matsmerge[ray]
    python benchmarks/ray_scaling.py --plan     # memory, disk, network, operations of 8 x 70B

Models and statistics are made when they are read, as in benchmarks/larger_than_memory.py, by the
workers, so that both do the same work and no disk decides. Runs alternate, forked and Ray; the
ratio is that of the shortest. Ray is started before, as a cluster is, and its workers have merged
once; what that takes is printed. Both write the same bytes, which is checked.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from larger_than_memory import MadeModel, Shape, make_statistics
from ray_clusters import processor_seconds

from matsmerge import Executor, LocalExecutor, RayExecutor
from matsmerge.byte_sizes import format_bytes
from matsmerge.checkpoints.checkpoint import Buffer, TensorSpec
from matsmerge.engine.machine import keep_freed_memory
from matsmerge.engine.merge_run import RunOptions, merge_to_folder
from matsmerge.engine.prepared_merge import PreparedMerge, prepare_merge
from matsmerge.lab.costs.cost_formulas import ModelShape, Setting
from matsmerge.recipes.recipe import make_recipe

GOAL = 0.8
NUM_WORKERS = 2
MAX_BYTES = 3 * 10**9


class Llama70B(Shape):
    """Llama 3 70B: 80 layers, grouped queries."""

    def __init__(self) -> None:
        width, inner, keys, vocabulary = 8192, 28672, 1024, 128256
        self.weights = {"model.embed_tokens.weight": (vocabulary, width)}
        self.leaders = {}
        for i in range(80):
            attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
            for part, rows in (("q", width), ("k", keys), ("v", keys)):
                self._add(f"{attention}.{part}_proj", (rows, width), f"{attention}.q_proj")
            self._add(f"{attention}.o_proj", (width, width), f"{attention}.o_proj")
            for part in ("gate", "up"):
                self._add(f"{mlp}.{part}_proj", (inner, width), f"{mlp}.gate_proj")
            self._add(f"{mlp}.down_proj", (width, inner), f"{mlp}.down_proj")
            for part in ("input", "post_attention"):
                self.weights[f"model.layers.{i}.{part}_layernorm.weight"] = (width,)
        self.weights["model.norm.weight"] = (width,)
        self._add("lm_head", (vocabulary, width), "lm_head")


class Headers(MadeModel):
    """A model in bfloat16 of which only headers matter."""

    def __init__(self, label: str, weights: Mapping[str, tuple[int, ...]], number: int) -> None:
        super().__init__(label, weights, number)
        self.specs = {n: TensorSpec(torch.bfloat16, shape) for n, shape in weights.items()}

    def read_into(self, buffer: Buffer, name: str, start: int) -> None:  # noqa: ARG002
        buffer.tensor.fill_(self.number)


def prepared_merge(
    shape: Shape, num_models: int, method: str, kind: type[MadeModel] = MadeModel
) -> PreparedMerge:
    made = [kind(f"m{i}", shape.weights, i) for i in range(num_models + 1)]
    models: dict[str, Any] = {model.label: model for model in made[1:]}
    kfac = method == "mats_kfac"
    with_statistics = kfac or method == "regmean"
    statistics = {n: make_statistics(shape, m, kfac=kfac) for n, m in models.items()}
    entries = [{"model": name, "name": name} for name in models]
    recipe = make_recipe({"models": entries, "base": "base", "method": method})
    return prepare_merge(recipe, {**models, "base": made[0]}, statistics if with_statistics else {})


@dataclass(frozen=True)
class Taken:
    """What something took: seconds by the clock, and of processors."""

    clock: float
    processor: float

    def __str__(self) -> str:
        return f"{self.clock:.1f} s ({self.processor:.1f} s of processors)"


@contextmanager
def timed(found: list[Taken]) -> Iterator[None]:
    clock, processor = time.perf_counter(), processor_seconds()
    yield
    used = processor_seconds() - processor
    found.append(Taken(time.perf_counter() - clock, used))


def merge(prepared: PreparedMerge, executor: Executor, found: list[Taken]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        with timed(found):
            merge_to_folder(prepared, Path(folder) / "out", RunOptions(executor))
        return (Path(folder) / "out" / "model.safetensors").read_bytes()


def compare(num_rounds: int, num_layers: int) -> None:
    import ray

    shape = Shape(width=512, inner=1408, num_layers=num_layers, vocabulary=1024)
    prepared = prepared_merge(shape, 4, "mats_kfac")
    print(f"{shape.num_parameters / 1e6:.0f} million parameters, {len(prepared.plan.jobs)} jobs")
    forked = LocalExecutor(NUM_WORKERS, MAX_BYTES, fork=True)
    once: list[Taken] = []
    os.environ.setdefault("RAY_AUTH_TOKEN", uuid.uuid4().hex * 2)  # else Ray writes one to ~/.ray
    with timed(once):
        _start(ray)
    print(f"Ray started in {once.pop()}", flush=True)
    on_ray = RayExecutor(max_bytes=MAX_BYTES)
    expected = merge(prepared, on_ray, once)
    print(f"first merge, with new workers: {once.pop()}", flush=True)
    taken: dict[str, list[Taken]] = {"forked": [], "Ray": []}
    for _ in range(num_rounds):
        for name, executor in (("forked", forked), ("Ray", on_ray)):
            content = merge(prepared, executor, taken[name])
            print(f"{name:<7} {taken[name][-1]}", flush=True)
            assert content == expected, "the bytes differ"
        print(_ratios(taken), flush=True)
    ray.shutdown()


def _start(ray: Any) -> None:
    """Start Ray; on a busy machine it may give up after half a minute, and is started again."""
    for attempts_left in (4, 3, 2, 1, 0):
        try:
            ray.init(
                "local",
                num_cpus=NUM_WORKERS,
                object_store_memory=200 * 10**6,
                include_dashboard=False,
                _node_ip_address="127.0.0.2",
                logging_level="ERROR",
                _system_config={"worker_niceness": 0},  # as forked workers; by default it is 15
            )
            return
        except Exception:
            ray.shutdown()
            if not attempts_left:
                raise


def _ratios(taken: Mapping[str, list[Taken]]) -> str:
    """Of the shortest so far: a busy machine only makes times longer."""
    clock, processor = (
        min(getattr(t, kind) for t in taken["forked"]) / min(getattr(t, kind) for t in taken["Ray"])
        for kind in ("clock", "processor")
    )
    return (
        f"efficiency of {NUM_WORKERS} Ray workers against forked ones, shortest of "
        f"{len(taken['Ray'])}: {clock:.2f} by the clock, {processor:.2f} by processor time "
        f"(goal {GOAL})"
    )


def show_plans() -> None:
    shape = Llama70B()
    print(f"{shape.num_parameters / 1e9:.1f} billion parameters, 8 models and a base in bfloat16")
    for method in ("task_arithmetic", "ties", "regmean", "mats_kfac"):
        prepared = prepared_merge(shape, 8, method, Headers)
        plan = prepared.plan
        read = plan.num_input_bytes
        num_passes = 2 if plan.is_measured else 1
        print(
            f"{method:<16} {len(plan.jobs):>6} jobs; read {format_bytes(read * num_passes)}, "
            f"write {format_bytes(prepared.layout(5 * 10**9).num_bytes)}; largest job "
            f"{format_bytes(plan.peak_bytes(1))}, 8 at once {format_bytes(plan.peak_bytes(8))}; "
            f"held while measuring {format_bytes(plan.measuring_bytes)}; "
            f"{num_operations(prepared, shape.num_parameters):.1e} operations"
        )


def num_operations(prepared: PreparedMerge, num_parameters: int) -> float:
    """Of merging, by the formulas of `mats cost`; a multiplication and an addition count as two."""
    rounds = [one for layer in prepared.plan.layers for one in layer.rounds]
    layers = [(one.found.num_inputs, one.found.num_outputs) for one in rounds]
    solvers = {one.stage.solver for one in rounds}
    iterations = max((getattr(solver, "iterations", 0) for solver in solvers), default=0)
    setting = Setting(
        ModelShape(num_parameters, layers, num_parameters),
        num_models=len(prepared.alignment.models),
        num_examples=0,
        num_tokens=0,
        num_iterations=iterations,
    )
    (method,) = prepared.methods
    return 2 * setting.formulas[method.name](setting).merging


def main() -> None:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plan", action="store_true", help="what 8 x 70B take")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=4, help="of each of two stacks")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    show_plans() if arguments.plan else compare(arguments.rounds, arguments.layers)


if __name__ == "__main__":
    main()
