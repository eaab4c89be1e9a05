"""A merge from beginning to end: measure, merge, write."""

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from matsmerge.checkpoints.checkpoint import Checkpoint, TensorSpec
from matsmerge.checkpoints.fingerprint import fingerprint
from matsmerge.checkpoints.in_memory import InMemoryCheckpoint
from matsmerge.checkpoints.input_file import has_versions
from matsmerge.engine.adapter_output import KeptEnergy
from matsmerge.engine.companion_files import write_companions
from matsmerge.engine.devices import spread
from matsmerge.engine.evidence import check_values
from matsmerge.engine.executor import Distant, Executor, check_executor
from matsmerge.engine.input_files import find_input_files
from matsmerge.engine.layout import DEFAULT_SHARD_BYTES, ShardFiles, make_layout
from matsmerge.engine.local_executor import LocalExecutor, gave_out
from matsmerge.engine.manifest import (
    MergeOutcome,
    describe_inputs,
    identify_merge,
    make_manifest,
    write_trace,
)
from matsmerge.engine.measurement import measure
from matsmerge.engine.output_folder import MANIFEST, OutputFolder, check_target
from matsmerge.engine.plan import JOB_ELEMENTS, Job
from matsmerge.engine.prepared_merge import PreparedMerge
from matsmerge.engine.private_paths import write_paths
from matsmerge.engine.worker import FINAL, Receipt, Sink, Sinks, Worker
from matsmerge.errors import MatsError, OutputError, ResourceError, machine_gave_out
from matsmerge.files.output_place import nearest_folder
from matsmerge.files.remote_names import url_of
from matsmerge.methods.site import Measured
from matsmerge.progress import BYTES, Progress


@dataclass(frozen=True)
class RunOptions:
    """How a merge is run, whatever it merges.

    With `resume` a merge that was interrupted goes on; with `verify` every byte of the inputs is
    compared, before and after. `trace` is a file to write the residual and objective of every layer
    and iteration to.
    """

    executor: Executor = field(default_factory=LocalExecutor)
    progress: Progress = field(default_factory=Progress)
    overwrite: bool = False
    resume: bool = False
    verify: bool = False
    allow_nonfinite: bool = False
    max_shard_bytes: int = DEFAULT_SHARD_BYTES
    trace: Path | None = None

    def __post_init__(self) -> None:
        check_executor(self.executor)


def merge_in_memory(prepared: PreparedMerge, options: RunOptions) -> MergeOutcome:
    """Merge into tensors of this process, which are the outcome's models."""
    if not options.executor.shares_memory:
        raise ResourceError(
            "the workers of this executor do not share the memory of this process, so that nothing "
            "can be merged into it; give out=, or another executor"
        )
    input_files = find_input_files(prepared)
    check_values(prepared.evidence, prepared.methods, options.executor, options.progress)
    run = _MergeRun(prepared, options)
    outcome = run.merge_apart(run.measure())
    if prepared.output.finish is not None:
        models = {at: MergedTensors(prepared.written) for at in outcome.models}
        for at, made in outcome.models.items():
            _write_all(made, prepared.written, models[at], options.progress)
        outcome = replace(outcome, models=models)
    input_files.check(options.executor, options.progress)
    return outcome


def merge_to_folder(
    prepared: PreparedMerge,
    target: Path,
    options: RunOptions | None = None,
    outcome: MergeOutcome | None = None,
) -> Path:
    """Write the merged model; the folder appears when it is complete.

    With a trajectory it holds a model folder for each iteration. Inputs that change while they are
    merged are an error. What was merged into memory already, the `outcome`, is only written.
    """
    options = options or RunOptions()
    executor, progress = options.executor, options.progress
    target = target.absolute()
    layout = prepared.layout(options.max_shard_bytes)
    num_bytes = layout.num_bytes + prepared.num_head_bytes + prepared.num_companion_bytes
    distant = _sender(prepared, target, executor, outcome)
    num_here = 0 if distant else num_bytes * len(prepared.models)
    _check_output(prepared, target, num_here, options)
    if distant is None and isinstance(executor, Distant):
        executor.check_sees(nearest_folder(target))
    input_files = find_input_files(prepared)
    input_files.check(executor, progress)  # since they were opened
    if options.verify:
        input_files.read_digests(executor, progress)
    check_values(prepared.evidence, prepared.methods, executor, progress)
    identified = cache(fingerprint)
    # Of what is in a store the journal notes the version. Its fingerprint is made at the end, when
    # the blocks that it is made of are likely to be here.
    known = describe_inputs(prepared, lambda c: None if has_versions(c.files) else identified(c))
    identity = identify_merge(prepared, layout, known, options.allow_nonfinite)
    output = OutputFolder(target, prepared, layout, identity, input_files, distant)
    output.open(resume=options.resume)
    if output.is_there:
        return target
    try:
        describe = partial(describe_inputs, prepared, identified)
        manifest = _MergeRun(prepared, options).fill(output, describe, outcome)
        input_files.check(executor, progress)
        if options.trace is not None:
            write_trace(options.trace, manifest)
        output.finish(json.dumps(manifest, indent=1) + "\n", progress)
    except BaseException as error:
        is_wrong = isinstance(error, MatsError) and not isinstance(error, ResourceError)
        output.discard() if is_wrong else output.close()
        if machine_gave_out(error):
            raise gave_out(error) from error
        if not isinstance(error, OSError):
            raise
        raise ResourceError(
            f"{output.staging}: writing failed ({error.strerror}); what was done is kept. Make "
            "room and continue with --resume, or delete that folder"
        ) from error
    return target


def _sender(
    prepared: PreparedMerge, target: Path, executor: Executor, outcome: MergeOutcome | None
) -> Distant | None:
    """The executor, if its workers are to send what they merge to a remote store themselves.

    Not where it is read again before it is complete: then the driver has it on its disk.
    """
    is_read = prepared.prefix or prepared.output.finish or prepared.heads or outcome
    is_sent = url_of(target) is not None and not is_read
    return executor if is_sent and isinstance(executor, Distant) else None


def _check_output(
    prepared: PreparedMerge, target: Path, num_bytes: int, options: RunOptions
) -> None:
    """Refuse an output folder that cannot or must not be written."""
    trace = options.trace
    if trace is not None and trace.resolve().is_relative_to(target.resolve()):
        raise OutputError(f"{trace}: is inside of the output folder, which is not there yet")
    check_target(
        target,
        overwrite=options.overwrite,
        resume=options.resume,
        inputs={c.label: c.place for c in prepared.checkpoints if c.place is not None},
        num_bytes=num_bytes,
    )


@dataclass(frozen=True)
class _MergeRun:
    """A merge at work."""

    prepared: PreparedMerge
    options: RunOptions

    @cached_property
    def worker(self) -> Worker:
        prepared = self.prepared
        return Worker(prepared.alignment, self.options.allow_nonfinite, prepared.evidence)

    def measure(self) -> dict[str, Measured]:
        return measure(
            self.prepared.plan, self.worker, self.options.executor, self.options.progress
        )

    def merge(
        self,
        measured: Mapping[str, Measured],
        sinks: Sinks,
        open_written: Callable[[], Checkpoint],
        finished: AbstractSet[int] = frozenset(),
        folder: Path | None = None,
    ) -> Iterator[Receipt]:
        """Do all jobs that are not finished; `open_written` reads back what sinks have taken.

        What workers read meanwhile is put into a `folder`, by default a temporary one.
        """
        plan, executor, progress = self.prepared.plan, self.options.executor, self.options.progress
        if self.prepared.prefix is not None:
            merged = self.prepared.output.as_merged(open_written())
            yield from self.prepared.prefix.run(
                plan, self.worker, executor, measured, sinks, merged, progress, finished, folder
            )
            return
        jobs = [job for job in plan.jobs if job.index not in finished]
        jobs = spread(jobs, executor.devices)
        # Of layers that are solved for each takes long, however few bytes it has.
        num_layers = len(plan.layers)
        unit, total = ("layers", num_layers) if num_layers else (BYTES, plan.num_input_bytes)
        sizes = {j.index: j.num_layers if num_layers else j.num_input_bytes for j in plan.jobs}
        progress.stage("merging", total, unit, total - sum(sizes[job.index] for job in jobs))
        merge = partial(self.worker.merge, measured=measured, sinks=sinks)
        for receipt in executor.map(merge, _told(jobs, progress if num_layers else Progress())):
            yield receipt
            progress.advance(sizes[receipt.job_index])

    def merge_apart(
        self, measured: Mapping[str, Measured], folder: Path | None = None
    ) -> MergeOutcome:
        """Merge into memory, or into files in a `folder` that all workers see, and read these."""
        prepared, written = self.prepared, self.prepared.plan.written
        models: dict[int | None, Checkpoint] = {}
        if self.options.executor.shares_memory:
            tensors = {at: MergedTensors(written) for at in prepared.models}
            receipts = list(self.merge(measured, tensors, lambda: tensors[FINAL]))
            models |= tensors
        else:
            layout = make_layout(written, "merged")
            with tempfile.TemporaryDirectory(prefix="merged-", dir=folder) as scratch:
                files = {at: ShardFiles(Path(scratch) / str(at), layout) for at in prepared.models}
                for own in files.values():
                    own.create()
                receipts = list(
                    self.merge(measured, files, lambda: files[FINAL].open(), folder=folder)
                )
                for at, own in files.items():
                    own.close()
                    stored = own.open()
                    models[at] = InMemoryCheckpoint("merged", {n: stored[n] for n in written})
        kept: KeptEnergy = {}
        if prepared.output.finish is not None:
            for at, merged in models.items():
                models[at], kept = prepared.output.finish.make(merged)
        return MergeOutcome(models, measured, {r.job_index: r for r in receipts}, kept)

    def fill(
        self,
        output: OutputFolder,
        describe: Callable[[], list[dict[str, Any]]],
        outcome: MergeOutcome | None,
    ) -> dict[str, Any]:
        """Write everything but the manifest, which is returned."""
        prepared = self.prepared
        measured = outcome.measured if outcome else output.measured
        if measured is None:
            measured = self.measure()
            output.note_measured(measured)
        if outcome is None and prepared.output.finish is not None:
            outcome = self.merge_apart(measured, output.staging)
        if outcome is not None:
            for at, made in outcome.models.items():
                _write_all(made, prepared.written, output.shards[at], self.options.progress)
        else:
            shards, done = output.shards, frozenset(output.finished)
            for receipt in self.merge(
                measured, output.sinks, lambda: shards[FINAL].open(), done, output.staging
            ):
                output.note_finished(receipt)
            outcome = MergeOutcome({}, measured, output.finished)
        manifest = make_manifest(prepared, describe(), outcome)
        for at, files in output.shards.items():
            write_companions(prepared, files.folder, output.target.name, at)
            if prepared.heads is not None:
                prepared.heads.run(files.folder, self.options.progress)
            if at is not FINAL:
                text = json.dumps({**manifest, "iteration": at}, indent=1) + "\n"
                (files.folder / MANIFEST).write_text(text)
        if FINAL not in prepared.models:  # the folder around several models
            write_paths(prepared, output.path)
        return manifest


def _told(jobs: Iterable[Job], progress: Progress) -> Iterator[Job]:
    """Jobs, each named as it is handed out."""
    for job in jobs:
        progress.advance(0, job.names[0].removesuffix(".weight"))
        yield job


def _write_all(
    made: Checkpoint, written: Mapping[str, TensorSpec], sink: Sink, progress: Progress
) -> None:
    """Write a checkpoint that is computed as it is read."""
    progress.stage("writing", sum(spec.num_bytes for spec in written.values()))
    for name, spec in written.items():
        for start in range(0, spec.num_elements, JOB_ELEMENTS):
            stop = min(start + JOB_ELEMENTS, spec.num_elements)
            sink.write(name, start, made.read(name, start, stop).to(spec.dtype))
            progress.advance((stop - start) * spec.dtype.itemsize)


class MergedTensors(InMemoryCheckpoint):
    """Merged values in the memory of this process: they are written to it, and read from it."""

    def __init__(self, specs: Mapping[str, TensorSpec]) -> None:
        self._tensors = {n: torch.empty(s.shape, dtype=s.dtype) for n, s in specs.items()}
        super().__init__("merged", self._tensors)

    def write(self, name: str, start: int, values: Tensor) -> None:
        self._flat[name][start : start + len(values)] = values

    def flush(self) -> None:
        """They are there."""

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]  # itself, and no copy
