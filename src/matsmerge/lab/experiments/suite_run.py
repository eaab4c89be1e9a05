"""A suite from beginning to end: steps side by side, each done once, and results as they come."""

import errno
import json
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from matsmerge.checkpoints.public_names import without_paths
from matsmerge.engine.devices import PROCESSOR
from matsmerge.engine.executor import Starter
from matsmerge.engine.machine import check_workers, num_cores
from matsmerge.errors import DataError, MatsError, OutputError, ResourceError
from matsmerge.files.guarded_files import parse_as
from matsmerge.files.strict_yaml import read_yaml
from matsmerge.files.whole_outputs import held, put_text
from matsmerge.lab.experiments.hub_check import check_hub
from matsmerge.lab.experiments.provenance import origin
from matsmerge.lab.experiments.score_tables import score_tables
from matsmerge.lab.experiments.step import Places, Step
from matsmerge.lab.experiments.step_processes import StepProcesses
from matsmerge.lab.experiments.store import Record, Store
from matsmerge.lab.experiments.suite import Suite, make_suite
from matsmerge.lab.experiments.suite_plan import SuitePlan
from matsmerge.lab.experiments.suite_results import RESULTS, STEPS, StepRecord, SuiteResults
from matsmerge.lab.experiments.suite_setup import local
from matsmerge.lab.run_logs import RunLog, open_log
from matsmerge.problems import reworded
from matsmerge.progress import AnyProgress, Progress, listener

Done = tuple[Any, float]  # what a step found, and how many seconds it took

SUITE, LOCAL = "suite.yaml", "local.yaml"


def run_suite(
    suite: Suite,
    folder: Path,
    *,
    base: Path | None = None,
    data: Path | None = None,
    num_workers: int | None = None,
    starter: Starter | None = None,
    log_to: str | None = None,
    progress: AnyProgress | None = None,
) -> SuiteResults:
    """Do what is not done yet, and write `results.json`.

    `base` and `data` are local folders that take the place of what the suite names. A folder
    continues where it was left, also with a suite that was changed: only what changed is done.
    Steps are done by processes of this machine, or where a `starter` such as `RayExecutor` does.
    `log_to` names a log: `tensorboard:FOLDER`, `wandb:PROJECT`.
    """
    if num_workers is not None and starter is None:
        check_workers(num_workers)
    folder = folder.absolute()
    _check_folder(folder)
    here = local(base, data, suite.tasks)
    check_hub(suite, here)
    places = {name: str(p.absolute()) for name, p in (("base", base), ("data", data)) if p}
    plan, store = SuitePlan(suite, here), Store(folder / STEPS)

    def write_results() -> SuiteResults:
        found = _results(plan, store)
        put_text(folder / RESULTS, found.model_dump_json(indent=1))
        return found

    with _room_on_disk(folder), closing(open_log(log_to)) as log:

        def note_step(step: Step[Any], seconds: float) -> None:
            log.seconds(step.kind, seconds)
            write_results()

        store.folder.mkdir(parents=True, exist_ok=True)
        with held(folder, "run"):
            content = suite.model_dump(mode="json", exclude_unset=True)
            text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
            put_text(folder / SUITE, text)
            put_text(folder / LOCAL, yaml.safe_dump(places))
            try:
                starter = starter or StepProcesses(num_workers or num_cores())
                _run(plan.steps, store, starter, listener(progress), note_step)
            finally:
                results = write_results()
        _log_results(results, log)
    return results


def _log_results(results: SuiteResults, log: RunLog) -> None:
    for name, variant in results.variants.items():
        for row in variant.comparison:
            settings = {"variant": name, "method": row.method, "seed": row.seed, **row.chosen}
            log.trial(settings, {**row.test.tasks, "mean": row.test.mean})
    for table in score_tables(results):
        log.table(*table)
    log.table("steps", ("step", "seconds"), [(s.name, s.seconds) for s in results.steps])


@contextmanager
def _room_on_disk(folder: Path) -> Iterator[None]:
    """Turn the error of a full disk into one that says what to do."""
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
    folder: Path,
    *,
    num_workers: int | None = None,
    starter: Starter | None = None,
    log_to: str | None = None,
    progress: AnyProgress | None = None,
) -> SuiteResults:
    """Continue a run with the suite as it was."""
    suite, given = read_run(folder)
    return run_suite(
        suite,
        folder,
        **given,
        num_workers=num_workers,
        starter=starter,
        log_to=log_to,
        progress=progress,
    )


def read_run(folder: Path) -> tuple[Suite, dict[str, Path]]:
    """The suite of a folder, and the local files it was run with."""
    path = folder / SUITE
    if not path.exists():
        raise DataError(f"{folder}: no run of a suite: it has no {SUITE}")
    suite = make_suite(str(path), read_yaml(path, DataError))
    places = folder / LOCAL
    given = read_yaml(places, DataError) if places.exists() else {}
    found = parse_as(given, dict[Literal["base", "data"], str], str(places), DataError)
    return suite, {name: Path(place) for name, place in found.items()}


def _check_folder(folder: Path) -> None:
    """A new or empty folder, or one of a run."""
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder}: is a file, expected a folder to write the run to")
    if folder.exists() and any(folder.iterdir()) and not (folder / STEPS).is_dir():
        raise OutputError(f"{folder}: holds something else than a run; choose another folder")


def _run(
    steps: list[Step[Any]],
    store: Store,
    starter: Starter,
    progress: Progress,
    each: Callable[[Step[Any], float], None],
) -> None:
    """Run each step as soon as the steps it needs are done, in their order otherwise.

    After each of them `each` is called with it and its seconds.
    """
    done = {step.key for step in steps if store.load(step) is not None}
    for note in store.notes:
        progress.note(f"note: {note}")
    waiting = [step for step in steps if step.key not in done]
    progress.stage("steps", len(steps), "steps", len(done))
    if done:
        progress.note(f"{len(done)} of {len(steps)} steps were done before")
    if not waiting:
        return
    running: dict[Future[Done], Step[Any]] = {}
    num_workers = starter.num_workers
    with starter.opened(_perform) as begin:
        while waiting or running:
            for step in list(waiting):
                needed = [need.key for need in step.needs if isinstance(need, Step)]
                if _has_room(step, running, num_workers) and done.issuperset(needed):
                    waiting.remove(step)
                    progress.advance(0, _names([*running.values(), step]))
                    places = Places({need.key: store.output(need) for need in step.needs})
                    partial = store.partial(step)
                    partial.mkdir(exist_ok=True)
                    running[begin(_Job(step, places, partial))] = step
            finished, _ = wait(running, return_when=FIRST_COMPLETED)
            # What went well is kept before it is said what did not.
            for future in sorted(finished, key=lambda f: f.exception() is not None):
                step = running.pop(future)
                found, seconds = _outcome(future, step)
                store.put(step, found, seconds)
                done.add(step.key)
                each(step, seconds)
                progress.note(f"{step.name}: {seconds:.1f} s")
                progress.advance(1, _names(running.values()))


def _names(steps: Iterable[Step[Any]]) -> str:
    return "; ".join(step.name for step in steps)


def _has_room(step: Step[Any], running: Mapping[Any, Step[Any]], num_workers: int) -> bool:
    """Whether a step can begin now; one that measures time runs alone."""
    if any(s.runs_alone for s in (step, *running.values())):
        return not running
    return len(running) < num_workers


def _outcome(future: "Future[Done]", step: Step[Any]) -> Done:
    try:
        with reworded(before=f"{step.name}: "):
            return future.result()
    except BrokenProcessPool as error:
        raise ResourceError(
            f"{step.name}: its process was killed, probably for want of memory; run fewer at once "
            "with --workers, and continue with `mats experiment resume`"
        ) from error


@dataclass(frozen=True)
class _Job:
    """A step that can be done now."""

    step: Step[Any]
    places: Places
    out: Path
    peak_bytes: int = 0  # which nobody knows
    device: str = PROCESSOR


def _perform(job: _Job) -> Done:
    begin = time.perf_counter()
    try:
        with _room_on_disk(job.out.parent.parent):
            found = job.step.run(job.places, job.out)
    except MatsError:
        raise
    except Exception as error:
        # The exception itself may not survive the way to another process.
        raise RuntimeError(traceback.format_exc()) from error
    return found, time.perf_counter() - begin


def _results(plan: SuitePlan, store: Store) -> SuiteResults:
    suite, steps = plan.suite, plan.steps
    records = {step.key: store.load(step) for step in steps}
    return SuiteResults(
        name=suite.name,
        title=suite.title,
        about=suite.about,
        suite=without_paths(suite.model_dump(mode="json", exclude_unset=True)),
        seeds=suite.seeds,
        variants=plan.results(store),
        missing=[step.name for step in steps if records[step.key] is None],
        steps=[
            StepRecord(name=s.name, kind=s.kind, key=s.key, seconds=record.seconds)
            for s in steps
            if (record := records[s.key]) is not None
        ],
        **origin(),
        replaced=plan.local.described,
        notes=[*store.notes, *_differences([r for r in records.values() if r is not None])],
    )


def _differences(records: Sequence[Record]) -> list[str]:
    """Notes on versions, commits and machines that differ between steps."""
    notes = []
    for what in ("versions", "commit", "machine"):
        found = {json.dumps(r.origin[what], sort_keys=True) for r in records if what in r.origin}
        if len(found) > 1:
            notes.append(
                f"steps were done with {len(found)} different {what}: {'; '.join(sorted(found))}"
            )
    return notes
