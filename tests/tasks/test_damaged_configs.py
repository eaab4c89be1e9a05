import json
from pathlib import Path

import pytest
from damaged_files import mutated_texts, refused
from tiny_models import bert_config, make_tokenizer, save
from transformers import AutoModelForSequenceClassification

from matsmerge.errors import DataError
from matsmerge.tasks.loaded_model import load_model


def test_configs_with_wrong_types(tmp_path: Path) -> None:
    model = AutoModelForSequenceClassification.from_config(bert_config(num_labels=3))
    folder = save(model, tmp_path / "config.json-and-more", make_tokenizer())
    path = folder / "config.json"
    content = json.loads(path.read_text())
    # Some of them: loading a model takes a while.
    texts = mutated_texts(content, every=11)
    assert len(refused(path, texts, lambda: load_model(str(folder)))) > 20


@pytest.mark.parametrize("length", [{"a": 1}, "x", [], True, -1, 0])
def test_lengths_of_a_tokenizer(length: object, tmp_path: Path) -> None:
    model = AutoModelForSequenceClassification.from_config(bert_config(num_labels=3))
    folder = save(model, tmp_path / "model", make_tokenizer())
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_max_length": length}))
    with pytest.raises(DataError, match="model_max_length"):
        load_model(str(folder))


def test_ids_of_labels_may_be_texts(tmp_path: Path) -> None:
    """As some fine-tuning scripts write them."""
    model = AutoModelForSequenceClassification.from_config(bert_config(num_labels=2))
    folder = save(model, tmp_path / "model", make_tokenizer())
    path = folder / "config.json"
    labels = {"id2label": {"0": "no", "1": "yes"}, "label2id": {"no": "0", "yes": "1"}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **labels}))
    load_model(str(folder))
