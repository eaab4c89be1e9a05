"""Before a merge: open, align, gather statistics, plan; all that is wrong is said here."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from matsmerge.checkpoints.alignment import Alignment, align, matches
from matsmerge.checkpoints.checkpoint import Checkpoint
from matsmerge.checkpoints.companions import companion_files, read_json
from matsmerge.checkpoints.opening import Source, open_checkpoint
from matsmerge.engine.evidence import StatisticsSource, gather_evidence
from matsmerge.engine.layout import Layout, make_layout
from matsmerge.engine.plan import Plan, SolveJob, make_plan
from matsmerge.engine.prefix_merging import PrefixMerge, prepare_prefix, without_inputs
from matsmerge.engine.worker import FINAL
from matsmerge.errors import (
    CheckpointError,
    RecipeError,
    StatisticsError,
)
from matsmerge.methods.mats import Mats, name_of
from matsmerge.methods.objectives.objective import Evidence
from matsmerge.recipes.recipe import Recipe
from matsmerge.recipes.rules import Rule, check_patterns, make_rules

_MAX_LISTED = 6


@dataclass(frozen=True)
class PreparedMerge:
    """A merge that has been checked and planned; nothing but headers has been read.

    Along a prefix, where `evidence` lacks what is about inputs, data and a model have been read.
    """

    recipe: Recipe
    alignment: Alignment
    plan: Plan
    evidence: tuple[Evidence, ...]
    is_adapter: bool
    companions: tuple[Path, ...]  # files to copy beside the weights
    notes: tuple[str, ...]
    prefix: PrefixMerge | None = None

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
    is_along_prefix = any(m.uses_merged_inputs for m in methods.values())
    if is_along_prefix and is_adapter:
        raise RecipeError(
            "inputs: merged is about the inputs of linear layers, and (IA)^3 trains none; use "
            "inputs: own"
        )
    evidence = gather_evidence(
        recipe,
        alignment,
        without_inputs(methods.values()) if is_along_prefix else methods.values(),
        statistics or {},
        force=force,
    )
    prefix = prepare_prefix(recipe, alignment, evidence) if is_along_prefix else None
    plan = make_plan(
        alignment, rules, dtype, prefix.evidence if prefix else evidence, len(recipe.trajectory)
    )
    _check_covered(plan, methods.values())
    # The base's configuration and tokenizer go with the result, or else the first model's.
    folders = [m.checkpoint.folder for m in (alignment.base, alignment.models[0]) if m is not None]
    companions = companion_files(next((f for f in folders if f is not None), None))
    prepared = PreparedMerge(
        recipe, alignment, plan, evidence, is_adapter, companions, alignment.notes, prefix
    )
    along = prefix.notes_on(plan) if prefix else ()
    return replace(prepared, notes=(*prepared.notes, *along, *_otherwise_notes(prepared)))


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
        p.rule.method.otherwise
        for p in prepared.plan.parameters
        if isinstance(p.rule.method, Mats) and p.name in names
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
