"""A merge from beginning to end: measure, merge, write."""

import json
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from matsmerge.adapters.adapter_config import CONFIG
from matsmerge.checkpoints.checkpoint import Checkpoint, TensorSpec, dtype_name
from matsmerge.checkpoints.companions import add_chat_template, copy_companions
from matsmerge.checkpoints.in_memory import InMemoryCheckpoint
from matsmerge.checkpoints.safetensors_header import encode_header
from matsmerge.checkpoints.stored import StoredCheckpoint
from matsmerge.engine.adapter_output import Kept
from matsmerge.engine.evidence import check_values
from matsmerge.engine.executor import Executor, LocalExecutor, gave_out
from matsmerge.engine.input_files import find_input_files
from matsmerge.engine.layout import DEFAULT_SHARD_BYTES, Layout
from matsmerge.engine.manifest import (
    describe_inputs,
    identify,
    make_manifest,
    public_notes,
    write_trace,
)
from matsmerge.engine.measuring import measure
from matsmerge.engine.model_card import make_model_card
from matsmerge.engine.output_folder import (
    MANIFEST,
    OutputFolder,
    check_target,
    staging_path,
)
from matsmerge.engine.plan import JOB_ELEMENTS
from matsmerge.engine.preparing import PreparedMerge
from matsmerge.engine.private_paths import write_paths
from matsmerge.engine.progress import Progress, Silent
from matsmerge.engine.worker import FINAL, Receipt, Sink, Sinks, Worker
from matsmerge.errors import (
    MatsError,
    OutputError,
    ResourceError,
    machine_gave_out,
)
from matsmerge.methods.method import Measured


def merge_in_memory(
    prepared: PreparedMerge,
    *,
    executor: Executor | None = None,
    allow_nonfinite: bool = False,
    progress: Progress | None = None,
) -> dict[int | None, dict[str, Tensor]]:
    """The merged state dicts, by iteration; tied weights are one tensor under several names."""
    progress = progress or Silent()
    executor = executor or LocalExecutor()
    input_files = find_input_files(prepared)
    check_values(prepared.evidence, prepared.methods, executor, progress)
    worker = Worker(prepared.alignment, allow_nonfinite, prepared.evidence)
    measured = measure(prepared.plan, worker, executor, progress)
    states, _ = _merge_states(prepared, worker, executor, measured, progress)
    if prepared.finish is not None:
        made = {at: prepared.finish.make(state)[0] for at, state in states.items()}
        states = {
            at: {n: checkpoint[n].to(spec.dtype) for n, spec in prepared.written.items()}
            for at, checkpoint in made.items()
        }
    input_files.check(executor, progress)
    if prepared.finish is not None:
        return states
    tied = prepared.alignment.tied.items()
    return {
        at: r | {other: r[kept] for other, kept in tied if kept in r} for at, r in states.items()
    }


def _merge_states(
    prepared: PreparedMerge,
    worker: Worker,
    executor: Executor,
    measured: Mapping[str, Measured],
    progress: Progress,
) -> tuple[dict[int | None, dict[str, Tensor]], dict[int, Receipt]]:
    """Merge in memory: the merged tensors by iteration, and all receipts."""
    states = {
        at: {n: torch.empty(s.shape, dtype=s.dtype) for n, s in prepared.plan.written.items()}
        for at in prepared.models
    }
    receipts = _run(
        prepared,
        worker,
        executor,
        measured,
        {at: _StateDict(state) for at, state in states.items()},
        progress,
        lambda: InMemoryCheckpoint("merged", states[FINAL]),
    )
    return states, {receipt.job_index: receipt for receipt in receipts}


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
) -> Path:
    """Write the merged model; the folder appears when it is complete.

    With a trajectory it holds a model folder for each iteration. `trace` is a file to write the
    residual and objective of every layer and iteration to. Inputs that change while they are merged
    are an error; with `verify` every byte of them is compared, before and after.
    """
    progress = progress or Silent()
    executor = executor or LocalExecutor()
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
        if output.measured is None:
            measured = measure(prepared.plan, worker, executor, progress)
            output.note_measured(measured)
        else:
            measured = output.measured
        sinks = {at: output.shards[folder] for at, folder in prepared.models.items()}
        kept: Kept = {}
        if prepared.finish is not None:
            states, finished = _merge_states(prepared, worker, LocalExecutor(), measured, progress)
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
            _write_companions(prepared, files.folder, target.name, at)
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


def _write_companions(
    prepared: PreparedMerge, folder: Path, name: str, iteration: int | None
) -> None:
    """Everything beside the weights that makes a folder a model."""
    _write_heads(prepared, folder)
    copy_companions(prepared.companions, folder, _single_dtype(prepared))
    if prepared.chat_template is not None:
        add_chat_template(prepared.chat_template, folder)
    if prepared.adapter_config is not None:
        text = json.dumps(prepared.adapter_config, indent=2) + "\n"
        (folder / CONFIG).write_text(text)
    write_paths(prepared, folder)
    name = name.encode(errors="backslashreplace").decode()  # of a folder whose name is no text
    title = name if iteration is FINAL else f"{name}, iteration {iteration}"
    config = prepared.adapter_config
    card = make_model_card(
        prepared.recipe,
        title,
        public_notes(prepared),
        _library(folder),
        None if config is None else config.get("base_model_name_or_path"),
        prepared.inherited,
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


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


def _write_heads(prepared: PreparedMerge, folder: Path) -> None:
    for model in prepared.alignment.models:
        if model.heads:
            (folder / "heads").mkdir(exist_ok=True)
            specs = {name: model.checkpoint.spec(name) for name in model.heads}
            with (folder / "heads" / f"{model.name}.safetensors").open("wb") as file:
                file.write(encode_header(specs, {"format": "pt"})[0])
                for name in specs:
                    file.write(model.checkpoint[name].view(-1).view(torch.uint8).numpy().data)


def _library(folder: Path) -> str | None:
    """The library that loads a folder, by its configuration files."""
    files = {"config.json": "transformers", "adapter_config.json": "peft"}
    return next((name for file, name in files.items() if (folder / file).exists()), None)


def _single_dtype(prepared: PreparedMerge) -> str | None:
    dtypes = {s.dtype for s in prepared.written.values() if s.dtype.is_floating_point}
    return dtype_name(dtypes.pop()) if len(dtypes) == 1 else None
