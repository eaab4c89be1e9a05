"""Two workers of Ray against two forked workers on `mats_kfac`; and what 8 x 70B take by the plan.

    python benchmarks/ray_scaling.py            # the ratio; needs matsmerge[ray]
    python benchmarks/ray_scaling.py --plan     # memory, disk and network of 8 x 70B, from headers

Models and statistics are made when they are read, as in benchmarks/larger_than_memory.py, by the
workers, so that both do the same work and no disk decides. Runs alternate, forked and Ray; the
ratio is that of the shortest. Ray is started before, as a cluster is, and its workers have merged
once; what that takes is printed. Both write the same bytes, which is checked.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from larger_than_memory import MadeModel, Shape, make_statistics

from matsmerge import Executor, LocalExecutor, RayExecutor
from matsmerge.byte_sizes import format_bytes
from matsmerge.checkpoints.checkpoint import Buffer, TensorSpec
from matsmerge.engine.machine import keep_freed_memory
from matsmerge.engine.merge_run import RunOptions, merge_to_folder
from matsmerge.engine.prepared_merge import PreparedMerge, prepare
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
    return prepare(recipe, {**models, "base": made[0]}, statistics if with_statistics else {})


def merge(prepared: PreparedMerge, executor: Executor) -> tuple[float, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        merge_to_folder(prepared, Path(folder) / "out", RunOptions(executor))
        seconds = time.perf_counter() - begin
        return seconds, (Path(folder) / "out" / "model.safetensors").read_bytes()


def compare(num_rounds: int) -> None:
    import ray

    shape = Shape(width=512, inner=1408, num_layers=4, vocabulary=1024)
    prepared = prepared_merge(shape, 4, "mats_kfac")
    forked = LocalExecutor(NUM_WORKERS, MAX_BYTES, fork=True)
    begin = time.perf_counter()
    ray.init(
        "local",
        num_cpus=NUM_WORKERS,
        object_store_memory=200 * 10**6,
        include_dashboard=False,
        _node_ip_address="127.0.0.2",
    )
    on_ray = RayExecutor(max_bytes=MAX_BYTES)
    merge(prepared, on_ray)
    print(f"Ray started and merged once in {time.perf_counter() - begin:.1f} s")
    seconds: dict[str, list[float]] = {"forked": [], "Ray": []}
    for _ in range(num_rounds):
        outputs = set()
        for name, executor in (("forked", forked), ("Ray", on_ray)):
            taken, content = merge(prepared, executor)
            seconds[name].append(taken)
            outputs.add(content)
        assert len(outputs) == 1, "the bytes differ"
    ray.shutdown()
    for name, found in seconds.items():
        print(f"{name:<7}", " ".join(f"{one:.1f} s" for one in found))
    ratio = min(seconds["forked"]) / min(seconds["Ray"])
    print(f"efficiency of {NUM_WORKERS} Ray workers: {ratio:.2f} (goal {GOAL})")


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
            f"held while measuring {format_bytes(plan.measuring_bytes)}"
        )


def main() -> None:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plan", action="store_true", help="what 8 x 70B take")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    show_plans() if arguments.plan else compare(arguments.rounds)


if __name__ == "__main__":
    main()
