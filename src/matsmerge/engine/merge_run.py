"""A merge from beginning to end: measure, merge, write."""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from matsmerge.checkpoints.checkpoint import Checkpoint, TensorSpec
from matsmerge.checkpoints.in_memory import InMemoryCheckpoint
from matsmerge.checkpoints.stored import StoredCheckpoint
from matsmerge.engine.adapter_output import Kept
from matsmerge.engine.companion_files import write_companions
from matsmerge.engine.evidence import check_values
from matsmerge.engine.executor import Executor, check_executor
from matsmerge.engine.input_files import find_input_files
from matsmerge.engine.layout import DEFAULT_SHARD_BYTES, Layout, make_layout
from matsmerge.engine.local_executor import LocalExecutor, gave_out
from matsmerge.engine.manifest import describe_inputs, identify, make_manifest, write_trace
from matsmerge.engine.measurement import measure
from matsmerge.engine.output_folder import (
    MANIFEST,
    OutputFolder,
    ShardFiles,
    check_target,
)
from matsmerge.engine.plan import JOB_ELEMENTS
from matsmerge.engine.prepared_merge import PreparedMerge
from matsmerge.engine.private_paths import write_paths
from matsmerge.engine.worker import FINAL, Receipt, Sink, Sinks, Worker
from matsmerge.errors import MatsError, OutputError, ResourceError, machine_gave_out
from matsmerge.files.whole_outputs import staging_path
from matsmerge.methods.site import Measured
from matsmerge.progress import Progress, Silent

States = dict[int | None, dict[str, Tensor]]


@dataclass(frozen=True)
class Outcome:
    """What a merge has made, by iteration: tensors as they are written, if they are in memory."""

    receipts: Mapping[int, Receipt]
    measured: Mapping[str, Measured]
    kept: Kept = field(default_factory=dict)  # of layers of a LoRA that were factored at the end
    states: States = field(default_factory=dict)


def merge_in_memory(
    prepared: PreparedMerge,
    *,
    executor: Executor | None = None,
    allow_nonfinite: bool = False,
    progress: Progress | None = None,
) -> Outcome:
    """Merge into tensors of this process."""
    progress = progress or Silent()
    executor = LocalExecutor() if executor is None else executor
    check_executor(executor)
    if not executor.shares_memory:
        raise ResourceError(
            "the workers of this executor do not share the memory of this process, so that nothing "
            "can be merged into it; give out=, or another executor"
        )
    input_files = find_input_files(prepared)
    check_values(prepared.evidence, prepared.methods, executor, progress)
    worker = Worker(prepared.alignment, allow_nonfinite, prepared.evidence)
    measured = measure(prepared.plan, worker, executor, progress)
    states, receipts = _merge_states(prepared, worker, executor, measured, progress)
    kept: Kept = {}
    if prepared.finish is not None:
        for at, state in states.items():
            made, kept = prepared.finish.make(state)
            states[at] = {n: made[n].to(spec.dtype) for n, spec in prepared.written.items()}
    input_files.check(executor, progress)
    return Outcome(receipts, measured, kept, states)


def _merge_states(
    prepared: PreparedMerge,
    worker: Worker,
    executor: Executor,
    measured: Mapping[str, Measured],
    progress: Progress,
    folder: Path | None = None,
) -> tuple[States, dict[int, Receipt]]:
    """The merged tensors by iteration, and all receipts; `folder` is one that all workers see."""
    plan = prepared.plan
    if executor.shares_memory:
        states: States = {
            at: {n: torch.empty(s.shape, dtype=s.dtype) for n, s in plan.written.items()}
            for at in prepared.models
        }
        sinks: Sinks = {at: _StateDict(state) for at, state in states.items()}
        receipts = _run(
            prepared, worker, executor, measured, sinks, progress,
            lambda: InMemoryCheckpoint("merged", states[FINAL]),
        )  # fmt: skip
        return states, {receipt.job_index: receipt for receipt in receipts}
    layout = make_layout(list(plan.written.items()), "merged")
    with tempfile.TemporaryDirectory(prefix="merged-", dir=folder) as scratch:
        files = {at: ShardFiles(Path(scratch) / str(at), layout) for at in prepared.models}
        for own in files.values():
            own.create()
        stored = {
            at: StoredCheckpoint("merged", [own.folder / x.file_name for x in layout.shards], None)
            for at, own in files.items()
        }
        found = _run(prepared, worker, executor, measured, files, progress, lambda: stored[FINAL])
        finished = {receipt.job_index: receipt for receipt in found}
        for own in files.values():
            own.close()
        return {at: {n: one[n] for n in plan.written} for at, one in stored.items()}, finished


def merge_to_folder(
    prepared: PreparedMerge,
    target: Path,
    *,
    executor: Executor | None = None,
    overwrite: bool = False,
    resume: bool = False,
    verify: bool = False,
    allow_nonfinite: bool = False,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Progress | None = None,
    trace: Path | None = None,
    outcome: Outcome | None = None,
) -> Path:
    """Write the merged model; the folder appears when it is complete.

    With a trajectory it holds a model folder for each iteration. `trace` is a file to write the
    residual and objective of every layer and iteration to. Inputs that change while they are merged
    are an error; with `verify` every byte of them is compared, before and after. What was merged
    into memory already, the `outcome`, is only written.
    """
    progress = progress or Silent()
    executor = LocalExecutor() if executor is None else executor
    check_executor(executor)
    target = target.absolute()
    layout = prepared.layout(max_shard_bytes)
    if trace is not None and trace.resolve().is_relative_to(target.resolve()):
        raise OutputError(f"{trace}: is inside of the output folder, which is not there yet")
    check_output(prepared, target, layout, overwrite=overwrite, resume=resume)
    input_files = find_input_files(prepared)
    input_files.check(executor, progress)  # since they were opened
    if verify:
        input_files.read_digests(executor, progress)
    check_values(prepared.evidence, prepared.methods, executor, progress)
    inputs = describe_inputs(prepared)
    identity = identify(prepared, layout, inputs, allow_nonfinite)
    num_pieces = {job.index: len(job.names) for job in prepared.plan.jobs}
    folders = list(prepared.models.values())
    output = OutputFolder(target, layout, identity, input_files, num_pieces, folders)
    output.open(resume=resume)
    if output.is_there:
        return target
    # Along a prefix each block depends on those before it; nothing of it is kept.
    leave = output.discard if prepared.prefix else output.close
    try:
        worker = Worker(prepared.alignment, allow_nonfinite, prepared.evidence)
        if outcome is not None:
            measured = dict(outcome.measured)
        elif output.measured is None:
            measured = measure(prepared.plan, worker, executor, progress)
            output.note_measured(measured)
        else:
            measured = output.measured
        sinks = {at: output.shards[folder] for at, folder in prepared.models.items()}
        kept: Kept = {}
        if outcome is not None:
            kept, finished = outcome.kept, dict(outcome.receipts)
            for at, state in outcome.states.items():
                made: Checkpoint = InMemoryCheckpoint("merged", state)
                _write_all(made, prepared.written, sinks[at], progress)
        elif prepared.finish is not None:
            states, finished = _merge_states(
                prepared, worker, executor, measured, progress, output.staging
            )
            for at, state in states.items():
                made, kept = prepared.finish.make(state)
                _write_all(made, prepared.written, sinks[at], progress)
        else:
            finished = output.finished
            paths = [output.path / shard.file_name for shard in layout.shards]
            for receipt in _run(
                prepared,
                worker,
                executor,
                measured,
                sinks,
                progress,
                lambda: StoredCheckpoint("merged", paths, None),
                frozenset(output.finished),
            ):
                output.note_finished(receipt)
        manifest = make_manifest(prepared, inputs, measured, finished, kept)
        for at, files in zip(prepared.models, output.shards.values(), strict=True):
            write_companions(prepared, files.folder, target.name, at)
            if at is not FINAL:
                text = json.dumps({**manifest, "iteration": at}, indent=1) + "\n"
                (files.folder / MANIFEST).write_text(text)
        if FINAL not in prepared.models:  # the folder around several models
            write_paths(prepared, output.path)
        input_files.check(executor, progress)
        if trace is not None:
            write_trace(trace, manifest)
        output.finish(json.dumps(manifest, indent=1) + "\n")
    except (MemoryError, RuntimeError, OSError) as error:
        leave()
        if machine_gave_out(error):
            raise gave_out(error) from error
        if not isinstance(error, OSError):
            raise
        advice = (
            "make room and start anew"
            if prepared.prefix
            else "what was done is kept. Make room and continue with --resume, or delete that "
            "folder"
        )
        raise ResourceError(
            f"{output.staging}: writing failed ({error.strerror}); {advice}"
        ) from error
    except ResourceError:
        leave()
        raise
    except MatsError:
        output.discard()
        raise
    except BaseException:
        leave()
        raise
    return target


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


def check_output(
    prepared: PreparedMerge, target: Path, layout: Layout, *, overwrite: bool, resume: bool
) -> None:
    """Refuse an output folder that cannot or must not be written."""
    if prepared.prefix and resume and staging_path(target).exists():
        raise OutputError(
            f"{target}: a merge with inputs: merged cannot be continued, since each block depends "
            "on those before it; start anew with --overwrite and without --resume"
        )
    used = {
        model.checkpoint.label: model.checkpoint.place
        for model in prepared.alignment.everyone
        if model.checkpoint.place is not None
    }
    for one in prepared.evidence:
        if one.statistics.arrays.place is not None:
            used[one.label] = one.statistics.arrays.place
    needed = layout.num_bytes + prepared.num_head_bytes + prepared.num_companion_bytes
    needed *= len(prepared.models)
    check_target(target, needed, used, overwrite=overwrite, resume=resume)


@dataclass(frozen=True)
class _StateDict:
    """Merged values in this process's memory."""

    tensors: dict[str, Tensor]

    def write(self, name: str, start: int, values: Tensor) -> None:
        self.tensors[name].view(-1)[start : start + len(values)] = values


def _run(
    prepared: PreparedMerge,
    worker: Worker,
    executor: Executor,
    measured: Mapping[str, Measured],
    sinks: Sinks,
    progress: Progress,
    open_written: Callable[[], Checkpoint],
    finished: AbstractSet[int] = frozenset(),
) -> Iterator[Receipt]:
    plan = prepared.plan
    if prepared.prefix is not None:
        yield from prepared.prefix.run(
            plan, worker, executor, measured, sinks, open_written(), progress
        )
        return
    jobs = [job for job in plan.jobs if job.index not in finished]
    progress.stage("merging", plan.num_input_bytes)
    progress.advance(plan.num_input_bytes - sum(job.num_input_bytes for job in jobs))
    for receipt in executor.map(partial(worker.merge, measured=measured, sinks=sinks), jobs):
        yield receipt
        progress.advance(plan.jobs[receipt.job_index].num_input_bytes)
