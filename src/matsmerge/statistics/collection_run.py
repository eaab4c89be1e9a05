"""A collection from beginning to end: batches, progress, interruptions, several processes."""

import contextlib
import hashlib
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

from torch import nn

from matsmerge.checkpoints.fingerprint import fingerprint
from matsmerge.checkpoints.public_names import public_name
from matsmerge.checkpoints.source import Source, local_path, open_checkpoint
from matsmerge.errors import DataError, OutputError, StatisticsError
from matsmerge.files.output_place import check_file, check_room
from matsmerge.models.parameter_names import match_names
from matsmerge.progress import AnyProgress, listener
from matsmerge.statistics.collection import Collection, Loss
from matsmerge.statistics.collection_options import CollectionOptions, make_collection_options
from matsmerge.statistics.compression import finish
from matsmerge.statistics.loss_terms import losses_by_labels
from matsmerge.statistics.partial_file import Interruption, PartialFile, partial_path
from matsmerge.statistics.processes import (
    Process,
    add_over_processes,
    this_process,
    wait_for_processes,
)
from matsmerge.statistics.ranks import RANK_UNLESS_GIVEN
from matsmerge.statistics.shown_batch import count_examples
from matsmerge.statistics.statistics import HELD_OUT, MAIN, Origin, Statistics
from matsmerge.statistics.statistics_file import (
    open_statistics,
    parse_dtype,
    read_identity,
    save_statistics,
)
from matsmerge.statistics.statistics_sum import add_up

# What may be said of data in a file.
_CHOICES = ("num_examples", "shuffle", "split", "batch_size", "max_tokens", "device")


def collect(
    model: nn.Module | str | Path,
    batches: Iterable[Any] | str | Path,
    statistics: str | Sequence[str] = ("gram",),
    *,
    loss: Loss | None = None,
    checkpoint: Source | None = None,
    name: str | None = None,
    data: str = "batches",
    out: str | Path | None = None,
    rank: int | Literal["auto", "full"] = RANK_UNLESS_GIVEN,
    dtype: str = "auto",
    overwrite: bool = False,
    resume: bool = False,
    progress: AnyProgress | None = None,
    **options: Any,
) -> Statistics:
    """Measure what a model does on its data.

    Of a model's folder or hub id, the data may be a file, or a task file (.yaml) that names it;
    then `options` may also be `num_examples`, `shuffle`, `split`, `batch_size`, `max_tokens` and
    `device`, as on the command line:

        collect("tuned/sst2", "sst2.yaml", "kfac", out="sst2.safetensors", num_examples=500)

    Otherwise data are batches: a tensor, a tuple or a mapping of tensors with examples along the
    first dimension, passed to the model as it is; `attention_mask` and `decoder_attention_mask` in
    a mapping say which rows are real. `loss(model, batch)` returns each example's negative
    log-likelihood, or its logits and targets. Everything but `gram` needs it; where batches have
    `labels`, a model of transformers needs none. Second moments of linear maps are kept
    by `rank` leading directions, "full" for whole matrices. The other options are those of
    `matsmerge.statistics.collection_options.CollectionOptions`.

    `checkpoint` is what the model was loaded from, if that is where the statistics will be used;
    by default they belong to the module's own state. With `out` they are also written to a file.
    With `torch.distributed` set up, each process passes batches of its own, and all get the total.
    `progress` is told how far it is: a listener, or a function of an `Update`.
    """
    from_file = isinstance(batches, (str, Path))
    choice = {key: options.pop(key) for key in _CHOICES if from_file and key in options}
    checked = make_collection_options(statistics=statistics, rank=rank, **options)
    parse_dtype(dtype)
    output = None if out is None else Output(local_path(out), dtype, resume, overwrite)
    if output is not None:
        check_output(output.path, overwrite=overwrite, resume=resume)
    if isinstance(batches, (str, Path)):
        from matsmerge.statistics.folder_collection import prepare_folder

        prepared = prepare_folder(model, batches, checked, loss, choice)
        found = prepared.run(output, progress)
        _warn([*prepared.notes, *prepared.collection.notes])
        return found
    if isinstance(model, (str, Path)):
        from matsmerge.tasks.ready_model import load

        checkpoint = model if checkpoint is None else checkpoint
        model = load(model)
    assert isinstance(model, nn.Module)
    if loss is None and checked.wants_gradients:
        first, batches = _peek(batches)
        has_labels = isinstance(first, Mapping) and first.get("labels") is not None
        loss = losses_by_labels if has_labels else None
    source = open_checkpoint(model if checkpoint is None else checkpoint)
    names = None if checkpoint is None else match_names(model, source)
    origin = Origin(name=public_name(name or source.label), fingerprint=fingerprint(source))
    collection = Collection(model, checked, loss, names)
    batches = assign_sets(batches, checked)
    of_data = Origin(name=public_name(data), fingerprint="")
    result = run_collection(collection, batches, origin, of_data, output, progress)
    _warn(collection.notes)
    return result


def _warn(notes: Iterable[str]) -> None:
    for note in notes:
        warnings.warn(note, stacklevel=3)


def _peek(batches: Iterable[Any]) -> tuple[Any, Iterable[Any]]:
    """The first batch, None if there is none; and all batches."""
    waiting = iter(batches)
    first = list(islice(waiting, 1))
    return (first[0] if first else None), chain(first, waiting)


def assign_sets(batches: Iterable[Any], options: CollectionOptions) -> Iterable[tuple[str, Any]]:
    """Every so many batches go to the held-out set."""
    share = options.held_out
    for i, batch in enumerate(batches):
        yield (HELD_OUT if int((i + 1) * share) > int(i * share) else MAIN), batch


@dataclass(frozen=True)
class Output:
    """A file to write statistics to."""

    path: Path
    dtype: str = "auto"
    resume: bool = False
    overwrite: bool = False
    part: Process | None = None  # of the data, which is collected from alone

    @property
    def process(self) -> Process:
        return self.part or this_process()

    @property
    def own_path(self) -> Path:
        """The file itself, or beside it that of the part."""
        if self.part is None:
            return self.path
        return self.path.with_name(f".{self.path.stem}{self.part.suffix}{self.path.suffix}")


def run_collection(
    collection: Collection,
    batches: Iterable[tuple[str, Any]],
    model: Origin,
    data: Origin,
    output: Output | None,
    progress: AnyProgress | None = None,
    plan: str = "",
    num_examples: int | None = None,
) -> Statistics:
    """Add this process's batches, each with the set it goes to, and then those of all processes.

    With an output, an unfinished collection is kept beside it every minute and on Ctrl-C. `plan`
    says how the batches were made, which must be the same for it to be continued. `num_examples`
    is how many there are of them, if that is known.
    """
    told = listener(progress)
    process = this_process() if output is None else output.process
    partial = None
    if output is not None:
        identity = identity_of(output, collection.options, model, data, process, plan)
        partial = PartialFile(output.path, identity, process.suffix)
        if (found := finished_before(output, partial)) is not None:
            assert data.fingerprint, "batches that nobody can tell from others"
            return found
    interruption = Interruption()
    with collection.running(), interruption.watching():
        waiting = iter(batches)
        num_done = 0
        if output is not None and partial is not None:
            if output.resume:
                num_done = partial.load(collection)
            else:
                partial.remove()
        told.stage("collecting", num_examples, "examples", collection.num_examples)
        if partial is not None:
            _skip(collection, num_done, waiting, interruption, partial.path)
        for i, (to, item) in enumerate(waiting):
            if i == 0 and output is not None:
                collection.look_at(item)
                check_room(output.path, collection.expected_bytes(output.dtype))
            told.advance(collection.add(item, to))
            if partial is not None and (interruption.is_asked or partial.is_due):
                partial.save(collection)
            interruption.check()
        if not collection.num_examples and process.num_processes == 1:
            raise DataError("there is no data: not a single batch to collect from")
        own = collection.statistics(model, (data,))
        try:
            total = put_down(own, output, partial)
        except OutputError:
            with contextlib.suppress(OutputError):
                if partial is not None:
                    partial.save(collection)
            raise
    if partial is not None:
        wait_for_processes()  # until the output is there
        partial.remove()
    return total


def _skip(
    collection: Collection,
    num_done: int,
    batches: Iterator[tuple[str, Any]],
    interruption: Interruption,
    path: Path,
) -> None:
    """Pass over the batches that are done, which must be as many and as large as they were."""
    num_batches, num_examples = 0, 0
    for _, item in islice(batches, num_done):
        try:
            collection.skip(item)
        except StatisticsError as error:
            raise StatisticsError(f"{path}: {error}") from error
        num_examples += count_examples(item)
        num_batches += 1
        interruption.check()
    if (num_batches, num_examples) != (num_done, collection.num_examples):
        raise OutputError(
            f"{path}: holds {collection.num_examples} examples of {num_done} batches, which now "
            f"have {num_examples}; the batches were made in another way, start anew with "
            "--overwrite"
        )


def put_down(own: Statistics, output: Output | None, partial: PartialFile | None) -> Statistics:
    """Write the sum over all processes, which is returned; or what a part of the data gave."""
    if output is None or partial is None:
        return finish(add_over_processes(own))
    if output.part is not None:
        # In float64 it is what another process would be sent.
        save_statistics(own, output.own_path, "float64", identity=partial.identity)
        return own
    total = finish(add_over_processes(own))
    if output.process.is_first:
        save_statistics(total, output.path, output.dtype, identity=partial.identity)
    return total


def add_parts(outputs: Sequence[Output]) -> Statistics:
    """Write the sum of all parts of the data, in the order in which processes are added."""
    first = outputs[0]
    if not (first.resume and not first.overwrite and first.path.exists()):
        parts = (open_statistics(output.own_path, is_part=True) for output in outputs)
        total = finish(reduce(lambda one, other: add_up([one, other]), parts))
        save_statistics(total, first.path, first.dtype, identity=read_identity(first.own_path))
    for output in outputs:
        output.own_path.unlink(missing_ok=True)
    return open_statistics(first.path)


def finished_before(output: Output, partial: PartialFile) -> Statistics | None:
    """What this very collection wrote before it was killed."""
    if not output.resume or output.overwrite:
        return None
    path = next((p for p in (output.path, output.own_path) if p.exists()), None)
    if path is None:
        return None
    if read_identity(path) != partial.identity:
        raise OutputError(
            f"{path}: exists already, and is of another model, other data or other options; "
            "replace it with --overwrite"
        )
    wait_for_processes()
    partial.remove()
    return open_statistics(path, is_part=path != output.path)


def identity_of(
    output: Output,
    options: CollectionOptions,
    model: Origin,
    data: Origin,
    process: Process,
    plan: str,
) -> str:
    """What must be the same for a collection to be continued."""
    content: Mapping[str, object] = {
        "dtype": output.dtype,
        "options": options.model_dump(mode="json"),
        "model": model.fingerprint,
        "data": data.fingerprint,
        "num_processes": process.num_processes,
        "plan": plan,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def check_output(
    target: Path,
    *,
    overwrite: bool,
    resume: bool,
    may_be_finished: bool = False,
    parts: Sequence[Process] = (),
) -> None:
    """Refuse a file that must not or cannot be written, before any work.

    One that `may_be_finished` is looked at again when it is known what will be collected.
    """
    check_file(
        target,
        ".safetensors",
        overwrite=overwrite,
        may_exist=lambda path: may_be_finished and read_identity(path) is not None,
    )
    begun = [partial_path(target, one.suffix) for one in parts or [this_process()]]
    begun += [Output(target, part=part).own_path for part in parts]
    if any(path.exists() for path in begun) and not (overwrite or resume):
        raise OutputError(
            f"{target}: an earlier collection was interrupted; continue it with --resume, or start "
            "anew with --overwrite"
        )
