"""What models answer on their data, against one text at a time."""

import math
from pathlib import Path

import pytest
import torch
from advised_models import Family, answers_of, make_family, write_texts
from safetensors.torch import load_file, save_file
from tiny_models import llama_config, make_tokenizer, save, write_rows
from transformers import LlamaForCausalLM

from matsmerge.advice.answers import Answers, answer, ask
from matsmerge.data.rows import read_data
from matsmerge.errors import NonFiniteError
from matsmerge.models.kept_base import KeptBase
from matsmerge.progress import Progress
from matsmerge.tasks.task_file import TaskFile


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(tmp_path_factory.mktemp("family"), poor=[2])


def answers(model: Path, data: Path) -> Answers:
    asked = ask(str(model), TaskFile(), read_data(data), 1000, KeptBase())
    return answer(asked, Progress())


def entropy(p: torch.Tensor) -> torch.Tensor:
    return -(p * p.log()).sum(-1)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_confidence_and_variety(family: Family, which: int) -> None:
    p = answers_of(family.models[which])
    found = answers(family.models[which], family.data[which])
    information = entropy(p.mean(0)) - entropy(p).mean()
    # The model runs in float32.
    assert found.confidence == pytest.approx(float(p.max(-1).values.mean()), rel=1e-4)
    assert found.variety == pytest.approx(float(information) / math.log(p.shape[1]), abs=1e-4)
    most = p.argmax(-1).bincount().max()
    assert found.commonest_share == pytest.approx(float(most) / len(p))
    assert (found.num_examples, found.num_classes) == p.shape
    assert found.accuracy is None
    assert (found.variety < 0.01) == (which == 2)


def test_labels_are_used_where_there_are_some(family: Family, tmp_path: Path) -> None:
    said = answers_of(family.models[0]).argmax(-1)
    labels = [int(a) if i % 4 else 0 for i, a in enumerate(said)]
    found = answers(family.models[0], write_texts(tmp_path / "labelled.jsonl", labels))
    right = [int(a) == label for a, label in zip(said, labels, strict=True)]
    assert found.accuracy == pytest.approx(sum(right) / len(right))
    share = max(labels.count(0), labels.count(1)) / len(labels)
    assert found.majority == pytest.approx(share)
    both = torch.tensor([share, 1 - share], dtype=torch.float64)
    assert found.label_variety == pytest.approx(float(entropy(both)) / math.log(2))


def test_labels_that_mean_nothing_to_the_model_are_noted(family: Family, tmp_path: Path) -> None:
    data = write_texts(tmp_path / "labelled.jsonl", ["good"] * 40)
    asked = ask(str(family.models[0]), TaskFile(), read_data(data), 10, KeptBase())
    assert any("labels were not used" in note for note in asked.notes)
    assert answer(asked, Progress()).accuracy is None


def test_examples_are_drawn_from_everywhere(family: Family) -> None:
    rows = read_data(family.data[0])
    asked = ask(str(family.models[0]), TaskFile(), rows, 10, KeptBase())
    numbers = [example.number for example in asked.examples]
    assert len(numbers) == 10
    assert max(numbers) > 20


def test_answers_of_language_models_are_tokens(tmp_path: Path) -> None:
    model = save(LlamaForCausalLM(llama_config()), tmp_path / "model", make_tokenizer())
    write_rows(tmp_path / "data.jsonl", [{"text": "a b c d"}, {"text": "e f"}])
    found = answers(model, tmp_path / "data.jsonl")
    assert found.writes_text
    assert found.num_classes == 24
    assert 1 / 24 <= found.confidence <= 1


def test_answers_that_are_nan(tmp_path: Path) -> None:
    damaged = make_family(tmp_path, num=1)
    file = damaged.models[0] / "model.safetensors"
    state = load_file(file)
    state["classifier.bias"][0] = math.nan
    save_file(state, file, {"format": "pt"})
    with pytest.raises(NonFiniteError, match="its answers on its data are NaN"):
        answers(damaged.models[0], damaged.data[0])
