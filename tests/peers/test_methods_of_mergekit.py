"""Methods that are mergekit's, on the same files from the same YAML; all its merges in one run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from mergekit_process import IS_THERE, WHY_NOT, merge_by_mergekit
from safetensors.torch import load_file, save_file

from matsmerge.cli import main

pytestmark = pytest.mark.skipif(not IS_THERE, reason=WHY_NOT)

# What each recipe says besides its method: models, then parameters of the merge, then of models.
ALL = ("a", "b", "c")
OWN = {"weight": [0.3, 0.5, 0.9], "density": [0.4, 0.6, 0.5]}
RECIPES: dict[str, tuple[str, str, dict[str, Any], list[str]]] = {
    "nuslerp": ("nuslerp", "ab", {}, ["weight"]),
    "nuslerp-changes": ("nuslerp", "ab base", {}, ["weight"]),
    "nuslerp-rows": ("nuslerp", "ab", {"nuslerp_flatten": False}, ["weight"]),
    "nuslerp-columns": (
        "nuslerp", "ab base", {"nuslerp_flatten": False, "nuslerp_row_wise": True}, ["weight"]
    ),
    "multislerp": ("multislerp", "abc", {}, ["weight"]),
    "multislerp-changes": ("multislerp", "abc base", {"normalize_weights": False}, ["weight"]),
    "karcher": ("karcher", "abc", {}, []),
    "breadcrumbs": ("breadcrumbs", "abc base", {"gamma": 0.1, "lambda": 0.8}, [*OWN]),
    "breadcrumbs-rescaled": ("breadcrumbs", "abc base", {"rescale": True}, [*OWN]),
    "breadcrumbs_ties": ("breadcrumbs_ties", "abc base", {"normalize": True}, [*OWN]),
    "ties-rescaled": ("ties", "abc base", {"rescale": True}, [*OWN]),
    "della-whole": ("della", "abc base", {"epsilon": 0.1}, ["weight"]),
    "della_linear-whole": ("della_linear", "abc base", {}, ["weight"]),
    "sce": ("sce", "abc base", {}, []),
    "sce-selected": ("sce", "abc base", {"select_topk": 0.3}, []),
    "ram": ("ram", "abc base", {"epsilon": 0.05}, []),
    "ramplus_tl": ("ramplus_tl", "abc base", {"epsilon": 0.05, "r": 0.4, "alpha": 1.0}, []),
    "nearswap": ("nearswap", "a base", {"t": 0.03}, []),
    "arcee_fusion": ("arcee_fusion", "a base", {}, []),
}  # fmt: skip
# What is kept depends on rounding, which mergekit does after every step, in bfloat16 much.
CHOOSING = ("breadcrumbs", "ties", "sce-selected", "ram", "arcee_fusion")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models in two dtypes, all recipes, and what mergekit makes of them."""
    folder: Path = tmp_path_factory.mktemp("peers")
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (64, 32),
        "model.norm.weight": (32,),
    }
    for i in range(2):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.self_attn.{p}_proj.weight": (32, 32) for p in "qkvo"}
        shapes |= {f"{layer}.mlp.{p}_proj.weight": (48, 32) for p in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj.weight": (32, 48)}
        shapes |= {f"{layer}.{n}_layernorm.weight": (32,) for n in ("input", "post_attention")}
    shapes |= {"lm_head.weight": (64, 32)}
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4, "vocab_size": 64, "tie_word_embeddings": False,
    }  # fmt: skip
    g = torch.Generator().manual_seed(0)
    base = {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}
    shared = {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}
    for name in ("base", *ALL):
        state = {
            n: v + (name != "base") * 0.05 * (torch.randn(v.shape, generator=g) + shared[n])
            for n, v in base.items()
        }
        for dtype in ("float32", "bfloat16"):
            place = folder / dtype / name
            place.mkdir(parents=True)
            (place / "config.json").write_text(json.dumps(config | {"torch_dtype": dtype}))
            stored = {n: v.to(getattr(torch, dtype)) for n, v in state.items()}
            save_file(stored, place / "model.safetensors", metadata={"format": "pt"})
    for dtype in ("float32", "bfloat16"):
        for name in RECIPES:
            path = folder / f"{dtype}-{name}.yaml"
            path.write_text(yaml.safe_dump(recipe(name, folder / dtype)))
            merge_by_mergekit(path, path.with_suffix(""))
    return folder


def recipe(name: str, models: Path) -> dict[str, object]:
    method, who, shared, own = RECIPES[name]
    letters, _, base = who.partition(" ")
    entries = [
        {"model": str(models / m), "parameters": {key: OWN[key][i] for key in own}}
        for i, m in enumerate(letters)
    ]
    return {
        "merge_method": method, "models": entries, "parameters": shared, "dtype": models.name,
        **({"base_model": str(models / base)} if base else {}),
    }  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", RECIPES)
def test_agrees(name: str, dtype: str, folder: Path, tmp_path: Path) -> None:
    if (name, dtype) == ("arcee_fusion", "bfloat16"):
        pytest.skip("divergences of near distributions are lost in bfloat16, as mergekit computes")
    path = folder / f"{dtype}-{name}.yaml"
    assert main.run(["merge", str(path), "--out", str(tmp_path / "ours"), "--quiet"]) == 0
    ours = load_file(tmp_path / "ours" / "model.safetensors")
    found = path.with_suffix("").glob("*.safetensors")
    theirs = {k: v for p in found for k, v in load_file(p).items()}
    assert ours.keys() == theirs.keys()
    epsilon = torch.finfo(getattr(torch, dtype)).eps
    num_off = num = 0
    for key, value in theirs.items():
        a, b = ours[key].double(), value.double()
        # Some round every model, weight and product in turn.
        num_off += int(((a - b).abs() > 8 * epsilon * b.abs().max()).sum())
        num += a.numel()
    is_choosing = any(name.startswith(chosen) for chosen in CHOOSING)
    allowed = num // (30 if dtype == "bfloat16" else 5000) if is_choosing else 0
    assert num_off <= allowed, f"{num_off} of {num} entries differ"
