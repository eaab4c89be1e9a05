"""How long commands take that only say something: help, and errors in recipes.

    python benchmarks/start_up.py

Each is run several times in turn with the others and with `python -c pass`; shown are the medians
of the clock's and of the processor's time. The latter is what to compare where others use the
machine. The goals are for the former, on a machine that is idle. Modules are compiled by the first
runs, as they are for everyone after the first command.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RECIPES = {
    "syntax.yaml": "models: [a, b\nmethod: ties\n",
    "key.yaml": "models: [a, b]\nbsae: c\nmethod: ties\n",
    "option.yaml": "models: [a, b]\nbase: c\nmethod: {name: ties, scale: much}\n",
}
MATS = ["-m", "matsmerge"]
COMMANDS: dict[str, tuple[list[str], float | None]] = {  # and goals in seconds
    "python -c pass": (["-c", "pass"], None),
    "import torch": (["-c", "import torch"], None),
    "import matsmerge": (["-c", "import matsmerge"], None),
    "matsmerge.merge": (["-c", "import matsmerge; matsmerge.merge"], None),
    "mats --help": ([*MATS, "--help"], 0.4),
    "mats merge --help": ([*MATS, "merge", "--help"], None),
    "recipe: no YAML": ([*MATS, "merge", "syntax.yaml", "-o", "out"], 0.6),
    "recipe: unknown key": ([*MATS, "merge", "key.yaml", "-o", "out"], 0.6),
    "recipe: wrong value": ([*MATS, "merge", "option.yaml", "-o", "out"], 0.6),
}


def run(arguments: list[str], folder: str) -> tuple[float, float]:
    """Seconds by the clock, and of the processor."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command, environment = [sys.executable, *arguments], dict(os.environ)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name, text in RECIPES.items():
            (Path(folder) / name).write_text(text)
        for command, _ in COMMANDS.values():
            run(command, folder)  # once to warm up
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
        for _ in range(arguments.repeat):
            for name, (command, _) in COMMANDS.items():
                found[name].append(run(command, folder))
    print(f"{'':22} {'seconds':>8} {'goal':>5} {'processor':>10}")
    for name, (_, goal) in COMMANDS.items():
        clock, processor = (statistics.median(times) for times in zip(*found[name], strict=True))
        print(f"{name:22} {clock:8.2f} {goal or '':>5} {processor:10.2f}")


if __name__ == "__main__":
    main()
