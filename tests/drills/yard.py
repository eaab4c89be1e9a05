"""A folder with small real inputs of every kind that a command reads, made once for all drills."""

import contextlib
import gzip
import io
import json
import os
import warnings
from pathlib import Path
from unittest.mock import patch

import torch
import yaml
from peft import IA3Config, LoraConfig
from peft_models import adapt
from tiny_models import bert_config, make_tokenizer, save
from transformers import BertForSequenceClassification

from matsmerge.cli import main
from matsmerge.engine import output_folder
from matsmerge.statistics import collection_run, partial_file

TASKS = ("one", "two")
HALF_MERGE = ("merge", "recipe.yaml", "--out", "half")
HALF_COLLECTION = (
    "collect", "one", "--task", "one.yaml", "--split", "train", "--batch-size", "4",
    "--statistics", "kfac,fisher", "--out", "half.safetensors",
)  # fmt: skip


def make_yard(folder: Path) -> Path:
    """Models, adapters, data, task files, recipes, statistics, a merge and its scores."""
    torch.manual_seed(0)
    folder.mkdir(parents=True)
    base = BertForSequenceClassification(bert_config(num_labels=3))
    save(base, folder / "base", make_tokenizer())
    for seed, name in enumerate(TASKS, 1):
        model = BertForSequenceClassification.from_pretrained(folder / "base")
        save(model, folder / name, make_tokenizer(), seed=seed)
        card = {"license": "mit", "language": "en", "datasets": [f"data-{name}"]}
        (folder / name / "README.md").write_text(f"---\n{yaml.safe_dump(card)}---\n\n# {name}\n")
        _write_data(folder, name, seed)
    sharded = BertForSequenceClassification.from_pretrained(folder / "one")
    sharded.save_pretrained(folder / "sharded", max_shard_size="10KB")
    torch.save(sharded.state_dict(), folder / "pickled.bin")
    lora = LoraConfig(r=2, target_modules=["query", "dense"], modules_to_save=["classifier"])
    scales = IA3Config(target_modules=["key", "value"], feedforward_modules=[])
    for name, config in (("lora", lora), ("ia3", scales)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            adapt(folder / "base", config, folder / name)
    _write_recipes(folder)
    for name in TASKS:
        run_here(
            folder, "collect", name, "--task", f"{name}.yaml", "--split", "train",
            "--statistics", "kfac,fisher,block_fisher", "--out", f"{name}.safetensors",
        )  # fmt: skip
    run_here(folder, "merge", "recipe.yaml", "--out", "merged", "--overwrite")
    run_here(folder, "evaluate", "merged", *task_options(), "--split", "test", "--out", "scores")
    return folder


def interrupt_work(folder: Path) -> None:
    """Leave a merge and a collection in a folder that were interrupted at their very end."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with (
        patch.object(output_folder.OutputFolder, "finish", interrupt),
        patch.object(collection_run, "save_statistics", interrupt),
        patch.object(partial_file, "_SECONDS_BETWEEN", 0.0),
    ):
        run_here(folder, *HALF_MERGE, ends_with=130)
        run_here(folder, *HALF_COLLECTION, ends_with=130)


def task_options() -> list[str]:
    return [part for name in TASKS for part in ("--task", f"{name}.yaml")]


def run_here(folder: Path, *arguments: str, ends_with: int = 0) -> None:
    """Run a command in this process; it has to end in a certain way."""
    before, said = Path.cwd(), io.StringIO()
    os.chdir(folder)
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            code = main.run([*arguments])
    finally:
        os.chdir(before)
    assert code == ends_with, f"{arguments}: {said.getvalue()}"


def _write_data(folder: Path, name: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, 8, (60, 4), generator=generator)
    rows = [
        {"text": " ".join("abcdefgh"[int(w)] for w in words), "label": int(words.sum()) % 3}
        for words in drawn
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / f"{name}.jsonl").write_text(lines)
    (folder / f"{name}.jsonl.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))
    table = "text,label\n" + "".join(f"{row['text']},{row['label']}\n" for row in rows)
    (folder / f"{name}.csv").write_text(table)
    (folder / f"{name}.tsv").write_text(table.replace(",", "\t"))
    (folder / f"{name}.json").write_text(json.dumps(rows))
    splits = "{train: 20, validation: 25, test: 15}"
    (folder / f"{name}.yaml").write_text(
        f"task: sequence_classification\ndata: {name}.jsonl\nsplits: {splits}\n"
    )


def _write_recipes(folder: Path) -> None:
    models = [{"model": name, "statistics": f"{name}.safetensors"} for name in TASKS]
    recipe = {
        "base": "base",
        "models": models,
        "method": {"name": "mats", "init": {"name": "ties"}, "objective": "gram", "iterations": 5},
        "heads": "classifier.*",
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    plain = {"base": "base", "models": ["one", "two"], "method": "task_arithmetic"}
    (folder / "plain.yaml").write_text(yaml.safe_dump(plain, sort_keys=False))
    foreign = {
        "merge_method": "ties",
        "base_model": "base",
        "models": [
            {"model": name, "parameters": {"weight": 0.5, "density": [0.2, 0.9]}} for name in TASKS
        ],
        "dtype": "float32",
    }
    (folder / "mergekit.yaml").write_text(yaml.safe_dump(foreign, sort_keys=False))
