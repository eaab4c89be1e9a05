"""What `mats merge` says: before, what it would do; after, how its layers ended."""

import json
import shlex
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matsmerge.byte_sizes import format_bytes
from matsmerge.cli.display import JsonScreen, Screen

if TYPE_CHECKING:
    from matsmerge import Executor, Merged, PlannedMerge


def show_plan(
    planned: "PlannedMerge",
    plan: Mapping[str, Any],
    executor: "Executor",
    out: Path | None,
    screen: JsonScreen,
) -> None:
    """What a merge that was described would do, for `--dry-run`; even if nothing else is shown."""
    screen.result(plan)
    prepared = planned.prepared
    rules: Counter[str] = Counter()
    otherwise = {p.name for p in prepared.plan.otherwise}
    for parameter in prepared.plan.parameters:
        method = parameter.rule.method
        if parameter.compute_dtype is None:
            rule = "copied"
        elif parameter.name in otherwise:
            rule = f"nothing to solve: {method.fallback.summary}"
        else:
            rule = method.summary
        rules[rule] += 1
    methods = [(f"  {rule}", f"{num} tensors") for rule, num in rules.items()]
    num_files = len(plan["output_files"])
    rows = [
        ("models", ", ".join(plan["models"])),
        ("tensors", f"{plan['num_tensors']:,}"),
        ("parameters", f"{plan['num_parameters']:,}"),
        *methods[:10],
        *([("  ...", f"{len(methods) - 10} more")] if len(methods) > 10 else []),
        *_vocabulary_rows(plan.get("vocabulary")),
        ("heads kept apart", f"{sum(map(len, plan['heads'].values())):,} tensors"),
        ("to read", format_bytes(plan["read_bytes"])),
        ("to write", f"{format_bytes(plan['output_bytes'])} in {num_files} file(s)"),
        ("peak memory, estimated", format_bytes(plan["peak_bytes"])),
        ("memory allowed", format_bytes(executor.max_bytes)),
    ]
    if out is not None:
        parent = next(p for p in out.resolve().parents if p.exists())
        rows.append(("disk free", format_bytes(shutil.disk_usage(parent).free)))
    shown = screen.model_copy(update={"quiet": False})
    shown.table(("plan", ""), rows)
    shown.next(f"the same command without --dry-run{'' if out else ', with --out FOLDER'}")


def describe_merge(
    planned: "PlannedMerge", executor: "Executor", max_shard_bytes: int
) -> dict[str, Any]:
    """A merge in numbers."""
    prepared = planned.prepared
    layout = prepared.layout(max_shard_bytes)
    return {
        "models": [model.name for model in prepared.alignment.models],
        "method": prepared.recipe.method.name,
        "num_tensors": len(prepared.written),
        "num_parameters": planned.num_parameters,
        "num_jobs": len(prepared.plan.jobs),
        "read_bytes": prepared.plan.num_input_bytes * (2 if prepared.plan.is_measured else 1),
        "output_bytes": (layout.num_bytes + prepared.num_head_bytes) * len(prepared.models),
        "output_files": [shard.file_name for shard in layout.shards],
        "peak_bytes": planned.peak_bytes(executor),
        "heads": prepared.heads_apart,
        "tied": dict(prepared.alignment.tied),
        "otherwise": [p.name for p in prepared.plan.otherwise],
        **({"vocabulary": prepared.vocabulary.describe()} if prepared.vocabulary else {}),
        "notes": list(prepared.notes),
    }


def _vocabulary_rows(described: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    """Where the rows of embeddings come from; each of them is in the output of --json."""
    if described is None:
        return
    yield "vocabulary", f"{described['num_rows']:,} rows, {described['num_tokens']:,} tokens"
    counts = {
        "in all models": described["in_all_models"],
        **{f"given by {name}": num for name, num in described["given_by"].items()},
        "averaged over those that have them": described["averaged"],
        "zero": described["zero"],
        "without a token, the mean": described["padding"],
    }
    yield from ((f"  {what}", f"{num:,}") for what, num in counts.items() if num)


def show_solutions(merged: "Merged", screen: Screen) -> None:
    """How the layers' systems ended, by objective; the text says what to try next."""
    from matsmerge.linalg.system import Status

    ended: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for report in (report for reports in merged.layers.values() for report in reports):
        ended.setdefault((report["objective"], report["status"]), []).append(report)
    for (objective, status), reports in ended.items():
        falls = sorted(
            r["objective_value"] / r["objective_of_start"]
            for r in reports
            if r["objective_of_start"]
        )
        iterations = sorted(r["iterations"] for r in reports)
        how = f", {_span(iterations)} iterations" if iterations[-1] else ""
        left = ""
        if falls:
            share = falls[len(falls) // 2]
            left = f" distance from the models {share:.1%} of what it was at the start (median);"
        num = f"{len(reports)} layer{'s' if len(reports) > 1 else ''}"
        screen.say(f"{num} by {objective}{how}:{left} {Status[status.upper()].value}")


def show_what_is_next(merged: "Merged", out: Path, screen: Screen) -> None:
    """How to find out how good a merged model is, and how it is used: the last lines."""
    from matsmerge.engine.model_card import load_call

    folder = merged.folder
    if merged.trajectory:
        folder = folder / f"iteration-{max(merged.trajectory)}"
        out = out / folder.name
    if not any((folder / name).exists() for name in ("config.json", "adapter_config.json")):
        screen.next(f"mats inspect {shlex.quote(str(out))}")
        return
    tasks, place = list(merged.report["heads"]), shlex.quote(str(out))
    new = shlex.quote(f"{out.name}-{tasks[0] if tasks else 'full'}")
    if tasks:
        other = f"mats export {place} --task {tasks[0]} --out {new}"
    elif (folder / "adapter_config.json").exists():
        other = f"mats export {place} --out {new} for a full model"
    else:
        other = f"from_pretrained({json.dumps(str(out))}) of transformers"
    screen.say(f"use it: {load_call(str(out), tasks)} in Python, or {other}")
    screen.next(f"mats evaluate {place} --task TASK.yaml", "how good it is")


def show_energies(layers: Mapping[str, Mapping[str, Any]], screen: Screen) -> None:
    """What the layers of a LoRA keep of their change, where that is not all of it."""
    energies = sorted(float(layer["energy"]) for layer in layers.values())
    if not energies:
        return
    ranks = sorted({int(layer["rank"]) for layer in layers.values()})
    of = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
    if energies[0] > 0.9999:
        text = f"LoRA of {of}, {len(energies)} layers: all of the merged change"
    else:
        least = min(layers, key=lambda module: layers[module]["energy"])
        text = (
            f"LoRA of {of}, {len(energies)} layers: keeps {energies[len(energies) // 2]:.1%} of "
            f"the merged change (median over layers, squared norm), at least {energies[0]:.1%} "
            f"({least}); more with a larger --rank, all of it in a full model. Each layer is in "
            "merge.json"
        )
    screen.say(text)


def _span(numbers: list[int]) -> str:
    return str(numbers[0]) if numbers[0] == numbers[-1] else f"{numbers[0]} to {numbers[-1]}"
