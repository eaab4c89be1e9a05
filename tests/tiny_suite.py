"""A suite of two tasks on a tiny BERT, with local files."""

import random
from pathlib import Path
from typing import Any

from tiny_models import bert_config, make_tokenizer, save, write_rows
from transformers import BertModel

from matsmerge.lab.experiments.suite import Suite, make_suite

METHODS: dict[str, Any] = {
    "average": {"method": "average"},
    "task_arithmetic": {"method": "task_arithmetic", "search": {"scale": [0.3, 0.6]}},
    "mats": {"method": "mats", "search": {"iterations": [1, 3]}},
}


def make_base(folder: Path) -> Path:
    return save(BertModel(bert_config()), folder, make_tokenizer())


def make_data(folder: Path) -> Path:
    """Is there an a in it; does it begin with a letter before h?"""
    folder.mkdir(parents=True)
    draw = random.Random(0)
    texts = [" ".join(draw.choices("abcdefghijklmnop", k=5)) for _ in range(60)]
    answers = {"has_a": ["a" in t for t in texts], "early": [t[0] < "h" for t in texts]}
    for name, found in answers.items():
        rows = [
            {"text": t, "label": "yes" if a else "no"} for t, a in zip(texts, found, strict=True)
        ]
        write_rows(folder / f"{name}.jsonl", rows)
    return folder


def tiny_suite(**changes: Any) -> Suite:
    task = {
        "task": "sequence_classification",
        "labels": ["no", "yes"],
        "splits": {"train": 20, "statistics": 12, "validation": 12, "test": 12},
        "metrics": ["accuracy"],
    }
    content: dict[str, Any] = {
        "name": "tiny",
        "title": "Two tasks",
        "about": "Letters.",
        "base": "nowhere/base",
        "tasks": {"has_a": task, "early": task},
        "variants": {
            "full": {
                "training": {"max_steps": 3, "batch_size": 4, "learning_rate": 1e-2},
                "statistics": ["kfac", "fisher"],
                "split": "statistics",
                "num_examples": 8,
                "heads": "classifier.*",
            }
        },
        "methods": METHODS,
    }
    return make_suite("tiny", {**content, **changes})
