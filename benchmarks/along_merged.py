"""Merging T5-shaped models layer after layer, along the merged model: passes, time and memory.

    python benchmarks/along_merged.py                     # narrow models of two blocks, quick
    python benchmarks/along_merged.py --full-width        # T5-Large's widths, two of 48 blocks
    python benchmarks/along_merged.py --full --folder F   # T5-Large: 25 GB of models in F

Models are a base and noise, data are random words. Passes are counted in products of linear layers,
relative to one forward pass of each model over its data, which is timed in the same run with the
same batches. Memory is that of the merge's process (proportional set size, sampled), the
interpreter included. Of a model that is run with fewer blocks, the weights of the
others are added for what all of T5-Large takes: nothing else that is in memory grows with depth.
What it is good for is printed beside: how often the merged model's likeliest token is that of the
model whose data it sees, and how often that of the models' average is.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from larger_than_memory import Phases
from merge_throughput import peak_memory
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from matsmerge.byte_sizes import format_bytes, parse_bytes
from matsmerge.data.rows import read_data
from matsmerge.engine.local_executor import LocalExecutor
from matsmerge.engine.machine import keep_freed_memory
from matsmerge.engine.merge_run import RunOptions, merge_to_folder
from matsmerge.engine.prepared_merge import prepare_merge
from matsmerge.recipes.recipe import make_recipe
from matsmerge.tasks.loaded_model import load_model
from matsmerge.tasks.task import encode_all

GOAL_BYTES, GOAL_PASSES = 8_000_000_000, 3
BATCH = 8
WORDS = [f"w{i}" for i in range(200)]


@dataclass(frozen=True)
class Size:
    """A T5 with gated layers, as v1.1; `num_layers` in each of its two stacks."""

    width: int
    inner: int
    num_layers: int
    vocabulary: int

    @property
    def num_bytes(self) -> int:
        """Of its weights in float32."""
        with torch.device("meta"):
            return sum(4 * int(parameter.numel()) for parameter in self.make().parameters())

    def make(self) -> Any:
        config = T5Config(
            d_model=self.width, d_ff=self.inner, num_layers=self.num_layers, d_kv=64,
            num_heads=self.width // 64, vocab_size=self.vocabulary,
            feed_forward_proj="gated-gelu", pad_token_id=0, eos_token_id=1,
            decoder_start_token_id=0,
        )  # fmt: skip
        torch.manual_seed(0)
        return T5ForConditionalGeneration(config)


LARGE = Size(1024, 2816, 24, 32128)


def make_inputs(folder: Path, size: Size, arguments: argparse.Namespace) -> None:
    """Write a base, models that are a little apart from it, and data of random words."""
    special = ["<pad>", "</s>", "<unk>"]
    words = {word: i for i, word in enumerate([*special, *WORDS])}
    inside = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inside.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inside.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inside, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    model = size.make()
    base = {name: values.clone() for name, values in model.state_dict().items()}
    for number in range(arguments.models + 1):
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for name, parameter in model.named_parameters() if number else ():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(base[name] + 0.1 * base[name].std().nan_to_num(0.1) * noise)
        target = folder / ("base" if number == 0 else f"m{number}")
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
        chosen = random.Random(number)
        rows = [
            {
                "input": " ".join(chosen.choices(WORDS, k=arguments.length)),
                "target": " ".join(chosen.choices(WORDS, k=arguments.length // 4)),
            }
            for _ in range(arguments.examples)
        ]
        (folder / f"d{number}.jsonl").write_text("\n".join(map(json.dumps, rows)))


class Products:
    """Counts products of linear layers."""

    def __init__(self) -> None:
        self.num = 0
        plain = nn.Linear.forward

        def forward(module: nn.Linear, x: Tensor) -> Tensor:
            self.num += x[..., 0].numel() * module.weight.numel()
            return plain(module, x)

        nn.Linear.forward = forward  # type: ignore[method-assign, assignment]

    def since(self, before: int) -> int:
        return self.num - before


def run_forward(folder: Path, number: int, model: str = "") -> Tensor:
    """A model, or another, once over its data, and nothing else: its likeliest tokens."""
    loaded = load_model(folder / (model or f"m{number}"), need_targets=False)
    examples = encode_all(loaded.task, read_data(folder / f"d{number}.jsonl"))
    said = []
    with torch.no_grad():
        for at in range(0, len(examples), BATCH):
            logits = loaded.model(**loaded.task.collate(examples[at : at + BATCH]).inputs).logits
            said.append(logits.argmax(-1).flatten())
    return torch.cat(said)


def compare(folder: Path, numbers: range) -> dict[str, float]:
    """The share of tokens that merged models say as each model does on its own data."""
    names = [str(folder / f"m{n}") for n in numbers]
    averaged = prepare_merge(make_recipe({"models": names, "method": "average"}))
    merge_to_folder(averaged, folder / "average")
    shares: dict[str, float] = dict.fromkeys(("average", "merged"), 0.0)
    for number in numbers:
        own = run_forward(folder, number)
        for name in shares:
            same = run_forward(folder, number, name) == own
            shares[name] += float(same.float().mean()) / len(numbers)
    return shares


def measure(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run in a process of its own, so that its memory can be watched."""
    torch.set_num_threads(1)
    keep_freed_memory()
    numbers = range(1, arguments.models + 1)
    products = Products()
    if arguments.child == "forward":
        begin = time.perf_counter()
        for number in numbers:
            run_forward(folder, number)
        return {"seconds": time.perf_counter() - begin, "products": products.num}
    if arguments.child == "compare":
        return compare(folder, numbers)
    phases = Phases()
    data = [{"path": str(folder / f"d{n}.jsonl"), "batch_size": BATCH} for n in numbers]
    recipe = {
        "base": str(folder / "base"),
        "models": [
            {"model": str(folder / f"m{n}"), "data": own}
            for n, own in zip(numbers, data, strict=True)
        ],
        "method": arguments.method,
    }
    prepared = prepare_merge(make_recipe(recipe))
    preparing = products.num
    executor = LocalExecutor(1, parse_bytes(arguments.max_memory))
    merge_to_folder(prepared, folder / "merged", RunOptions(executor, phases))
    return {
        "seconds": sum(phases.seconds().values()),
        "phases": phases.seconds(),
        "products": products.since(preparing),
        "preparing": preparing,
    }


def watch(folder: Path, child: str) -> tuple[dict[str, Any], int]:
    """What a process says, and the most memory it had."""
    command = [sys.executable, __file__, *sys.argv[1:], "--child", child, "--folder", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    most = peak_memory(process)
    assert process.stdout is not None
    text = process.stdout.read()
    if process.returncode:
        sys.exit(process.returncode)
    return json.loads(text.splitlines()[-1]), most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="all of T5-Large")
    parser.add_argument("--full-width", action="store_true", help="T5-Large with two blocks")
    parser.add_argument("--method", default="featcal", help="featcal, mats_cross, ...")
    parser.add_argument("--models", type=int, default=8)
    parser.add_argument("--examples", type=int, default=32, help="of each model")
    parser.add_argument("--length", type=int, default=32, help="words of an example")
    parser.add_argument("--max-memory", default="5GB")
    parser.add_argument("--folder", type=Path, help="where models are made, and then deleted")
    parser.add_argument("--child", choices=["forward", "merge", "compare"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(arguments.folder, arguments)))
        return
    size = Size(128, 352, 1, 1024)
    if arguments.full or arguments.full_width:
        size = LARGE if arguments.full else Size(LARGE.width, LARGE.inner, 1, LARGE.vocabulary)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as made:
        folder = Path(made)
        make_inputs(folder, size, arguments)
        plain, plain_bytes = watch(folder, "forward")
        found, most = watch(folder, "merge")
        shares, _ = watch(folder, "compare")
    print(f"{arguments.models} models, {2 * size.num_layers} blocks {size.width} wide, "
          f"{arguments.examples} examples each, {arguments.method}")  # fmt: skip
    for name, seconds in found["phases"].items():
        print(f"{name:28}{seconds:8.1f} s")
    print(f"{'a forward pass, with loading':28}{plain['seconds']:8.1f} s")
    passes = found["products"] / plain["products"]
    few = found["preparing"] / plain["products"]
    print(
        f"passes                      {passes:8.2f} (goal {GOAL_PASSES}), trying it out {few:.2f}"
    )
    merged, average = shares["merged"], shares["average"]
    print(f"says what the models say    {merged:8.1%} (their average {average:.1%})")
    print(f"memory of a forward pass    {format_bytes(plain_bytes)}")
    print(f"peak memory                 {format_bytes(most)}")
    if size.width == LARGE.width:
        whole = most + LARGE.num_bytes - size.num_bytes
        met = "met" if whole < GOAL_BYTES else "missed"
        print(f"of all of T5-Large          {format_bytes(whole)} (goal 8 GB: {met})")


if __name__ == "__main__":
    main()
