"""LoRA merged: against PEFT, against merges of full models, and against dense float64 formulas."""

import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig
from peft.tuners.lora import LoraLayer
from peft_models import (
    adapt,
    assert_same_function,
    config_of,
    fold,
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
from matsmerge.engine.output_folder import OutputFolder

Bases = Callable[[str], Path]
Adapters = Callable[[str], list[Path]]

# Two LoRAs for each architecture, with different ranks, scalings and target modules.
PAIRS: dict[str, tuple[LoraConfig, LoraConfig]] = {
    "bert": (
        LoraConfig(target_modules=["query", "dense"], r=2, bias="lora_only"),
        LoraConfig(target_modules=["query", "value"], r=3, lora_alpha=5, lora_bias=True),
    ),
    "gpt2": (
        LoraConfig(target_modules=["c_attn", "c_proj"], r=2, fan_in_fan_out=True, bias="all"),
        LoraConfig(target_modules=["c_proj", "wpe"], r=3, lora_alpha=5, fan_in_fan_out=True),
    ),
    "llama": (
        LoraConfig(target_modules=["q_proj", "down_proj"], r=2, modules_to_save=["norm"]),
        LoraConfig(target_modules=["q_proj", "v_proj"], r=3, lora_alpha=5, use_rslora=True),
    ),
    "t5": (
        LoraConfig(target_modules=["q", "wo"], r=2),
        LoraConfig(target_modules=["q", "relative_attention_bias"], r=3, lora_alpha=5),
    ),
    "vit": (
        LoraConfig(target_modules=["projection", "q_proj"], r=2, lora_alpha=1),
        LoraConfig(target_modules=["projection", "v_proj"], r=3, lora_alpha=5),
    ),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Bases:
    return cache(lambda name: make_base(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="module")
def adapters(bases: Bases, tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    def make(architecture: str) -> list[Path]:
        folder = tmp_path_factory.mktemp("adapters")
        return [
            adapt(bases(architecture), config, folder / f"lora{i}", seed=i + 1)
            for i, config in enumerate(PAIRS[architecture])
        ]

    return cache(make)


@pytest.fixture(scope="module")
def llamas(bases: Bases, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three LoRAs of the same kind."""
    folder = tmp_path_factory.mktemp("llamas")
    config = LoraConfig(target_modules=["q_proj", "up_proj"], r=2, lora_alpha=3)
    return [adapt(bases("llama"), config, folder / f"lora{i}", seed=i + 1) for i in range(3)]


def changes(base: Path, adapter: Path) -> dict[str, Tensor]:
    """The change of every module, (out, in) or as a convolution has it, from PEFT's own layers."""
    model = put_on(base, adapter).double()
    return {
        name.removeprefix("base_model.model."): module.get_delta_weight("default").detach()
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer)
    }


def loaded(folder: Path) -> dict[str, Tensor]:
    state: dict[str, Tensor] = load(folder).state_dict()
    return state


@pytest.mark.parametrize("options", [{}, {"output": "dense"}, {"align": "knots"}])
@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_adapters_that_change_before_resuming(
    llamas: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    file: str,
) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    own = [Path(shutil.copytree(llama, tmp_path / llama.name)) for llama in llamas]
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(OutputFolder, "finish", stop)
        with pytest.raises(KeyboardInterrupt):
            matsmerge.merge(own, out=out, method="ties", **options)
    os.utime(own[1] / file, ns=(1, 1))
    with pytest.raises(matsmerge.OutputError, match=f"lora1/{file}: was modified"):
        matsmerge.merge(own, out=out, method="ties", resume=True, **options)


# --- One adapter ---------------------------------------------------------------------------------

SINGLE: dict[str, tuple[str, LoraConfig]] = {
    "alpha": ("llama", LoraConfig(target_modules=["q_proj", "down_proj"], r=3, lora_alpha=7)),
    "rank-stabilised": ("t5", LoraConfig(target_modules=["q", "wi"], r=3, use_rslora=True)),
    "patterns": (
        "llama",
        LoraConfig(
            target_modules=r".*\.(q|v)_proj",
            rank_pattern={"0.self_attn.q_proj": 5, "v_proj": 2},
            alpha_pattern={r"layers\.1\..*": 3},
        ),
    ),
    "some-layers": ("llama", LoraConfig(target_modules=["q_proj"], layers_to_transform=[1])),
    "all-biases": ("bert", LoraConfig(target_modules=["query"], r=2, bias="all")),
    "own-biases": ("bert", LoraConfig(target_modules=["query"], r=2, bias="lora_only")),
    "lora-bias": ("bert", LoraConfig(target_modules=["query"], r=2, lora_bias=True)),
    "modules-to-save": (
        "bert",
        LoraConfig(target_modules=["query"], modules_to_save=["pooler", "LayerNorm"]),
    ),
    "head": ("bert", LoraConfig(target_modules=["query"], task_type="SEQ_CLS", bias="all")),
    "embedding": ("llama", LoraConfig(target_modules=["embed_tokens", "q_proj"], r=2)),
    "output-layer": ("llama", LoraConfig(target_modules=["lm_head"], r=2)),
    "conv1d": ("gpt2", LoraConfig(target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)),
    "convolution": (
        "vit",
        LoraConfig(target_modules=["projection"], r=2, modules_to_save=["classifier"]),
    ),
    "rank-above-layer": ("llama", LoraConfig(target_modules=["q_proj"], r=40)),
}


# Those with something that is not a change of a linear layer's weight.
OF_CHANGES = (
    "all-biases",
    "lora-bias",
    "head",
    "embedding",
    "output-layer",
    "conv1d",
    "convolution",
)


@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in SINGLE), *((name, {"rank": "concatenate"}) for name in OF_CHANGES)],
    ids=str,
)
def test_one_adapter_stays_what_it_is(
    name: str, options: Any, bases: Bases, tmp_path: Path
) -> None:
    architecture, config = SINGLE[name]
    base = bases(architecture)
    adapter = adapt(base, config, tmp_path / "adapter")
    out = matsmerge.merge([adapter], out=tmp_path / "out", **options).folder
    merged = put_on(base, out)
    assert_same_function(logits(merged), logits(put_on(base, adapter)))
    assert config_of(out)["task_type"] == config_of(adapter)["task_type"]
    # PEFT would load biases in any case, and lose them when it saves the adapter again.
    assert config_of(out)["bias"] == ("lora_only" if name == "lora-bias" else config.bias)
    # All that was written has found its place.
    saved = {n for n in tensors(out) if ".lora_" in n}
    found = {n.replace(".default", "") for n, _ in merged.named_parameters() if ".lora_" in n}
    assert saved == found


@pytest.mark.parametrize("options", [{}, {"rank": "concatenate"}], ids=str)
def test_embeddings_that_changed_before_training(
    options: Any, bases: Bases, tmp_path: Path
) -> None:
    """Rows of new tokens, say: PEFT saves the embedding beside its LoRA because of them."""
    model = load(bases("llama"))
    with torch.no_grad():
        model.model.embed_tokens.weight[4:7] += 1
    config = LoraConfig(target_modules=["embed_tokens", "q_proj"], r=2)
    adapter = adapt(model, config, tmp_path / "adapter")
    with pytest.raises(
        matsmerge.CheckpointError, match=r"other values of model.embed_tokens.weight"
    ):
        matsmerge.merge([adapter], out=tmp_path / "out", **options)
    out = matsmerge.merge([adapter], out=tmp_path / "out", output="dense").folder
    assert_same_function(logits(load(out)), logits(put_on(bases("llama"), adapter)))


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_an_output_layer_that_is_no_longer_tied(bases: Bases, tmp_path: Path) -> None:
    """Part of the adapter as other modules; a full model of this base has no place for it."""
    base = bases("gpt2")
    config = LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True, modules_to_save=["lm_head"])
    adapter = adapt(base, config, tmp_path / "adapter")
    with pytest.raises(matsmerge.MatsError, match="lm_head.weight"):
        matsmerge.merge([adapter], output="dense")
    out = matsmerge.merge([adapter], out=tmp_path / "out").folder
    assert_same_function(logits(put_on(base, out)), logits(put_on(base, adapter)))


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("task_arithmetic", {}),
        ("ties", {"density": 1.0}),
        ("dare_linear", {"density": 1.0}),
        ("dare_ties", {"density": 1.0}),
        ("model_stock", {}),
    ],
)
def test_one_adapter_by_every_method(
    method: str, parameters: Any, bases: Bases, adapters: Adapters, tmp_path: Path
) -> None:
    base, adapter = bases("llama"), adapters("llama")[0]
    expected = logits(put_on(base, adapter))
    out = matsmerge.merge([adapter], None, method, out=tmp_path / "out", **parameters).folder
    assert_same_function(logits(put_on(base, out)), expected)
    full = matsmerge.merge(
        [adapter], None, method, out=tmp_path / "full", output="dense", **parameters
    ).folder
    assert_same_function(logits(load(full)), expected)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "vit"])
def test_dora(architecture: str, bases: Bases, tmp_path: Path) -> None:
    """A full model; or a LoRA, the same where its rank is that of the layer."""
    targets = {"llama": ["q_proj", "down_proj"], "gpt2": ["c_attn", "c_proj"]}
    base = bases(architecture)
    config = LoraConfig(
        target_modules=targets.get(architecture, ["projection", "q_proj"]),
        use_dora=True,
        fan_in_fan_out=architecture == "gpt2",
    )
    adapter = adapt(base, config, tmp_path / "adapter")
    expected = logits(put_on(base, adapter))
    full = matsmerge.merge([adapter], out=tmp_path / "full").folder
    assert_same_function(logits(load(full)), expected)
    out = matsmerge.merge([adapter], out=tmp_path / "out", rank=16).folder
    assert not config_of(out)["use_dora"]
    assert_same_function(logits(put_on(base, out)), expected)


# --- Several adapters ----------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"align": "knots"}], ids=str)
@pytest.mark.parametrize(
    ("method", "parameters"),
    [("average", {}), ("ties", {"density": 1.0}), ("model_stock", {})],
)
def test_identical_adapters_merge_to_themselves(
    method: str, parameters: Any, options: Any, bases: Bases, adapters: Adapters, tmp_path: Path
) -> None:
    base, adapter = bases("llama"), adapters("llama")[0]
    shutil.copytree(adapter, tmp_path / "copy")
    out = matsmerge.merge(
        [adapter, tmp_path / "copy"], None, method, out=tmp_path / "out", **options, **parameters
    ).folder
    assert_same_function(logits(put_on(base, out)), logits(put_on(base, adapter)))


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("average", {"rank": "concatenate"}),
        ("ties", {"density": 0.3, "rank": 2}),
        ("ties", {"density": 0.3, "align": "knots"}),
        ("dare_linear", {}),
        ("dare_ties", {"output": "dense", "align": "knots"}),
    ],
)
def test_order_does_not_matter(
    method: str, options: Any, bases: Bases, llamas: list[Path], tmp_path: Path
) -> None:
    said = []
    for i, order in enumerate(([0, 1, 2], [2, 0, 1])):
        models = {f"model{j}": llamas[j] for j in order}
        out = matsmerge.merge(models, None, method, out=tmp_path / str(i), **options).folder
        is_full = options.get("output") == "dense"
        said.append(logits(load(out) if is_full else put_on(bases("llama"), out)))
    assert_same_function(said[0], said[1])


METHODS: dict[str, dict[str, Any]] = {
    "average": {},
    "task_arithmetic": {"scale": 0.4},
    "ties": {"density": 0.1},
    "dare_linear": {"density": 0.4},
    "dare_ties": {"density": 0.4},
    "slerp": {},
    "model_stock": {},
    "actmat": {},
}


def merge_folded(
    base: Path, models: Mapping[str, Path], method: str, **options: Any
) -> dict[str, Tensor]:
    """The merge of the full models that PEFT makes, in float64."""
    full = {name: fold(base, adapter) for name, adapter in models.items()}
    start = load(base).state_dict()
    return matsmerge.merge(full, start, method, dtype="float32", **options).state_dict()


@pytest.mark.filterwarnings("ignore:merged by average, since the objective has nothing for them")
@pytest.mark.parametrize("method", METHODS)
def test_full_models_are_those_of_folded_adapters(
    method: str, bases: Bases, adapters: Adapters
) -> None:
    base = bases("llama")
    models = dict(zip("ab", adapters("llama"), strict=True))
    options = METHODS[method] | {"weights": [1.0, 0.6]}
    found = matsmerge.merge(models, None, method, output="dense", **options)
    expected = merge_folded(base, models, method, **options)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("architecture", ["bert", "gpt2", "t5", "vit"])
def test_full_models_of_other_architectures(
    architecture: str, bases: Bases, adapters: Adapters, tmp_path: Path
) -> None:
    base = bases(architecture)
    models = dict(zip("ab", adapters(architecture), strict=True))
    options: dict[str, Any] = {"density": 0.2, "scale": 0.7}
    out = matsmerge.merge(
        models, None, "ties", out=tmp_path / "out", output="dense", **options
    ).folder
    found, expected = loaded(out), merge_folded(base, models, "ties", **options)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("method", ["task_arithmetic", "ties"])
def test_half_precision_is_rounded_once(method: str, bases: Bases, tmp_path: Path) -> None:
    """PEFT rounds each folded model, here only the result is: to the nearest of the exact one."""
    load(bases("llama")).bfloat16().save_pretrained(tmp_path / "base")
    base = tmp_path / "base"
    config = LoraConfig(target_modules=["q_proj", "up_proj"], r=2)
    models = {name: adapt(base, config, tmp_path / name, seed=i) for i, name in enumerate("ab", 1)}
    options: dict[str, Any] = {"scale": 0.5} | ({"density": 0.5} if method == "ties" else {})
    found = matsmerge.merge(models, None, method, output="dense", **options)
    expected = merge_folded(base, models, method, **options)
    changed = 0
    for name, value in found.items():
        assert value.dtype == torch.bfloat16
        torch.testing.assert_close(value.float(), expected[name], rtol=2**-8, atol=1e-6)
        changed += int((value != expected[name].bfloat16()).sum())
    # Between two neighbours float32 and float64 hardly ever decide differently.
    assert changed <= 5
    out = matsmerge.merge(models, None, method, out=tmp_path / "out", rank=16, **options).folder
    assert {value.dtype for value in tensors(out).values()} == {torch.float32}
    for module, change in changes(base, out).items():
        weight = f"{module}.weight"
        exact = expected[weight].double() - load(base).state_dict()[weight].double()
        torch.testing.assert_close(change, exact, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def merged_logits(
    adapters: Adapters, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Tensor]:
    """What the full model says that a method makes of an architecture's LoRAs."""

    @cache
    def make(architecture: str, method: str) -> Tensor:
        out = tmp_path_factory.mktemp("merged") / "full"
        models = adapters(architecture)
        matsmerge.merge(models, None, method, weights=[1, -0.4], out=out, output="dense")
        return logits(load(out))

    return make


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("average", {}),
        ("task_arithmetic", {"rank": "concatenate"}),
        ("task_arithmetic", {"align": "knots"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("architecture", PAIRS)
def test_the_adapter_written_is_the_full_model(
    architecture: str,
    method: str,
    options: Any,
    bases: Bases,
    adapters: Adapters,
    merged_logits: Callable[[str, str], Tensor],
    tmp_path: Path,
) -> None:
    models = adapters(architecture)
    out = matsmerge.merge(
        models, None, method, weights=[1, -0.4], out=tmp_path / "out", **options
    ).folder
    found = logits(put_on(bases(architecture), out))
    assert_same_function(found, merged_logits(architecture, method))


def test_layers_that_peft_also_saves_whole(bases: Bases, tmp_path: Path) -> None:
    """PEFT saves embeddings beside their LoRA, for tokens that may have been added."""
    config = LoraConfig(target_modules=["embed_tokens", "q_proj"], r=2)
    models = [adapt(bases("llama"), config, tmp_path / f"lora{i}", i) for i in range(2)]
    whole = "base_model.model.model.embed_tokens.base_layer.weight"
    assert all(whole in tensors(model) for model in models)
    out = matsmerge.merge(
        models, None, "ties", density=1.0, align="knots", out=tmp_path / "out"
    ).folder
    deltas = [changes(bases("llama"), model) for model in models]
    for name, change in changes(bases("llama"), out).items():
        # An embedding's factors are those of (dimensions, tokens).
        sides = [d[name].mT if "embed" in name else d[name] for d in deltas]
        u = torch.linalg.svd(torch.cat(sides, 1), full_matrices=False)[0][:, :4]
        merged = u @ ties([{name: u.mT @ side} for side in sides], 1.0, 1.0)[name]
        expected = merged.mT if "embed" in name else merged
        torch.testing.assert_close(change, expected, rtol=1e-5, atol=1e-6)


def test_a_module_that_only_one_trains_whole(bases: Bases, tmp_path: Path) -> None:
    """Its change is of full rank, whatever the ranks of the others are."""
    configs = (
        LoraConfig(target_modules=["q_proj"], r=2, modules_to_save=["lm_head"]),
        LoraConfig(target_modules=["q_proj", "lm_head"], r=2),
    )
    models = [adapt(bases("llama"), c, tmp_path / f"lora{i}", i) for i, c in enumerate(configs)]
    full = matsmerge.merge(models, out=tmp_path / "full", output="dense").folder
    out = matsmerge.merge(models, out=tmp_path / "out").folder
    assert_same_function(logits(put_on(bases("llama"), out)), logits(load(full)))


def test_what_was_written_is_an_adapter_like_others(
    bases: Bases, adapters: Adapters, tmp_path: Path
) -> None:
    """Ranks differ between its modules, and none of its settings is lost."""
    out = matsmerge.merge(adapters("gpt2"), out=tmp_path / "out").folder
    assert config_of(out)["rank_pattern"]
    again = matsmerge.merge([out], out=tmp_path / "again").folder
    expected = logits(put_on(bases("gpt2"), out))
    assert_same_function(logits(put_on(bases("gpt2"), again)), expected)


def test_weights_that_only_some_adapters_say_are_transposed(bases: Bases, tmp_path: Path) -> None:
    """One on an embedding has nothing to transpose, and says so; squares do not show it."""
    embedding = LoraConfig(target_modules=["wpe"], r=2)
    linear = LoraConfig(target_modules=["attn.c_proj"], r=2, fan_in_fan_out=True)
    models = [
        adapt(bases("gpt2"), config, tmp_path / f"lora{i}")
        for i, config in enumerate((embedding, linear))
    ]
    shared: dict[str, Any] = {"method": "task_arithmetic", "scale": 0.5}
    plain = matsmerge.merge(models, output="dense", **shared)
    aligned = matsmerge.merge(models, output="dense", align="knots", **shared)
    for name, value in plain.items():
        torch.testing.assert_close(aligned[name], value, rtol=1e-6, atol=1e-6)
    out = matsmerge.merge(models, out=tmp_path / "out", **shared).folder
    assert config_of(out)["fan_in_fan_out"]


# --- Ranks ---------------------------------------------------------------------------------------


def truncated(values: Tensor, rank: int) -> tuple[Tensor, float]:
    """The nearest matrix of a rank, and the share of the squared norm it keeps."""
    u, s, vh = torch.linalg.svd(values.double().flatten(1), full_matrices=False)
    nearest = ((u[:, :rank] * s[:rank]) @ vh[:rank]).view(values.shape)
    return nearest, float(s[:rank].square().sum() / s.square().sum())


def manifest(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "merge.json").read_text())
    return content


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "vit"])
def test_a_rank_keeps_the_largest_singular_values(
    architecture: str, bases: Bases, adapters: Adapters, tmp_path: Path
) -> None:
    base, models = bases(architecture), adapters(architecture)
    shared: dict[str, Any] = {"method": "ties", "density": 0.05, "scale": 0.5}
    full = matsmerge.merge(models, out=tmp_path / "full", output="dense", **shared).folder
    out = matsmerge.merge(models, out=tmp_path / "out", rank=3, **shared).folder
    start, end = loaded(base), loaded(full)
    found, kept = changes(base, out), manifest(out)["lora"]
    assert found.keys() == kept.keys()
    for module, change in found.items():
        exact = end[f"{module}.weight"].double() - start[f"{module}.weight"].double()
        nearest, energy = truncated(exact, 3)
        torch.testing.assert_close(change, nearest, rtol=1e-5, atol=1e-6)
        assert kept[module] == {"rank": 3, "energy": pytest.approx(energy, rel=1e-5)}
    assert min(entry["energy"] for entry in kept.values()) < 0.9


def test_ranks_by_default(bases: Bases, adapters: Adapters, tmp_path: Path) -> None:
    """The sum of those of all adapters that change a layer, and no more than it has room for."""
    out = matsmerge.merge(adapters("vit"), out=tmp_path / "out").folder
    layer = "vit.layers.0.attention."
    kept = manifest(out)["lora"]
    ranks = {
        "vit.embeddings.patch_embeddings.projection": 5,
        f"{layer}q_proj": 2,
        f"{layer}v_proj": 3,
    }
    for module, rank in ranks.items():
        assert kept[module] == {"rank": rank, "energy": pytest.approx(1)}
        assert len(tensors(out)[f"base_model.model.{module}.lora_A.weight"]) == rank
    base = bases("llama")
    config = LoraConfig(target_modules=["q_proj"], r=12)
    wide = [adapt(base, config, tmp_path / f"wide{i}", seed=i) for i in range(2)]
    out = matsmerge.merge(wide, out=tmp_path / "wide").folder
    assert {entry["rank"] for entry in manifest(out)["lora"].values()} == {16}
    joined = matsmerge.merge(wide, out=tmp_path / "joined", rank="concatenate").folder
    assert {entry["rank"] for entry in manifest(joined)["lora"].values()} == {24}


def test_layers_smaller_than_the_rank(adapters: Adapters, tmp_path: Path) -> None:
    """They get the rank they have room for."""
    out = matsmerge.merge(adapters("t5"), out=tmp_path / "out", rank=6).folder
    ranks = {module: entry["rank"] for module, entry in manifest(out)["lora"].items()}
    small = {m for m in ranks if m.endswith("relative_attention_bias")}
    assert len(small) == 2
    assert all(ranks[module] == (2 if module in small else 6) for module in ranks)


@pytest.mark.filterwarnings("ignore:merged by average, since the objective has nothing for them")
def test_solved_merges_as_adapters(bases: Bases, llamas: list[Path], tmp_path: Path) -> None:
    """A method that solves systems: the nearest LoRA to the full model it makes."""
    base = bases("llama")
    full = matsmerge.merge(llamas, None, "actmat", out=tmp_path / "full", output="dense").folder
    out = matsmerge.merge(llamas, None, "actmat", out=tmp_path / "out", rank=4).folder
    start, end = loaded(base), loaded(full)
    for module, change in changes(base, out).items():
        exact = end[f"{module}.weight"].double() - start[f"{module}.weight"].double()
        torch.testing.assert_close(change, truncated(exact, 4)[0], rtol=1e-5, atol=1e-6)


# --- KnOTS ---------------------------------------------------------------------------------------


def ties(deltas: Sequence[Mapping[str, Tensor]], density: float, scale: float) -> dict[str, Tensor]:
    """TIES with the trimming of the paper, over all entries of a model, written out densely."""
    trimmed = []
    for delta in deltas:
        sizes = torch.cat([d.flatten().abs() for d in delta.values()]).sort(descending=True).values
        threshold = sizes[int(density * len(sizes)) - 1]
        trimmed.append({n: torch.where(d.abs() >= threshold, d, 0.0) for n, d in delta.items()})
    merged = {}
    for name in deltas[0]:
        stacked = torch.stack([t[name] for t in trimmed])
        agrees = stacked.sign() == stacked.sum(0).sign()
        agrees &= stacked != 0
        merged[name] = scale * (stacked * agrees).sum(0) / agrees.sum(0).clamp_min(1)
    return merged


@pytest.mark.parametrize("rank", [None, 2])
def test_knots_is_ties_on_coordinates(
    rank: int | None, bases: Bases, llamas: list[Path], tmp_path: Path
) -> None:
    base = bases("llama")
    deltas = [changes(base, adapter) for adapter in llamas]
    spaces = {
        name: torch.linalg.svd(torch.cat([d[name] for d in deltas], 1), full_matrices=False)[0]
        for name in deltas[0]
    }
    # Six coordinates: the sum of the ranks.
    coordinates = [{n: spaces[n][:, :6].mT @ d[n] for n in d} for d in deltas]
    merged = ties(coordinates, density=0.3, scale=0.8)
    options: dict[str, Any] = {"density": 0.3, "scale": 0.8, "align": "knots", "rank": rank}
    out = matsmerge.merge(llamas, None, "ties", out=tmp_path / "out", **options).folder
    full = matsmerge.merge(llamas, None, "ties", output="dense", **options)
    start = loaded(base)
    kept = manifest(out)["lora"]
    found = changes(base, out)
    assert found.keys() == spaces.keys()
    for name, change in found.items():
        expected, energy = truncated(spaces[name][:, :6] @ merged[name], rank or 6)
        torch.testing.assert_close(change, expected, rtol=1e-5, atol=1e-6)
        assert kept[name] == {"rank": rank or 6, "energy": pytest.approx(energy, rel=1e-6)}
        weight = f"{name}.weight"
        torch.testing.assert_close(
            full[weight].double() - start[weight], expected, rtol=1e-5, atol=1e-6
        )
    others = start.keys() - {f"{name}.weight" for name in found}
    assert all(torch.equal(full[name], start[name]) for name in others)


@pytest.mark.parametrize("align", ["knots", "core_space"])
@pytest.mark.parametrize("architecture", PAIRS)
def test_aligning_changes_nothing_for_a_linear_method(
    architecture: str, align: str, adapters: Adapters, tmp_path: Path
) -> None:
    """As a full model too, however the architecture stores its weights."""
    shared: dict[str, Any] = {"method": "task_arithmetic", "scale": 0.6, "output": "dense"}
    plain = matsmerge.merge(adapters(architecture), **shared)
    aligned = matsmerge.merge(adapters(architecture), align=align, **shared)
    assert plain.keys() <= aligned.keys()
    for name, value in plain.items():
        torch.testing.assert_close(aligned[name], value, rtol=1e-6, atol=1e-6)


def lora_factors(adapter: Path, module: str) -> tuple[Tensor, Tensor]:
    """B and A as they are stored."""
    state = load_file(adapter / "adapter_model.safetensors")
    stem = f"base_model.model.{module}.lora_"
    return state[f"{stem}B.weight"].double(), state[f"{stem}A.weight"].double()


def tsv_m(cores: Sequence[Tensor]) -> Tensor:
    """TSV-M by the definition of the nearest orthogonal matrix, (A Aᵀ)^(-1/2) A."""

    def nearest(matrix: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(matrix.mT @ matrix)
        result: Tensor = matrix @ (vectors * values.rsqrt()) @ vectors.mT
        return result

    triples = [torch.linalg.svd(core) for core in cores]
    kept = min(cores[0].shape) // len(cores)
    left = nearest(torch.cat([u[:, :kept] for u, _, _ in triples], 1))
    right = nearest(torch.cat([v[:kept].mT for _, _, v in triples], 1))
    merged: Tensor = left @ torch.cat([s[:kept] for _, s, _ in triples]).diag() @ right.mT
    return merged


@pytest.mark.parametrize("rank", [None, 2])
@pytest.mark.parametrize("method", ["ties", "tsv_m"])
def test_core_space(
    method: str, rank: int | None, bases: Bases, llamas: list[Path], tmp_path: Path
) -> None:
    """The method on Uᵀ s B A V, U and V of the factors; both are dense here."""
    base = bases("llama")
    deltas = [changes(base, adapter) for adapter in llamas]
    outputs, inputs = {}, {}
    for name in deltas[0]:
        factors = [lora_factors(adapter, name) for adapter in llamas]
        outputs[name] = torch.linalg.svd(torch.cat([b for b, _ in factors], 1))[0][:, :6]
        inputs[name] = torch.linalg.svd(torch.cat([a for _, a in factors]))[2][:6].mT
    cores = [{n: outputs[n].mT @ d[n] @ inputs[n] for n in d} for d in deltas]
    if method == "ties":
        merged = ties(cores, density=0.3, scale=0.8)
    else:
        merged = {n: 0.8 * tsv_m([core[n] for core in cores]) for n in cores[0]}
    options: dict[str, Any] = {"scale": 0.8, "align": "core_space", "rank": rank}
    options |= {"density": 0.3} if method == "ties" else {}
    out = matsmerge.merge(llamas, None, method, out=tmp_path / "out", **options).folder
    found = changes(base, out)
    assert found.keys() == deltas[0].keys()
    for name, change in found.items():
        exact = outputs[name] @ merged[name] @ inputs[name].mT
        expected, _ = truncated(exact, rank or 6)
        torch.testing.assert_close(change, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"align": "knots"}, {"align": "core_space"}], ids=str)
def test_the_dtype_asked_for(options: Any, adapters: Adapters) -> None:
    merged = matsmerge.merge(adapters("llama"), dtype="bfloat16", **options)
    assert any(name.endswith("norm.weight") for name in merged)
    assert {value.dtype for value in merged.values()} == {torch.bfloat16}


# --- Beside other models -------------------------------------------------------------------------


def test_beside_a_full_model(bases: Bases, adapters: Adapters, tmp_path: Path) -> None:
    base, adapter = bases("llama"), adapters("llama")[0]
    tuned = save(load(base), tmp_path / "tuned", seed=5)
    models = {"tuned": tuned, "lora": adapter}
    found = matsmerge.merge(models, base, "task_arithmetic", scale=0.5)
    end, folded, start = loaded(tuned), fold(base, adapter), loaded(base)
    for name, value in found.items():
        expected = (end[name].double() + folded[name].double()) / 2
        torch.testing.assert_close(value, expected.float(), rtol=1e-6, atol=1e-7)
    trimmed = matsmerge.merge(models, base, "ties", density=0.2, out=tmp_path / "ties").folder
    deltas = [{n: m[n].double() - start[n].double() for n in start} for m in (end, folded)]
    for name, delta in ties(deltas, density=0.2, scale=1.0).items():
        value = loaded(trimmed)[name].double()
        torch.testing.assert_close(value, start[name].double() + delta, rtol=1e-6, atol=1e-6)
    # The base is known from the adapter.
    assert matsmerge.merge(models, None, "task_arithmetic", scale=0.5).keys() == found.keys()


def test_beside_an_ia3_adapter(bases: Bases, adapters: Adapters, tmp_path: Path) -> None:
    base, adapter = bases("llama"), adapters("llama")[1]
    config = IA3Config(target_modules=["v_proj", "down_proj"], feedforward_modules=["down_proj"])
    models = [adapter, adapt(base, config, tmp_path / "ia3")]
    out = matsmerge.merge(models, None, "task_arithmetic", scale=0.7, out=tmp_path / "out").folder
    found, start = loaded(out), loaded(base)
    folded = [fold(base, model) for model in models]
    for name, value in found.items():
        expected = start[name].double() + 0.7 * sum(f[name] - start[name] for f in folded)
        torch.testing.assert_close(value, expected.float(), rtol=1e-6, atol=1e-7)


def test_heads_stay_with_their_tasks(tmp_path: Path) -> None:
    """Classifiers of two adapters on an encoder; that of a single one stays in the adapter."""
    torch.manual_seed(0)
    base = save(BertModel(bert_config()), tmp_path / "base")
    adapters = {}

    def classifier(num: int) -> Any:
        torch.manual_seed(num)
        return BertForSequenceClassification.from_pretrained(base, num_labels=num)

    for num in (2, 5):
        config = LoraConfig(target_modules=["query"], r=2, task_type="SEQ_CLS")
        adapters[f"task{num}"] = adapt(classifier(num), config, tmp_path / f"task{num}", num)
    with pytest.warns(UserWarning, match="each adapter's own head: classifier.bias, classifier"):
        out = matsmerge.merge(adapters, out=tmp_path / "out").folder
    assert not any("classifier" in name for name in tensors(out))
    assert config_of(out)["modules_to_save"] is None
    assert config_of(out)["task_type"] is None
    with pytest.warns(UserWarning, match="own head"):
        full = matsmerge.merge(adapters, out=tmp_path / "full", output="dense").folder
    for name, adapter in adapters.items():
        heads = [load_file(folder / "heads" / f"{name}.safetensors") for folder in (out, full)]
        for what in ("weight", "bias"):
            own = tensors(adapter)[f"base_model.model.classifier.{what}"]
            assert all(torch.equal(head[f"classifier.{what}"], own) for head in heads)
        model = put_on(classifier(len(own)), out).base_model.model
        model.load_state_dict(heads[0], strict=False)
        merged = BertForSequenceClassification.from_pretrained(full, num_labels=len(own))
        merged.load_state_dict(heads[1], strict=False)
        assert_same_function(logits(model), logits(merged))
    single = matsmerge.merge([adapters["task5"]], out=tmp_path / "single").folder
    assert config_of(single)["modules_to_save"] == ["classifier"]
    assert not (single / "heads").exists()
    expected = logits(put_on(classifier(5), adapters["task5"]))
    assert_same_function(logits(put_on(classifier(5), single)), expected)
    alone = matsmerge.merge([adapters["task5"]], out=tmp_path / "alone", output="dense").folder
    merged = BertForSequenceClassification.from_pretrained(alone, num_labels=5)
    assert_same_function(logits(merged), expected)


def test_a_bias_of_a_head_that_was_not_trained(bases: Bases, tmp_path: Path) -> None:
    """With bias "all" PEFT saves that of the classifier too, and not its weight."""
    config = LoraConfig(target_modules=["query"], r=2, bias="all")
    models = [adapt(bases("bert"), config, tmp_path / f"lora{i}", i) for i in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a head that is kept apart, if it is
        full = matsmerge.merge(models, output="dense")
    assert ("classifier.weight" in full) == ("classifier.bias" in full)
