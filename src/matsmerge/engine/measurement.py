"""Running the measurements that methods ask for before they merge."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from matsmerge.checkpoints.alignment import Alignment
from matsmerge.engine.executor import Executor, Piece, map_pieces
from matsmerge.engine.plan import Job, Parameter, Plan, make_jobs
from matsmerge.engine.worker import Worker
from matsmerge.methods.method import Pass
from matsmerge.methods.site import Measured, SiteTask
from matsmerge.progress import Progress


def measure(
    plan: Plan, worker: Worker, executor: Executor, progress: Progress
) -> dict[str, Measured]:
    """Measure everything the plan's methods need, by parameter."""
    result: dict[str, Measured] = {}
    for group in plan.measured_together:
        measured = _measure_together(group, worker, executor, progress)
        result |= {p.name: p.rule.method.measured_of(p.name, measured) for p in group}
    if plan.measured_alone:
        pieces = [_alone(parameter, worker.alignment) for parameter in plan.measured_alone]
        pieces.sort(key=lambda piece: -piece.num_bytes)  # so that all workers end together
        function = partial(_measure_alone, worker)
        result |= map_pieces(executor, progress, "measuring", function, pieces)
    return result


def _measure_together(
    group: Sequence[Parameter], worker: Worker, executor: Executor, progress: Progress
) -> Measured:
    """Measure parameters that are one population, such as all that TIES ranks."""
    jobs = list(make_jobs(group, worker.alignment))

    def run(reading: Pass) -> list[Any]:
        title = "measuring" if reading.spacing is None else "sampling"
        pieces = [Piece(job, job.num_input_bytes, job.peak_bytes) for job in jobs]
        function = partial(worker.observe, reading=reading)
        notes = dict(map_pieces(executor, progress, title, function, pieces))
        return [note for index in sorted(notes) for note in notes[index]]

    return _drive(group[0], sum(p.spec.num_elements for p in group), run)


def _alone(parameter: Parameter, alignment: Alignment) -> Piece[tuple[Parameter, tuple[Job, ...]]]:
    jobs = tuple(make_jobs([parameter], alignment))
    num_bytes = sum(job.num_input_bytes for job in jobs)
    return Piece((parameter, jobs), num_bytes, max(job.peak_bytes for job in jobs))


def _measure_alone(worker: Worker, work: tuple[Parameter, tuple[Job, ...]]) -> tuple[str, Measured]:
    parameter, jobs = work

    def run(reading: Pass) -> list[Any]:
        return [note for job in jobs for note in worker.observe(job, reading)[1]]

    return parameter.name, _drive(parameter, parameter.spec.num_elements, run)


def _drive(parameter: Parameter, num_elements: int, run: Callable[[Pass], list[Any]]) -> Measured:
    """Run the passes a method asks for until it knows enough."""
    rule = parameter.rule
    tasks = [
        SiteTask("", weight, shares, 0, 0, _no_values)
        for weight, shares in zip(rule.weights, rule.shares, strict=True)
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
