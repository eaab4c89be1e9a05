"""What was done: merge.json, the trace, and what must be the same for a merge to be resumed."""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matsmerge.checkpoints.checkpoint import Checkpoint, dtype_name
from matsmerge.checkpoints.fingerprint import fingerprint
from matsmerge.checkpoints.public_names import public_name, public_text
from matsmerge.engine.adapter_output import KeptEnergy
from matsmerge.engine.layout import Layout
from matsmerge.engine.prepared_merge import PreparedMerge
from matsmerge.engine.worker import Receipt
from matsmerge.files.whole_outputs import whole_file
from matsmerge.methods.site import Measured
from matsmerge.recipes.rules import Rule
from matsmerge.version import __version__, versions


@dataclass(frozen=True)
class MergeOutcome:
    """What a merge has made, before it is written: a model for each iteration."""

    models: Mapping[int | None, Checkpoint]
    measured: Mapping[str, Measured]
    receipts: Mapping[int, Receipt]
    # Of layers of a LoRA that were factored at the end.
    kept: KeptEnergy = field(default_factory=dict)


def describe_inputs(
    prepared: PreparedMerge, identified: Callable[[Checkpoint], str | None] = fingerprint
) -> list[dict[str, Any]]:
    """What is merged, with what each model and its statistics are `identified` by."""
    return (
        [
            {
                "name": model.name,
                "source": public_name(model.checkpoint.label),
                "fingerprint": identified(model.checkpoint),
            }
            for model in prepared.alignment.everyone
        ]
        + [
            {
                "name": model.name,
                "statistics": public_name(one.label),
                "fingerprint": identified(one.statistics.arrays),
                "num_examples": {n: s.num_examples for n, s in one.statistics.header.sets.items()},
            }
            for model, one in zip(prepared.alignment.models, prepared.evidence, strict=False)
        ]
        + [
            {
                "name": task.model.name,
                "data": public_text(task.data.data.name),
                "fingerprint": task.data.data.fingerprint,
                "num_examples": task.data.num_examples,
            }
            for task in (prepared.prefix.tasks if prepared.prefix else ())
        ]
    )


def identify_merge(
    prepared: PreparedMerge, layout: Layout, inputs: list[dict[str, Any]], allow_nonfinite: bool
) -> str:
    """What must be the same for a merge to be resumed; it may go on on another device."""
    recipe = prepared.recipe.model_dump(mode="json", exclude={"device"})
    text = json.dumps([__version__, recipe, inputs, allow_nonfinite])
    headers = b"".join(shard.header for shard in layout.shards)
    return hashlib.sha256(text.encode() + headers).hexdigest()


def make_manifest(
    prepared: PreparedMerge,
    inputs: list[dict[str, Any]],
    outcome: MergeOutcome,
) -> dict[str, Any]:
    """What was done. No times in it: the same merge gives the same bytes."""
    rules = list(dict.fromkeys(p.rule for p in prepared.plan.parameters))
    squares: dict[str, float] = {}
    solved: dict[str, Any] = {}
    energies: dict[str, float] = {}
    for job in prepared.plan.jobs:
        receipt = outcome.receipts[job.index]
        solved |= receipt.reports
        energies |= receipt.energies
        for name, square in zip(job.names, receipt.squares, strict=True):
            squares[name] = squares.get(name, 0.0) + square
    otherwise = {p.name for p in prepared.plan.otherwise}
    lora = outcome.kept or {
        p.lora.module: {"rank": p.lora.rank, "energy": energies[p.name]}
        for p in prepared.plan.parameters
        if p.lora is not None
    }
    return {
        "format": 1,
        "versions": versions("torch", "python"),
        "recipe": prepared.recipe.published,
        "inputs": inputs,
        "notes": prepared.public_notes,
        "tied": dict(prepared.alignment.tied),
        "heads": prepared.heads_apart,
        **({"lora": lora} if lora else {}),
        "rules": [_describe_rule(rule) for rule in rules],
        "parameters": {
            p.name: {
                "shape": list(p.spec.shape),
                "dtype": dtype_name(p.scaled.dtype if p.scaled else p.spec.dtype),
                **(
                    {"rule": rules.index(p.rule), "norm": math.sqrt(squares[p.name])}
                    if p.compute_dtype is not None
                    else {"copied": True}
                ),
                **({"measured": found} if (found := outcome.measured.get(p.name)) else {}),
                **({"solved": solved[p.name]} if p.name in solved else {}),
                **({"otherwise": True} if p.name in otherwise else {}),
            }
            for p in prepared.plan.parameters
        },
    }


def write_trace(path: Path, manifest: Mapping[str, Any]) -> None:
    """Residual and objective of every layer, system and iteration, one line of JSON for each."""
    with whole_file(path) as file:
        for name, parameter in manifest["parameters"].items():
            for report in parameter.get("solved", ()):
                values = report.get("objective_values", ())
                held_out = report.get("held_out_values", ())
                for i, residual in enumerate(report.get("residuals", ())):
                    line = {
                        "parameter": name,
                        "stage": report["stage"],
                        "objective": report["objective"],
                        "iteration": i,
                        "residual": residual,
                        "objective_value": values[i],
                        **({"held_out_value": held_out[i]} if held_out else {}),
                    }
                    file.write(f"{json.dumps(line)}\n".encode())


_SHARES = {
    "density": "densities",
    "gamma": "gammas",
    "epsilon": "epsilons",
    "importance": "importances",
}


def _describe_rule(rule: Rule) -> dict[str, Any]:
    return {
        "method": rule.method.name,
        **{k: v for k, v in rule.method.model_dump(mode="json").items() if k != "name"},
        "weights": dict(zip(rule.models, rule.weights, strict=True)),
        **{
            plural: {n: getattr(s, key) for n, s in zip(rule.models, rule.shares, strict=True)}
            for key, plural in _SHARES.items()
            if rule.method.own_share(key) is not None
        },
    }
