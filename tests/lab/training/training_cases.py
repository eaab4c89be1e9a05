"""Tiny tasks, and what the tests of training ask of a run."""

import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tiny_models import write_rows

from matsmerge.progress import BYTES, Progress
from matsmerge.tasks.loaded_model import load_model
from matsmerge.tasks.splits import read_split
from matsmerge.tasks.task import encode_all
from matsmerge.tasks.task_file import read_task_file

State = dict[str, torch.Tensor]
SPLITS = "splits: {train: 0.75, validation: 0.25}\n"


def sentences(num: int, seed: int = 0) -> list[list[str]]:
    drawn = random.Random(seed)
    return [[drawn.choice("abcdefgh") for _ in range(drawn.randint(2, 7))] for _ in range(num)]


def rule_task(
    folder: Path, num: int = 200, name: str = "rule", classes: tuple[str, ...] = ("abcd", "efgh")
) -> Path:
    """From which letters is a text made?"""
    drawn = random.Random(name)
    rows = []
    for i in range(num):
        words = drawn.choices(classes[i % len(classes)], k=drawn.randint(2, 7))
        rows.append({"text": " ".join(words), "label": i % len(classes)})
    write_rows(folder / f"{name}.jsonl", rows)
    path = folder / f"{name}.yaml"
    path.write_text(f"task: sequence_classification\ndata: {name}.jsonl\n{SPLITS}")
    return path


def three_classes(folder: Path) -> Path:
    return rule_task(folder, 150, "three", ("abc", "def", "gh"))


QUICK: dict[str, Any] = {"learning_rate": 3e-3, "eval_every": 15, "max_steps": 45}


def weights(folder: Path) -> State:
    (file,) = folder.glob("*model.safetensors")
    return load_file(file)


def assert_same(a: State, b: State) -> None:
    assert a.keys() == b.keys()
    for name, values in a.items():
        assert torch.equal(values, b[name]), name


def accuracy(
    folder: Path, task: Path, split: str = "validation", head: Path | None = None
) -> float:
    """One example at a time, as anybody would."""
    file = read_task_file(task)
    loaded = load_model(folder, file, head=head)
    examples = encode_all(
        loaded.task, read_split(file, split), file.columns, wordings=file.wordings
    )
    right = 0
    for example in examples:
        with torch.no_grad():
            said = loaded.task.predict(loaded.model, loaded.task.collate([example]))
        assert said.targets is not None
        right += int(said.logits.argmax(-1) == said.targets)
    return right / len(examples)


def choice_task(folder: Path, name: str = "choice", num: int = 160) -> Path:
    rows = [{"words": " ".join(w), "first": int(w[0] <= "d")} for w in sentences(num)]
    write_rows(folder / f"{name}.jsonl", rows)
    path = folder / f"{name}.yaml"
    path.write_text(
        f"task: multiple_choice\ndata: {name}.jsonl\ncolumns: {{label: first}}\n{SPLITS}"
        "template: ['{words} i', 'j {words}']\nchoices: [k l, m]\n"
    )
    return path


def images_task(folder: Path, num: int = 120) -> Path:
    g = torch.Generator().manual_seed(0)
    rows = []
    for i in range(num):
        image = torch.randint(0, 100, (8, 8, 3), generator=g)
        image[..., i % 3] += 150
        rows.append({"image": image.tolist(), "label": ["red", "green", "blue"][i % 3]})
    write_rows(folder / "images.jsonl", rows)
    path = folder / "images.yaml"
    path.write_text(
        f"task: image_classification\ndata: images.jsonl\n{SPLITS}labels: [red, green, blue]\n"
    )
    return path


class Interrupting(Progress):
    """Stops like Ctrl-C after a batch."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.first: int | None = None
        self.number = 0

    def stage(self, title: str, total: int | None = None, unit: str = BYTES, done: int = 0) -> None:
        assert (title, unit) == ("training", "batches")
        assert total
        self.first = self.number = done

    def advance(self, amount: int, doing: str | None = None) -> None:
        assert doing
        assert doing.startswith("loss ")
        self.number += amount
        if self.number == self.at:
            raise KeyboardInterrupt
