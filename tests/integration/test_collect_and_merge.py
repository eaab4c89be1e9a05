"""From `mats collect` to `mats merge` on tiny transformers, each layout once; (IA)^3 adapters."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, PeftModel, get_peft_model
from safetensors.torch import load_file
from tiny_models import (
    bert_config,
    gpt2_config,
    llama_config,
    make_tokenizer,
    mixtral_config,
    save,
    t5_config,
    vit_config,
    write_rows,
)
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BertForSequenceClassification,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MixtralForCausalLM,
    T5ForConditionalGeneration,
    ViTForImageClassification,
)

from matsmerge.checkpoints.source import open_checkpoint
from matsmerge.statistics.statistics_file import open_statistics

Run = Callable[..., tuple[int, str, str]]
Rows = list[dict[str, Any]]

WORDS = ["a", "b", "c", "d", "e", "f", "g", "h"]


def sentences(seed: int, num: int = 12) -> list[str]:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 9, (num,), generator=g)
    return [
        " ".join(WORDS[int(i)] for i in torch.randint(0, 8, (int(n),), generator=g))
        for n in lengths
    ]


def classified(seed: int) -> Rows:
    return [{"text": t, "label": i % 3} for i, t in enumerate(sentences(seed))]


def completed(seed: int) -> Rows:
    return [{"input": t, "target": t[::-1]} for t in sentences(seed)]


def pictures(seed: int) -> Rows:
    g = torch.Generator().manual_seed(seed)
    return [
        {"image": torch.randint(0, 256, (8, 8, 3), generator=g).tolist(), "label": i % 3}
        for i in range(6)
    ]


# A model, its data, what loads the result, and one of its weights with the module it belongs to.
CASES: dict[str, tuple[Any, Any, Any, str]] = {
    "bert": (
        lambda: BertForSequenceClassification(bert_config(num_labels=3)),
        classified,
        AutoModel,
        "bert.encoder.layer.1.attention.self.query",
    ),
    "t5": (
        lambda: T5ForConditionalGeneration(t5_config()),
        completed,
        AutoModelForSeq2SeqLM,
        "decoder.block.1.layer.1.EncDecAttention.k",
    ),
    "llama": (
        lambda: LlamaForCausalLM(llama_config()),
        completed,
        AutoModelForCausalLM,
        "model.layers.1.mlp.down_proj",
    ),
    "mixtral": (
        lambda: MixtralForCausalLM(mixtral_config()),
        completed,
        AutoModelForCausalLM,
        "model.layers.1.mlp.experts.2.up_proj",
    ),
    "gpt2": (
        lambda: GPT2LMHeadModel(gpt2_config()),
        completed,
        AutoModelForCausalLM,
        "transformer.h.0.mlp.c_fc",
    ),
    "vit": (
        lambda: ViTForImageClassification(vit_config(num_labels=3)),
        pictures,
        AutoModel,
        "vit.embeddings.patch_embeddings.projection",
    ),
}


def fine_tune(model: Any, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=g))


# A method without a system, with one in closed form, and with K-FAC; the others of all layouts but one
# are long.
FEW = ("regmean", "mats_kfac", "diagonal_fisher")
OTHERS = ("regmean", "mats", "actmat")


@pytest.mark.parametrize(
    ("case", "methods"),
    [
        *(pytest.param(case, FEW, id=case) for case in CASES),
        pytest.param("bert", OTHERS, id="bert, others"),
        *(
            pytest.param(case, OTHERS, id=f"{case}, others", marks=pytest.mark.long)
            for case in CASES
            if case != "bert"
        ),
    ],
)
def test_collect_then_merge(case: str, methods: tuple[str, ...], mats: Run, tmp_path: Path) -> None:
    make, rows, loader, module = CASES[case]
    tokenizer = None if case == "vit" else make_tokenizer()
    torch.manual_seed(0)
    model = make()
    base = save(model, tmp_path / "base", tokenizer)
    folders = []
    for seed in (1, 2):
        torch.manual_seed(0)
        tuned = type(model).from_pretrained(base)
        folder = tmp_path / f"tuned{seed}"
        fine_tune(tuned, seed)
        tuned.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        write_rows(tmp_path / f"{seed}.jsonl", rows(seed))
        code, _, error = mats(
            "collect", folder, "--data", tmp_path / f"{seed}.jsonl", "--statistics", "kfac,fisher",
            "--out", folder / "statistics.safetensors", "--quiet",
        )  # fmt: skip
        assert code == 0, error
        folders.append(folder)
    options = ["--base", base, "--model", folders[0], "--model", folders[1]]
    for method in methods:
        out = tmp_path / method.replace("+", "p")
        code, _, error = mats("merge", "--method", method, *options, "--out", out)
        assert code == 0, error
        loader.from_pretrained(out)
        assert all(bool(t.isfinite().all()) for t in _load(out).values())
    expected = regmean(folders, module)
    found = _load(tmp_path / "regmean")[_weight_name(folders[0], module)]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def _load(folder: Path) -> dict[str, Tensor]:
    checkpoint = open_checkpoint(folder)
    return {name: checkpoint[name] for name in checkpoint.specs}


def _weight_name(folder: Path, module: str) -> str:
    return open_statistics(folder / "statistics.safetensors").map_of(module).weight


def regmean(folders: Sequence[Path], module: str) -> Tensor:
    """W = (sum W_m G_m)(sum G_m)^-1 by the pseudo-inverse, the average where nothing is known."""
    grams, weights = [], []
    for folder in folders:
        statistics = open_statistics(folder / "statistics.safetensors")
        m = statistics.map_of(module)
        weight = _load(folder)[m.weight].double()
        weights.append(weight.T if m.layout == "conv1d" else weight.flatten(1))
        gram = statistics.gram(module).double()
        grams.append(0.9 * gram + 0.1 * gram.diagonal().diag())
    start = (weights[0] + weights[1]) / 2
    right = sum(((w - start) @ g for w, g in zip(weights, grams, strict=True)), torch.zeros(()))
    inverse = torch.linalg.pinv(grams[0] + grams[1], hermitian=True, rtol=1e-6)
    merged = start + right @ inverse
    statistics = open_statistics(folders[0] / "statistics.safetensors")
    m = statistics.map_of(module)
    shape = _load(folders[0])[m.weight].shape
    turned: Tensor = merged.T if m.layout == "conv1d" else merged
    return turned.reshape(shape).float()


def test_ia3_by_exact_blocks(mats: Run, tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = save(T5ForConditionalGeneration(t5_config()), tmp_path / "base", make_tokenizer())
    config = {
        "task_type": "SEQ_2_SEQ_LM",
        "target_modules": ["k", "wo"],
        "feedforward_modules": ["wo"],
    }
    folders = []
    for seed in (1, 2):
        model = get_peft_model(
            T5ForConditionalGeneration.from_pretrained(base), IA3Config(**config)
        )
        trained = [p for p in model.parameters() if p.requires_grad]
        g = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in trained:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=g))
        folder = tmp_path / f"adapter{seed}"
        model.save_pretrained(folder)
        write_rows(tmp_path / f"{seed}.jsonl", completed(seed))
        code, _, error = mats(
            "collect", folder, "--data", tmp_path / f"{seed}.jsonl", "--statistics",
            "block_fisher,fisher", "--out", folder / "statistics.safetensors", "--quiet",
        )  # fmt: skip
        assert code == 0, error
        folders.append(folder)
    options = ["--model", folders[0], "--model", folders[1], "--init", "average"]
    code, _, error = mats(
        "merge", "--method", "mats", "--iterations", 500, *options, "--out", tmp_path / "merged"
    )
    assert code == 0, error
    merged = load_file(tmp_path / "merged" / "adapter_model.safetensors")
    states = [load_file(f / "adapter_model.safetensors") for f in folders]
    statistics = [open_statistics(f / "statistics.safetensors") for f in folders]
    for name, values in merged.items():
        blocks = [s.block_fisher(name).double() for s in statistics]
        thetas = [s[name].double().flatten() for s in states]
        start = (thetas[0] + thetas[1]) / 2
        a = blocks[0] + blocks[1]
        r = sum((b @ (t - start) for b, t in zip(blocks, thetas, strict=True)), torch.zeros(()))
        expected = start + torch.linalg.pinv(a, hermitian=True, rtol=1e-5) @ r
        off = values.double().flatten() - expected
        assert float(off @ a @ off) <= 1e-6 * float(expected @ a @ expected)
    PeftModel.from_pretrained(T5ForConditionalGeneration.from_pretrained(base), tmp_path / "merged")
    for method in ("regmean", "mats_kfac", "actmat"):
        code, _, error = mats("merge", "--method", method, *options, "--out", tmp_path / method)
        assert code == 1
        assert "(IA)^3 trains none" in " ".join(error.split()), error
