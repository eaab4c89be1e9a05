"""What kinds of tasks say of themselves; and that a new kind is one class and one line."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from tiny_models import bert_config, make_tokenizer, save, write_rows
from torch.nn.functional import cross_entropy

from matsmerge.data.row_values import text_of
from matsmerge.errors import DataError
from matsmerge.lab.evaluation.comparison import evaluate
from matsmerge.lab.evaluation.metrics import METRICS
from matsmerge.tasks.batch import Batch
from matsmerge.tasks.kinds import TASKS, kind_of_model
from matsmerge.tasks.loaded_model import load_model
from matsmerge.tasks.prediction import IGNORED
from matsmerge.tasks.task import Encoded, encode_all
from matsmerge.tasks.task_file import TaskFile
from matsmerge.tasks.text_encoder import Ids, pad_ids
from matsmerge.tasks.text_task import TextTask


@dataclass(frozen=True)
class EncodedMask(Encoded):
    features: Mapping[str, Ids]
    targets: list[int]


class MaskedLM(TextTask[EncodedMask]):
    """Columns `text`, in which ? stands for a hidden word, and `word`."""

    kind = "masked_lm"
    auto_class = "AutoModelForMaskedLM"
    architectures = ("ForMaskedLM",)
    required = ("text", "word")
    prompt = "text"
    metrics = ("accuracy", "loss")

    def encode(self, row: Mapping[str, Any], number: int) -> EncodedMask:
        features = self.encoder.encode(number, text_of(row, "text"))
        word, mask = (self.encoder.ids(t, special=False)[0] for t in (text_of(row, "word"), "?"))
        ids = features["input_ids"]
        if mask not in ids:
            raise DataError("'text': hides no word")
        return EncodedMask(
            number, len(ids), features, [word if i == mask else IGNORED for i in ids]
        )

    def collate(self, examples: Sequence[EncodedMask]) -> Batch:
        targets = pad_ids([e.targets for e in examples], IGNORED)
        return self.pad(examples, [e.features for e in examples], targets)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(TASKS, "masked_lm", MaskedLM)
    torch.manual_seed(0)
    return save(transformers.BertForMaskedLM(bert_config()), tmp_path / "m", make_tokenizer())


def test_a_new_kind(folder: Path, tmp_path: Path) -> None:
    rows = [{"text": text, "word": "b"} for text in ("a ? c", "? a", "c d a b ?")]
    data = write_rows(tmp_path / "d.jsonl", rows)
    loaded = load_model(folder)
    assert isinstance(loaded.task, MaskedLM)
    examples = encode_all(loaded.task, data)
    prediction = loaded.task.predict(loaded.model, loaded.task.collate(examples))
    for example, loss in zip(examples, prediction.losses(), strict=True):
        alone: Any = loaded.model(input_ids=torch.tensor([example.features["input_ids"]]))
        expected = cross_entropy(alone.logits[0], torch.tensor(example.targets), reduction="sum")
        torch.testing.assert_close(loss, expected)
    file = TaskFile(name="hidden", data=str(tmp_path / "d.jsonl"))
    results = evaluate({"a": folder, "b": folder}, [file], ensemble=True)
    assert list(results.tasks["hidden"].metrics) == ["accuracy"]
    with pytest.raises(DataError, match="'f1' does not fit the task masked_lm"):
        evaluate([folder], [file.model_copy(update={"metrics": ["f1"]})])


@pytest.mark.parametrize("name", TASKS)
def test_what_kinds_say(name: str) -> None:
    kind = TASKS[name]
    assert kind.kind == name
    assert set(kind.metrics) <= set(METRICS)
    models = kind.model_kind(bert_config())
    assert hasattr(transformers, models.auto_class)
    assert models.peft_type is None or models.peft_type in peft.TaskType.__members__


@pytest.mark.parametrize(
    ("architecture", "is_encoder_decoder", "expected"),
    [
        ("BertForSequenceClassification", False, "sequence_classification"),
        ("BertForTokenClassification", False, "token_classification"),
        ("GPT2LMHeadModel", False, "causal_lm"),
        ("LlamaForCausalLM", False, "causal_lm"),
        ("T5ForConditionalGeneration", True, "seq2seq"),
        ("BartModel", True, "seq2seq"),
        ("BertModel", False, None),
        ("LlavaForConditionalGeneration", False, None),
        ("DeiTForImageClassificationWithTeacher", False, "image_classification"),
    ],
)
def test_which_kind_a_model_is_for(
    architecture: str, is_encoder_decoder: bool, expected: str | None
) -> None:
    config = bert_config()
    config.architectures, config.is_encoder_decoder = [architecture], is_encoder_decoder
    found = kind_of_model(config)
    assert (None if found is None else found.kind) == expected
