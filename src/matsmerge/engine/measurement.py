"""Running the measurements that methods ask for before they merge."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from matsmerge.engine.executor import Executor
from matsmerge.engine.plan import Job, Parameter, Plan, make_jobs
from matsmerge.engine.worker import Worker
from matsmerge.methods.method import Pass
from matsmerge.methods.site import Measured, Task
from matsmerge.progress import Progress


@dataclass(frozen=True)
class _AloneJob:
    parameter: Parameter
    jobs: tuple[Job, ...]
    peak_bytes: int


def measure(
    plan: Plan, worker: Worker, executor: Executor, progress: Progress
) -> dict[str, Measured]:
    """Measure everything the plan's methods need, by parameter."""
    result: dict[str, Measured] = {}
    for group in plan.measured_together:
        jobs = tuple(make_jobs(group, worker.alignment))
        num_bytes = sum(job.num_input_bytes for job in jobs)

        def run(
            reading: Pass, jobs: tuple[Job, ...] = jobs, num_bytes: int = num_bytes
        ) -> list[Any]:
            progress.stage("measuring" if reading.spacing is None else "sampling", num_bytes)
            notes: dict[int, list[Any]] = {}
            for index, noted in executor.map(partial(worker.observe, reading=reading), jobs):
                notes[index] = noted
                progress.advance(jobs[index].num_input_bytes)
            return [note for index in sorted(notes) for note in notes[index]]

        measured = _drive(group[0], sum(p.spec.num_elements for p in group), run)
        result |= {parameter.name: measured for parameter in group}

    if plan.measured_alone:
        alone = list(_alone_jobs(plan, worker))
        progress.stage("measuring", sum(j.num_input_bytes for a in alone for j in a.jobs))
        for name, measured, num_bytes in executor.map(partial(_measure_alone, worker), alone):
            result[name] = measured
            progress.advance(num_bytes)
    return result


def _alone_jobs(plan: Plan, worker: Worker) -> Iterator[_AloneJob]:
    for parameter in plan.measured_alone:
        jobs = tuple(make_jobs([parameter], worker.alignment))
        yield _AloneJob(parameter, jobs, max(job.peak_bytes for job in jobs))


def _measure_alone(worker: Worker, work: _AloneJob) -> tuple[str, Measured, int]:
    def run(reading: Pass) -> list[Any]:
        return [note for job in work.jobs for note in worker.observe(job, reading)[1]]

    measured = _drive(work.parameter, work.parameter.spec.num_elements, run)
    return work.parameter.name, measured, sum(job.num_input_bytes for job in work.jobs)


def _drive(parameter: Parameter, num_elements: int, run: Callable[[Pass], list[Any]]) -> Measured:
    """Run the passes a method asks for until it knows enough."""
    rule = parameter.rule
    tasks = [
        Task("", weight, density, 0, 0, _no_values)
        for weight, density in zip(rule.weights, rule.densities, strict=True)
    ]
    measuring = rule.method.measure(tasks, num_elements)
    try:
        reading = next(measuring)
        while True:
            reading = measuring.send(run(reading))
    except StopIteration as finished:
        return finished.value  # type: ignore[no-any-return]


def _no_values(start: int, stop: int, out: Tensor | None = None) -> Tensor:  # noqa: ARG001
    raise AssertionError("a measurement reads values at sites only")
