"""A suite from beginning to end: steps side by side, each done once, and results as they come."""

import errno
import json
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import yaml

from matsmerge.checkpoints.public_names import without_paths
from matsmerge.engine.machine import (
    become_worker,
    check_workers,
    die_with,
    num_cores,
    starting_workers,
)
from matsmerge.errors import DataError, MatsError, OutputError, ResourceError
from matsmerge.experiments.hub_check import check_hub
from matsmerge.experiments.provenance import origin
from matsmerge.experiments.results import RESULTS, StepRecord, SuiteResults
from matsmerge.experiments.setup import Local, local
from matsmerge.experiments.step import Step
from matsmerge.experiments.store import Record, Store
from matsmerge.experiments.studies import gather, plan
from matsmerge.experiments.suite import Suite, make_suite
from matsmerge.guarded_files import Content, parse_as
from matsmerge.strict_yaml import read_yaml
from matsmerge.whole_folder import held, put_text

STEPS, SUITE, LOCAL = "steps", "suite.yaml", "local.yaml"
ALONE = ("costs",)


class _Places(Content):
    """Of local files that took the place of what a suite names."""

    base: str | None = None
    data: str | None = None


class Watcher(Protocol):
    """Who is told what is going on."""

    def planned(self, num_steps: int, num_done: int) -> None: ...
    def began(self, step: Step) -> None: ...
    def ended(self, step: Step, seconds: float) -> None: ...
    def noted(self, note: str) -> None: ...


class Silent:
    """Nobody."""

    def planned(self, num_steps: int, num_done: int) -> None: ...
    def began(self, step: Step) -> None: ...
    def ended(self, step: Step, seconds: float) -> None: ...
    def noted(self, note: str) -> None: ...


@dataclass(frozen=True)
class Done:
    """What became of a step in its process."""

    found: Mapping[str, Any]
    seconds: float


def run_suite(
    suite: Suite,
    folder: Path,
    *,
    base: Path | None = None,
    data: Path | None = None,
    num_workers: int | None = None,
    watcher: Watcher | None = None,
) -> SuiteResults:
    """Do what is not done yet, and write `results.json`.

    `base` and `data` are local folders that take the place of what the suite names. A folder
    continues where it was left, also with a suite that was changed: only what changed is done.
    """
    watcher = watcher or Silent()
    if num_workers is not None:
        check_workers(num_workers)
    folder = folder.absolute()
    _check_local(base, data)
    _check_folder(folder)
    here = local(base, data, suite.tasks)
    check_hub(suite, here)
    with _room_on_disk(folder):
        return _run_in(folder, suite, here, {"base": base, "data": data}, num_workers, watcher)


def _run_in(
    folder: Path,
    suite: Suite,
    here: Local,
    places: Mapping[str, Path | None],
    num_workers: int | None,
    watcher: Watcher,
) -> SuiteResults:
    (folder / STEPS).mkdir(parents=True, exist_ok=True)
    with held(folder, f"{folder}: another run is writing it just now"):
        put_text(folder / SUITE, _as_yaml(suite))
        given = {name: str(place.absolute()) for name, place in places.items() if place}
        put_text(folder / LOCAL, yaml.safe_dump(given))
        store = Store(folder / STEPS)
        steps = plan(suite, here)
        try:
            _run(steps, store, num_workers or num_cores(), watcher)
        finally:
            results = _results(suite, here, steps, store)
            put_text(folder / RESULTS, results.model_dump_json(indent=1))
    return results


@contextmanager
def _room_on_disk(folder: Path) -> Iterator[None]:
    """A full disk is for the user to put right."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ResourceError(
            f"{folder}: {error.strerror}; what was done is kept. Make room, and the same command "
            "continues"
        ) from error


def resume_suite(
    folder: Path, *, num_workers: int | None = None, watcher: Watcher | None = None
) -> SuiteResults:
    """Continue a run with the suite as it was."""
    suite, given = read_run(folder)
    return run_suite(suite, folder, **given, num_workers=num_workers, watcher=watcher)


def read_run(folder: Path) -> tuple[Suite, dict[str, Path]]:
    """The suite of a folder, and the local files it was run with."""
    path = folder / SUITE
    if not path.exists():
        raise DataError(f"{folder}: no run of a suite: it has no {SUITE}")
    content = read_yaml(path, DataError)
    if not isinstance(content, dict):
        raise DataError(f"{path}: is no suite; it was damaged or edited")
    suite = make_suite(str(path), content)
    places = folder / LOCAL
    given = read_yaml(places, DataError) if places.exists() else {}
    found = parse_as(given, _Places, str(places), DataError)
    return suite, {name: Path(place) for name, place in found if place is not None}


def _as_yaml(suite: Suite) -> str:
    content = suite.model_dump(mode="json", exclude_unset=True)
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)


def _check_local(base: Path | None, data: Path | None) -> None:
    problems = [
        f"{option} {path}: no such folder"
        for option, path in (("--base", base), ("--data", data))
        if path is not None and not path.is_dir()
    ]
    if problems:
        raise DataError(problems)


def _check_folder(folder: Path) -> None:
    """A new or empty folder, or one of a run."""
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder}: is a file, expected a folder to write the run to")
    if folder.exists() and any(folder.iterdir()) and not (folder / STEPS).is_dir():
        raise OutputError(f"{folder}: holds something else than a run; choose another folder")


def _run(steps: list[Step], store: Store, num_workers: int, watcher: Watcher) -> None:
    """Steps in their order, as soon as what they need is there."""
    done = {step.key for step in steps if store.load(step) is not None}
    for note in store.notes:
        watcher.noted(note)
    waiting = [step for step in steps if step.key not in done]
    watcher.planned(len(steps), len(done))
    if not waiting:
        return
    running: dict[Future[Done], Step] = {}
    pool = _pool(num_workers)
    try:
        while waiting or running:
            for step in list(waiting):
                needed = [n.key for n in step.needs.values() if isinstance(n, Step)]
                if _has_room(step, running, num_workers) and done.issuperset(needed):
                    waiting.remove(step)
                    watcher.began(step)
                    paths = {name: store.path(need) for name, need in step.needs.items()}
                    partial = store.partial(step)
                    partial.mkdir(exist_ok=True)
                    future = pool.submit(_perform, step.kind, dict(step.settings), paths, partial)
                    running[future] = step
            finished, _ = wait(running, return_when=FIRST_COMPLETED)
            # What went well is kept before it is said what did not.
            for future in sorted(finished, key=lambda f: f.exception() is not None):
                step = running.pop(future)
                outcome = _outcome(future, step)
                store.put(step, outcome.found, outcome.seconds)
                done.add(step.key)
                watcher.ended(step, outcome.seconds)
    except BaseException:
        for process in list((getattr(pool, "_processes", None) or {}).values()):
            process.terminate()  # a step may take an hour
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _has_room(step: Step, running: Mapping[Any, Step], num_workers: int) -> bool:
    """Can a step begin now? What measures time runs alone."""
    if any(s.kind in ALONE for s in (step, *running.values())):
        return not running
    return len(running) < num_workers


def _pool(num_workers: int) -> Executor:
    """Processes that stay for several steps; or just this one."""
    if num_workers == 1:
        return _Here()
    return _Processes(
        num_workers,
        multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(max(1, num_cores() // num_workers),),
    )


class _Processes(ProcessPoolExecutor):
    """Processes that Ctrl-C does not reach, from their first moment on; we take them along."""

    def submit(self, function: Any, /, *arguments: Any, **keywords: Any) -> "Future[Any]":
        with starting_workers():
            return super().submit(function, *arguments, **keywords)


class _Here(Executor):
    """One step after the other in this process."""

    def submit(self, function: Any, /, *arguments: Any, **_: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        try:
            future.set_result(function(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future


def _outcome(future: "Future[Done]", step: Step) -> Done:
    try:
        return future.result()
    except MatsError as error:
        problems = [f"{step.name}: {problem}" for problem in error.problems]
        raise type(error)(problems) from error
    except BrokenProcessPool as error:
        raise ResourceError(
            f"{step.name}: its process was killed, probably for want of memory; run fewer at once "
            "with --workers, and continue with `mats experiment resume`"
        ) from error


def _begin(num_threads: int) -> None:
    """Begin as a worker: the parent deals with Ctrl-C, and takes us along when it dies."""
    import torch

    become_worker()
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    if sys.platform == "linux" and parent.pid is not None:
        die_with(parent.pid)
    else:
        threading.Thread(target=watch, daemon=True).start()
    torch.set_num_threads(num_threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _perform(kind: str, settings: dict[str, Any], needs: dict[str, Path], out: Path) -> Done:
    from matsmerge.experiments.actions import ACTIONS

    begin = time.perf_counter()
    try:
        with _room_on_disk(out.parent.parent):
            found = ACTIONS[kind](settings, needs, out)
    except MatsError:
        raise
    except Exception as error:
        # The exception itself may not survive the way to another process.
        raise RuntimeError(traceback.format_exc()) from error
    return Done(found, time.perf_counter() - begin)


def _results(suite: Suite, here: Local, steps: list[Step], store: Store) -> SuiteResults:
    records = {step.key: store.load(step) for step in steps}
    return SuiteResults(
        name=suite.name,
        title=suite.title,
        about=suite.about,
        suite=without_paths(suite.model_dump(mode="json", exclude_unset=True)),
        seeds=suite.seeds,
        variants=gather(suite, here, store),
        missing=[step.name for step in steps if records[step.key] is None],
        steps=[
            StepRecord(name=s.name, kind=s.kind, key=s.key, seconds=record.seconds)
            for s in steps
            if (record := records[s.key]) is not None
        ],
        **origin(),
        replaced=_replaced(here),
        notes=[*store.notes, *_differences([r for r in records.values() if r is not None])],
    )


def _replaced(here: Local) -> list[str]:
    """What the suite names and was not used."""
    base = [] if here.base is None else [f"base model: {here.base.path.name}"]
    return base + [f"data of {task}: {given.path.name}" for task, given in here.data.items()]


def _differences(records: Sequence[Record]) -> list[str]:
    """In what the steps were done with, if not all in the same."""
    notes = []
    for what in ("versions", "commit", "machine"):
        found = {json.dumps(r.origin[what], sort_keys=True) for r in records if what in r.origin}
        if len(found) > 1:
            notes.append(
                f"steps were done with {len(found)} different {what}: {'; '.join(sorted(found))}"
            )
    return notes
