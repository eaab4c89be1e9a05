"""Merges on a Ray cluster whose workers, nodes and drivers are killed at random moments."""

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ray_clusters import add_node, cluster, processor_seconds
from safetensors.torch import save_file
from torch import Tensor, nn

import matsmerge
from drills.arena import Tally
from drills.kills import digest
from matsmerge import LocalExecutor, RayExecutor
from matsmerge.engine.layout import ShardFiles
from matsmerge.files.whole_outputs import staging_path
from matsmerge.recipes.recipe import make_recipe

KINDS = ("worker", "node", "driver")
_NUM_LAYERS = 16  # each a job
_NUM_KILLS = len(KINDS)  # of a merge, before it may come to its end and is compared
_PAUSE = 0.2  # seconds, in the middle of every tensor that is written
_GIVE_UP_SECONDS = 240.0  # of processors, since the merge last got on


class Slow(RayExecutor):
    """Jobs that pause in the middle of what they write, so that kills find them there."""

    def map(self, function: Any, jobs: Any) -> Any:
        return super().map(partial(do_slowly, function), jobs)


def do_slowly(function: Callable[[Any], Any], job: Any) -> Any:
    ShardFiles.write = write_slowly  # type: ignore[method-assign]
    return function(job)


_write = ShardFiles.write


def write_slowly(self: ShardFiles, name: str, start: int, values: Tensor) -> None:
    half = len(values) // 2
    _write(self, name, start, values[:half])
    time.sleep(_PAUSE)
    _write(self, name, start + half, values[half:])


def merge(recipe: dict[str, Any], out: Path) -> None:
    """A driver: begin, or continue what was killed."""
    resume = staging_path(out).exists()
    torch.set_num_threads(1)
    matsmerge.merge(make_recipe(recipe), out=out, executor=Slow(), resume=resume)


def make_inputs(place: Path) -> dict[str, Any]:
    """A recipe for models of many layers, with statistics."""
    torch.manual_seed(0)
    place.mkdir(parents=True)
    entries = []
    for name in ("base", "a", "b"):
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(_NUM_LAYERS)))
        path, statistics = place / f"{name}.safetensors", place / f"{name}.statistics.safetensors"
        save_file(model.state_dict(), path)
        if name != "base":
            matsmerge.collect(model, [torch.randn(40, 16)], checkpoint=path, out=statistics)
            entries.append({"model": str(path), "statistics": str(statistics)})
    return {"models": entries, "base": str(place / "base.safetensors"), "method": "regmean"}


def drill_ray_kills(place: Path, seed: int, num: int) -> Tally:
    """Kill workers, nodes and drivers `num` times in all, in turn; outputs stay the same."""
    recipe, tally = make_inputs(place / "inputs"), Tally("kills on Ray")
    matsmerge.merge(make_recipe(recipe), out=place / "here" / "out", executor=LocalExecutor(2))
    expected, draw = digest(place / "here" / "out"), random.Random(seed)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["drills.ray_kills"])
    with cluster(2) as nodes:
        number = 0
        while tally.tried < num:
            out = place / f"{number}" / "out"
            out.parent.mkdir()
            number += 1
            last = min(tally.tried + _NUM_KILLS, num)
            driver, patience = context.Process(target=merge, args=(recipe, out)), _Patience(out)
            driver.start()
            while driver.is_alive() or driver.exitcode != 0:
                kind = KINDS[tally.tried % len(KINDS)]
                is_merging = patience.journal.exists() and bool(_busy_workers(nodes))
                if tally.tried < last and driver.is_alive() and is_merging:
                    time.sleep(draw.uniform(0, _PAUSE * _NUM_LAYERS / 2))
                    if driver.is_alive() and _kill(kind, nodes, driver, draw):
                        tally.tried += 1
                        print(f"{tally.tried}: {kind} killed, merge {number}", flush=True)
                        if out.exists() and digest(out) != expected:
                            tally.violations.append(f"seed {seed}: half an output after {kind}")
                driver.join(1.0)
                if driver.exitcode == -signal.SIGKILL:
                    driver = context.Process(target=merge, args=(recipe, out))
                    driver.start()
                elif driver.exitcode or patience.is_over(tally.tried):
                    ended = "ended" if driver.exitcode else "does not get on"
                    tally.violations.append(f"seed {seed}: the driver {ended}: {driver.exitcode}")
                    driver.kill()
                    break
            is_whole = out.exists() and digest(out) == expected
            if driver.exitcode == 0 and (not is_whole or staging_path(out).exists()):
                tally.violations.append(f"seed {seed}: the output of merge {number} differs")
            tally.slowest = max(tally.slowest, patience.spent)
        print(f"{number} merges, each compared with one that nobody killed", flush=True)
    return tally


class _Patience:
    """Notices a merge that computes, or waits, without getting on, however busy the machine is."""

    def __init__(self, out: Path) -> None:
        self.journal = staging_path(out) / "journal.jsonl"
        self.spent = 0.0  # seconds of processors
        self._last = processor_seconds()
        self._seen: tuple[int, ...] = ()
        self._spent_then = 0.0

    def is_over(self, num_kills: int) -> bool:
        now = processor_seconds()
        self.spent += max(0.0, now - self._last)  # what is killed takes its seconds along
        self._last = now
        seen = (num_kills, self.journal.stat().st_size if self.journal.exists() else 0)
        if seen != self._seen:
            self._seen, self._spent_then = seen, self.spent
        return self.spent - self._spent_then > _GIVE_UP_SECONDS


def _kill(kind: str, nodes: Any, driver: Any, draw: random.Random) -> bool:
    """Whether there was something of this kind to kill."""
    if kind == "driver":
        driver.kill()
        driver.join()
        return True
    if kind == "node":
        node = nodes.worker_nodes.copy().pop()
        nodes.remove_node(node, allow_graceful=False)
        add_node(nodes)
        return True
    workers = _busy_workers(nodes)
    if workers:
        os.kill(draw.choice(workers), signal.SIGKILL)
    return bool(workers)


def _busy_workers(nodes: Any) -> list[int]:
    """Processes of the cluster that have a job."""
    raylets = {node.all_processes["raylet"][0].process.pid for node in nodes.list_all_nodes()}
    return [pid for pid in _processes() if _parent(pid) in raylets and _is_busy(pid)]


def _processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _is_busy(pid: int) -> bool:
    """Whether a process is a worker of Ray with a job."""
    try:
        return b"_perform" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
