"""`mats collect` for several adapters: one base in memory, statistics of what they change."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig
from peft_models import adapt, load, put_on
from tiny_models import bert_config, make_tokenizer, save, write_rows
from transformers import BertForSequenceClassification

import matsmerge
from matsmerge.checkpoints.source import open_checkpoint
from matsmerge.models.kept_base import KeptBase
from matsmerge.models.pretrained import load_pretrained
from matsmerge.statistics.statistics_file import open_statistics
from matsmerge.tasks import loaded_model

Run = Callable[..., tuple[int, str, str]]

LORAS = [
    LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS"),
    LoraConfig(r=3, target_modules=["key", "value"], use_rslora=True, task_type="SEQ_CLS"),
]
VECTORS = [
    IA3Config(target_modules=["key", "output.dense"], feedforward_modules=["output.dense"]),
    IA3Config(target_modules=["value"], feedforward_modules=[]),
]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    model = BertForSequenceClassification(bert_config(num_labels=3))
    return save(model, tmp_path / "base", make_tokenizer())


def rows(seed: int) -> list[dict[str, Any]]:
    g = torch.Generator().manual_seed(seed)
    words = [[chr(97 + int(w)) for w in torch.randint(0, 8, (5,), generator=g)] for _ in range(12)]
    return [{"text": " ".join(w), "label": i % 3} for i, w in enumerate(words)]


def folders(base: Path, configs: list[Any], tmp_path: Path) -> tuple[list[Path], list[Path]]:
    made, data = [], []
    for i, config in enumerate(configs):
        made.append(adapt(base, config, tmp_path / f"adapter{i}", seed=i))
        data.append(tmp_path / f"{i}.jsonl")
        write_rows(data[-1], rows(i))
    return made, data


def options(data: list[Path]) -> list[Any]:
    return [x for path in data for x in ("--data", path)]


@pytest.mark.parametrize(
    ("configs", "kinds", "method"),
    [
        (LORAS, "kfac", ["mats_kfac"]),
        (VECTORS[:1] * 2, "kfac,block_fisher", ["mats"]),
        (VECTORS[:1] * 2, "kfac", ["mats", "--objective", "kfac_scales"]),
        (VECTORS[:1] * 2, "fisher", ["diagonal_fisher"]),
    ],
)
def test_the_next_merge_that_is_named_works(
    configs: list[Any], kinds: str, method: list[str], base: Path, tmp_path: Path, mats: Run
) -> None:
    adapters, data = folders(base, configs, tmp_path)
    code, out, error = mats("collect", *adapters, *options(data), "--statistics", kinds)
    assert code == 0, error
    command = shlex.split(out.splitlines()[-1].removeprefix("next: mats "))
    assert command == ["merge", *map(str, adapters), "--method", *method, "--out", "merged"]
    code, _, error = mats(*command[:-1], tmp_path / "merged")
    assert code == 0, error


def test_why_nothing_has_a_statistic_is_said(base: Path, tmp_path: Path, mats: Run) -> None:
    without_head = LoraConfig(r=2, target_modules=["query", "value"])
    adapters, data = folders(base, [without_head], tmp_path)
    code, out, error = mats("collect", *adapters, *options(data), "--statistics", "block_fisher")
    assert code == 0, error
    assert re.search(r"block_fisher +0 +(\d+) +\1 not a vector", out)


def test_gram_matrices_of_vectors_are_for_no_merge(base: Path, tmp_path: Path, mats: Run) -> None:
    adapters, data = folders(base, VECTORS[:1], tmp_path)
    code, out, error = mats("collect", *adapters, *options(data), "--statistics", "gram")
    assert code == 0, error
    assert "--statistics block_fisher  # Gram matrices alone" in out.splitlines()[-1]


def test_loras_get_statistics_of_what_any_of_them_changes(
    base: Path, tmp_path: Path, mats: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are those of the folded models, and the base was read once."""
    adapters, data = folders(base, LORAS, tmp_path)
    loads = []

    def counted(*arguments: Any, **more: Any) -> Any:
        loads.append(arguments)
        return load_pretrained(*arguments, **more)

    monkeypatch.setattr(loaded_model, "load_pretrained", counted)
    code, _, error = mats("collect", *adapters, *options(data), "--statistics", "kfac,fisher", "-q")
    assert code == 0, error
    assert len(loads) == 1
    for i, adapter in enumerate(adapters):
        folded = put_on(base, adapter).merge_and_unload()
        folded.save_pretrained(tmp_path / f"folded{i}")
        make_tokenizer().save_pretrained(tmp_path / f"folded{i}")
        own = tmp_path / f"folded{i}.safetensors"
        code, _, error = mats(
            "collect", tmp_path / f"folded{i}", "--data", data[i], "--statistics", "kfac,fisher",
            "--out", own, "-q",
        )  # fmt: skip
        assert code == 0, error
        found, expected = open_statistics(adapter / "statistics.safetensors"), open_statistics(own)
        kinds = [name.split(".")[-2] for name in found.parameters("fisher") if "layer" in name]
        assert sorted(set(kinds)) == ["key", "query", "value"]
        for name in found.arrays.specs:
            torch.testing.assert_close(
                found.arrays[name], expected.arrays[name], rtol=1e-4, atol=1e-4
            )
    code, _, error = mats(
        "merge", "--method", "mats_kfac", "--model", adapters[0], "--model", adapters[1], "-q",
        "--out", tmp_path / "merged",
    )  # fmt: skip
    assert code == 0, error
    put_on(base, tmp_path / "merged")
    assert len(json.loads((tmp_path / "merged" / "merge.json").read_text())["lora"]) == 6


def test_merging_with_statistics_equals_merging_folded_models(base: Path, tmp_path: Path) -> None:
    configs = [
        LoraConfig(r=2, target_modules=["query", "value"]),
        LoraConfig(r=3, target_modules=["query", "value"]),
    ]
    adapters, data = folders(base, configs, tmp_path)
    from matsmerge.cli.main import run

    arguments = ["collect", *adapters, *options(data), "--statistics", "kfac", "-q"]
    assert run([str(a) for a in arguments]) == 0
    statistics = [open_statistics(a / "statistics.safetensors") for a in adapters]
    folded = [put_on(base, a).merge_and_unload().state_dict() for a in adapters]
    for method in ("regmean", "mats", "mats_kfac"):
        with pytest.warns(UserWarning, match="merged by average"):
            found = matsmerge.merge(adapters, base, method, output="dense")
        with pytest.warns(UserWarning, match="merged by average"):
            expected = matsmerge.merge(
                folded, open_checkpoint(base), method, statistics=statistics, force=True
            )
        for name, values in expected.items():
            torch.testing.assert_close(found[name], values, rtol=1e-3, atol=1e-3)


def test_vectors_on_one_base(base: Path, tmp_path: Path, mats: Run) -> None:
    adapters, data = folders(base, VECTORS, tmp_path)
    code, _, error = mats(
        "collect", *adapters, *options(data), "--statistics", "block_fisher", "-q"
    )
    assert code == 0, error
    for i, adapter in enumerate(adapters):
        alone = tmp_path / f"alone{i}.safetensors"
        code, _, error = mats(
            "collect", adapter, "--data", data[i], "--statistics", "block_fisher", "--out", alone,
            "-q",
        )  # fmt: skip
        assert code == 0, error
        found, expected = (
            open_statistics(adapter / "statistics.safetensors"),
            open_statistics(alone),
        )
        assert set(found.arrays.specs) == set(expected.arrays.specs)
        for name in found.arrays.specs:
            assert torch.equal(found.arrays[name], expected.arrays[name])


@pytest.mark.parametrize("configs", [LORAS, VECTORS])
def test_a_kept_base_is_as_it_was(configs: list[Any], base: Path, tmp_path: Path) -> None:
    adapters, _ = folders(base, configs, tmp_path)
    kept = KeptBase()
    ids = torch.tensor([[2, 4, 5, 3]])
    first = loaded_model.load_model(adapters[0], kept=kept).model(input_ids=ids).logits
    loaded_model.load_model(adapters[1], kept=kept)
    again = loaded_model.load_model(adapters[0], kept=kept).model(input_ids=ids).logits
    assert torch.equal(first, again)
    torch.testing.assert_close(first, put_on(load(base), adapters[0])(input_ids=ids).logits)


def test_what_is_wrong_with_the_last_is_said_first(base: Path, tmp_path: Path, mats: Run) -> None:
    adapters, data = folders(base, LORAS, tmp_path)
    write_rows(data[1], [{"text": "a", "label": 9}])
    code, _, error = mats("collect", *adapters, *options(data), "--statistics", "fisher", "-q")
    assert code == 1
    assert "label 9 is out of range" in " ".join(error.split())
    assert not (adapters[0] / "statistics.safetensors").exists()
    for extra, message in (
        (["--data", data[0], "--data", data[0], "--data", data[0]], "3 times --data for 2 models"),
        (["--data", data[0], "--out", tmp_path / "x.safetensors"], "1 times --out for 2 models"),
    ):
        code, _, error = mats("collect", *adapters, *extra, "-q")
        assert code == 1
        assert message in " ".join(error.split())
