"""What `mats collect --dry-run` says."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from matsmerge.byte_sizes import format_bytes
from matsmerge.cli.display import Screen

if TYPE_CHECKING:
    from matsmerge.statistics.prepared_blocks import PreparedBlocks
    from matsmerge.statistics.prepared_collection import PreparedCollection

_AT_ONCE = "with all of the model in memory, one pass over the data"


def describe_needs(blocks: "PreparedBlocks", max_bytes: int | None, target: Path) -> dict[str, Any]:
    """What a collection takes, as JSON; refuses what does not fit."""
    needs = blocks.needs
    is_by_blocks = needs.are_by_blocks(max_bytes)
    if is_by_blocks:
        needs.check(max_bytes)
    return {
        "out": str(target),
        "by_blocks": is_by_blocks,
        "num_blocks": len(blocks.cut.outline.blocks),
        "num_passes": needs.num_passes if is_by_blocks else 1,
        "memory_bytes": max_bytes if is_by_blocks else needs.whole,
        "memory_bytes_whole": needs.whole,
        "memory_bytes_by_blocks": needs.by_blocks,
        "held_bytes": needs.held if is_by_blocks else 0,
        "disk_bytes": needs.disk(max_bytes),
        "file_bytes": needs.file,
        "num_examples": blocks.prepared.num_examples,
        "notes": blocks.prepared.notes,
    }


def show_needs(
    blocks: "PreparedBlocks", max_bytes: int | None, target: Path, screen: Screen
) -> None:
    """Say what a collection takes."""
    found = describe_needs(blocks, max_bytes, target)
    how = _AT_ONCE
    if found["by_blocks"]:
        how = f"block by block, each of {found['num_blocks']} loaded "
        how += "once" if found["num_passes"] == 1 else "twice, forward and back"
    sizes = {key: format_bytes(value) for key, value in found.items() if key.endswith("_bytes")}
    whole, least = (format_bytes(n) for n in (blocks.needs.whole, blocks.needs.by_blocks))
    screen.say(
        f"{found['num_examples']} examples, {how}",
        f"memory         about {whole} with all of the model, block by block at least {least}",
        f"kept inputs    {sizes['held_bytes']}, temporary files {sizes['disk_bytes']}",
        f"file           about {sizes['file_bytes']}, {target}",
    )


def describe_least(
    prepared: "PreparedCollection", least: int, target: Path, why: str
) -> dict[str, Any]:
    """What is known before it runs of a model that cannot be cut into blocks, as JSON."""
    return {
        "out": str(target),
        "by_blocks": False,
        "num_passes": 1,
        "least_memory_bytes": least,
        "num_examples": prepared.num_examples,
        "notes": [*prepared.notes, why],
    }


def show_least(report: dict[str, Any], screen: Screen) -> None:
    """Say what is known of such a model."""
    screen.notes(report["notes"])
    screen.say(
        f"{report['num_examples']} examples, {_AT_ONCE}",
        f"memory         at least {format_bytes(report['least_memory_bytes'])}",
        f"file           {report['out']}",
    )
