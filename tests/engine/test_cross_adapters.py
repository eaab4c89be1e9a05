"""Adapters merged along the merged model: vectors of (IA)^3, and LoRA as output.

What an (IA)^3 vector x scales, n, and what model m has there, y* = l_m n*, are seen in plain passes
of PEFT's models. Each feature's system is then solved here by itself, in float64.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig
from peft_models import adapt, config_of, fold, make_base, put_on, tensors
from prefix_families import TEXTS, merge
from safetensors.torch import load_file, save_file
from tiny_models import make_tokenizer, write_rows
from torch import Tensor

import matsmerge
from matsmerge.data.rows import read_data
from matsmerge.errors import RecipeError
from matsmerge.tasks.loaded_model import load_model
from matsmerge.tasks.task import encode_all

F64 = torch.float64
ANCHOR = 0.02
PREFIX = "base_model.model."
IA3 = {
    "bert": IA3Config(
        target_modules=["key", "value", "output.dense"], feedforward_modules=["output.dense"]
    ),
    "t5": IA3Config(target_modules=["k", "v", "wo"], feedforward_modules=["wo"]),
    "gpt2": IA3Config(
        target_modules=["c_attn", "mlp.c_proj"], feedforward_modules=["mlp.c_proj"],
        fan_in_fan_out=True,
    ),
}  # fmt: skip
LORA = {
    "bert": LoraConfig(r=3, target_modules=["key", "value", "output.dense"]),
    "t5": LoraConfig(r=3, target_modules=["q", "v", "wo"]),
}


class Adapters:
    """Two adapters on a base, both in float64, and their data."""

    def __init__(self, name: str, config: Any, folder: Path) -> None:
        self.base = make_base(name, folder / "base")
        make_tokenizer().save_pretrained(self.base)
        self.widen(self.base / "model.safetensors")
        self.paths = [adapt(self.base, config, folder / f"a{i}", seed=i + 1) for i in range(2)]
        self.data = []
        for i, path in enumerate(self.paths):
            self.widen(path / "adapter_model.safetensors")
            self.data.append(folder / f"d{i}.jsonl")
            rows = [{"text": t, "input": t, "target": t[:3]} for t in TEXTS[i]]
            write_rows(self.data[i], rows)

    @staticmethod
    def widen(file: Path) -> None:
        save_file({n: t.double() for n, t in load_file(file).items()}, file, {"format": "pt"})

    def merge(self, method: str = "featcal", **options: Any) -> Any:
        given: dict[str, Any] = {"data": self.data, "init": "average", "base": self.base}
        return merge(self.paths, method=method, **given | options)

    def scaled(self, merged: dict[str, Tensor], number: int) -> dict[str, tuple[Tensor, Tensor]]:
        """What vectors scale in the merged model and in one of its own, of real rows."""
        loaded = load_model(self.paths[number], need_targets=False)
        rows = read_data(self.data[number])
        batches = [loaded.task.collate([e]) for e in encode_all(loaded.task, rows)]
        own = _watch(loaded.model, batches)
        with torch.no_grad():
            for name, tensor in loaded.names.items():
                loaded.model.get_parameter(name).copy_(merged[tensor])
        found = _watch(loaded.model, batches)
        return {name: (found[name], own[name]) for name in own}


def _watch(model: Any, batches: list[Any]) -> dict[str, Tensor]:
    """What each vector scales, by the vector's name in the adapter."""
    rows: dict[str, list[Tensor]] = {}
    masks: list[Tensor] = []
    hooks = []
    for name, module in model.named_modules():
        if hasattr(module, "is_feedforward"):

            def keep(module: Any, args: Any, output: Tensor, name: str = name) -> None:
                n = args[0] if module.is_feedforward else module.base_layer(args[0])
                real = [mask for mask in masks if mask.shape == n.shape[:-1]]
                own = n[real[0]] if real else n.flatten(0, -2)
                rows.setdefault(f"{name}.ia3_l", []).append(own.double())

            hooks.append(module.register_forward_hook(keep))
    with torch.no_grad():
        for batch in batches:
            masks[:] = batch.row_masks
            model(**batch.inputs)
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(own) for name, own in rows.items()}


@pytest.mark.parametrize("name", ["bert", "t5", "gpt2"])
@pytest.mark.parametrize("method", ["featcal", "mats_cross"])
def test_vectors_scale_to_what_each_model_has(name: str, method: str, tmp_path: Path) -> None:
    """x_j = (sum_m E[n_j y*_j] + λ a_j) / (sum_m E[n_j²] + λ), models of the same size."""
    adapters = Adapters(name, IA3[name], tmp_path)
    found = {n: t.double() for n, t in adapters.merge(method).items()}
    vectors = [{n: t.double() for n, t in tensors(path).items()} for path in adapters.paths]
    seen = [adapters.scaled(found, m) for m in range(2)]
    assert set(seen[0]) == set(found)
    for vector, value in found.items():
        start = torch.stack([v[vector] for v in vectors]).mean(0)
        above, below = torch.zeros(value.numel(), dtype=F64), torch.zeros(value.numel(), dtype=F64)
        for own, (n, n_own) in zip(vectors, (s[vector] for s in seen), strict=True):
            size = n.square().mean(0).sum()
            above += (n * n_own * own[vector].flatten()).mean(0) / size
            below += n.square().mean(0) / size
        strength = ANCHOR * 2 / value.numel()
        expected = (above + strength * start.flatten()) / (below + strength)
        assert torch.allclose(value.flatten(), expected, rtol=1e-6, atol=1e-8), vector
        assert not torch.allclose(expected, start.flatten(), rtol=1e-2)


def test_where_inputs_are_the_models_own_vectors_have_plain_moments(tmp_path: Path) -> None:
    """Nothing is merged before the first keys: x_j = sum_m E[n_j²] l_mj / sum_m E[n_j²]."""
    adapters = Adapters("bert", IA3["bert"], tmp_path)
    found = adapters.merge(anchor=0.0)
    vectors = [tensors(path) for path in adapters.paths]
    seen = [adapters.scaled({n: t.double() for n, t in found.items()}, m) for m in range(2)]
    first, later = (f"{PREFIX}bert.encoder.layer.{i}.attention.self.key.ia3_l" for i in range(2))
    moments = []
    for scaled in seen:
        n, n_own = scaled[first]
        torch.testing.assert_close(n, n_own, rtol=0, atol=0)
        assert not torch.allclose(*scaled[later], rtol=1e-3)
        moments.append(n.square().mean(0) / n.square().mean(0).sum())
    above = sum(g * v[first].double().flatten() for g, v in zip(moments, vectors, strict=True))
    expected = above / (moments[0] + moments[1])
    torch.testing.assert_close(found[first].double().flatten(), expected, rtol=1e-6, atol=1e-9)


def test_one_adapter_and_equal_ones_stay_what_they_are(tmp_path: Path) -> None:
    adapters = Adapters("t5", IA3["t5"], tmp_path)
    first = tensors(adapters.paths[0])
    data = adapters.data
    same = shutil.copytree(adapters.paths[0], tmp_path / "same")
    for paths in (adapters.paths[:1], [adapters.paths[0], same]):
        found = merge(
            paths, base=adapters.base, method="mats_cross", init="average", data=data[: len(paths)]
        )
        for name, expected in first.items():
            torch.testing.assert_close(found[name].double(), expected.double(), rtol=1e-9, atol=0)


def test_order_does_not_matter(tmp_path: Path) -> None:
    adapters = Adapters("bert", IA3["bert"], tmp_path)
    found = adapters.merge()
    turned = merge(
        adapters.paths[::-1], base=adapters.base, method="featcal", init="average",
        data=adapters.data[::-1],
    )  # fmt: skip
    for name, expected in found.items():
        torch.testing.assert_close(turned[name], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("output", ["adapter", "dense"])
def test_vectors_are_written_as_an_adapter_or_folded(output: str, tmp_path: Path) -> None:
    adapters = Adapters("t5", IA3["t5"], tmp_path)
    expected = adapters.merge("mats_cross")
    adapters.merge("mats_cross", output=output, out=tmp_path / "merged")
    notes = json.loads((tmp_path / "merged" / "merge.json").read_text())["notes"]
    assert not [note for note in notes if "collected from the data" in note]  # no metric, no pass
    if output == "adapter":
        written = tensors(tmp_path / "merged")
        assert written.keys() == expected.keys()
        assert all(torch.equal(written[n], expected[n]) for n in expected)
        put_on(adapters.base, tmp_path / "merged")
    else:
        save_file(dict(expected), adapters.paths[0] / "adapter_model.safetensors")
        model = matsmerge.open_checkpoint(tmp_path / "merged")
        for name, value in fold(adapters.base, adapters.paths[0]).items():
            if name in model.specs:
                torch.testing.assert_close(model[name].double(), value, rtol=1e-6, atol=1e-9)


def test_vectors_of_different_modules_are_refused(tmp_path: Path) -> None:
    adapters = Adapters("t5", IA3["t5"], tmp_path)
    fewer = IA3Config(target_modules=["k", "wo"], feedforward_modules=["wo"])
    adapters.paths[1] = adapt(adapters.base, fewer, tmp_path / "fewer", seed=3)
    adapters.widen(adapters.paths[1] / "adapter_model.safetensors")
    with pytest.raises(RecipeError, match="scale different modules, such as '.*v'"):
        adapters.merge()


def test_weights_of_vectors_are_no_targets(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="match what they scale with mats_cross or featcal"):
        Adapters("t5", IA3["t5"], tmp_path).merge("regmean++")


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_a_lora_of_full_rank_is_the_full_model(name: str, tmp_path: Path) -> None:
    """Of the weights that adapters change; all others stay the base's."""
    adapters = Adapters(name, LORA[name], tmp_path)
    changed = {f"{m}.weight" for m in _modules(adapters.paths[0])}
    others = [n for n in matsmerge.open_checkpoint(adapters.base).specs if n not in changed]
    kept = [{"match": n, "method": {"name": "passthrough", "model": "base"}} for n in others]
    expected = adapters.merge(output="dense", bias=False, overrides=kept)
    adapters.merge(bias=False, rank=16, out=tmp_path / "merged")
    found = fold(adapters.base, tmp_path / "merged")
    assert len(changed) >= 6
    for weight in changed:
        torch.testing.assert_close(
            found[weight].double(), expected[weight].double(), rtol=1e-4, atol=1e-4
        )


def _modules(adapter: Path) -> set[str]:
    return {n.partition(".lora_")[0].removeprefix(PREFIX) for n in tensors(adapter)}


def test_layers_see_the_factors_of_those_before(tmp_path: Path) -> None:
    """Each weight is merged on what the truncated ones before it make of the data.

    The first layer's change is nearest to its dense merge; a later one's inputs are not those of
    the dense merge, and it is not truncated from that.
    """
    adapters = Adapters("bert", LORA["bert"], tmp_path)
    adapters.merge(bias=False, rank=1, out=tmp_path / "one")
    adapters.merge(bias=False, rank=16, out=tmp_path / "whole")
    base = {n: t.double() for n, t in load_file(adapters.base / "model.safetensors").items()}
    one, whole = (fold(adapters.base, tmp_path / name) for name in ("one", "whole"))
    far = []
    for module in sorted(_modules(adapters.paths[0])):
        weight = f"{module}.weight"
        u, s, v = torch.linalg.svd(whole[weight].double() - base[weight])
        nearest = s[0] * u[:, :1] @ v[:1]
        change = one[weight].double() - base[weight]
        assert torch.linalg.matrix_rank(change, rtol=1e-5) == 1
        far.append(float((change - nearest).norm() / nearest.norm()))
    assert min(far) < 1e-6
    assert max(far) > 1e-3
    assert config_of(tmp_path / "one")["r"] == 1
    kept = json.loads((tmp_path / "one" / "merge.json").read_text())["lora"]
    assert all(0 < layer["energy"] < 1 for layer in kept.values())
