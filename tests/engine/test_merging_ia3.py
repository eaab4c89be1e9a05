"""(IA)^3 merged: vectors against dense formulas from the all-ones start, functions against PEFT."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config
from peft_models import (
    adapt,
    assert_same_function,
    config_of,
    load,
    logits,
    make_base,
    put_on,
    tensors,
)
from safetensors.torch import load_file
from tiny_models import bert_config, save
from torch import Tensor
from transformers import BertForSequenceClassification, BertModel

import matsmerge

Bases = Callable[[str], Path]
Vectors = dict[str, Tensor]
F64 = torch.float64

LLAMA = IA3Config(
    target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
)
# Two adapters for each architecture that share some of their modules.
PAIRS: dict[str, tuple[IA3Config, IA3Config]] = {
    "bert": (
        IA3Config(target_modules=["key", "output.dense"], feedforward_modules=["output.dense"]),
        IA3Config(target_modules=["key", "value"], feedforward_modules=[]),
    ),
    "gpt2": (
        IA3Config(
            target_modules=["c_attn", "mlp.c_proj"],
            feedforward_modules=["mlp.c_proj"],
            fan_in_fan_out=True,
        ),
        IA3Config(
            target_modules=["c_attn", "attn.c_proj"],
            feedforward_modules=["attn.c_proj"],
            fan_in_fan_out=True,
        ),
    ),
    "llama": (
        IA3Config(target_modules=r".*\.(k|v)_proj", feedforward_modules=[]),
        IA3Config(target_modules=["v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    ),
    "t5": (
        IA3Config(target_modules=["k", "v", "wo"], feedforward_modules=["wo"]),
        IA3Config(target_modules=["k", "wi"], feedforward_modules=[]),
    ),
    "vit": (
        IA3Config(target_modules=["projection", "k_proj"], feedforward_modules=["projection"]),
        IA3Config(target_modules=["projection", "fc2"], feedforward_modules=["projection", "fc2"]),
    ),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Bases:
    return cache(lambda name: make_base(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="module")
def llamas(bases: Bases, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three adapters with the same modules."""
    folder = tmp_path_factory.mktemp("llamas")
    return [adapt(bases("llama"), LLAMA, folder / f"ia3-{i}", seed=i + 1) for i in range(3)]


@pytest.fixture(scope="module")
def pairs(bases: Bases, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Path]]:
    def make(architecture: str) -> list[Path]:
        folder = tmp_path_factory.mktemp("pair")
        return [
            adapt(bases(architecture), config, folder / f"ia3-{i}", seed=i + 1)
            for i, config in enumerate(PAIRS[architecture])
        ]

    return cache(make)


def check(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name].float(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("average", {}),
        ("task_arithmetic", {}),
        ("ties", {"density": 1.0}),
        ("dare_linear", {"density": 1.0}),
        ("model_stock", {}),
    ],
)
def test_one_adapter_comes_back_bit_by_bit(
    method: str, parameters: Any, llamas: list[Path], tmp_path: Path
) -> None:
    out = matsmerge.merge(llamas[:1], None, method, out=tmp_path / "out", **parameters).folder
    found, expected = tensors(out), tensors(llamas[0])
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    kept, given = config_of(out), config_of(llamas[0])
    for key in ("peft_type", "base_model_name_or_path", "feedforward_modules"):
        assert kept[key] == given[key]


@pytest.mark.parametrize(
    ("method", "parameters"),
    [("average", {}), ("ties", {"density": 1.0}), ("model_stock", {}), ("slerp", {})],
)
def test_identical_adapters_merge_to_themselves(
    method: str, parameters: Any, llamas: list[Path], tmp_path: Path
) -> None:
    shutil.copytree(llamas[0], tmp_path / "copy")
    found = matsmerge.merge([llamas[0], tmp_path / "copy"], None, method, **parameters)
    check(found, tensors(llamas[0]))


@pytest.mark.parametrize(
    ("method", "parameters"),
    [("average", {}), ("ties", {"density": 0.3}), ("dare_ties", {"density": 0.4})],
)
def test_order_does_not_matter(method: str, parameters: Any, llamas: list[Path]) -> None:
    models = {f"model{i}": path for i, path in enumerate(llamas)}
    found = matsmerge.merge(models, None, method, **parameters)
    turned = matsmerge.merge(dict(reversed(models.items())), None, method, **parameters)
    check(turned, found)


# --- Formulas ------------------------------------------------------------------------------------


def task_vectors(models: Sequence[Path]) -> list[Vectors]:
    """What each adapter changes of the all-ones start; what it lacks it leaves at one."""
    stored = [tensors(model) for model in models]
    ones = {n: torch.ones_like(v).double() for state in stored for n, v in state.items()}
    return [{n: state.get(n, one).double() - one for n, one in ones.items()} for state in stored]


def from_ones(changes: Vectors) -> Vectors:
    return {name: 1 + change for name, change in changes.items()}


def test_averages(llamas: list[Path]) -> None:
    weights = [1.0, 2.0, 0.5]
    found = matsmerge.merge(llamas, weights=weights)
    deltas = task_vectors(llamas)
    check(
        found,
        from_ones(
            {n: sum(w * d[n] for w, d in zip(weights, deltas, strict=True)) / 3.5 for n in found}  # type: ignore[misc]
        ),
    )


def test_task_vectors_are_taken_from_ones(bases: Bases, llamas: list[Path]) -> None:
    """Also where the base is given: it is what the vectors scale, not what they start from."""
    deltas = task_vectors(llamas)
    expected = from_ones({n: 0.4 * torch.stack([d[n] for d in deltas]).sum(0) for n in deltas[0]})
    check(matsmerge.merge(llamas, None, "task_arithmetic", scale=0.4), expected)
    check(matsmerge.merge(llamas, bases("llama"), "task_arithmetic", scale=0.4), expected)


def test_ties(llamas: list[Path]) -> None:
    """Trimmed over all vectors of an adapter together."""
    found = matsmerge.merge(llamas, None, "ties", density=0.3, scale=0.8)
    trimmed = []
    for delta in task_vectors(llamas):
        sizes = torch.cat([d.abs().flatten() for d in delta.values()]).sort(descending=True).values
        threshold = sizes[int(0.3 * len(sizes)) - 1]
        trimmed.append({n: torch.where(d.abs() >= threshold, d, 0.0) for n, d in delta.items()})
    expected = {}
    for name in found:
        stacked = torch.stack([t[name] for t in trimmed])
        agrees = (stacked.sign() == stacked.sum(0).sign()) & (stacked != 0)
        expected[name] = 0.8 * (stacked * agrees).sum(0) / agrees.sum(0).clamp_min(1)
    check(found, from_ones(expected))


def test_dare(llamas: list[Path]) -> None:
    """Every entry is one, or one plus its change divided by the density."""
    merged = matsmerge.merge({"a": llamas[0]}, None, "dare_linear", density=0.25)
    (deltas,) = task_vectors(llamas[:1])
    changed = torch.cat([merged[n].double().flatten() - 1 for n in deltas])
    full = torch.cat([d.flatten() for d in deltas.values()]) * 4
    kept = changed.abs() > 1e-6
    torch.testing.assert_close(changed[kept], full[kept], rtol=1e-5, atol=1e-6)
    assert 0.1 < kept.double().mean() < 0.4
    # Those of several add up, each thinned as when it is alone.
    alone = matsmerge.merge({"b": llamas[1]}, None, "dare_linear", density=0.25)
    models = {"a": llamas[0], "b": llamas[1]}
    both = matsmerge.merge(models, None, "dare_linear", density=0.25)
    check(both, {n: merged[n].double() + alone[n].double() - 1 for n in both})


def test_missing_vectors_are_ones(pairs: Callable[[str], list[Path]]) -> None:
    models = pairs("llama")
    deltas = task_vectors(models)
    expected = from_ones({n: (deltas[0][n] + deltas[1][n]) / 2 for n in deltas[0]})
    check(matsmerge.merge(models), expected)
    layer = "base_model.model.model.layers.0."
    assert expected.keys() > {f"{layer}self_attn.k_proj.ia3_l", f"{layer}mlp.down_proj.ia3_l"}


# --- As functions --------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", PAIRS)
def test_the_adapter_written_is_the_full_model(
    architecture: str, bases: Bases, pairs: Callable[[str], list[Path]], tmp_path: Path
) -> None:
    base, models = bases(architecture), pairs(architecture)
    shared: dict[str, Any] = {"method": "task_arithmetic", "weights": [1.0, 0.6]}
    out = matsmerge.merge(models, out=tmp_path / "out", **shared).folder
    full = matsmerge.merge(models, out=tmp_path / "full", output="dense", **shared).folder
    merged = put_on(base, out)
    assert_same_function(logits(merged), logits(load(full)))
    found = {n.removesuffix(".default") for n, _ in merged.named_parameters() if ".ia3_l" in n}
    assert found == set(tensors(out))


def test_one_adapter_as_a_full_model(
    bases: Bases, pairs: Callable[[str], list[Path]], tmp_path: Path
) -> None:
    for architecture in ("gpt2", "vit"):
        for i, model in enumerate(pairs(architecture)):
            out = tmp_path / f"{architecture}{i}"
            full = matsmerge.merge([model], out=out, output="dense").folder
            assert_same_function(logits(load(full)), logits(put_on(bases(architecture), model)))


def test_half_precision(bases: Bases, llamas: list[Path], tmp_path: Path) -> None:
    """Vectors keep their own dtype, the full model that of its base."""
    load(bases("llama")).bfloat16().save_pretrained(tmp_path / "base")
    with pytest.warns(UserWarning, match=f"the adapters name {bases('llama')}"):
        full = matsmerge.merge(llamas[:2], tmp_path / "base", output="dense")
    vectors = matsmerge.merge(llamas[:2])
    assert {v.dtype for v in vectors.values()} == {torch.float32}
    assert {v.dtype for v in full.values()} == {torch.bfloat16}
    name = "model.layers.0.self_attn.k_proj"
    weight = load(tmp_path / "base").state_dict()[f"{name}.weight"].double()
    expected = weight * vectors[f"base_model.model.{name}.ia3_l"].double()
    torch.testing.assert_close(full[f"{name}.weight"].double(), expected, rtol=2**-8, atol=0)


def test_heads_stay_with_their_tasks(tmp_path: Path) -> None:
    """Classifiers of two adapters on an encoder; that of a single one stays in the adapter."""
    torch.manual_seed(0)
    base = save(BertModel(bert_config()), tmp_path / "base")

    def classifier(num: int) -> Any:
        torch.manual_seed(num)
        return BertForSequenceClassification.from_pretrained(base, num_labels=num)

    adapters = {}
    for num in (2, 5):
        config = IA3Config(
            target_modules=["key", "value"], feedforward_modules=[], task_type="SEQ_CLS"
        )
        adapters[f"task{num}"] = adapt(classifier(num), config, tmp_path / f"task{num}", num)
    with pytest.warns(UserWarning, match="each adapter's own head: classifier.bias, classifier"):
        out = matsmerge.merge(adapters, out=tmp_path / "out").folder
    assert all(name.endswith("ia3_l") for name in tensors(out))
    assert config_of(out)["modules_to_save"] is None
    assert config_of(out)["task_type"] is None
    for name, adapter in adapters.items():
        head = load_file(out / "heads" / f"{name}.safetensors")
        own = {n: v for n, v in tensors(adapter).items() if "classifier" in n}
        assert len(own) == 2
        assert head.keys() == own.keys()
        assert all(torch.equal(head[n], value) for n, value in own.items())
    merged = put_on(classifier(2), out)
    assert {n.removesuffix(".default") for n in dict(merged.named_parameters()) if "ia3" in n} == {
        *tensors(out)
    }
    single = matsmerge.merge([adapters["task5"]], out=tmp_path / "single").folder
    assert not (single / "heads").exists()
    assert config_of(single)["modules_to_save"] == ["classifier"]
    expected = tensors(adapters["task5"])
    assert tensors(single).keys() == expected.keys()
    assert all(torch.equal(value, expected[n]) for n, value in tensors(single).items())
    said = logits(put_on(classifier(5), adapters["task5"]))
    assert_same_function(logits(put_on(classifier(5), single)), said)
    full = matsmerge.merge([adapters["task5"]], out=tmp_path / "full", output="dense").folder
    model = BertForSequenceClassification.from_pretrained(full, num_labels=5)
    assert_same_function(logits(model), said)


def test_other_modules_that_come_along(bases: Bases, tmp_path: Path) -> None:
    """What an adapter brings whole is merged from the base's values; another has the base's."""
    base = bases("bert")
    configs = (
        IA3Config(target_modules=["key"], feedforward_modules=[], modules_to_save=["pooler"]),
        IA3Config(target_modules=["key"], feedforward_modules=[]),
    )
    models = [adapt(base, c, tmp_path / f"ia3-{i}", i + 1) for i, c in enumerate(configs)]
    options: dict[str, Any] = {"method": "task_arithmetic", "scale": 0.6}
    out = matsmerge.merge(models, out=tmp_path / "out", **options).folder
    assert config_of(out)["modules_to_save"] == ["pooler"]
    name = "bert.pooler.dense.weight"
    start = load(base).state_dict()[name].double()
    own = tensors(models[0])[f"base_model.model.{name}"].double()
    expected = start + 0.6 * (own - start)
    torch.testing.assert_close(
        tensors(out)[f"base_model.model.{name}"].double(), expected, rtol=1e-6, atol=1e-7
    )
    full = matsmerge.merge(models, out=tmp_path / "full", output="dense", **options).folder
    assert_same_function(logits(put_on(base, out)), logits(load(full)))
