"""Statistics of what transformers' Trainer trains, written beside the model it saves."""

import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from matsmerge.checkpoints.fingerprint import fingerprint
from matsmerge.checkpoints.public_names import public_name
from matsmerge.checkpoints.source import open_checkpoint
from matsmerge.data.rows import fingerprint_rows
from matsmerge.errors import DataError, RecipeError
from matsmerge.models.parameter_names import match_names
from matsmerge.models.pretrained import quiet
from matsmerge.optional_import import import_optional
from matsmerge.statistics.collection import Collection, Loss
from matsmerge.statistics.collection_options import make_collection_options
from matsmerge.statistics.collection_run import assign_sets
from matsmerge.statistics.compression import finish
from matsmerge.statistics.loss_terms import losses_by_labels
from matsmerge.statistics.ranks import RANK_UNLESS_GIVEN
from matsmerge.statistics.shown_batch import count_examples
from matsmerge.statistics.statistics import Origin
from matsmerge.statistics.statistics_file import BESIDE, parse_dtype, save_statistics

On = Literal["train_end", "save"]

_LABELS = {"label", "labels", "label_ids"}  # what Trainer keeps of a row for the loss

_TrainerCallback: Any = import_optional("transformers").TrainerCallback


class StatisticsCallback(_TrainerCallback):  # type: ignore[misc]
    """Writes `statistics.safetensors` beside the model at the end of training, or at each save.

    `data` is a dataset whose examples the trainer's collator takes, of which the first
    `num_examples` are used, or a `DataLoader` of batches; keep it apart from what is trained on.
    At the end of training the model is saved to `output_dir` as well, as `trainer.save_model()`
    does. Losses follow from `labels`, unless `loss(model, batch)` is given as to
    `matsmerge.collect`; so do `statistics` and the other options. Training goes on as if nothing
    had happened: modes, gradients and random states are what they were. Only the first process
    collects.
    """

    def __init__(
        self,
        data: Any,
        statistics: str | Sequence[str] = ("gram",),
        *,
        num_examples: int | None = 1000,
        on: On = "train_end",
        loss: Loss | None = None,
        name: str = "data",
        rank: int | Literal["auto", "full"] = RANK_UNLESS_GIVEN,
        dtype: str = "auto",
        **options: Any,
    ) -> None:
        self.options = make_collection_options(statistics=statistics, rank=rank, **options)
        parse_dtype(dtype)
        if on not in get_args(On):
            raise RecipeError(f"on: expected one of {', '.join(get_args(On))}, found '{on}'")
        if num_examples is not None and num_examples < 1:
            raise RecipeError(f"num_examples: expected at least 1, found {num_examples}")
        self._data, self._num_examples, self._on, self._dtype = data, num_examples, on, dtype
        self._loss = loss or (losses_by_labels if self.options.wants_gradients else None)
        self._name = public_name(name)

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:  # noqa: ARG002
        """Look at a batch, so that what is wrong is said before anything is trained."""
        if not state.is_world_process_zero:
            return
        model = _unwrapped(given["model"])
        _check(model, args)
        with _undisturbed(model, self.options.seed):
            batches = self._batches(model, args, given["train_dataloader"].collate_fn)
            if (first := next(batches, None)) is None:
                raise DataError("StatisticsCallback: there is no data: not a single example")
            collection = Collection(model, self.options, self._loss)
            with collection.running():
                collection.look_at(first)

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:  # noqa: ARG002
        """Collect from the checkpoint that was just saved."""
        if self._on == "save" and state.is_world_process_zero:
            self._write(args, Path(args.output_dir) / f"checkpoint-{state.global_step}", given)

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:  # noqa: ARG002
        """Save the model, and collect from it."""
        if self._on != "train_end" or not state.is_world_process_zero:
            return
        parts: list[Any] = [_unwrapped(given["model"]), given.get("processing_class")]
        with quiet():
            for part in parts:
                if part is not None:
                    part.save_pretrained(args.output_dir)
        self._write(args, Path(args.output_dir), given)

    def _write(self, args: Any, folder: Path, given: Mapping[str, Any]) -> None:
        model = _unwrapped(given["model"])
        saved = open_checkpoint(folder)
        of_model = Origin(name=public_name(folder.name), fingerprint=fingerprint(saved))
        batches = self._batches(model, args, given["train_dataloader"].collate_fn)
        with _undisturbed(model, self.options.seed):
            collection = Collection(model, self.options, self._loss, match_names(model, saved))
            with collection.running():
                for to, batch in assign_sets(batches, self.options):
                    collection.add(batch, to)
                rows = [row for row in self._rows() if isinstance(row, Mapping)]
                of_rows = fingerprint_rows(rows) if rows else ""
                of_data = Origin(name=self._name, fingerprint=of_rows)
                found = finish(collection.statistics(of_model, (of_data,)))
        save_statistics(found, folder / BESIDE, self._dtype)
        for note in collection.notes:
            warnings.warn(note, stacklevel=2)

    def _all_examples(self) -> Iterator[Any]:
        """Batches of a loader, or examples of a dataset, some of which have a length and no end."""
        data = self._data
        if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
            return (data[i] for i in range(len(data)))
        return iter(data)

    def _rows(self) -> Iterator[Any]:
        """The examples of a dataset that are used; none of a loader."""
        is_loader = isinstance(self._data, DataLoader)
        return islice(() if is_loader else self._all_examples(), self._num_examples)

    def _batches(self, model: nn.Module, args: Any, collate: Callable[..., Any]) -> Iterator[Any]:
        """Batches of the examples that are used; of a loader, as many as hold so many."""
        if isinstance(self._data, DataLoader):
            num_examples = 0
            for batch in self._data:
                yield batch
                num_examples += count_examples(batch)
                if self._num_examples is not None and num_examples >= self._num_examples:
                    return
            return
        kept = None
        if args.remove_unused_columns:  # as Trainer does with the rows it trains on
            kept = {*signature(type(model).forward).parameters} | _LABELS
        rows = self._rows()
        while batch := list(islice(rows, args.per_device_eval_batch_size)):
            yield collate([_cut(row, kept) for row in batch])


@contextmanager
def _undisturbed(model: Any, seed: int) -> Iterator[None]:
    """Random numbers by a seed, all parameters free of gradients; then all is as it was."""
    kept = [(p, p.requires_grad, p.grad) for p in model.parameters()]
    # Accelerate trains in mixed precision by another forward; statistics have the model's own.
    trained, own = (vars(model).get(key) for key in ("forward", "_original_forward"))
    of_python, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.manual_seed(seed)
            if own is not None:
                model.forward = own
            for parameter, _, _ in kept:
                parameter.grad = None
                parameter.requires_grad_(parameter.is_floating_point())
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)
            if own is not None:
                model.forward = trained
            for parameter, requires, gradient in kept:
                parameter.requires_grad_(requires)
                parameter.grad = gradient


def _unwrapped(model: nn.Module) -> nn.Module:
    unwrapped: nn.Module = import_optional("accelerate.utils").extract_model_from_parallel(model)
    return unwrapped


def _check(model: nn.Module, args: Any) -> None:
    """Refuse models whose statistics cannot be had while they are trained."""
    advice = "collect from what is saved, with `mats collect FOLDER --data FILE`"
    name = type(model).__name__
    if hasattr(model, "peft_config"):
        raise RecipeError(f"StatisticsCallback: {name} is a PEFT adapter on a model; {advice}")
    if not hasattr(model, "save_pretrained"):
        raise RecipeError(f"StatisticsCallback: {name} is no model of transformers; {advice}")
    if getattr(args, "fsdp", None) or any(hasattr(p, "ds_id") for p in model.parameters()):
        raise RecipeError(f"StatisticsCallback: {name} is spread over processes; {advice}")


def _cut(row: Any, kept: set[str] | None) -> Any:
    if kept is None or not isinstance(row, Mapping):
        return row
    return {key: value for key, value in row.items() if key in kept}
