"""Commands that are killed at a random moment, continued, and compared with undisturbed ones."""

import hashlib
import random
import shutil
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from drills.arena import Tally, run
from drills.yard import task_options

_MOST_KILLS = 4  # of one run, before it is left to finish


@dataclass(frozen=True)
class Work:
    """A command that writes an output and can be continued."""

    name: str
    arguments: tuple[str, ...]
    output: str
    resume: tuple[str, ...] = ("--resume",)
    ignored: tuple[str, ...] = ()  # files that hold times


def works(yard: Path) -> list[Work]:
    search = ("--search", "scale=0.2:0.6:0.2")
    return [
        Work("merge", ("merge", "recipe.yaml", "--out", "out"), "out"),
        Work("merge", ("merge", "mergekit.yaml", "--out", "out", "--workers", "2"), "out"),
        Work(
            "collect",
            (
                "collect",
                "one",
                "--task",
                "one.yaml",
                "--split",
                "train",
                "--statistics",
                "kfac,fisher,block_fisher",
                "--batch-size",
                "2",
                "--out",
                "out.safetensors",
            ),
            "out.safetensors",
        ),
        Work(
            "tune",
            ("tune", "plain.yaml", *task_options(), *search, "--out", "out"),
            "out",
            ignored=("tuning.json", "trials.jsonl"),
        ),
        Work(
            "experiment",
            (
                "experiment",
                "run",
                _write_suite(yard).name,
                "--base",
                "base",
                "--data",
                "rows",
                "--out",
                "out",
                "--workers",
                "1",
            ),
            "out",
            (),
            ignored=("results.json", "report.html", "step.json", "training.json"),  # hold times
        ),
    ]


def _write_suite(yard: Path) -> Path:
    """A suite of two tasks and two methods, quick enough to be killed again and again."""
    task = {
        "task": "sequence_classification",
        "labels": ["0", "1", "2"],
        "splits": {"train": 20, "statistics": 12, "validation": 12, "test": 12},
        "metrics": ["accuracy"],
    }
    suite = {
        "name": "drill",
        "title": "Two tasks",
        "about": "Letters.",
        "base": "nowhere/base",
        "tasks": dict.fromkeys(("one", "two"), task),
        "variants": {
            "full": {
                "training": {"max_steps": 2, "batch_size": 4},
                "statistics": ["gram"],
                "split": "statistics",
                "num_examples": 8,
                "heads": "classifier.*",
            }
        },
        "methods": {"average": {"method": "average"}, "regmean": {"method": "regmean"}},
    }
    (yard / "rows").mkdir(exist_ok=True)
    for name in ("one", "two"):
        shutil.copy(yard / f"{name}.jsonl", yard / "rows")
    path = yard / "suite.yaml"
    path.write_text(yaml.safe_dump(suite, sort_keys=False))
    return path


def drill_kills(yard: Path, place: Path, seed: int, num: int) -> list[Tally]:
    """Kill commands `num` times in all; a tally for each command."""
    tallies: dict[str, Tally] = {}
    draw = random.Random(seed)
    each = works(yard)[:num]
    shutil.copytree(yard, place)
    undisturbed = {}
    for work in each:
        outcome = run(place, work.arguments)
        assert outcome.code == 0, f"{work.arguments}: {outcome.text}"
        undisturbed[work] = digest(place / work.output, work.ignored), outcome.seconds
        _clear(place, yard)
    kills = 0
    while kills < num:
        work = each[kills % len(each)]
        tally = tallies.setdefault(work.name, Tally(f"kills of {work.name}"))
        expected, seconds = undisturbed[work]
        arguments: Sequence[str] = work.arguments
        problems: list[str] = []
        moments = []
        for attempt in range(_MOST_KILLS + 1):
            moment = draw.uniform(0, seconds) if attempt < _MOST_KILLS else None
            outcome = run(place, arguments, signal_after=moment)
            if moment is not None and outcome.code == -signal.SIGKILL:
                kills += 1
                tally.count(outcome)
                moments.append(round(moment, 3))
                if (place / work.output).exists() and work.name != "experiment":
                    problems += _compare(place / work.output, expected, work, "after a kill")
                begun = any(p.name.startswith(f".{work.output}") for p in place.iterdir())
                arguments = (*work.arguments, *(work.resume if begun else ()))
                if (place / work.output).exists() and work.name != "experiment":
                    break  # killed when it was done
            else:
                if outcome.code != 0:
                    problems.append(f"continuing ended with {outcome.code}: {outcome.text[-800:]}")
                else:
                    problems += _compare(place / work.output, expected, work, "when continued")
                break
        left = [p.name for p in place.iterdir() if p.name.startswith(f".{work.output}")]
        if left and outcome.code == 0:
            problems.append(f"left {', '.join(left)} behind")
        if problems:
            tally.violations.append(f"seed {seed}, killed after {moments} s: {'; '.join(problems)}")
        _clear(place, yard)
    return list(tallies.values())


def digest(path: Path, ignored: Sequence[str] = ()) -> str:
    """What a file or folder holds: names and bytes."""
    found = hashlib.sha256()
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    for file in files:
        if file.is_file() and file.name not in ignored:
            found.update(str(file.relative_to(path)).encode() + b"\0" + file.read_bytes())
    return found.hexdigest()


def _compare(path: Path, expected: str, work: Work, when: str) -> list[str]:
    if digest(path, work.ignored) == expected:
        return []
    return [f"mats {' '.join(work.arguments)}: the output differs {when}"]


def _clear(place: Path, yard: Path) -> None:
    """Leave only what the yard has."""
    kept = {path.name for path in yard.iterdir()}
    for path in place.iterdir():
        if path.name not in kept:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
