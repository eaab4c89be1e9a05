"""`mats stats`, and what `mats inspect` shows of statistics."""

import shlex
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from matsmerge.byte_sizes import format_bytes
from matsmerge.cli.collected_display import show_kinds, show_next_merge
from matsmerge.cli.display import JsonScreen, Screen
from matsmerge.cli.field_options import CommandOptions, argument, option, takes_options
from matsmerge.cli.shared_options import Replacing
from matsmerge.errors import StatisticsError
from matsmerge.limits import MOST_RANK
from matsmerge.problems import noted

if TYPE_CHECKING:
    from matsmerge.statistics.spectra import Spectrum
    from matsmerge.statistics.statistics import Statistics

app = typer.Typer(help="Work with files of statistics.", no_args_is_help=True)


class Combination(CommandOptions):
    """What to combine, and where to."""

    files: list[str] = argument(metavar="FILES...")
    """Files that `mats collect` wrote."""

    out: Path = option(..., short="-o", metavar="FILE")
    """File to write, NAME.safetensors."""

    dtype: str = "auto"
    """Of the file: auto (sketches in 8 bits, all else float32), float32, bfloat16, float64."""

    force: bool = False
    """Also where they are of different models."""


@app.command()
@takes_options
def combine(asked: Combination, earlier: Replacing, screen: Screen) -> None:
    """Add up statistics of one model on several parts of its data; each counts by its size."""
    from matsmerge.statistics.collection_run import check_output
    from matsmerge.statistics.statistics_file import (
        open_statistics,
        parse_dtype,
        save_statistics,
    )
    from matsmerge.statistics.statistics_sum import combine_statistics

    parse_dtype(asked.dtype)
    check_output(asked.out, overwrite=earlier.overwrite, resume=False)
    parts: list[Statistics] = []
    problems: list[str] = []
    for file in asked.files:
        with noted(problems):
            parts.append(open_statistics(file))
    StatisticsError.raise_all(problems)
    combined = combine_statistics(parts, force=asked.force)
    save_statistics(combined, asked.out, asked.dtype)
    sizes = " + ".join(str(part.header.num_examples) for part in parts)
    screen.say(f"{sizes} = {combined.header.num_examples} examples in {asked.out}")
    screen.next(f"mats merge ... --statistics {shlex.quote(str(asked.out))}")


class Compression(CommandOptions):
    """What to compress, and where to."""

    file: str = argument()
    """A file that `mats collect` wrote."""

    rank: int = option(..., ge=1, le=MOST_RANK)
    """Leading directions to keep of second moments."""

    out: Path = option(..., short="-o", metavar="FILE")
    """File to write, NAME.safetensors."""

    dtype: str = "auto"
    """Of the file: auto (sketches in 8 bits, all else float32), float32, bfloat16, float64."""


@app.command()
@takes_options
def compress(asked: Compression, earlier: Replacing, screen: Screen) -> None:
    """Keep second moments by a rank, as `mats collect --rank` does: files become small."""
    from matsmerge.statistics.collection_run import check_output
    from matsmerge.statistics.compression import compress_statistics
    from matsmerge.statistics.statistics_file import (
        open_statistics,
        parse_dtype,
        save_statistics,
    )

    parse_dtype(asked.dtype)
    check_output(asked.out, overwrite=earlier.overwrite, resume=False)
    save_statistics(
        compress_statistics(open_statistics(asked.file), asked.rank), asked.out, asked.dtype
    )
    before, after = (format_bytes(Path(p).stat().st_size) for p in (asked.file, asked.out))
    screen.say(f"{before} in {asked.file}, {after} of rank {asked.rank} in {asked.out}")
    screen.next(f"mats merge ... --statistics {shlex.quote(str(asked.out))}")


def inspect(path: str, model: str | None, screen: JsonScreen) -> None:
    """Show a file of statistics, or check that it is a model's."""
    from matsmerge.checkpoints.source import open_checkpoint
    from matsmerge.statistics.statistics import check_belongs
    from matsmerge.statistics.statistics_file import open_statistics

    statistics = open_statistics(path)
    if model is not None:
        check_belongs(statistics, open_checkpoint(model), can_be_forced=False)
        screen.result({"path": path, "model": model})
        if not screen.quiet:
            screen.say(f"{path} was collected from {model}: they belong together")
            show_next_merge([model], [Path(path)], statistics.kinds, screen)
        return
    spectra = _spectra(statistics, screen)
    content = {
        "path": path,
        "header": statistics.header.model_dump(),
        "spectra": {
            key: asdict(found) | {"condition": None if found.is_singular else found.condition}
            for key, found in spectra.items()
        },
    }
    screen.result(content)
    _show(path, statistics, spectra, screen)
    screen.next(f"mats inspect {shlex.quote(path)} MODEL", "is it of this model?")


def _spectra(statistics: "Statistics", screen: Screen) -> "dict[str, Spectrum]":
    """The spectrum of every second moment, by its key."""
    from matsmerge.statistics.spectra import spectrum, truncated_spectrum
    from matsmerge.statistics.statistics import MAIN

    keys = [
        name.removeprefix(f"{MAIN}/")
        for name, form in statistics.header.forms.items()
        if name.startswith(f"{MAIN}/") and form != "full"
    ]
    with screen.status("computing spectra"):
        moments = ((key, statistics.truncated(key)) for key in keys)
        return {
            key: spectrum(statistics.array(key)) if moment is None else truncated_spectrum(moment)
            for key, moment in moments
        }


def _show(
    path: str, statistics: "Statistics", spectra: "dict[str, Spectrum]", screen: Screen
) -> None:
    from matsmerge.statistics.coded_sketches import bytes_in_file
    from matsmerge.statistics.kinds import KINDS
    from matsmerge.statistics.statistics import MAIN

    header, arrays = statistics.header, statistics.arrays
    total = sum(bytes_in_file(arrays, name) for name in arrays.specs)
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
    screen.say(path, style="bold")
    screen.say(*(f"{name + ':':10} {value}" for name, value in facts.items()), "")
    show_kinds(statistics, screen)
    sharing = Counter(f"inputs/{m.inputs}" for m in header.maps)
    for kind in KINDS.values():
        cells = [
            (
                key.removeprefix(f"{kind.array}/"),
                str(sharing[key] or 1),
                str(found.dim),
                str(found.rank),
                f"{found.explained:.1%}",
                format_bytes(bytes_in_file(arrays, f"{MAIN}/{key}")),
                f"{found.effective_rank:.1f}",
                "singular" if found.is_singular else f"{found.condition:.1e}",
            )
            for key, found in spectra.items()
            if key.startswith(f"{kind.array}/")
        ]
        if cells and kind.title:
            columns = (
                "",
                "shared by",
                "dim",
                "rank",
                "explained",
                "size",
                "eff. rank",
                "condition",
            )
            screen.say("")
            screen.table(columns, cells, kind.title)
