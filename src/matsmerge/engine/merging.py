"""A merge from beginning to end: open, align, plan, measure, merge, write."""

import hashlib
import json
import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from matsmerge.checkpoints.alignment import Alignment, align, matches
from matsmerge.checkpoints.checkpoint import Checkpoint, dtype_name
from matsmerge.checkpoints.companions import companion_files, copy_companions, read_json
from matsmerge.checkpoints.fingerprint import fingerprint
from matsmerge.checkpoints.opening import Source, open_checkpoint
from matsmerge.checkpoints.safetensors_header import encode_header
from matsmerge.engine.executor import Executor, LocalExecutor
from matsmerge.engine.layout import DEFAULT_SHARD_BYTES, Layout, make_layout
from matsmerge.engine.measuring import measure
from matsmerge.engine.model_card import make_model_card
from matsmerge.engine.output_folder import OutputFolder, check_target
from matsmerge.engine.plan import Plan, make_plan
from matsmerge.engine.progress import Progress, Silent
from matsmerge.engine.worker import Receipt, Sink, Worker
from matsmerge.errors import CheckpointError, MatsError, RecipeError, ResourceError
from matsmerge.methods import METHODS
from matsmerge.methods.method import Measured
from matsmerge.recipes.recipe import Recipe
from matsmerge.recipes.rules import Rule, check_patterns, make_rules
from matsmerge.version import __version__


@dataclass(frozen=True)
class PreparedMerge:
    """A merge that has been checked and planned; nothing but headers has been read."""

    recipe: Recipe
    alignment: Alignment
    plan: Plan
    is_adapter: bool
    companions: tuple[Path, ...]  # files to copy beside the weights
    notes: tuple[str, ...]

    @property
    def num_head_bytes(self) -> int:
        models = self.alignment.models
        return sum(m.checkpoint.spec(name).num_bytes for m in models for name in m.heads)

    @property
    def num_companion_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.companions)

    def layout(self, max_shard_bytes: int) -> Layout:
        stem = "adapter_model" if self.is_adapter else "model"
        limit = max(self.plan.num_output_bytes, 1) if self.is_adapter else max_shard_bytes
        return make_layout([(p.name, p.spec) for p in self.plan.parameters], stem, limit)


def prepare(recipe: Recipe, sources: Mapping[str, Source] | None = None) -> PreparedMerge:
    """Open and check everything a recipe names. `sources` replaces paths, by model name."""
    given = sources or {}
    wanted = {str(entry.name): given.get(str(entry.name), entry.model) for entry in recipe.models}
    if recipe.base is not None:
        wanted["base"] = given.get("base", recipe.base)
    opened: dict[str, Checkpoint] = {}
    problems: list[str] = []
    for name, source in wanted.items():
        try:
            opened[name] = open_checkpoint(
                source, None if isinstance(source, (str, Path)) else name
            )
        except CheckpointError as error:
            problems += error.problems
    if problems:
        raise CheckpointError(problems)
    base = opened.pop("base", None)
    is_adapter = _check_adapters(opened)

    dtype = getattr(torch, recipe.dtype) if recipe.dtype else None
    alignment = align(
        opened,
        base,
        heads=recipe.heads,
        dtype=dtype,
        may_differ=lambda name: _taken_from_one(recipe, name),
    )
    check_patterns(recipe, alignment.names)
    rules = make_rules(recipe, alignment.names)
    plan = make_plan(alignment, rules, dtype)
    # The base's configuration and tokenizer go with the result, or else the first model's.
    folders = [m.checkpoint.folder for m in (alignment.base, alignment.models[0]) if m is not None]
    companions = companion_files(next((f for f in folders if f is not None), None))
    return PreparedMerge(recipe, alignment, plan, is_adapter, companions, alignment.notes)


def _taken_from_one(recipe: Recipe, name: str) -> bool:
    """Does the recipe pass this parameter through from one model?"""
    method = recipe.method.name
    for override in recipe.overrides:
        if override.method and matches(name, override.match):
            method = override.method.get("name", method)
    return method == "passthrough"


def _check_adapters(models: Mapping[str, Checkpoint]) -> bool:
    """Are these PEFT adapters? Kinds whose tensors cannot be merged one by one are refused."""
    kinds: dict[str, str] = {}
    for checkpoint in models.values():
        path = checkpoint.folder / "adapter_config.json" if checkpoint.folder else None
        if path is not None and path.exists() and not path.with_name("config.json").exists():
            kinds[checkpoint.label] = str(read_json(path).get("peft_type"))
        elif any(".lora_A." in name for name in checkpoint.specs):
            kinds[checkpoint.label] = "LORA"
    problems = [
        f"{label}: is a {kind} adapter; its factors cannot be merged tensor by tensor (the average "
        "of two products is not the product of the averages). Fold it into its base model first"
        for label, kind in kinds.items()
        if kind != "IA3"
    ]
    if problems:
        raise RecipeError(problems)
    if kinds and len(kinds) != len(models):
        raise RecipeError("adapters and full models cannot be merged with each other")
    return bool(kinds)


def merge_in_memory(
    prepared: PreparedMerge,
    *,
    executor: Executor | None = None,
    allow_nonfinite: bool = False,
    progress: Progress | None = None,
) -> dict[str, Tensor]:
    """The merged state dict; tied weights are one tensor under several names."""
    progress = progress or Silent()
    executor = executor or LocalExecutor()
    worker = Worker(prepared.alignment, allow_nonfinite)
    measured = measure(prepared.plan, worker, executor, progress)
    result = {
        p.name: torch.empty(p.spec.shape, dtype=p.spec.dtype) for p in prepared.plan.parameters
    }
    for _ in _run(prepared.plan, worker, executor, measured, _StateDict(result), progress):
        pass
    return result | {other: result[kept] for other, kept in prepared.alignment.tied.items()}


def merge_to_folder(
    prepared: PreparedMerge,
    target: Path,
    *,
    executor: Executor | None = None,
    overwrite: bool = False,
    resume: bool = False,
    allow_nonfinite: bool = False,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Progress | None = None,
) -> Path:
    """Write the merged model; the folder appears when it is complete."""
    progress = progress or Silent()
    executor = executor or LocalExecutor()
    target = target.absolute()
    layout = prepared.layout(max_shard_bytes)
    check_output(prepared, target, layout, overwrite=overwrite, resume=resume)
    inputs = _describe_inputs(prepared)
    output = OutputFolder(target, layout, _identity(prepared, layout, inputs, allow_nonfinite))
    output.open(resume=resume)
    try:
        worker = Worker(prepared.alignment, allow_nonfinite)
        if output.measured is None:
            measured = measure(prepared.plan, worker, executor, progress)
            output.note_measured(measured)
        else:
            measured = output.measured
        done = frozenset(output.finished)
        for receipt in _run(
            prepared.plan, worker, executor, measured, output.shards, progress, done
        ):
            output.note_finished(receipt)
        _write_heads(prepared, output.path)
        copy_companions(prepared.companions, output.path, _single_dtype(prepared.plan))
        card = make_model_card(
            prepared.recipe, target.name, list(prepared.notes), _library(output.path)
        )
        (output.path / "README.md").write_text(card)
        manifest = _manifest(prepared, inputs, measured, output.finished)
        output.finish(json.dumps(manifest, indent=1) + "\n")
    except OSError as error:
        output.close()
        raise ResourceError(
            f"{output.path}: writing failed ({error.strerror}); what was done is kept. Make room "
            "and continue with --resume, or delete that folder"
        ) from error
    except ResourceError:
        output.close()
        raise
    except MatsError:
        output.discard()
        raise
    except BaseException:
        output.close()
        raise
    return target


def check_output(
    prepared: PreparedMerge, target: Path, layout: Layout, *, overwrite: bool, resume: bool
) -> None:
    """Refuse an output folder that cannot or must not be written."""
    used = {
        model.checkpoint.label: model.checkpoint.place
        for model in prepared.alignment.everyone
        if model.checkpoint.place is not None
    }
    needed = layout.num_bytes + prepared.num_head_bytes + prepared.num_companion_bytes
    check_target(target, needed, used, overwrite=overwrite, resume=resume)


@dataclass(frozen=True)
class _StateDict:
    """Merged values in this process's memory."""

    tensors: dict[str, Tensor]

    def write(self, name: str, start: int, values: Tensor) -> None:
        self.tensors[name].view(-1)[start : start + len(values)] = values


def _run(
    plan: Plan,
    worker: Worker,
    executor: Executor,
    measured: Mapping[str, Measured],
    sink: Sink,
    progress: Progress,
    finished: AbstractSet[int] = frozenset(),
) -> Iterator[Receipt]:
    jobs = [job for job in plan.jobs if job.index not in finished]
    progress.stage("merging", plan.num_input_bytes)
    progress.advance(plan.num_input_bytes - sum(job.num_input_bytes for job in jobs))
    for receipt in executor.map(partial(worker.merge, measured=measured, sink=sink), jobs):
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


def _single_dtype(plan: Plan) -> str | None:
    dtypes = {p.spec.dtype for p in plan.parameters if p.compute_dtype is not None}
    return dtype_name(dtypes.pop()) if len(dtypes) == 1 else None


def _describe_inputs(prepared: PreparedMerge) -> list[dict[str, Any]]:
    return [
        {
            "name": model.name,
            "source": model.checkpoint.label,
            "fingerprint": fingerprint(model.checkpoint),
        }
        for model in prepared.alignment.everyone
    ]


def _identity(
    prepared: PreparedMerge, layout: Layout, inputs: list[dict[str, Any]], allow_nonfinite: bool
) -> str:
    """What must be the same for a merge to be resumed."""
    recipe = prepared.recipe.model_dump(mode="json")
    text = json.dumps([__version__, recipe, inputs, allow_nonfinite])
    headers = b"".join(shard.header for shard in layout.shards)
    return hashlib.sha256(text.encode() + headers).hexdigest()


def _manifest(
    prepared: PreparedMerge,
    inputs: list[dict[str, Any]],
    measured: Mapping[str, Measured],
    finished: Mapping[int, Sequence[float]],
) -> dict[str, Any]:
    """What was done. No times in it: the same merge gives the same bytes."""
    rules = list(dict.fromkeys(p.rule for p in prepared.plan.parameters))
    names = [entry.name for entry in prepared.recipe.models]
    squares: dict[str, float] = {}
    for job in prepared.plan.jobs:
        for piece, square in zip(job.pieces, finished[job.index], strict=True):
            squares[piece.parameter.name] = squares.get(piece.parameter.name, 0.0) + square
    return {
        "format": 1,
        "versions": {
            "matsmerge": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "recipe": prepared.recipe.model_dump(mode="json", exclude_defaults=True),
        "inputs": inputs,
        "notes": list(prepared.notes),
        "tied": dict(prepared.alignment.tied),
        "heads": {m.name: list(m.heads) for m in prepared.alignment.models if m.heads},
        "rules": [_describe_rule(rule, names) for rule in rules],
        "parameters": {
            p.name: {
                "shape": list(p.spec.shape),
                "dtype": dtype_name(p.spec.dtype),
                **(
                    {"rule": rules.index(p.rule), "norm": math.sqrt(squares[p.name])}
                    if p.compute_dtype is not None
                    else {"copied": True}
                ),
                **({"measured": measured[p.name]} if measured.get(p.name) else {}),
            }
            for p in prepared.plan.parameters
        },
    }


def _describe_rule(rule: Rule, names: list[str | None]) -> dict[str, Any]:
    return {
        "method": next(name for name, cls in METHODS.items() if cls is type(rule.method)),
        **rule.method.model_dump(mode="json"),
        "weights": dict(zip(names, rule.weights, strict=True)),
        **(
            {"densities": dict(zip(names, rule.densities, strict=True))}
            if "density" in type(rule.method).model_fields
            else {}
        ),
    }
