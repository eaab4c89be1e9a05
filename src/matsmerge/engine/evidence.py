"""The statistics a merge needs: found, opened, and checked against models and objectives."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from matsmerge.checkpoints.alignment import Alignment
from matsmerge.checkpoints.checkpoint import Checkpoint
from matsmerge.engine.executor import Executor, Piece, map_pieces
from matsmerge.engine.worker import is_finite
from matsmerge.errors import StatisticsError
from matsmerge.files.guarded_files import reading
from matsmerge.files.mirror import fetch_path
from matsmerge.linalg.rounding import may_be_second_moment
from matsmerge.linalg.triangle import unpack_upper
from matsmerge.methods.method import Method
from matsmerge.methods.objectives.objective import Evidence
from matsmerge.problems import listed, noted
from matsmerge.progress import Progress
from matsmerge.recipes.recipe import Recipe
from matsmerge.statistics.kinds import arrays_of, includes, kind_of
from matsmerge.statistics.statistics import HELD_OUT, MAIN, Statistics, check_belongs
from matsmerge.statistics.statistics_file import BESIDE, open_statistics

_OF_EXPERT = re.compile(r"\bexperts\.\w+\.")
_LANCZOS_STEPS = 12
_EXACT_DIM = 128

StatisticsSource = str | Path | Statistics


def gather_evidence(
    recipe: Recipe,
    alignment: Alignment,
    methods: Iterable[Method],
    given: Mapping[str, StatisticsSource],
    *,
    force: bool,
    may_be_collected: bool = False,
) -> tuple[Evidence, ...]:
    """Every model's statistics, if the methods need any; all that is wrong is said at once.

    Where they `may_be_collected` while merging, it is no error if no model has any.
    """
    methods = list(methods)
    kinds = kinds_needed(methods)
    sources = {
        model.name: given.get(model.name) or entry.statistics or find_beside(model.checkpoint)
        for entry, model in zip(recipe.models, alignment.models, strict=True)
    }
    if not kinds or (may_be_collected and not any(sources.values())):
        return ()
    held_out = any(method.uses_held_out for method in methods)
    problems: list[str] = []
    evidence = []
    for model in alignment.models:
        with noted(problems):
            source = sources[model.name]
            if source is None:
                raise StatisticsError(
                    f"{model.checkpoint.label}: the method needs statistics ({', '.join(kinds)}) "
                    f"and there is no {BESIDE} beside it; run `mats collect MODEL --data FILE "
                    f"--statistics {','.join(kinds)}` and name the file with --statistics / "
                    "statistics:"
                )
            found = source if isinstance(source, Statistics) else open_statistics(source)
            problems += [*_lacking(found, kinds, held_out), *_without_experts(found)]
            if not force:
                check_belongs(found, model.checkpoint)
            is_object = isinstance(source, Statistics) and found.arrays.place is None
            label = f"statistics of {model.name}" if is_object else found.arrays.label
            evidence.append(Evidence(label, found, model.names))
    StatisticsError.raise_all(problems)
    return tuple(evidence)


def kinds_needed(methods: Iterable[Method]) -> list[str]:
    """The kinds of statistics that methods need."""
    return list(dict.fromkeys(kind for m in methods for kind in m.needed_statistics))


def find_beside(model: Checkpoint) -> Path | None:
    """The file of statistics that lies beside a model, if any."""
    place = model.place
    if place is None:
        return None
    path = (place if place.is_dir() else place.parent) / BESIDE
    with reading(path, StatisticsError):
        return path if fetch_path(path).exists() else None


def _lacking(statistics: Statistics, kinds: Sequence[str], held_out: bool) -> Iterator[str]:
    label, header = statistics.arrays.label, statistics.header
    for kind in kinds:
        if not includes(statistics.kinds, kind):
            yield (
                f"{label}: has {', '.join(statistics.kinds)} and no {kind}, which the objective "
                f"needs; collect again with --statistics {kind}"
            )
    for name in (MAIN, HELD_OUT) if held_out else (MAIN,):
        if name not in header.sets:
            yield f"{label}: has no held-out set to stop by; collect again with --held-out 0.2"
        elif header.sets[name].num_examples == 0:
            yield f"{label}: was collected from no examples ({name}); collect again"
    if held_out and HELD_OUT in header.sets and header.sets[HELD_OUT].num_examples > 0:
        used = arrays_of(kinds)
        arrays = (name.split("/", 1) for name in header.forms)
        own = [rest for of, rest in arrays if of == MAIN and rest.split("/")[0] in used]
        missing = [rest for rest in own if f"{HELD_OUT}/{rest}" not in header.forms]
        if missing:
            yield (
                f"{label}: the held-out set has no {listed(missing, 3)}, which no held-out example "
                "used; hold out more of them (mats collect --held-out)"
            )


def _without_experts(statistics: Statistics) -> list[str]:
    """What speaks against statistics of a mixture of which no expert was used."""
    header = statistics.header
    unused = [n for reasons in header.without.values() for n in reasons if header.is_unused(n)]
    if not unused or any(_OF_EXPERT.search(m.module) for m in header.maps):
        return []
    return [
        f"{statistics.arrays.label}: no token of its data was routed to any expert, such as that "
        f"of '{unused[0]}'; collect on data that uses them"
    ]


def check_values(
    evidence: Sequence[Evidence], methods: Iterable[Method], executor: Executor, progress: Progress
) -> None:
    """Read what the methods use once: all of it finite, no second moment clearly negative."""
    used = arrays_of(kind for m in methods for kind in m.needed_statistics)
    # As a full matrix, and what looking at it takes.
    arrays = [
        Piece((one, name), spec.num_bytes, 6 * spec.num_bytes)
        for one in evidence
        for name, spec in one.statistics.arrays.specs.items()
        if name.split("/")[1] in used
    ]
    problems: list[str] = []
    if arrays:
        for found in map_pieces(executor, progress, "checking statistics", _check_array, arrays):
            problems += found
    StatisticsError.raise_all(sorted(problems))


def _check_array(array: tuple[Evidence, str]) -> list[str]:
    evidence, name = array
    statistics, label = evidence.statistics, evidence.label
    values = statistics.arrays[name]
    problems = []
    advice = "the file is damaged, or the model gave NaN on its data; collect again"
    flat = values.reshape(-1)
    if values.is_floating_point() and not is_finite(flat, torch.dot(flat, flat).item()):
        bad = values[~values.isfinite()][0].item()
        problems.append(f"{label}: array '{name}' holds {bad}; {advice}")
    else:
        form = statistics.header.forms.get(name)
        kind = kind_of(name.split("/")[1])
        if form == "symmetric":
            lowest = lowest_eigenvalue(unpack_upper(values))
        elif form == "diagonal" or (kind is not None and kind.is_diagonal):
            lowest = float(values.min()) / (float(values.abs().max()) or 1.0)
        elif form == "sketch":
            lowest = float(values[:, -1].min()) / (float(values[:, -1].max()) or 1.0)
        else:
            lowest = 0.0
        if not may_be_second_moment(lowest, values.dtype):
            problems.append(
                f"{label}: array '{name}' has an eigenvalue of {lowest:.2g} times its "
                f"largest, but a second moment has none below zero; {advice}"
            )
    return problems


def lowest_eigenvalue(matrix: Tensor) -> float:
    """About the lowest eigenvalue relative to the largest, exact for small matrices.

    A few Lanczos steps find an eigenvalue that stands out below zero, at the cost of reading.
    """
    if matrix.ndim == 3:
        return min(map(lowest_eigenvalue, matrix))
    if len(matrix) <= _EXACT_DIM:
        values = torch.linalg.eigvalsh(matrix.double())
    else:
        values = torch.linalg.eigvalsh(_lanczos(matrix))
    return float(values[0]) / (float(values.abs().max()) or 1.0)


def _lanczos(matrix: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(len(matrix), generator=generator, dtype=matrix.dtype)
    basis = [v / v.norm()]
    for _ in range(_LANCZOS_STEPS - 1):
        w = matrix @ basis[-1]
        for _ in range(2):
            for u in basis:
                w = w - torch.dot(u, w) * u
        if not float(w.norm()) > 0:
            break
        basis.append(w / w.norm())
    q = torch.stack(basis)
    return (q @ matrix @ q.mT).double()
