"""Adapters merged along the merged model: vectors of (IA)^3, and LoRA as output.

What an (IA)^3 vector x scales, n, and what model m has there, y* = l_m n*, are seen in plain passes
of PEFT's models. The systems are then solved here, in float64: each feature's by itself, or those of
all features at once where gradients at what is scaled weigh their errors.
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
RIDGE = 3.0
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
def test_vectors_scale_to_what_each_model_has(name: str, tmp_path: Path) -> None:
    """x_j = (sum_m E[n_j y*_j] + λ a_j) / (sum_m E[n_j²] + λ), models of the same size."""
    adapters = Adapters(name, IA3[name], tmp_path)
    found = {n: t.double() for n, t in adapters.merge().items()}
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


def dense_metric(adapters: Adapters, number: int) -> dict[str, Tensor]:
    """O of each vector: second moments of gradients at what is scaled, an example at a time.

    By the true Fisher: every class counts by its probability.
    """
    loaded = load_model(adapters.paths[number], need_targets=False)
    examples = encode_all(loaded.task, read_data(adapters.data[number]))
    found: dict[str, Tensor] = {}
    scaled: dict[str, Tensor] = {}
    for example in examples:
        hooks = []
        for name, module in loaded.model.named_modules():
            if hasattr(module, "is_feedforward"):

                def keep(
                    _: Any, given: Any, output: Tensor | None = None, name: str = name
                ) -> None:
                    at = given[0] if output is None else output
                    at.retain_grad()
                    scaled[f"{name}.ia3_l"] = at

                inner = module.base_layer if module.is_feedforward else module
                register = (
                    inner.register_forward_pre_hook
                    if module.is_feedforward
                    else inner.register_forward_hook
                )
                hooks.append(register(keep))
        loaded.model.requires_grad_(True)
        batch = loaded.task.collate([example])
        logits = loaded.model(**batch.inputs).logits
        for answer in range(logits.shape[-1]):
            for tensor in scaled.values():
                tensor.grad = None
            p = logits.detach().double().softmax(-1)[0, answer]
            logits.log_softmax(-1)[0, answer].backward(retain_graph=True)
            for name, tensor in scaled.items():
                assert tensor.grad is not None
                rows = tensor.grad.double().flatten(0, -2)
                found[name] = found.get(name, 0) + p * rows.mT @ rows / len(examples)
        for hook in hooks:
            hook.remove()
    return found


def own_statistics(adapters: Adapters, kinds: str = "kfac") -> list[Any]:
    """By the true Fisher, of data without labels; exactly, for three classes."""
    return [
        matsmerge.collect(path, data, kinds, fisher="true", num_samples=2)
        for path, data in zip(adapters.paths, adapters.data, strict=True)
    ]


def test_metrics_are_of_gradients_at_what_is_scaled(tmp_path: Path) -> None:
    adapters = Adapters("bert", IA3["bert"], tmp_path)
    for number, statistics in enumerate(own_statistics(adapters)):
        expected = dense_metric(adapters, number)
        scaled = adapters.scaled(dict(tensors(adapters.paths[number])), number)
        assert {f"{m.module}.ia3_l" for m in statistics.header.maps} == set(expected)
        for vector, metric in expected.items():
            module = vector.removesuffix(".ia3_l")
            torch.testing.assert_close(statistics.output_factor(module).double(), metric)
            n, _ = scaled[vector]
            torch.testing.assert_close(statistics.gram(module).double(), n.mT @ n / len(n))


def test_beside_metrics_blocks_of_the_fisher_information_are_what_they_are_alone(
    tmp_path: Path,
) -> None:
    """Gradients of a vector have a closed form where what it scales is watched."""
    adapters = Adapters("bert", IA3["bert"], tmp_path)
    alone = own_statistics(adapters, "block_fisher,fisher")[0]
    beside = own_statistics(adapters, "block_fisher,fisher,kfac")[0]
    names = alone.parameters("block_fisher")
    assert len(names) == 8
    for name in names:
        torch.testing.assert_close(beside.block_fisher(name), alone.block_fisher(name))
        torch.testing.assert_close(beside.fisher(name), alone.fisher(name))


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_errors_of_features_count_by_the_metric_of_outputs(name: str, tmp_path: Path) -> None:
    """sum_m (O_m ∘ E[n nᵀ]) x + λ x = sum_m (O_m ∘ E[n n*ᵀ]) l_m + λ a, in full."""
    adapters = Adapters(name, IA3[name], tmp_path)
    statistics = own_statistics(adapters)
    found = {n: t.double() for n, t in adapters.merge("mats_cross", statistics=statistics).items()}
    vectors = [{n: t.double() for n, t in tensors(path).items()} for path in adapters.paths]
    seen = [adapters.scaled(found, m) for m in range(2)]
    for vector, value in found.items():
        d = value.numel()
        start = torch.stack([v[vector] for v in vectors]).mean(0).flatten()
        left, right = torch.zeros(d, d, dtype=F64), torch.zeros(d, dtype=F64)
        for m in range(2):
            n, n_own = seen[m][vector]
            module = vector.removesuffix(".ia3_l")
            metric = statistics[m].output_factor(module).double()
            metric += RIDGE * metric.diagonal().mean() * torch.eye(d, dtype=F64)
            own = vectors[m][vector].flatten()
            # Of every example the gradient at x of the error's square, without moments.
            size = sum(float((r * (metric @ r.diag())).diagonal().sum()) for r in n) / len(n)
            for row, row_own in zip(n, n_own, strict=True):
                scaling = row.diag()
                left += scaling @ metric @ scaling / len(n) / size
                right += scaling @ metric @ (row_own * own) / len(n) / size
        strength = ANCHOR * left.trace() / d
        expected = torch.linalg.solve(
            left + strength * torch.eye(d, dtype=F64), right + strength * start
        )
        assert torch.allclose(value.flatten(), expected, rtol=1e-5, atol=1e-7), vector


def test_where_inputs_are_the_models_own_metrics_weigh_plain_moments(tmp_path: Path) -> None:
    """Nothing is merged before the first keys: the system is that of statistics alone."""
    adapters = Adapters("bert", IA3["bert"], tmp_path)
    statistics = own_statistics(adapters)
    options = {"statistics": statistics, "output_ridge": 1.0, "solver": "closed_form"}
    options |= {"objective": "kfac_scales", "equalize": True}
    along = adapters.merge("mats", **options, inputs="merged")
    plain = adapters.merge("mats", **options, data=None)
    first, later = (f"{PREFIX}bert.encoder.layer.{i}.attention.self.key.ia3_l" for i in range(2))
    torch.testing.assert_close(along[first], plain[first], rtol=1e-6, atol=1e-9)
    assert not torch.allclose(along[later], plain[later], rtol=1e-3)


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
    adapters = Adapters("bert", IA3["bert"], tmp_path)
    first = tensors(adapters.paths[0])
    data = adapters.data
    same = shutil.copytree(adapters.paths[0], tmp_path / "same")
    for paths in (adapters.paths[:1], [adapters.paths[0], same]):
        found = merge(
            paths, base=adapters.base, method="mats_cross", init="average", data=data[: len(paths)]
        )
        for name, expected in first.items():
            torch.testing.assert_close(found[name].double(), expected.double(), rtol=1e-9, atol=0)


@pytest.mark.parametrize("method", [pytest.param("featcal", marks=pytest.mark.long), "mats_cross"])
def test_order_does_not_matter(method: str, tmp_path: Path) -> None:
    adapters = Adapters("bert", IA3["bert"], tmp_path)
    found = adapters.merge(method)
    turned = merge(
        adapters.paths[::-1], base=adapters.base, method=method, init="average",
        data=adapters.data[::-1],
    )  # fmt: skip
    for name, expected in found.items():
        torch.testing.assert_close(turned[name], expected, rtol=1e-9, atol=1e-12)


def test_with_a_large_ridge_features_count_alike(tmp_path: Path) -> None:
    """A metric that is nearly the identity is none; nor is it one in a stage without metric."""
    adapters = Adapters("bert", IA3["bert"], tmp_path)
    expected = adapters.merge("featcal")
    alike = adapters.merge("mats_cross", output_ridge=1e9)
    stages = [
        {"objective": {"name": "kfac", "equalize": True}},
        {"objective": {"name": "gram", "equalize": True}, "solver": "closed_form"},
    ]
    last = adapters.merge("mats", inputs="merged", stages=stages)
    plain = adapters.merge("featcal", anchor=0.0)
    for name, value in expected.items():
        torch.testing.assert_close(alike[name], value, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(last[name], plain[name], rtol=1e-6, atol=1e-8)


def test_metrics_from_statistics_alone(tmp_path: Path) -> None:
    """sum_m (O_m ∘ G_m) x = sum_m (O_m ∘ G_m) l_m, without data; also of a rank."""
    adapters = Adapters("bert", IA3["bert"], tmp_path)
    statistics = own_statistics(adapters)
    options = {"data": None, "statistics": statistics, "objective": "kfac_scales"}
    found = adapters.merge("mats", **options, solver="closed_form", output_ridge=0.5)
    vectors = [tensors(path) for path in adapters.paths]
    for vector, value in found.items():
        module, d = vector.removesuffix(".ia3_l"), value.numel()
        left, right = torch.zeros(d, d, dtype=F64), torch.zeros(d, dtype=F64)
        for own, one in zip(vectors, statistics, strict=True):
            metric = one.output_factor(module).double()
            metric = metric + 0.5 * metric.diagonal().mean() * torch.eye(d, dtype=F64)
            block = metric * one.gram(module).double()
            left += block
            right += block @ own[vector].double().flatten()
        expected = torch.linalg.solve(left, right)
        torch.testing.assert_close(value.double().flatten(), expected, rtol=1e-5, atol=1e-7)


def test_kfac_itself_is_not_for_vectors(tmp_path: Path) -> None:
    adapters = Adapters("bert", IA3["bert"], tmp_path)
    with pytest.raises(RecipeError, match="Use the objective block_fisher.* kfac_scales"):
        adapters.merge("mats_kfac", data=None, statistics=own_statistics(adapters))


def test_vectors_are_written_as_an_adapter_or_folded(tmp_path: Path) -> None:
    adapters = Adapters("bert", IA3["bert"], tmp_path)
    expected = adapters.merge("mats_cross")
    for output in ("adapter", "dense"):
        adapters.merge("mats_cross", output=output, out=tmp_path / output)
        notes = json.loads((tmp_path / output / "merge.json").read_text())["notes"]
        assert [note for note in notes if "collected from the data beforehand: kfac" in note]
    written = tensors(tmp_path / "adapter")
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[n], expected[n]) for n in expected)
    put_on(adapters.base, tmp_path / "adapter")
    save_file(dict(expected), adapters.paths[0] / "adapter_model.safetensors")
    model = matsmerge.open_checkpoint(tmp_path / "dense")
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


@pytest.mark.parametrize("name", ["bert", pytest.param("t5", marks=pytest.mark.long)])
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
