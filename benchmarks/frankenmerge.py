"""Stacking layers of two models into a longer one: memory does not grow with the model.

    python benchmarks/frankenmerge.py               # writes 3.2 and 9.5 GB, one after the other
    python benchmarks/frankenmerge.py --layers 4    # a quick trial

Layers are those of Llama-2-13B (634 MB in bfloat16). The result has the first of A's and the last
of B's, which overlap, in mergekit's YAML by `mats mergekit`. Inputs are sparse files of zeros,
which take no room; the output is written whole, and deleted. Peak memory is that of the command and
all its processes, looked at 20 times a second, less that of an interpreter that has only imported
torch. Planned memory, which --dry-run says, is printed beside it, and alone for results that are
not written.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from merge_throughput import run

from matsmerge.checkpoints.checkpoint import TensorSpec
from matsmerge.checkpoints.safetensors_header import encode_header

HIDDEN, INTERMEDIATE, VOCABULARY = 5120, 13824, 32000


def specs(num_layers: int) -> dict[str, TensorSpec]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for i in range(num_layers):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.self_attn.{p}_proj.weight": (HIDDEN, HIDDEN) for p in "qkvo"}
        shapes |= {f"{layer}.mlp.{p}_proj.weight": (INTERMEDIATE, HIDDEN) for p in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj.weight"] = (HIDDEN, INTERMEDIATE)
        norms = ("input_layernorm", "post_attention_layernorm")
        shapes |= {f"{layer}.{norm}.weight": (HIDDEN,) for norm in norms}
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}
    return {name: TensorSpec(torch.bfloat16, shape) for name, shape in shapes.items()}


def make_model(folder: Path, num_layers: int) -> Path:
    """A model of zeros that takes no room on disk."""
    folder.mkdir()
    tensors = specs(num_layers)
    header, _ = encode_header(tensors, {"format": "pt"})
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(spec.num_bytes for spec in tensors.values()))
    config: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    config |= {"num_hidden_layers": num_layers, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_recipe(folder: Path, num_layers: int) -> Path:
    """Two models that give the result so many layers, half of which overlap, and how."""
    each, shared = num_layers // 2, num_layers // 4
    a, b = (make_model(folder / name, each + shared) for name in "AB")
    ranges = [(a, [0, each]), (b, [shared, each + shared])]
    slices = [{"sources": [{"model": str(m), "layer_range": r}]} for m, r in ranges]
    file = folder / "recipe.yml"
    recipe = {"merge_method": "passthrough", "dtype": "bfloat16", "slices": slices}
    file.write_text(json.dumps(recipe))
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 14], help="of results")
    parser.add_argument("--planned", type=int, nargs="+", default=[62], help="not written")
    parser.add_argument("--folder", type=Path, help="where to work (needs the size of one result)")
    arguments = parser.parse_args()
    imports = [sys.executable, "-c", "import torch, safetensors.torch, time; time.sleep(0.5)"]
    interpreter = run(imports).peak_bytes
    mats = [sys.executable, "-m", "matsmerge"]
    print(f"interpreter with torch: {interpreter / 1e6:.0f} MB")
    print(f"{'layers':>6} {'GB':>6} {'s':>7} {'planned MB':>11} {'peak MB':>8}")
    for num_layers in (*arguments.layers, *arguments.planned):
        with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
            file = write_recipe(Path(name), num_layers)
            asked = [*mats, "merge", str(file), "--dry-run", "--json"]
            said = subprocess.run(asked, check=True, capture_output=True, text=True).stdout
            plan = json.loads(said)
            row = f"{num_layers:6} {plan['output_bytes'] / 1e9:6.1f}"
            planned = f"{plan['peak_bytes'] / 1e6:11.0f}"
            if num_layers in arguments.planned:
                print(f"{row} {'-':>7} {planned} {'-':>8}")
                continue
            command = [*mats, "mergekit", str(file), str(Path(name) / "out"), "--quiet"]
            seconds, peak, _ = run(command)
            shutil.rmtree(Path(name) / "out")
            print(f"{row} {seconds:7.1f} {planned} {(peak - interpreter) / 1e6:8.0f}", flush=True)


if __name__ == "__main__":
    main()
