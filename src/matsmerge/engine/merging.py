"""A merge from beginning to end: open, align, plan, measure, merge, write."""

import hashlib
import json
import math
import platform
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
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
from matsmerge.engine.evidence import StatisticsSource, check_values, gather_evidence
from matsmerge.engine.executor import Executor, LocalExecutor
from matsmerge.engine.layout import DEFAULT_SHARD_BYTES, Layout, make_layout
from matsmerge.engine.measuring import measure
from matsmerge.engine.model_card import make_model_card
from matsmerge.engine.output_folder import MANIFEST, OutputFolder, check_target
from matsmerge.engine.plan import Plan, SolveJob, make_plan
from matsmerge.engine.progress import Progress, Silent
from matsmerge.engine.worker import FINAL, Receipt, Sinks, Worker
from matsmerge.errors import (
    CheckpointError,
    MatsError,
    RecipeError,
    ResourceError,
    StatisticsError,
)
from matsmerge.methods import METHODS
from matsmerge.methods.mats import Mats, name_of
from matsmerge.methods.method import Measured
from matsmerge.methods.objectives.objective import Evidence
from matsmerge.recipes.recipe import Recipe
from matsmerge.recipes.rules import Rule, check_patterns, make_rules
from matsmerge.version import __version__

_MAX_LISTED = 6


@dataclass(frozen=True)
class PreparedMerge:
    """A merge that has been checked and planned; nothing but headers has been read."""

    recipe: Recipe
    alignment: Alignment
    plan: Plan
    evidence: tuple[Evidence, ...]
    is_adapter: bool
    companions: tuple[Path, ...]  # files to copy beside the weights
    notes: tuple[str, ...]

    @property
    def models(self) -> dict[int | None, str]:
        """The models to write, by iteration, and the folder of each within the output."""
        return {at: f"iteration-{at}" for at in self.recipe.trajectory} or {FINAL: "."}

    @property
    def methods(self) -> list[Mats]:
        """Those that solve systems."""
        methods = (p.rule.method for p in self.plan.parameters)
        return list(dict.fromkeys(m for m in methods if isinstance(m, Mats)))

    @property
    def otherwise(self) -> list[str]:
        """Parameters whose method solves systems, but has nothing for them."""
        solved = {n for job in self.plan.jobs if isinstance(job, SolveJob) for n in job.names}
        return [
            p.name
            for p in self.plan.parameters
            if isinstance(p.rule.method, Mats) and p.compute_dtype is not None
            if p.name not in solved
        ]

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


def prepare(
    recipe: Recipe,
    sources: Mapping[str, Source] | None = None,
    statistics: Mapping[str, StatisticsSource] | None = None,
    *,
    force: bool = False,
) -> PreparedMerge:
    """Open and check everything a recipe names.

    `sources` replaces paths of models, `statistics` paths of statistics, both by model name. With
    `force`, statistics of another model are used all the same.
    """
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
    if is_adapter:
        rules = {name: _for_adapters(rule) for name, rule in rules.items()}
    methods = {
        m.model_dump_json(): m for m in (r.method for r in rules.values()) if isinstance(m, Mats)
    }
    evidence = gather_evidence(recipe, alignment, methods.values(), statistics or {}, force=force)
    plan = make_plan(alignment, rules, dtype, evidence, len(recipe.trajectory))
    _check_covered(plan, methods.values())
    # The base's configuration and tokenizer go with the result, or else the first model's.
    folders = [m.checkpoint.folder for m in (alignment.base, alignment.models[0]) if m is not None]
    companions = companion_files(next((f for f in folders if f is not None), None))
    prepared = PreparedMerge(
        recipe, alignment, plan, evidence, is_adapter, companions, alignment.notes
    )
    return replace(prepared, notes=(*prepared.notes, *_otherwise_notes(prepared)))


def _for_adapters(rule: Rule) -> Rule:
    """A rule for (IA)^3 vectors; objectives about linear layers have no meaning for them."""
    if not isinstance(rule.method, Mats):
        return rule
    method = rule.method.for_adapters()
    for stage in method.rounds:
        if not stage.objective.for_vectors:
            raise RecipeError(
                f"{name_of('objective', stage.objective)} is about the inputs of linear layers, "
                "and (IA)^3 trains none: its vectors scale activations elementwise. Use the "
                "objective block_fisher, exact for vectors, or fisher"
            )
    return replace(rule, method=method)


def _check_covered(plan: Plan, methods: Iterable[Mats]) -> None:
    """Refuse objectives that have nothing for any parameter."""
    used = {
        name_of("objective", r.stage.objective)
        for job in plan.jobs
        if isinstance(job, SolveJob)
        for layer in job.layers
        for r in layer.rounds
    }
    wanted = {name_of("objective", stage.objective) for m in methods for stage in m.rounds}
    if wanted - used:
        raise StatisticsError(
            [
                f"the objective {name} has nothing for any of the parameters to merge; are the "
                "statistics of these models, and were their layers among the collected ones?"
                for name in sorted(wanted - used)
            ]
        )


def _otherwise_notes(prepared: PreparedMerge) -> list[str]:
    names = prepared.otherwise
    if not names:
        return []
    chosen = {
        p.rule.method.otherwise for p in prepared.plan.parameters if isinstance(p.rule.method, Mats)
    }
    what = (
        "averaged"
        if chosen == {"average"}
        else "left at the init"
        if chosen == {"init"}
        else ("averaged or left at the init")
    )
    shown = ", ".join(names[:_MAX_LISTED])
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return [
        f"{what}, since the objective has nothing for them ({len(names)} of "
        f"{len(prepared.plan.parameters)} tensors; all are in merge.json): {shown}{more}"
    ]


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
) -> dict[int | None, dict[str, Tensor]]:
    """The merged state dicts, by iteration; tied weights are one tensor under several names."""
    progress = progress or Silent()
    executor = executor or LocalExecutor()
    if not allow_nonfinite:
        check_values(prepared.evidence, prepared.methods, executor, progress)
    worker = Worker(prepared.alignment, allow_nonfinite, prepared.evidence)
    measured = measure(prepared.plan, worker, executor, progress)
    results = {
        at: {
            p.name: torch.empty(p.spec.shape, dtype=p.spec.dtype) for p in prepared.plan.parameters
        }
        for at in prepared.models
    }
    sinks = {at: _StateDict(result) for at, result in results.items()}
    for _ in _run(prepared.plan, worker, executor, measured, sinks, progress):
        pass
    tied = prepared.alignment.tied.items()
    return {at: r | {other: r[kept] for other, kept in tied} for at, r in results.items()}


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
    trace: Path | None = None,
) -> Path:
    """Write the merged model; the folder appears when it is complete.

    With a trajectory it holds a model folder for each iteration. `trace` is a file to write the
    residual and objective of every layer and iteration to.
    """
    progress = progress or Silent()
    executor = executor or LocalExecutor()
    target = target.absolute()
    layout = prepared.layout(max_shard_bytes)
    check_output(prepared, target, layout, overwrite=overwrite, resume=resume)
    if not allow_nonfinite:
        check_values(prepared.evidence, prepared.methods, executor, progress)
    inputs = _describe_inputs(prepared)
    identity = _identity(prepared, layout, inputs, allow_nonfinite)
    output = OutputFolder(target, layout, identity, list(prepared.models.values()))
    output.open(resume=resume)
    try:
        worker = Worker(prepared.alignment, allow_nonfinite, prepared.evidence)
        if output.measured is None:
            measured = measure(prepared.plan, worker, executor, progress)
            output.note_measured(measured)
        else:
            measured = output.measured
        done = frozenset(output.finished)
        sinks = {at: output.shards[folder] for at, folder in prepared.models.items()}
        for receipt in _run(prepared.plan, worker, executor, measured, sinks, progress, done):
            output.note_finished(receipt)
        manifest = _manifest(prepared, inputs, measured, output.finished)
        for at, files in zip(prepared.models, output.shards.values(), strict=True):
            _write_companions(prepared, files.folder, target.name, at)
            if at is not FINAL:
                text = json.dumps({**manifest, "iteration": at}, indent=1) + "\n"
                (files.folder / MANIFEST).write_text(text)
        if trace is not None:
            write_trace(trace, manifest)
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


def _write_companions(
    prepared: PreparedMerge, folder: Path, name: str, iteration: int | None
) -> None:
    """Everything beside the weights that makes a folder a model."""
    _write_heads(prepared, folder)
    copy_companions(prepared.companions, folder, _single_dtype(prepared.plan))
    title = name if iteration is FINAL else f"{name}, iteration {iteration}"
    card = make_model_card(prepared.recipe, title, list(prepared.notes), _library(folder))
    (folder / "README.md").write_text(card)


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
    needed *= len(prepared.models)
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
    sinks: Sinks,
    progress: Progress,
    finished: AbstractSet[int] = frozenset(),
) -> Iterator[Receipt]:
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
    ] + [
        {
            "name": model.name,
            "statistics": one.label,
            "fingerprint": fingerprint(one.statistics.arrays),
            "num_examples": {n: s.num_examples for n, s in one.statistics.header.sets.items()},
        }
        for model, one in zip(prepared.alignment.models, prepared.evidence, strict=False)
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
    finished: Mapping[int, Receipt],
) -> dict[str, Any]:
    """What was done. No times in it: the same merge gives the same bytes."""
    rules = list(dict.fromkeys(p.rule for p in prepared.plan.parameters))
    names = [entry.name for entry in prepared.recipe.models]
    squares: dict[str, float] = {}
    solved: dict[str, Any] = {}
    for job in prepared.plan.jobs:
        receipt = finished[job.index]
        solved |= receipt.solved
        for name, square in zip(job.names, receipt.squares, strict=True):
            squares[name] = squares.get(name, 0.0) + square
    otherwise = set(prepared.otherwise)
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
                **({"solved": solved[p.name]} if p.name in solved else {}),
                **({"otherwise": True} if p.name in otherwise else {}),
            }
            for p in prepared.plan.parameters
        },
    }


def write_trace(path: Path, manifest: Mapping[str, Any]) -> None:
    """Residual and objective of every layer, system and iteration, one line of JSON for each."""
    with path.open("w") as file:
        for name, parameter in manifest["parameters"].items():
            for number, report in enumerate(parameter.get("solved", ())):
                values = report.get("objective_values", ())
                held_out = report.get("held_out_values", ())
                for i, residual in enumerate(report.get("residuals", ())):
                    line = {
                        "parameter": name,
                        "stage": number,
                        "objective": report["objective"],
                        "iteration": i,
                        "residual": residual,
                        "objective_value": values[i],
                        **({"held_out_value": held_out[i]} if held_out else {}),
                    }
                    file.write(json.dumps(line) + "\n")


def _describe_rule(rule: Rule, names: list[str | None]) -> dict[str, Any]:
    return {
        "method": next(name for name, cls in METHODS.items() if cls is type(rule.method)),
        **rule.method.model_dump(mode="json"),
        "weights": dict(zip(names, rule.weights, strict=True)),
        **(
            {"densities": dict(zip(names, rule.densities, strict=True))}
            if rule.method.own_density is not None
            else {}
        ),
    }
