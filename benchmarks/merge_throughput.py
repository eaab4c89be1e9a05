"""Merging six models of half a billion parameters: us, mergekit, and copying the bytes.

    python benchmarks/merge_throughput.py --mergekit .peers/bin/mergekit-yaml

Both tools are run as commands, with the same YAML, on the same files, one after the other; times
include starting up, with bytecode that an earlier start has left, as installing leaves it. The copy
limit reads every input and writes as many bytes as the output has, both with plain file operations,
and waits for the disk. Peak memory is that of the command and all its processes (proportional set
sizes added up, looked at up to 20 times a second), less that of an interpreter that has only
imported torch and safetensors. Processor seconds, of all threads and
processes, are those that do not depend on what else a machine does.

scripts/peers makes the environment with mergekit. --layers 2 is a quick trial.
"""

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

HIDDEN, INTERMEDIATE, VOCABULARY = 1024, 4096, 32000
METHODS: dict[str, dict[str, float | None]] = {
    "linear": {"goal_copy": 1.5, "goal_mergekit": None},
    "task_arithmetic": {"goal_copy": 1.5, "goal_mergekit": None},
    "ties": {"goal_copy": None, "goal_mergekit": 20},
    "dare_linear": {"goal_copy": None, "goal_mergekit": None},
    "model_stock": {"goal_copy": None, "goal_mergekit": None},
    **{
        method: {"goal_copy": None, "goal_mergekit": 3}
        for method in (
            *("nuslerp", "multislerp", "karcher", "breadcrumbs", "breadcrumbs_ties", "della"),
            *("della_linear", "sce", "ram", "ramplus_tl", "nearswap", "arcee_fusion"),
        )
    },
}
NUM_MODELS = {"nuslerp": 2, "nearswap": 1, "arcee_fusion": 1}  # where only one number makes sense
WEIGHED = ("linear", "task_arithmetic", "nuslerp", "multislerp")
THINNED = ("ties", "dare_linear", "breadcrumbs", "breadcrumbs_ties", "della", "della_linear")
PARAMETERS = {"nearswap": "{t: 0.001}", "sce": "{select_topk: 0.2}", "karcher": "{max_iter: 10}"}


def shapes(num_layers: int) -> dict[str, tuple[int, ...]]:
    result: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for i in range(num_layers):
        layer = f"model.layers.{i}"
        result |= {f"{layer}.self_attn.{p}_proj.weight": (HIDDEN, HIDDEN) for p in "qkvo"}
        result |= {
            f"{layer}.mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{layer}.mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{layer}.mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
            f"{layer}.input_layernorm.weight": (HIDDEN,),
            f"{layer}.post_attention_layernorm.weight": (HIDDEN,),
        }
    return result | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}


def make_models(folder: Path, num_models: int, num_layers: int) -> None:
    """A base and models that differ from it by noise, as Llama checkpoints in bfloat16."""
    import torch
    from safetensors.torch import save_file

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    generator = torch.Generator().manual_seed(0)
    largest = VOCABULARY * HIDDEN
    values = torch.randn(largest, generator=generator).mul_(0.02)
    noise = torch.randn(largest + 10_000_019, generator=generator).mul_(0.002)
    for m, path in enumerate(model_paths(folder, num_models)):
        path.mkdir()
        state = {}
        for i, (name, shape) in enumerate(shapes(num_layers).items()):
            num = int(torch.tensor(shape).prod())
            state[name] = values[:num].clone()
            if m:
                start = (1_000_003 * m + 7919 * i) % 10_000_019
                state[name] += noise[start : start + num]
            state[name] = state[name].bfloat16().view(shape)
        save_file(state, path / "model.safetensors", metadata={"format": "pt"})
        (path / "config.json").write_text(json.dumps(config))


def model_paths(folder: Path, num_models: int) -> list[Path]:
    return [folder / "base", *(folder / f"model_{m}" for m in range(1, num_models + 1))]


def recipe(method: str, paths: list[Path]) -> str:
    """The merge in mergekit's YAML, which both tools read."""
    lines = [f"merge_method: {method}", "dtype: bfloat16", "models:"]
    for path in paths[1 : 1 + NUM_MODELS.get(method, len(paths))]:
        lines += [f"  - model: {path}"]
        if method in (*WEIGHED, *THINNED):
            lines += ["    parameters:", "      weight: 0.3"]
        if method in THINNED:
            lines += ["      density: 0.2"]
    if method in PARAMETERS:
        lines += [f"parameters: {PARAMETERS[method]}"]
    if method not in ("linear", "karcher"):
        lines += [f"base_model: {paths[0]}"]
    return "\n".join(lines) + "\n"


class Run(NamedTuple):
    """What a command took."""

    seconds: float
    peak_bytes: int  # of the process and its children
    processor_seconds: float


def run(command: list[str]) -> Run:
    start, processor = time.perf_counter(), processor_seconds()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        most = peak_memory(process)
        seconds = time.perf_counter() - start
        if process.returncode != 0:
            output.seek(0)
            sys.exit(f"{' '.join(command)} failed:\n{output.read().decode()[-3000:]}")
    return Run(seconds, most, processor_seconds() - processor)


def processor_seconds() -> float:
    """Of all processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def peak_memory(process: "subprocess.Popen[Any]") -> int:
    """Wait for a process to end; returns the most memory that it and all below it had."""
    most = 0
    while process.poll() is None:
        looked = time.perf_counter()
        most = max(most, memory_of(process.pid))
        # Looking at many gigabytes takes long: no more than a tenth of a processor for it.
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.05, 10 * (time.perf_counter() - looked)))
    return most


def memory_of(pid: int) -> int:
    """Proportional set size of a process and all below it, in bytes; 0 where it has ended."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0
    own = next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
    return own * 1024 + sum(memory_of(int(child)) for child in children)


def copy_limit(paths: list[Path], target: Path) -> float:
    """Seconds to read all inputs and write one model's worth of bytes."""
    start = time.perf_counter()
    buffer = bytearray(1 << 24)
    for path in paths[1:]:
        with (path / "model.safetensors").open("rb", buffering=0) as source:
            while source.readinto(buffer):
                pass
    with (
        (paths[0] / "model.safetensors").open("rb", buffering=0) as source,
        target.open("wb", buffering=0) as copy,
    ):
        while count := source.readinto(buffer):
            copy.write(memoryview(buffer)[:count])
        os.fsync(copy.fileno())
    seconds = time.perf_counter() - start
    target.unlink()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mergekit", type=Path, help="the mergekit-yaml command to compare with")
    parser.add_argument("--models", type=int, default=6)
    parser.add_argument("--layers", type=int, default=26, help="26 is 0.5 billion parameters")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--repeat", type=int, default=3, help="runs of ours and of the copy")
    parser.add_argument("--folder", type=Path, help="where to work (needs 9 GB)")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        # In a process of its own, so that this one stays small.
        maker = multiprocessing.get_context("spawn").Process(
            target=make_models, args=(folder, arguments.models, arguments.layers)
        )
        maker.start()
        maker.join()
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        mats_command = str(Path(sys.executable).with_name("mats"))
        if arguments.mergekit:
            run([str(arguments.mergekit), "--help"])
        paths = model_paths(folder, arguments.models)
        size = (paths[0] / "model.safetensors").stat().st_size
        print(f"{arguments.models} models and a base of {size / 2e9:.3f} billion parameters, bf16")
        imports = [sys.executable, "-c", "import torch, safetensors.torch, time; time.sleep(0.5)"]
        interpreter = run(imports).peak_bytes
        print(f"interpreter with torch: {interpreter / 1e6:.0f} MB")
        print(
            f"{'':16} {'copy s':>8} {'ours s':>8} {'mergekit s':>11} {'ours/copy':>10} {'goal':>6} "
            f"{'mergekit/ours':>14} {'goal':>6} {'our MB':>8} {'their MB':>9} "
            f"{'processor s':>12} {'theirs':>8} {'ratio':>6}"
        )
        for method in arguments.methods:
            file = folder / "recipe.yaml"
            file.write_text(recipe(method, paths))
            out = folder / "out"
            mats = [mats_command, "merge", str(file), "-o", str(out)]
            run([*mats, "--dry-run", "--quiet"])
            copies, ours = [], []
            for _ in range(arguments.repeat):
                copies.append(copy_limit(paths, folder / "copy"))
                ours.append(run([*mats, "--quiet"]))
                shutil.rmtree(out)
            seconds = statistics.median(r.seconds for r in ours)
            processor = statistics.median(r.processor_seconds for r in ours)
            memory = max(r.peak_bytes for r in ours) - interpreter
            limit = statistics.median(copies)
            peer = Run(0, interpreter, 0)
            if arguments.mergekit:
                peer = run([str(arguments.mergekit), str(file), str(out)])
                shutil.rmtree(out)
            goals = METHODS[method]
            print(
                f"{method:16} {limit:8.2f} {seconds:8.2f} {peer.seconds:11.2f} "
                f"{seconds / limit:10.2f} {goals['goal_copy'] or '-':>6} "
                f"{peer.seconds / seconds:14.1f} {goals['goal_mergekit'] or '-':>6} "
                f"{memory / 1e6:8.0f} {(peer.peak_bytes - interpreter) / 1e6:9.0f} "
                f"{processor:12.2f} {peer.processor_seconds:8.2f} "
                f"{peer.processor_seconds / processor:6.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
