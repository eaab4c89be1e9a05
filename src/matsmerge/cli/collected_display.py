"""What `mats collect` and `mats stats` say of statistics: what there is, and what there is not."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matsmerge.byte_sizes import format_bytes
from matsmerge.cli.display import Screen

if TYPE_CHECKING:
    from matsmerge.statistics.kinds.statistic import Form
    from matsmerge.statistics.statistics import Statistics


def describe_collected(
    notes: Sequence[str], collected: "Statistics", target: Path
) -> dict[str, Any]:
    """What was collected, for JSON."""
    header = collected.header
    return {
        "out": str(target),
        "num_bytes": target.stat().st_size,
        "model": header.model.model_dump(),
        "data": [origin.model_dump() for origin in header.data],
        "sets": {name: s.num_examples for name, s in header.sets.items()},
        "num_maps": len(header.maps),
        "num_grams": len({m.inputs for m in header.maps if m.inputs is not None}),
        "parameters": {kind: len(collected.parameters(kind)) for kind in collected.kinds},
        "without": header.without,
        "rank": None if header.sketching is None else header.sketching.rank,
        "num_sketches": num_sketches(collected),
        "notes": list(notes),
    }


def show_collected(collected: "Statistics", target: Path, screen: Screen) -> None:
    """What was collected, and where it is."""
    from matsmerge.statistics.statistics import MAIN

    header = collected.header
    show_kinds(collected, screen)
    screen.say(
        f"{header.num_examples} examples of {header.data[0].name} in {target} "
        f"({format_bytes(target.stat().st_size)})"
    )
    marks = header.sets[MAIN].marks
    if marks is not None and marks.num:
        poor = "; that is a poor model" if marks.is_poor else ""
        screen.say(
            f"the model is right on {marks.accuracy:.0%} of them; always giving the most frequent "
            f"label would be right on {marks.majority:.0%}{poor}"
        )


def show_next_merge(
    models: Sequence[str], out: Sequence[Path], kinds: Sequence[str], screen: Screen
) -> None:
    """Which merge the statistics are for; those beside the models need not be named.

    Adapters know their base.
    """
    from matsmerge.adapters.adapter_folder import read_adapter
    from matsmerge.checkpoints.source import open_checkpoint

    adapters = [read_adapter(open_checkpoint(model)) for model in models]
    base = [] if all(adapters) else ["--base", "BASE"]
    have_vectors = any(adapter and not adapter.kind.is_folded for adapter in adapters)
    if have_vectors and tuple(kinds) == ("gram",):
        again = f"mats collect {shlex.join(models)} --data ... --statistics block_fisher"
        screen.next(f"{again}  # Gram matrices alone do not merge vectors of (IA)^3")
        return
    method = _method_for_vectors(kinds) if have_vectors else [_method_for_weights(kinds)]
    files = [f"--statistics={path}" for path in out]
    if len(models) == 1:
        models, files = [*models, "MODEL2"], [*files, *(["--statistics=FILE2"] if out else [])]
    listed = shlex.join([*models, *base, "--method", *method, *files])
    screen.next(f"mats merge {listed} --out merged")


def _method_for_weights(kinds: Sequence[str]) -> str:
    if tuple(kinds) == ("block_fisher",):
        return "block_fisher"
    return "mats_kfac" if "kfac" in kinds else "mats" if "gram" in kinds else "diagonal_fisher"


def _method_for_vectors(kinds: Sequence[str]) -> list[str]:
    """What merges vectors of (IA)^3, to which K-FAC's products do not apply."""
    if "block_fisher" in kinds:
        return ["mats"]
    return ["mats", "--objective", "kfac_scales"] if "kfac" in kinds else ["diagonal_fisher"]


def show_kinds(collected: "Statistics", screen: Screen) -> None:
    """What there is of each kind, and what there is not."""
    from matsmerge.statistics.kinds import KINDS

    rows = []
    for kind in collected.kinds:
        lacking = collected.header.without.get(kind, {})
        num = len(collected.parameters(kind))
        expected = KINDS[kind].expected_reasons if num else ()  # that nothing has it is not
        reasons = sorted(set(lacking.values()) - set(expected))
        rows.append(
            (
                kind,
                f"{num:,}",
                f"{len(lacking):,}",
                "; ".join(f"{sum(w == r for w in lacking.values())} {r}" for r in reasons),
            )
        )
    screen.table(("statistic", "parameters with", "without", "why without"), rows)
    if collected.header.sketching is not None:
        num, num_whole = num_sketches(collected), num_sketches(collected, "symmetric")
        screen.say(
            f"sketches of rank {collected.header.sketching.rank}: {num} second moments; whole, "
            f"which is no larger for them: {num_whole}"
        )


def num_sketches(collected: "Statistics", form: "Form" = "sketch") -> int:
    """How many second moments of linear maps are sketches, or whole."""
    from matsmerge.statistics.kinds import KINDS

    may_be = {
        array for kind in KINDS.values() for array in kind.arrays if "sketch" in kind.arrays[array]
    }
    forms = collected.header.forms.items()
    return sum(own == form and name.split("/")[1] in may_be for name, own in forms)
