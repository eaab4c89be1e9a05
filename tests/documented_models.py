"""Models and data under the names that the README gives them; needs nothing of the repository.

`python documented_models.py FOLDER` makes them for scripts/wheel-walk.
"""

import json
import random
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    PreTrainedTokenizerFast,
)

_LETTERS = "abcdefghijklmnop"
_TASK = """task: sequence_classification
data: {name}.jsonl
labels: ["no", "yes"]
splits: {{train: 0.5, validation: 0.2, test: 0.3}}
"""


def make_documented_models(folder: Path) -> None:
    """Make base, tuned/sst2, tuned/trec, lora/a, lora/b, and files of data and tasks."""
    torch.manual_seed(0)
    draw = random.Random(0)
    ids = {word: i for i, word in enumerate(["<pad>", "<unk>", *_LETTERS])}
    words = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", pad_token="<pad>"
    )
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = BertConfig(vocab_size=len(ids), num_attention_heads=2, **sizes)
    BertModel(config).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    for name in ("sst2", "trec"):
        labels = {"id2label": {0: "no", 1: "yes"}, "label2id": {"no": 0, "yes": 1}}
        tuned = BertForSequenceClassification.from_pretrained(folder / "base", **labels)
        with torch.no_grad():
            for parameter in tuned.parameters():
                parameter += 0.02 * torch.randn_like(parameter)
        tuned.save_pretrained(folder / "tuned" / name)
        tokenizer.save_pretrained(folder / "tuned" / name)
        texts = [" ".join(draw.choices(_LETTERS, k=4)) for _ in range(40)]
        rows = [{"text": text, "label": "yes" if "a" in text else "no"} for text in texts]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines)
        (folder / f"{name}.yaml").write_text(_TASK.format(name=name))
    for name, rank in (("a", 2), ("b", 4)):
        base = BertModel.from_pretrained(folder / "base")
        options = {"target_modules": ["query", "value"], "init_lora_weights": False}
        adapter = get_peft_model(base, LoraConfig(r=rank, **options))
        adapter.save_pretrained(str(folder / "lora" / name))


if __name__ == "__main__":
    make_documented_models(Path(sys.argv[1]).resolve())  # adapters name their base by its path
