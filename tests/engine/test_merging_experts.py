"""Mixtures of experts merged expert by expert, whether they are stored fused or apart."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import gpt_oss_config, make_tokenizer, mixtral_config, write_rows
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
)

import matsmerge
from matsmerge.checkpoints.source import open_checkpoint
from matsmerge.errors import AlignmentError, StatisticsError
from matsmerge.statistics.collection import Collection
from matsmerge.statistics.collection_options import make_collection_options
from matsmerge.statistics.statistics import HELD_OUT, MAIN, UNROUTED, Origin, Statistics

Run = Callable[..., tuple[int, str, str]]
State = Mapping[str, Tensor]

PREFIX = "model.layers.1.mlp.experts"


def make(config: Any, seed: int, like: Any = None) -> Any:
    """A model, or one that is fine-tuned from another."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = 0.1 * torch.randn(p.shape)
            p.copy_(p + noise if like is None else like.get_parameter(name) + noise)
    return model


def loss(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    logits, targets = model(**batch).logits[:, :-1], batch["input_ids"][:, 1:]
    return cross_entropy(logits.mT, targets, reduction="none").sum(1)


def measure(model: Any, seed: int, checkpoint: Any = None, length: int = 12) -> Statistics:
    g = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(0, 24, (4, length), generator=g) for _ in range(3)]
    batches = [{"input_ids": t, "attention_mask": torch.ones_like(t)} for t in tokens]
    return matsmerge.collect(model, batches, "kfac", loss=loss, checkpoint=checkpoint)


def fused_family(config: Any) -> tuple[Any, list[Any]]:
    base = make(config, 0)
    return base, [make(config, seed, base) for seed in (1, 2)]


def merge(models: Sequence[Any], base: Any, method: str, **options: Any) -> matsmerge.Merged:
    return matsmerge.plan(models, base, method, **options).merge()


@pytest.mark.parametrize("method", ["tsv_m", "iso_c", "actmat", "wudi", "tact", "ties"])
def test_a_stack_is_merged_matrix_by_matrix(method: str) -> None:
    base, models = fused_family(mixtral_config())
    options = {"trim": "parameter"} if method == "ties" else {}
    merged = merge(models, base, method, **options)
    assert merged.keys() == base.state_dict().keys()
    for fused in ("gate_up_proj", "down_proj"):
        name = f"{PREFIX}.{fused}"
        states = [m.state_dict()[name] for m in (*models, base)]
        for number in range(4):
            for rows in (
                (slice(0, 32), slice(32, 64)) if fused == "gate_up_proj" else (slice(None),)
            ):
                # Under a name that says what it is, as some methods look at it.
                own = [{"layers.1.up_proj.weight": s[number, rows].clone()} for s in states]
                expected = merge(own[:2], own[2], method, **options)["layers.1.up_proj.weight"]
                assert torch.equal(merged[name][number, rows], expected)


def test_each_expert_matches_outputs_on_its_own_tokens() -> None:
    """RegMean in closed form, in float64, with biases; gates and values of one expert together."""
    base, models = fused_family(gpt_oss_config())
    statistics = [measure(model, seed) for seed, model in enumerate(models)]
    objective = {"name": "gram", "off_diagonal": 1.0, "bias": True}
    merged = merge(models, base, "regmean", statistics=statistics, objective=objective)
    for part in ("gate_up_proj", "down_proj"):
        for number in range(4):
            grams, weights = [], []
            for model, one in zip(models, statistics, strict=True):
                gram = one.gram(f"{PREFIX}.{number}.{part}", bias=True).double()
                state = model.state_dict()
                weight = state[f"{PREFIX}.{part}"][number]  # (in, out)
                bias = state[f"{PREFIX}.{part}_bias"][number]
                weights.append(torch.cat([weight, bias[None]]).double())
                grams.append(gram)
            total = sum(grams[1:], grams[0])
            products = [g @ w for g, w in zip(grams, weights, strict=True)]
            mean = sum(weights[1:], weights[0]) / 2
            change = sum(products[1:], products[0]) - total @ mean
            expected = mean + torch.linalg.pinv(total, hermitian=True) @ change
            found = [merged[f"{PREFIX}.{part}"], merged[f"{PREFIX}.{part}_bias"]]
            joined = torch.cat([found[0][number], found[1][number][None]]).double()
            torch.testing.assert_close(joined, expected, rtol=1e-3, atol=1e-4)


def unused_family() -> tuple[Any, list[Any], list[Statistics]]:
    """Models of which the second never uses expert 2 of the last layer."""
    base, models = fused_family(gpt_oss_config())
    with torch.no_grad():
        models[1].model.layers[1].mlp.router.bias[2] = -1000
    return base, models, [measure(model, seed) for seed, model in enumerate(models)]


def test_experts_that_a_model_does_not_use_are_averaged_and_named(tmp_path: Path) -> None:
    base, models, statistics = unused_family()
    planned = matsmerge.plan(
        {"a": models[0], "b": models[1]}, base, "mats_kfac", statistics=statistics
    )
    notes = [note for note in planned.notes if "routed" in note]
    assert notes == [
        f"merged by average, since no token of b's data was routed to them (1 expert): {PREFIX}.2"
    ]
    merged = planned.merge(tmp_path / "out")
    for part in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"):
        states = [model.state_dict()[f"{PREFIX}.{part}"] for model in models]
        mean = ((states[0].double() + states[1].double()) / 2).float()
        found = merged[f"{PREFIX}.{part}"]
        assert torch.equal(found[2], mean[2])
        assert not torch.allclose(found[1], mean[1])
    report = json.loads((tmp_path / "out" / "merge.json").read_text())
    assert notes[0] in report["notes"]
    solved = {n for n, p in report["parameters"].items() if "solved" in p}
    assert f"{PREFIX}.1.down_proj.weight" in solved
    assert not any(name.startswith(f"{PREFIX}.2.") for name in solved)
    base.load_state_dict(merged)


def test_an_expert_that_gets_only_padding_is_one_without_tokens() -> None:
    """Gradients arrive at its outputs, but they are zero, and its inputs are not counted."""
    base, models = fused_family(gpt_oss_config())
    tokens = torch.randint(1, 24, (2, 4), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1, 1, 0, 0]] * 2)

    def masked(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        logits, targets = model(**batch).logits[:, :-1], batch["input_ids"][:, 1:]
        return (
            cross_entropy(logits.mT, targets, reduction="none") * batch["attention_mask"][:, 1:]
        ).sum(1)

    padded = {"input_ids": tokens, "attention_mask": mask}
    found = matsmerge.collect(models[0], [padded], "kfac", loss=masked)
    short = {"input_ids": tokens[:, :2], "attention_mask": mask[:, :2]}
    expected = matsmerge.collect(models[0], [short], "kfac", loss=masked)
    assert found.header.without == expected.header.without
    assert any(m.inputs is None and m.outputs for m in found.header.maps)
    assert merge(models, base, "mats_kfac", statistics=[found, measure(models[1], 1)])


def test_experts_that_only_held_out_examples_use_are_averaged() -> None:
    base, models = fused_family(gpt_oss_config())
    generator = torch.Generator().manual_seed(0)
    statistics = []
    for model in models:
        collection = Collection(
            model, make_collection_options(statistics="kfac", held_out=0.5), loss
        )
        with collection.running():
            for of, shape in ((MAIN, (1, 2)), (HELD_OUT, (4, 9))):
                tokens = torch.randint(0, 24, shape, generator=generator)
                collection.add({"input_ids": tokens}, of)
            origin = Origin(name="x", fingerprint="")
            statistics.append(collection.statistics(origin, (origin,)))
    header = statistics[0].header
    unused = [m for m in header.maps if f"inputs/{m.inputs}" not in header.sets[MAIN].num_rows]
    assert unused
    assert all(header.is_unused(m.weight) for m in unused)
    for method in ("mats", "mats_kfac"):
        planned = matsmerge.plan(models, base, method, statistics=statistics, force=True)
        (note,) = (note for note in planned.notes if "of model_0's data was routed" in note)
        assert unused[0].module.rpartition(".")[0] in note
        assert planned.merge()


def test_experts_that_are_modules() -> None:
    """Of models each of which leaves some of them unused."""
    config = SwitchTransformersConfig(
        vocab_size=24, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_decoder_layers=2,
        num_heads=2, num_experts=3, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1,
        decoder_start_token_id=0,
    )  # fmt: skip
    made = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        made.append(SwitchTransformersForConditionalGeneration(config).eval())
    tokens = {"input_ids": torch.tensor([[3, 4]]), "decoder_input_ids": torch.tensor([[0, 5]])}
    statistics = [matsmerge.collect(model, [tokens], "gram") for model in made]
    assert all(UNROUTED in s.header.without["gram"].values() for s in statistics)
    planned = matsmerge.plan(made, None, "regmean", statistics=statistics)
    assert any("expert_" in note for note in planned.notes if "routed" in note)
    assert planned.merge()


def test_a_model_that_uses_no_expert_is_refused() -> None:
    base, models, statistics = unused_family()
    header = statistics[1].header
    experts = [m for m in header.maps if ".experts." in m.module]
    without = {"kfac": header.without["kfac"] | {m.weight: UNROUTED for m in experts}}
    others = tuple(m for m in header.maps if m not in experts)
    changes = {"maps": others, "without": without}
    none = replace(statistics[1], header=header.model_copy(update=changes))
    with pytest.raises(StatisticsError, match="no token of its data was routed to any expert"):
        matsmerge.plan(models, base, "mats_kfac", statistics=[statistics[0], none])


def test_the_same_models_give_the_same() -> None:
    base = make(gpt_oss_config(), 0)
    model = make(gpt_oss_config(), 1, base)
    statistics = [measure(model, seed) for seed in (1, 2)]
    state = model.state_dict()
    merged = merge([state, dict(state)], base, "regmean", statistics=statistics, force=True)
    for name, values in state.items():
        torch.testing.assert_close(merged[name], values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "layouts", [(True, False, False), (False, True, True), (False, False, True)]
)
def test_layouts_are_merged_together(layouts: Sequence[bool], tmp_path: Path) -> None:
    """The base's is that of the output; statistics go with either."""
    base, models = fused_family(mixtral_config())
    folders = [tmp_path / name for name in ("base", "a", "b")]
    for model, folder, is_original in zip((base, *models), folders, layouts, strict=True):
        model.save_pretrained(folder, save_original_format=is_original)
    statistics = [
        measure(model, seed, folder)
        for seed, (model, folder) in enumerate(zip(models, folders[1:], strict=True))
    ]
    out = tmp_path / "out"
    planned = matsmerge.plan(folders[1:], folders[0], "mats_kfac", statistics=statistics)
    merged = planned.merge(out)
    assert merged.keys() == open_checkpoint(folders[0]).specs.keys()
    loaded, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values())
    expected = merge(
        models, base, "mats_kfac", statistics=[measure(m, seed) for seed, m in enumerate(models)]
    )
    for name, values in loaded.state_dict().items():
        torch.testing.assert_close(values, expected[name], rtol=1e-4, atol=1e-5)


OF_TASK_VECTORS: dict[str, dict[str, Any]] = {
    "linear": {},
    "nuslerp": {"task_vectors": True},
    "multislerp": {},
    "karcher": {},
    "breadcrumbs": {"density": 0.5, "gamma": 0.1},
    "breadcrumbs_ties": {"density": 0.5},
    "della": {"density": 0.5},
    "della_linear": {"density": 0.5, "rescale": False},
    "magnitude_prune": {"density": 0.5},
    "sce": {"select_topk": 0.5},
    "ram": {"epsilon": 0.1},
    "ramplus_tl": {"epsilon": 0.1},
    "nearswap": {"t": 0.1},
    "arcee_fusion": {},
}


@pytest.mark.parametrize("method", OF_TASK_VECTORS)
def test_a_fused_and_a_separate_model(method: str) -> None:
    """Merged as if both were separate, and written as the base is."""
    states = [_fused_state(seed) for seed in range(3)]
    num = matsmerge.methods.METHODS[method].num_models or 2
    options = OF_TASK_VECTORS[method]
    mixed = dict(zip("ab", (_apart(states[1]), states[2]), strict=True))
    apart = dict(zip("ab", (_apart(states[1]), _apart(states[2])), strict=True))
    first = dict(list(mixed.items())[:num])
    merged = matsmerge.merge(first, states[0], method, **options)
    expected = matsmerge.merge({n: apart[n] for n in first}, _apart(states[0]), method, **options)
    assert merged.keys() == states[0].keys()
    for name, values in _apart(merged).items():
        assert torch.equal(values, expected[name]), name


def _fused_state(seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = {"gate_up_proj": (3, 12, 4), "down_proj": (3, 4, 6)}
    return {f"{PREFIX}.{n}": torch.randn(shape, generator=g) for n, shape in shapes.items()}


def _apart(state: State) -> dict[str, Tensor]:
    """With a tensor for each expert."""
    found: dict[str, Tensor] = {}
    for i in range(3):
        gate, up = state[f"{PREFIX}.gate_up_proj"][i].chunk(2)
        down = state[f"{PREFIX}.down_proj"][i]
        parts = {"gate_proj": gate, "up_proj": up, "down_proj": down}
        found |= {f"{PREFIX}.{i}.{n}.weight": part.clone() for n, part in parts.items()}
    return found


def test_a_head_that_is_a_part_of_a_fused_tensor_is_refused() -> None:
    base, models = fused_family(mixtral_config())
    with pytest.raises(AlignmentError, match=r"'model\.layers\.0\.mlp\.experts\.1\.gate_proj"):
        matsmerge.plan(models, base, "average", heads=["*.experts.1.*"])


@pytest.mark.parametrize("config", [mixtral_config, gpt_oss_config])
def test_merging_along_the_merged_model_is_refused(
    config: Callable[[], Any], mats: Run, tmp_path: Path
) -> None:
    base = make(config(), 0)
    base.save_pretrained(tmp_path / "base")
    make(config(), 1, base).save_pretrained(tmp_path / "a")
    make_tokenizer().save_pretrained(tmp_path / "a")
    write_rows(tmp_path / "a.jsonl", [{"text": "a b c"}, {"text": "b c"}])
    code, _, error = mats(
        "merge", "--method", "mats_cross", "--base", tmp_path / "base", "--model", tmp_path / "a",
        "--data", tmp_path / "a.jsonl", "--out", tmp_path / "out",
    )  # fmt: skip
    assert code == 1
    assert "holds all experts of a mixture" in error
    assert not (tmp_path / "out").exists()
