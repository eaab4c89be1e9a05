"""`mats stats`, and what `mats inspect` shows of statistics."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from matsmerge.cli import collect_command, display
from matsmerge.cli.shared_options import RUNNING, Quiet

if TYPE_CHECKING:
    from matsmerge.statistics.spectra import Spectrum
    from matsmerge.statistics.statistics import Statistics

app = typer.Typer(help="Work with files of statistics.", no_args_is_help=True)


@app.callback()
def _options() -> None:
    """Work with files of statistics."""


@app.command()
def combine(
    files: Annotated[
        list[str], typer.Argument(help="Files that `mats collect` wrote.", metavar="FILES...")
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="File to write, NAME.safetensors.", metavar="FILE")
    ],
    dtype: Annotated[
        str, typer.Option(help="Of the file: float32, bfloat16, float64.")
    ] = "float32",
    force: Annotated[
        bool, typer.Option("--force", help="Also where they are of different models.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the file.", rich_help_panel=RUNNING)
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Add up statistics of one model on several parts of its data; each counts by its size."""
    from matsmerge.checkpoints.source import local_path
    from matsmerge.statistics.collection_run import check_output
    from matsmerge.statistics.statistics_file import (
        open_statistics,
        parse_dtype,
        save_statistics,
    )
    from matsmerge.statistics.statistics_sum import combine as combine_statistics

    parse_dtype(dtype)
    check_output(local_path(out), overwrite=overwrite, resume=False)
    parts = [open_statistics(file) for file in files]
    combined = combine_statistics(parts, force=force)
    save_statistics(combined, out, dtype)
    if not quiet:
        sizes = " + ".join(str(part.header.num_examples) for part in parts)
        display.stdout.print(f"{sizes} = {combined.header.num_examples} examples in {out}")


def inspect(path: str, model: str | None, *, quiet: bool, as_json: bool) -> None:
    """Show a file of statistics, or check that it is a model's."""
    from matsmerge.checkpoints.source import open_checkpoint
    from matsmerge.statistics.statistics import check_belongs
    from matsmerge.statistics.statistics_file import open_statistics

    statistics = open_statistics(path)
    if model is not None:
        check_belongs(statistics, open_checkpoint(model))
        if not quiet:
            display.stdout.print(f"{path} was collected from {model}")
        return
    rows = list(_matrices(statistics, quiet=quiet or as_json))
    if as_json:
        content = {
            "path": path,
            "header": statistics.header.model_dump(),
            "spectra": {
                key: asdict(found) | {"condition": None if found.is_singular else found.condition}
                for key, _, _, found in rows
            },
        }
        print(json.dumps(content, indent=2))
        return
    _show(path, statistics, rows)


def _matrices(
    statistics: "Statistics", *, quiet: bool
) -> "list[tuple[str, list[str], int, Spectrum]]":
    """Every second moment: key, who has it, bytes stored, spectrum."""
    from matsmerge.statistics.spectra import spectrum
    from matsmerge.statistics.statistics import MAIN

    sharing: dict[str, list[str]] = {}
    for m in statistics.header.maps:
        if m.inputs is not None:
            sharing.setdefault(f"inputs/{m.inputs}", []).append(m.module)
    keys = [
        key
        for name, form in statistics.header.forms.items()
        if name.startswith(f"{MAIN}/") and form in ("symmetric", "diagonal", "rows")
        for key in [name.removeprefix(f"{MAIN}/")]
    ]
    found = []
    with display.status("computing spectra", quiet=quiet):
        for key in keys:
            num_bytes = statistics.arrays.specs[f"{MAIN}/{key}"].num_bytes
            of = sharing.get(key, [key.partition("/")[2]])
            found.append((key, of, num_bytes, spectrum(statistics.array(key))))
    return found


def _show(path: str, statistics: "Statistics", rows: list[Any]) -> None:
    from matsmerge.byte_sizes import format_bytes
    from matsmerge.statistics.kinds import KINDS

    header = statistics.header
    total = sum(spec.num_bytes for spec in statistics.arrays.specs.values())
    sets = ", ".join(f"{name} {s.num_examples}" for name, s in header.sets.items())
    facts = {
        "model": f"{header.model.name} (fingerprint {header.model.fingerprint[:16]})",
        "data": "; ".join(o.name for o in header.data),
        "examples": sets,
        "size": format_bytes(total),
        "fisher": header.options.fisher,
        "loss": f"{header.options.reduction} over tokens",
        "versions": ", ".join(f"{name} {v}" for name, v in header.versions.items()),
    }
    display.stdout.print(path, style="bold")
    for name, value in facts.items():
        display.stdout.print(f"{name + ':':10} {value}", soft_wrap=True)
    display.stdout.print()
    collect_command.show_kinds(statistics)
    for kind in KINDS.values():
        cells = [
            (
                key.removeprefix(f"{kind.array}/"),
                str(len(of)),
                str(found.dim),
                format_bytes(num_bytes),
                f"{found.effective_rank:.1f}",
                "singular" if found.is_singular else f"{found.condition:.1e}",
            )
            for key, of, num_bytes, found in rows
            if key.startswith(f"{kind.array}/")
        ]
        if cells and kind.title:
            columns = ("", "shared by", "dim", "size", "eff. rank", "condition")
            display.stdout.print()
            display.show_table(columns, cells, kind.title)
