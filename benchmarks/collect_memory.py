"""Collecting statistics of a Llama-shaped model of 1.1 billion parameters: memory that it takes.

    python benchmarks/collect_memory.py            # 22 layers in bfloat16, 64 x 128 tokens
    python benchmarks/collect_memory.py --quick    # 2 layers, 4 examples

The model has random weights and is written as sharded safetensors to a temporary folder, which
needs 2.2 GB of disk. `mats collect` is run on it with all of the model in memory, and with
--max-memory block by block, each in a process of its own. Memory is that process's (proportional
set size, sampled), interpreter and libraries included. Goals: the bytes of the
model and 2 GB with all of it in memory, 2 GB in all block by block. Statistics are of the default
form; what is put behind `--` is passed on to `mats collect`, such as `--model-dtype float32` for
processors that have no bfloat16.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from merge_throughput import peak_memory
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from matsmerge.byte_sizes import format_bytes

VOCABULARY, NUM_TOKENS = 32000, 128
GOAL_BYTES = 2_000_000_000


def make_model(folder: Path, num_layers: int) -> int:
    """Write a model shard by shard, without having it in memory; returns its bytes."""
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=num_layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        vocab_size=VOCABULARY,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
        torch_dtype="bfloat16",
    )
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in LlamaForCausalLM(config).named_parameters()}
    shards: dict[str, list[str]] = {}
    for name in shapes:
        layer = name.split(".")[2] if name.startswith("model.layers.") else "outside"
        shards.setdefault(f"model-{layer}.safetensors", []).append(name)
    generator = torch.Generator().manual_seed(0)
    num_bytes = 0
    for file, names in shards.items():
        tensors = {}
        for name in names:
            values = torch.ones(shapes[name])
            if len(shapes[name]) > 1:
                values.uniform_(-0.03, 0.03, generator=generator)
            tensors[name] = values.to(torch.bfloat16)
            num_bytes += tensors[name].nbytes
        save_file(tensors, folder / file, {"format": "pt"})
    places = {name: file for file, names in shards.items() for name in names}
    index = {"metadata": {"total_size": num_bytes}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config.save_pretrained(folder)
    words = {"<unk>": 0, "</s>": 1, "<pad>": 2} | {f"w{i}": i for i in range(3, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(folder)
    return num_bytes


def make_data(path: Path, num_examples: int) -> None:
    drawn = random.Random(0)
    with path.open("w") as file:
        for _ in range(num_examples):
            words = [f"w{drawn.randrange(3, VOCABULARY)}" for _ in range(NUM_TOKENS)]
            file.write(json.dumps({"text": " ".join(words)}) + "\n")


def measure(folder: Path, options: list[str]) -> tuple[int, float, int] | None:
    """Peak memory and seconds of a collection, and the size of its file; None if it fails."""
    out = folder / "statistics.safetensors"
    command = [sys.executable, "-m", "matsmerge", "collect", str(folder / "model"), "--overwrite"]
    command += ["--rank", "auto"]
    command += ["--data", str(folder / "data.jsonl"), "--out", str(out), "--quiet", *options]
    begin = time.perf_counter()
    # Pieces of heap that are freed and not given back would be counted, in any program.
    process = subprocess.Popen(command, env=os.environ | {"MALLOC_ARENA_MAX": "1"})
    most = peak_memory(process)
    if process.returncode:
        return None
    num_bytes = out.stat().st_size
    out.unlink()
    return most, time.perf_counter() - begin, num_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="2 layers and 4 examples")
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--examples", type=int, default=64)
    parser.add_argument("--max-memory", default="1.4GB", help="block by block")
    parser.add_argument("--ways", default="whole,blocks", help="which to measure")
    parser.add_argument("--folder", type=Path, help="where the temporary folder is made")
    parser.add_argument("collect", nargs="*", help="options of mats collect, after --")
    given = parser.parse_args()
    num_layers, num_examples = (2, 4) if given.quick else (given.layers, given.examples)
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        (folder / "model").mkdir()
        num_bytes = make_model(folder / "model", num_layers)
        make_data(folder / "data.jsonl", num_examples)
        print(f"model {format_bytes(num_bytes)}, {num_examples} x {NUM_TOKENS} tokens", flush=True)
        ways = {
            "whole": ("all of the model in memory", [], num_bytes + GOAL_BYTES),
            "blocks": ("block by block", ["--max-memory", given.max_memory], GOAL_BYTES),
        }
        for way in given.ways.split(","):
            title, options, goal = ways[way]
            found = measure(folder, [*options, *given.collect])
            if found is None:
                print(f"{title:28}failed")
                continue
            most, seconds, size = found
            met = "met" if most <= goal else "missed"
            print(
                f"{title:28}peak {format_bytes(most)} (goal {format_bytes(goal)}: {met}), "
                f"{seconds:.0f} s, file {format_bytes(size)}",
                flush=True,
            )


if __name__ == "__main__":
    main()
