"""Plain models: what task, which class, what is refused, and where parameters came from."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from tiny_models import (
    SIZES,
    WORDS,
    bert_config,
    gpt2_config,
    llama_config,
    make_tokenizer,
    save,
    t5_config,
    vit_config,
)
from transformers import (
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
    T5ForConditionalGeneration,
    ViTForImageClassification,
)

from matsmerge.checkpoints.fingerprint import fingerprint
from matsmerge.checkpoints.source import open_checkpoint
from matsmerge.errors import CheckpointError, DataError
from matsmerge.models import experts
from matsmerge.models.experts import ExpertsApart
from matsmerge.tasks.loaded_model import LoadedModel, load_model
from matsmerge.tasks.task_file import TaskFile

MODELS: dict[str, tuple[Any, Any]] = {
    "sequence_classification": (BertForSequenceClassification, bert_config),
    "token_classification": (BertForTokenClassification, bert_config),
    "seq2seq": (T5ForConditionalGeneration, t5_config),
    "causal_lm": (LlamaForCausalLM, llama_config),
    "image_classification": (ViTForImageClassification, vit_config),
}


def check_names(loaded: LoadedModel) -> None:
    """Every parameter has the values of the tensor it is said to come from."""
    parameters = dict(loaded.model.named_parameters())
    for name, stored in loaded.names.items():
        assert torch.equal(parameters[name].float(), loaded.checkpoint[stored].float()), name
    assert not set(loaded.names) & set(loaded.head_names)


def make(kind: str, folder: Path, **options: Any) -> Path:
    model_class, config = MODELS[kind]
    return save(model_class(config(**options)), folder, make_tokenizer())


@pytest.mark.parametrize("kind", MODELS)
def test_the_architecture_says_the_task(kind: str, tmp_path: Path) -> None:
    loaded = load_model(make(kind, tmp_path))
    assert loaded.task.kind == kind
    assert not loaded.model.training
    assert loaded.notes == []
    check_names(loaded)
    assert loaded.names.keys() == {name for name, _ in loaded.model.named_parameters()}
    assert all(p.requires_grad for p in loaded.model.parameters())
    assert fingerprint(loaded.checkpoint) == fingerprint(open_checkpoint(tmp_path))
    if hasattr(loaded.model.config, "use_cache"):
        assert loaded.model.config.use_cache is False


@pytest.mark.parametrize("kind", ["seq2seq", "causal_lm"])
def test_tied_weights_have_one_name(kind: str, tmp_path: Path) -> None:
    loaded = load_model(make(kind, tmp_path, tie_word_embeddings=True))
    check_names(loaded)
    assert len(loaded.names) == len(list(loaded.model.parameters()))


def test_a_tied_weight_may_be_stored_under_its_other_name(tmp_path: Path) -> None:
    folder = save(GPT2LMHeadModel(gpt2_config()), tmp_path, make_tokenizer())
    state = load_file(folder / "model.safetensors")
    state["lm_head.weight"] = state.pop("transformer.wte.weight")
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    loaded = load_model(folder)
    assert loaded.names["transformer.wte.weight"] == "lm_head.weight"
    check_names(loaded)


def test_names_without_prefix_and_in_old_spelling(tmp_path: Path) -> None:
    folder = make("causal_lm", tmp_path / "a")
    state = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("model."): value for name, value in state.items()}
    save_file(bare, folder / "model.safetensors", {"format": "pt"})
    loaded = load_model(folder)
    assert loaded.names["model.norm.weight"] == "norm.weight"
    check_names(loaded)

    folder = make("sequence_classification", tmp_path / "b")
    state = load_file(folder / "model.safetensors")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): value
        for name, value in state.items()
    }
    save_file(old, folder / "model.safetensors", {"format": "pt"})
    loaded = load_model(folder)
    assert loaded.names["bert.embeddings.LayerNorm.weight"] == "bert.embeddings.LayerNorm.gamma"
    check_names(loaded)
    assert len(loaded.names) == len(list(loaded.model.parameters()))


def test_parameters_made_of_several_tensors_are_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers stacks the experts of a mixture; no stored tensor is such a stack."""
    config = MixtralConfig(**SIZES, vocab_size=24, num_key_value_heads=2, num_local_experts=4)
    folder = save(MixtralForCausalLM(config), tmp_path, make_tokenizer())
    if not any("experts.0." in name for name in open_checkpoint(folder).specs):
        pytest.skip("this version of transformers stores experts as it computes with them")
    loaded = load_model(folder)
    assert not loaded.notes
    with ExpertsApart(loaded.model).installed():
        check_names(loaded)
    monkeypatch.setattr(experts, "pieces_of", lambda _: {})  # of a form that is not known
    loaded = load_model(folder)
    check_names(loaded)
    assert "no tensor of its own was found for 4 parameters" in loaded.notes[0]


def test_experts_of_any_width_run(tmp_path: Path) -> None:
    sizes = SIZES | {"intermediate_size": 30}  # 120 bytes, no multiple of 16
    config = MixtralConfig(**sizes, vocab_size=24, num_key_value_heads=2, num_local_experts=4)
    loaded = load_model(save(MixtralForCausalLM(config), tmp_path, make_tokenizer()))
    logits = loaded.model(torch.arange(6)[None]).logits
    logits.sum().backward()
    assert bool(logits.isfinite().all())


def test_sharded_and_pickled_weights(tmp_path: Path) -> None:
    folder = make("causal_lm", tmp_path / "a")
    model = LlamaForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "b", max_shard_size="5KB")
    make_tokenizer().save_pretrained(tmp_path / "b")
    assert (tmp_path / "b" / "model.safetensors.index.json").exists()
    check_names(load_model(tmp_path / "b"))
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    check_names(load_model(folder))


class Runs:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("ran"),)


def test_code_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = make("causal_lm", tmp_path / "a")
    torch.save({"model.norm.weight": Runs()}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="refused"):
        load_model(folder)

    folder = make("causal_lm", tmp_path / "b")
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "own",
        "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(
        "from pathlib import Path\nPath('ran').touch()\nclass Own: pass\n"
    )
    with pytest.raises(
        DataError, match="config.json: the configuration cannot be read by transformers"
    ):
        load_model(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("dtype", [None, "auto", "float32", "bfloat16"])
def test_dtype(dtype: str | None, tmp_path: Path) -> None:
    folder = save(LlamaForCausalLM(llama_config()).bfloat16(), tmp_path, make_tokenizer())
    loaded = load_model(folder, dtype=dtype, device="cpu")
    expected = torch.float32 if dtype == "float32" else torch.bfloat16
    assert {p.dtype for p in loaded.model.parameters()} == {expected}
    check_names(loaded)


def test_stored_values_are_not_rounded(tmp_path: Path) -> None:
    """Whatever config.json says of the dtype."""
    folder = make("causal_lm", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    check_names(load_model(folder))
    with pytest.raises(DataError, match="no dtype 'float'; expected auto or one of float64"):
        load_model(folder, dtype="float")


def test_device_map(tmp_path: Path) -> None:
    folder = make("causal_lm", tmp_path)
    check_names(load_model(folder, device_map={"": "cpu"}))
    with pytest.raises(DataError, match="either a device or a device_map"):
        load_model(folder, device="cpu", device_map="auto")


def test_unknown_tasks(tmp_path: Path) -> None:
    folder = save(BertModel(bert_config()), tmp_path / "a", make_tokenizer())
    with pytest.raises(
        DataError, match="'BertModel' does not say what task.*--task.*one of sequence_"
    ):
        load_model(folder)
    with pytest.raises(ValidationError, match="no task 'sentiment'; there is sequence_"):
        TaskFile(task="sentiment")
    classifier = make("sequence_classification", tmp_path / "b")
    for task in ("token_classification", "causal_lm", "multiple_choice"):
        with pytest.raises(
            DataError, match=f"is a BertForSequenceClassification.*cannot do {task}"
        ):
            load_model(classifier, TaskFile(task=task))
    with pytest.raises(DataError, match="transformers has no bert model for image_classification"):
        load_model(folder, TaskFile(task="image_classification"))


def test_missing_heads(tmp_path: Path) -> None:
    for model_class in (BertModel, BertForMaskedLM):
        folder = save(model_class(bert_config()), tmp_path / model_class.__name__, make_tokenizer())
        with pytest.raises(
            DataError,
            match=r"no head for this task: .*'classifier.bias'.*random; give the head as",
        ):
            load_model(folder, TaskFile(task="token_classification"))


def test_missing_unexpected_and_misshapen_tensors(tmp_path: Path) -> None:
    folder = make("sequence_classification", tmp_path)
    state = load_file(folder / "model.safetensors")
    name = "bert.encoder.layer.0.attention.self.query.bias"
    values = state.pop(name)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        DataError, match=f"lacks '{name}', which BertForSequenceClassification needs"
    ):
        load_model(folder)
    save_file(
        state | {name: values, "extra": values + 1}, folder / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(
        DataError, match="holds 'extra', for which BertForSequenceClassification has no"
    ):
        load_model(folder)
    save_file(state | {name: values[:5]}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        DataError, match=rf"'{name}' is \[5\], BertForSequenceClassification expects \[16\]"
    ):
        load_model(folder)


def test_folders_that_are_none(tmp_path: Path) -> None:
    folder = make("causal_lm", tmp_path / "a")
    with pytest.raises(
        DataError, match="expected a model's folder with its config.json, found a file"
    ):
        load_model(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="no such file or folder"):
        load_model(tmp_path / "none")
    (tmp_path / "outside.json").write_text("{}")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to(tmp_path / "outside.json")
    with pytest.raises(CheckpointError, match="outside of its folder"):
        load_model(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "config.json").unlink()
    with pytest.raises(DataError, match="has no config.json"):
        load_model(folder)


def test_tokenizers(tmp_path: Path) -> None:
    folder = save(BertForSequenceClassification(bert_config()), tmp_path / "a")
    with pytest.raises(DataError, match="has no tokenizer .*--tokenizer"):
        load_model(folder)
    make_tokenizer().save_pretrained(tmp_path / "t")
    assert (
        load_model(folder, TaskFile(tokenizer=str(tmp_path / "t"))).task.kind
        == "sequence_classification"
    )
    with pytest.raises(DataError, match="expected a folder with a tokenizer"):
        load_model(folder, TaskFile(tokenizer=str(tmp_path / "none")))
    make_tokenizer([*WORDS, *map(str, range(10))]).save_pretrained(tmp_path / "big")
    with pytest.raises(DataError, match="the tokenizer has 30 tokens, .* embedding has only 24"):
        load_model(folder, TaskFile(tokenizer=str(tmp_path / "big")))
    (tmp_path / "t" / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match="the tokenizer cannot be read"):
        load_model(folder, TaskFile(tokenizer=str(tmp_path / "t")))


def test_positions_that_begin_behind_the_padding(tmp_path: Path) -> None:
    config = RobertaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        vocab_size=24, max_position_embeddings=12, pad_token_id=0,
    )  # fmt: skip
    folder = save(RobertaForSequenceClassification(config), tmp_path / "m", make_tokenizer())
    loaded = load_model(folder)
    example = loaded.task.encode({"text": "a " * 50, "label": 0}, 0)
    assert example.length == 11
    batch = loaded.task.collate([example])
    assert loaded.task.predict(loaded.model, batch).losses().isfinite().all()


def test_loading_is_quiet_and_leaves_logging_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers.utils import logging

    folder = make("causal_lm", tmp_path)
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    capfd.readouterr()
    load_model(folder, need_targets=False)
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (verbosity, bars)


def test_missing_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make("causal_lm", tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(DataError, match=r"needs transformers.*pip install 'matsmerge\[hf\]'"):
        load_model(folder)
