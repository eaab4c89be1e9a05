"""What `mats merge` says: before, what it would do; after, how its layers ended."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matsmerge.cli import display

if TYPE_CHECKING:
    from pydantic import BaseModel

    from matsmerge.engine.executor import LocalExecutor
    from matsmerge.engine.parameter import Parameter
    from matsmerge.engine.preparing import PreparedMerge


def show_plan(
    prepared: "PreparedMerge",
    executor: "LocalExecutor",
    out: Path | None,
    max_shard_bytes: int,
    *,
    as_json: bool,
) -> None:
    """What a merge would do, for `--dry-run`."""
    import shutil

    from matsmerge.engine.machine import format_bytes

    plan = describe(prepared, executor, max_shard_bytes)
    if as_json:
        print(json.dumps(plan, indent=2))
        return
    rules: dict[str, int] = {}
    otherwise = set(prepared.otherwise)
    for parameter in prepared.plan.parameters:
        copied = parameter.compute_dtype is None
        rule = "copied" if copied else _describe_method(parameter, parameter.name in otherwise)
        rules[rule] = rules.get(rule, 0) + 1
    methods = [(f"  {rule}", f"{num} tensors") for rule, num in rules.items()]
    rows = [
        ("models", ", ".join(plan["models"])),
        ("tensors", f"{plan['num_tensors']:,}"),
        ("parameters", f"{plan['num_parameters']:,}"),
        *methods[:10],
        *([("  ...", f"{len(methods) - 10} more")] if len(methods) > 10 else []),
        ("heads kept apart", f"{sum(map(len, plan['heads'].values())):,} tensors"),
        ("to read", format_bytes(plan["read_bytes"])),
        (
            "to write",
            f"{format_bytes(plan['output_bytes'])} in {len(plan['output_files'])} file(s)",
        ),
        ("peak memory, estimated", format_bytes(plan["peak_bytes"])),
        ("memory allowed", format_bytes(executor.max_bytes)),
    ]
    if out is not None:
        parent = next(p for p in out.resolve().parents if p.exists())
        rows.append(("disk free", format_bytes(shutil.disk_usage(parent).free)))
    display.show_table(("plan", ""), rows)


def describe(
    prepared: "PreparedMerge", executor: "LocalExecutor", max_shard_bytes: int
) -> dict[str, Any]:
    """A merge in numbers."""
    layout = prepared.layout(max_shard_bytes)
    peak = prepared.plan.peak_bytes(executor.num_workers)
    held = prepared.prefix.num_held_bytes if prepared.prefix else 0
    return {
        "models": [model.name for model in prepared.alignment.models],
        "method": prepared.recipe.method.name,
        "num_tensors": len(prepared.written),
        "num_parameters": sum(spec.num_elements for spec in prepared.written.values()),
        "num_jobs": len(prepared.plan.jobs),
        "read_bytes": prepared.plan.num_input_bytes * (2 if prepared.plan.is_measured else 1),
        "output_bytes": (layout.num_bytes + prepared.num_head_bytes) * len(prepared.models),
        "output_files": [shard.file_name for shard in layout.shards],
        "peak_bytes": min(peak, executor.max_bytes) + prepared.plan.measuring_bytes + held,
        "heads": {m.name: list(m.heads) for m in prepared.alignment.models if m.heads},
        "tied": dict(prepared.alignment.tied),
        "otherwise": prepared.otherwise,
        "notes": list(prepared.notes),
    }


def _describe_method(parameter: "Parameter", is_otherwise: bool) -> str:
    """What happens to a parameter, in a line."""
    from matsmerge.methods.mats import Mats, name_of

    method = parameter.rule.method
    if not isinstance(method, Mats):
        return repr(method)
    if is_otherwise:
        return f"nothing to solve: {method.otherwise}"

    def short(part: str, value: "BaseModel") -> str:
        chosen = ", ".join(f"{k}={v!r}" for k, v in value.model_dump(exclude_defaults=True).items())
        return name_of(part, value) + (f"({chosen})" if chosen else "")

    stages = (
        f"{short('objective', stage.objective)} by {short('solver', stage.solver)}"
        for stage in method.rounds
    )
    return ", then ".join([short("init", method.start), *stages])


def show_solutions(manifest: dict[str, Any]) -> None:
    """How the layers' systems ended, by objective; the text says what to try next."""
    from matsmerge.linalg.system import Status

    ended: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for parameter in manifest["parameters"].values():
        for report in parameter.get("solved", ()):
            ended.setdefault((report["objective"], report["status"]), []).append(report)
    for (objective, status), reports in ended.items():
        falls = sorted(
            r["objective_value"] / r["objective_of_start"]
            for r in reports
            if r["objective_of_start"]
        )
        iterations = sorted(r["iterations"] for r in reports)
        how = f", {_span(iterations)} iterations" if iterations[-1] else ""
        left = f", objective {falls[len(falls) // 2]:.1%} of the init's (median)" if falls else ""
        num = f"{len(reports)} layer{'s' if len(reports) > 1 else ''}"
        text = f"{num}, {objective}{how}{left}: {Status[status.upper()].value}"
        display.stdout.print(text, soft_wrap=True)


def _span(numbers: list[int]) -> str:
    return str(numbers[0]) if numbers[0] == numbers[-1] else f"{numbers[0]} to {numbers[-1]}"
