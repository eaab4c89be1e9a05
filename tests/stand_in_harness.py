"""A small stand-in for lm-evaluation-harness, and a task of it that the real one can run."""

import json
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tiny_models import make_tokenizer

LETTERS = "abcdefghijklmnop"
TASK = """\
task: letters
dataset_path: json
dataset_kwargs: {data_files: {SPLITS}}
output_type: multiple_choice
doc_to_text: "{{input}}"
doc_to_choice: choices
doc_to_target: label
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
"""


@dataclass
class Task:
    """What is used of the harness's tasks."""

    name: str
    validation: list[str] = field(default_factory=list)
    test: list[str] = field(default_factory=list)
    metrics: Mapping[str, bool] = field(default_factory=lambda: {"acc": True, "acc_norm": True})
    is_fixed: bool = False  # of a Python class, which does as it likes

    def has_validation_docs(self) -> bool:
        return bool(self.validation)

    def has_test_docs(self) -> bool:
        return bool(self.test)

    @property
    def eval_docs(self) -> list[str]:
        return self.test or self.validation

    def set_config(self, key: str, value: None) -> None:
        assert key == "test_split"
        if not self.is_fixed:
            self.test = []

    def higher_is_better(self) -> dict[str, bool]:
        return dict(self.metrics)

    def dump_config(self) -> dict[str, Any]:
        return {"task": self.name}


def install(
    monkeypatch: pytest.MonkeyPatch,
    evaluate: Callable[..., Any],
    tasks: Mapping[str, Task] | None = None,
    names: tuple[str, ...] = (),
) -> None:
    """Put a library in the harness's place that knows some tasks and evaluates as told."""
    found = dict(tasks or {})

    class TaskManager:
        def __init__(self, include_defaults: bool = True) -> None:
            self.all_tasks = [*found, *names] if include_defaults else []

        def load(self, wanted: list[str]) -> dict[str, Any]:
            return {"tasks": {name: found[name] for name in wanted}}

    library: Any = ModuleType("lm_eval")
    manager: Any = ModuleType("lm_eval.tasks")
    library.simple_evaluate, library.__version__ = evaluate, "9.9"
    manager.TaskManager = TaskManager
    monkeypatch.setitem(sys.modules, "lm_eval", library)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", manager)


def accuracy(model: Any, path: Path, num: int | None = None) -> float:
    """How often a model, whose tokens are letters, finds the right one of two likelier."""
    model.eval()
    tokenizer = letter_tokenizer()
    right: list[bool] = []
    for row in map(json.loads, path.read_text().splitlines()[:num]):
        ids = tokenizer(row["input"], return_tensors="pt").input_ids
        with torch.no_grad():
            scores = model(ids).logits[0, -1].double()
        found = [float(scores[tokenizer.convert_tokens_to_ids(c)]) for c in row["choices"]]
        right.append(bool(found.index(max(found)) == row["label"]))
    return sum(right) / len(right)


def letter_tokenizer() -> Any:
    return make_tokenizer(begin=False, end=False)


def write_task(folder: Path, *splits: str, num: int = 40) -> Path:
    """A task in the harness's format: which of two letters comes next, from local files."""
    for seed, split in enumerate(splits):
        draw = random.Random(seed)
        with (folder / f"{split}.jsonl").open("w") as file:
            for _ in range(num):
                text, choices = " ".join(draw.choices(LETTERS, k=4)), draw.sample(LETTERS, 2)
                row = {"input": text, "choices": choices, "label": draw.randrange(2)}
                file.write(json.dumps(row) + "\n")
    files = ", ".join(f"{split}: {folder / split}.jsonl" for split in splits)
    text = TASK.replace("SPLITS", files)
    text += "".join(f"{split}_split: {split}\n" for split in splits)
    (folder / "letters.yaml").write_text(text)
    return folder / "letters.yaml"
