"""Heads matched to the merged model: linear maps of its features that give what their own gave."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import IA3Config, LoraConfig
from peft_models import adapt, put_on
from safetensors.torch import load_file
from tiny_models import bert_config, make_tokenizer, save, write_rows
from torch import Tensor, nn
from transformers import (
    AlbertConfig,
    AlbertForSequenceClassification,
    AutoTokenizer,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
)

import matsmerge
from matsmerge.engine.matched_heads import STRENGTH, matched
from matsmerge.errors import DataError, RecipeError

F64 = torch.float64
NAMES = ("one", "two")
TEXTS = (["a b c", "d", "e f g h", "b a", "c c d a e"], ["p o n m", "i j", "k l m a b", "a", "n n"])
POOLED = ["classifier.*", "*pooler.*"]


def make_family(folder: Path, kind: Any = BertForSequenceClassification, **row: Any) -> Path:
    """A base, and two models with two and three classes and texts of their own."""
    save(kind(bert_config(num_labels=2)), folder / "base", make_tokenizer())
    for i, (name, texts) in enumerate(zip(NAMES, TEXTS, strict=True)):
        save(kind(bert_config(num_labels=2 + i)), folder / name, make_tokenizer(), seed=i + 1)
        write_rows(folder / f"{name}.jsonl", [{"text": text, **row} for text in texts])
    return folder


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("family"))


def merge(
    family: Path,
    out: Path,
    method: str = "average",
    models: dict[str, Path] | None = None,
    **options: Any,
) -> Path:
    models = models or {name: family / name for name in NAMES}
    settings = {"heads": POOLED, "data": [family / f"{n}.jsonl" for n in NAMES], **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # notes on blocks and heads
        matsmerge.merge(models, family / "base", method, out=out, **settings)
    return out


def with_one(rows: Tensor) -> Tensor:
    return torch.cat([rows, rows.new_ones(len(rows), 1)], 1)


def least_squares(z: Tensor, outputs: Tensor, start: Tensor) -> Tensor:
    """argmin ||z Xᵀ - outputs||² + λ ||X - start||², by rows that stand for the second term."""
    strength = (STRENGTH * (z.mT @ z).diagonal().mean()).sqrt()
    more = strength * torch.eye(z.shape[1], dtype=F64)
    rows, wanted = torch.cat([z, more]), torch.cat([outputs, more @ start.mT])
    solution: Tensor = torch.linalg.lstsq(rows, wanted, driver="gelsd").solution
    return solution.mT


@pytest.mark.parametrize("has_bias", [True, False])
def test_formula(has_bias: bool) -> None:
    g = torch.Generator().manual_seed(0)
    head = nn.Linear(6, 3, bias=has_bias, dtype=F64)
    z, own = (torch.randn(20, 6, dtype=F64, generator=g) for _ in range(2))
    outputs = head(own).detach()
    start = head.weight.detach()
    if has_bias:
        z, start = with_one(z), torch.cat([start, head.bias.detach()[:, None]], 1)
    expected = least_squares(z, outputs, start)
    weight, bias = matched(z.mT @ z, outputs.mT @ z, head)
    found = weight if bias is None else torch.cat([weight, bias[:, None]], 1)
    torch.testing.assert_close(found, expected)


def test_equal_features_leave_the_head_as_it_is() -> None:
    g = torch.Generator().manual_seed(0)
    head = nn.Linear(6, 3, dtype=F64)
    z = torch.randn(4, 6, dtype=F64, generator=g)  # fewer than there are directions
    second, cross = with_one(z).mT @ with_one(z), head(z).detach().mT @ with_one(z)
    weight, bias = matched(second, cross, head)
    torch.testing.assert_close(weight, head.weight.detach())
    torch.testing.assert_close(bias, head.bias.detach())


def pooled(model: Any, texts: list[str], tokenizer: Any) -> tuple[Tensor, Tensor, Tensor]:
    """What pooler and classifier receive, and the logits: plain passes, an example at a time."""
    seen: dict[str, list[Tensor]] = {"pooler": [], "classifier": []}
    maps = {"pooler": model.bert.pooler.dense, "classifier": model.classifier}
    hooks = [
        module.register_forward_pre_hook(lambda _, args, n=name: seen[n].append(args[0]))
        for name, module in maps.items()
    ]
    with torch.no_grad():
        logits = [model(**tokenizer(text, return_tensors="pt")).logits for text in texts]
    for hook in hooks:
        hook.remove()
    return torch.cat(seen["pooler"]), torch.cat(seen["classifier"]), torch.cat(logits)


def test_maps_of_a_head_are_matched_in_turn(family: Path, tmp_path: Path) -> None:
    merged = merge(family, tmp_path / "merged", match_heads=True)
    tokenizer = AutoTokenizer.from_pretrained(merged)
    for name, texts in zip(NAMES, TEXTS, strict=True):
        own = BertForSequenceClassification.from_pretrained(family / name).double().eval()
        body = BertForSequenceClassification.from_pretrained(
            merged, num_labels=own.config.num_labels, ignore_mismatched_sizes=True
        )
        body = body.double().eval()
        body.bert.pooler.load_state_dict(own.bert.pooler.state_dict())
        body.classifier.load_state_dict(own.classifier.state_dict())
        own_pooled, _, _ = pooled(own, texts, tokenizer)
        for which, module in enumerate((body.bert.pooler.dense, body.classifier)):
            z = pooled(body, texts, tokenizer)[which]
            z_own = pooled(own, texts, tokenizer)[which]
            start = torch.cat([module.weight, module.bias[:, None]], 1).detach()
            found = least_squares(with_one(z), with_one(z_own) @ start.mT, start)
            module.weight.data, module.bias.data = found[:, :-1], found[:, -1]
        head = load_file(merged / "heads" / f"{name}.safetensors")
        # The models run in float32.
        for tensor, expected in {
            "bert.pooler.dense.weight": body.bert.pooler.dense.weight,
            "classifier.weight": body.classifier.weight,
            "classifier.bias": body.classifier.bias,
        }.items():
            torch.testing.assert_close(
                head[tensor].double(), expected.detach(), rtol=1e-3, atol=1e-4
            )
        assert own_pooled.shape == (len(texts), 16)


def test_answers_come_nearer_to_the_models_own(family: Path, tmp_path: Path) -> None:
    distances = {}
    for name in ("kept", "matched"):
        merged = merge(
            family,
            tmp_path / name,
            **({"match_heads": True} if name == "matched" else {"data": None}),
        )
        total = 0.0
        for task, texts in zip(NAMES, TEXTS, strict=True):
            own = BertForSequenceClassification.from_pretrained(family / task).eval()
            tokenizer = AutoTokenizer.from_pretrained(merged)
            body = BertForSequenceClassification.from_pretrained(
                merged, num_labels=own.config.num_labels, ignore_mismatched_sizes=True
            )
            head = load_file(merged / "heads" / f"{task}.safetensors")
            body.eval().load_state_dict(head, strict=False)
            wanted, found = (pooled(model, texts, tokenizer)[2] for model in (own, body))
            total += float((wanted - found).square().sum())
        distances[name] = total
    assert distances["matched"] < 0.5 * distances["kept"]


@pytest.mark.parametrize(
    "config",
    [
        IA3Config(target_modules=["key", "value"], feedforward_modules=[], task_type="SEQ_CLS"),
        LoraConfig(target_modules=["query", "dense"], r=2, task_type="SEQ_CLS"),
    ],
    ids=["ia3", "lora"],
)
def test_heads_of_adapters(family: Path, tmp_path: Path, config: Any) -> None:
    def classifier(task: str) -> Any:
        return BertForSequenceClassification.from_pretrained(
            family / "base", num_labels=2 + NAMES.index(task), ignore_mismatched_sizes=True
        )

    own = {n: adapt(classifier(n), config, tmp_path / n, seed) for seed, n in enumerate(NAMES, 1)}
    tokenizer = AutoTokenizer.from_pretrained(family / "base")
    distances = {"kept": 0.0, "matched": 0.0}
    for name in distances:
        options = {"match_heads": True} if name == "matched" else {"data": None}
        merged = merge(family, tmp_path / name, models=own, heads=[], **options)
        for task, texts in zip(NAMES, TEXTS, strict=True):
            head = load_file(merged / "heads" / f"{task}.safetensors")
            found, expected = (put_on(classifier(task), a) for a in (merged, own[task]))
            found.get_base_model().classifier.load_state_dict(
                {tensor.split(".")[-1]: value for tensor, value in head.items()}
            )
            for text in texts:
                given = tokenizer(text, return_tensors="pt")
                with torch.no_grad():
                    difference = found(**given).logits - expected(**given).logits
                distances[name] += float(difference.square().sum())
    assert distances["matched"] < 0.5 * distances["kept"]


def test_one_model_keeps_its_head(family: Path, tmp_path: Path) -> None:
    models = {"one": family / "one"}
    data = [family / "one.jsonl"]
    matsmerge.merge(
        models, family / "base", "average", out=tmp_path / "m", heads=POOLED, data=data,
        match_heads=True,
    )  # fmt: skip
    head = load_file(tmp_path / "m" / "heads" / "one.safetensors")
    own = load_file(family / "one" / "model.safetensors")
    for name, tensor in head.items():
        torch.testing.assert_close(tensor, own[name], rtol=1e-5, atol=1e-6)


def test_padding_is_not_counted(tmp_path: Path) -> None:
    """Texts of different lengths, all in one batch or one at a time."""
    folder = make_family(tmp_path, BertForTokenClassification)
    for name, texts in zip(NAMES, TEXTS, strict=True):
        write_rows(folder / f"{name}.jsonl", [{"tokens": text.split()} for text in texts])
    found = []
    for size in (1, 8):
        data = [{"path": folder / f"{n}.jsonl", "batch_size": size} for n in NAMES]
        out = merge(
            folder, tmp_path / f"m{size}", heads="classifier.*", match_heads=True, data=data
        )
        found.append(load_file(out / "heads" / "two.safetensors"))
    for name, tensor in found[0].items():
        torch.testing.assert_close(tensor, found[1][name], rtol=1e-3, atol=1e-4)
    own = load_file(folder / "two" / "model.safetensors")
    assert not torch.allclose(found[0]["classifier.weight"], own["classifier.weight"], atol=1e-3)


def test_a_model_runs_once_and_the_merged_one_once_for_each_map(
    family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond what is tried out on the first batch, however many follow."""
    plain, num_texts = BertModel.forward, 0

    def counted(self: BertModel, input_ids: Tensor, *args: Any, **inputs: Any) -> Any:
        nonlocal num_texts
        num_texts += len(input_ids)
        return plain(self, input_ids, *args, **inputs)

    monkeypatch.setattr(BertModel, "forward", counted)
    found = []
    for num in (4, 12):
        data = [tmp_path / f"{name}{num}.jsonl" for name in NAMES]
        for path in data:
            write_rows(path, [{"text": "a b c"}] * num)
        num_texts = 0
        merge(family, tmp_path / f"m{num}", match_heads=True,
              data=[{"path": path, "batch_size": 2} for path in data])  # fmt: skip
        found.append(num_texts)
    assert found[1] - found[0] == len(NAMES) * (12 - 4) * (1 + 2)  # pooler and classifier


@pytest.mark.parametrize(
    ("method", "options", "is_matched"),
    [
        ("mats_cross", {}, True),
        ("mats_cross", {"match_heads": False}, False),
        ("svc", {"init": "mats_cross"}, True),
        ("mats", {"init": "mats_cross"}, True),
    ],
)
def test_it_is_the_default_of_mats_cross(
    method: str, options: dict[str, Any], is_matched: bool, family: Path, tmp_path: Path
) -> None:
    """Also of what starts from it."""
    merged = merge(family, tmp_path / "merged", method, **options)
    own = load_file(family / "one" / "model.safetensors")
    head = load_file(merged / "heads" / "one.safetensors")
    assert torch.equal(head["classifier.weight"], own["classifier.weight"]) != is_matched


def test_the_base_may_be_an_encoder(family: Path, tmp_path: Path) -> None:
    """Whose configuration does not say what the heads are for."""
    encoder = BertForSequenceClassification.from_pretrained(family / "base").bert
    save(encoder, tmp_path / "base", make_tokenizer())
    for name in NAMES:
        (tmp_path / name).symlink_to(family / name)
        (tmp_path / f"{name}.jsonl").symlink_to(family / f"{name}.jsonl")
    found, plain = (
        load_file(merge(place, tmp_path / out, match_heads=True) / "heads" / "two.safetensors")
        for place, out in ((tmp_path, "encoder"), (family, "plain"))
    )
    assert found.keys() == plain.keys()
    for name, values in plain.items():
        torch.testing.assert_close(found[name], values)


def test_what_is_not_matched_is_said(family: Path, tmp_path: Path) -> None:
    """No linear layer, or one that runs more than once: ALBERT's layers are one layer."""
    heads = ["classifier.*", "*layer.1.output.LayerNorm.weight"]
    merged = merge(family, tmp_path / "bert", "average", heads=heads, match_heads=True)
    weight = "bert.encoder.layer.1.output.LayerNorm.weight"
    assert _not_matched(merged) == [
        f"{name}: '{weight}' is not matched, since it is not of a linear layer" for name in NAMES
    ]
    kept = load_file(merged / "heads" / "one.safetensors")[weight]
    assert torch.equal(kept, load_file(family / "one" / "model.safetensors")[weight])

    def albert(_: Any) -> Any:
        sizes = {"hidden_size": 16, "embedding_size": 16, "intermediate_size": 32}
        return AlbertForSequenceClassification(
            AlbertConfig(
                **sizes, vocab_size=24, num_hidden_layers=2, num_attention_heads=2, num_labels=2
            )
        )

    twice = make_family(tmp_path / "albert", albert)
    heads = ["classifier.*", "*attention.query.*"]
    merged = merge(twice, tmp_path / "merged", "average", heads=heads, match_heads=True)
    query = "albert.encoder.albert_layer_groups.0.albert_layers.0.attention.query"
    assert _not_matched(merged) == [
        f"{name}: '{query}.{part}' is not matched, since its layer does not run once a pass"
        for name in NAMES
        for part in ("bias", "weight")
    ]
    assert not _not_matched(merge(family, tmp_path / "all", match_heads=True))


def _not_matched(merged: Path) -> list[str]:
    notes = json.loads((merged / "merge.json").read_text())["notes"]
    return sorted(note for note in notes if "is not matched" in note)


def test_the_command_line(
    family: Path, tmp_path: Path, mats: Callable[..., tuple[int, str, str]]
) -> None:
    recipe = {
        "models": [
            {"model": str(family / n), "name": n, "data": str(family / f"{n}.jsonl")} for n in NAMES
        ],
        "base": str(family / "base"),
        "method": "mats_cross",
        "heads": POOLED,
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    code, _, error = mats(
        "merge", tmp_path / "recipe.yaml", "--no-match-heads", "--out", tmp_path / "m"
    )
    assert code == 0, error
    head = load_file(tmp_path / "m" / "heads" / "one.safetensors")
    own = load_file(family / "one" / "model.safetensors")
    assert torch.equal(head["classifier.weight"], own["classifier.weight"])


def test_what_has_no_meaning_is_refused_before_work_starts(family: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="the model one has none; give it with data"):
        merge(family, tmp_path / "m", match_heads=True, data=None)
    with pytest.raises(RecipeError, match="leave it out, or say match_heads"):
        merge(family, tmp_path / "m")
    same = {"a": family / "one", "b": family / "one" / "model.safetensors"}
    with pytest.raises(RecipeError, match="no model has a head of its own"):
        matsmerge.merge(
            same, family / "one", "average", out=tmp_path / "m", match_heads=True,
            data=[family / "one.jsonl"] * 2,
        )  # fmt: skip
    one = {"x": family / "one"}
    with pytest.raises(DataError, match="match_heads is for linear layers of heads"):
        matsmerge.merge(
            one, family / "one", "average", out=tmp_path / "m", match_heads=True,
            heads="*LayerNorm*", data=[family / "one.jsonl"],
        )  # fmt: skip
    assert not (tmp_path / "m").exists()
