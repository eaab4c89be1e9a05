"""Merging from Python."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

from torch import Tensor, nn

from matsmerge.checkpoints.checkpoint import Checkpoint
from matsmerge.checkpoints.opening import Source, local_path
from matsmerge.engine.evidence import StatisticsSource
from matsmerge.engine.merging import merge_in_memory, merge_to_folder
from matsmerge.engine.output_folder import check_target
from matsmerge.engine.preparing import PreparedMerge, prepare
from matsmerge.errors import RecipeError, closest
from matsmerge.limits import MOST_KEPT
from matsmerge.recipes.recipe import make_recipe, short_names

Models = Sequence[Source] | Mapping[str, Source]
AllStatistics = Sequence[StatisticsSource] | Mapping[str, StatisticsSource]
# A path, or a mapping with `path` and options, for each model.
DataSource = str | Path | Mapping[str, Any]
AllData = Sequence[DataSource] | Mapping[str, DataSource]


@overload
def merge(
    models: Models,
    base: Source | None = None,
    method: str | Mapping[str, Any] = "average",
    *,
    out: None = None,
    statistics: AllStatistics | None = None,
    data: AllData | None = None,
    weights: Sequence[float] | None = None,
    overrides: Sequence[Mapping[str, Any]] = (),
    heads: str | Sequence[str] = (),
    dtype: str | None = None,
    output: str | None = None,
    rank: int | str | None = None,
    align: str | None = None,
    ignore_tokenizers: bool = False,
    allow_nonfinite: bool = False,
    force: bool = False,
    **parameters: Any,
) -> dict[str, Tensor]: ...
@overload
def merge(
    models: Models,
    base: Source | None = None,
    method: str | Mapping[str, Any] = "average",
    *,
    out: str | Path,
    statistics: AllStatistics | None = None,
    data: AllData | None = None,
    weights: Sequence[float] | None = None,
    overrides: Sequence[Mapping[str, Any]] = (),
    heads: str | Sequence[str] = (),
    dtype: str | None = None,
    output: str | None = None,
    rank: int | str | None = None,
    align: str | None = None,
    ignore_tokenizers: bool = False,
    allow_nonfinite: bool = False,
    force: bool = False,
    overwrite: bool = False,
    resume: bool = False,
    verify: bool = False,
    **parameters: Any,
) -> Path: ...
def merge(
    models: Models,
    base: Source | None = None,
    method: str | Mapping[str, Any] = "average",
    *,
    out: str | Path | None = None,
    statistics: AllStatistics | None = None,
    data: AllData | None = None,
    weights: Sequence[float] | None = None,
    overrides: Sequence[Mapping[str, Any]] = (),
    heads: str | Sequence[str] = (),
    dtype: str | None = None,
    output: str | None = None,
    rank: int | str | None = None,
    align: str | None = None,
    ignore_tokenizers: bool = False,
    allow_nonfinite: bool = False,
    force: bool = False,
    overwrite: bool = False,
    resume: bool = False,
    verify: bool = False,
    **parameters: Any,
) -> dict[str, Tensor] | Path:
    """Merge models given as paths, hub ids, state dicts or modules.

    Returns the merged state dict, or with `out` writes a model folder and returns its path.
    `models` may be a mapping from names, which then name the files in `heads/`; `parameters` are
    the method's own, as in `merge(models, base, "task_arithmetic", scale=0.3)`. `statistics` are
    what `collect` returned or wrote, in the order of the models or by their names; with `force`
    also those of other models. `data` is what methods with `inputs="merged"`, such as `regmean++`,
    run the models on: for each a file, or a mapping with `path` and what `mats collect` has as
    options.

    Adapters of PEFT are models like others. Several LoRA or (IA)^3 adapters become one adapter
    again, or with `output="dense"` a full model; `rank` is that of the LoRA to make, and
    `align="knots"` merges LoRA adapters in the space that their outputs share.

    Models whose tokenizers give tokens different ids are refused, unless `ignore_tokenizers`.

    With `resume` a merge into `out` that was interrupted goes on, if its inputs are unchanged; with
    `verify` that is told from every byte of them instead of from sizes and times.

    What is decided without being asked, such as parameters kept apart as heads, is said as a
    warning.
    """
    recipe = {
        "overrides": list(overrides),
        "heads": heads,
        "dtype": dtype,
        "output": output,
        "rank": rank,
        "align": align,
        "ignore_tokenizers": ignore_tokenizers,
    }
    target = None if out is None else local_path(out)
    if target is not None:
        check_target(target, 0, {}, overwrite=overwrite, resume=resume)
    prepared = _prepare(
        models, base, method, parameters, statistics, weights, recipe, force=force, data=data
    )
    if target is None:
        return merge_in_memory(prepared, allow_nonfinite=allow_nonfinite)[None]
    return merge_to_folder(
        prepared,
        target,
        overwrite=overwrite,
        resume=resume,
        verify=verify,
        allow_nonfinite=allow_nonfinite,
    )


def merge_trajectory(
    models: Models,
    base: Source | None = None,
    method: str | Mapping[str, Any] = "mats",
    *,
    iterations: Sequence[int],
    statistics: AllStatistics | None = None,
    weights: Sequence[float] | None = None,
    overrides: Sequence[Mapping[str, Any]] = (),
    heads: str | Sequence[str] = (),
    dtype: str | None = None,
    output: str | None = None,
    rank: int | str | None = None,
    align: str | None = None,
    ignore_tokenizers: bool = False,
    allow_nonfinite: bool = False,
    force: bool = False,
    **parameters: Any,
) -> dict[int, dict[str, Tensor]]:
    """The merged state dict after each of these iterations of the last solver, from one run."""
    if isinstance(iterations, int) or not iterations:
        raise RecipeError(f"iterations: expected a list such as [10, 20], found {iterations!r}")
    if len(iterations) > MOST_KEPT:
        raise RecipeError(f"iterations: {len(iterations):,} models; {MOST_KEPT:,} are possible")
    recipe = {
        "overrides": list(overrides),
        "heads": heads,
        "dtype": dtype,
        "output": output,
        "rank": rank,
        "align": align,
        "ignore_tokenizers": ignore_tokenizers,
        "trajectory": list(iterations),
    }
    prepared = _prepare(models, base, method, parameters, statistics, weights, recipe, force=force)
    found = merge_in_memory(prepared, allow_nonfinite=allow_nonfinite)
    return {at: state for at, state in found.items() if at is not None}


def _prepare(
    models: Models,
    base: Source | None,
    method: str | Mapping[str, Any],
    parameters: Mapping[str, Any],
    statistics: AllStatistics | None,
    weights: Sequence[float] | None,
    recipe: Mapping[str, Any],
    *,
    force: bool,
    data: AllData | None = None,
) -> PreparedMerge:
    named = dict(models) if isinstance(models, Mapping) else _named(models)
    if weights is not None and len(weights) != len(named):
        raise RecipeError(f"{len(weights)} weights for {len(named)} models")
    _refuse_twice(named)
    spec = {"name": method} if isinstance(method, str) else dict(method)
    heads = recipe["heads"]
    data_of: dict[str, DataSource] = _by_name("data", data, list(named))
    checked = make_recipe(
        {
            **recipe,
            "models": [
                {
                    "model": str(source) if isinstance(source, (str, Path)) else name,
                    "name": name,
                    "weight": weight,
                    "data": data_of.get(name),
                }
                for (name, source), weight in zip(
                    named.items(), weights or [1.0] * len(named), strict=True
                )
            ],
            "base": str(base) if isinstance(base, (str, Path)) else base and "base",
            "method": {**spec, **parameters},
            "heads": heads if isinstance(heads, str) else list(heads),
        }
    )
    prepared = prepare(
        checked,
        named | ({} if base is None else {"base": base}),
        _by_name("statistics", statistics, list(named)),
        force=force,
    )
    for note in prepared.notes:
        warnings.warn(note, stacklevel=3)
    return prepared


T = TypeVar("T")


def _by_name(
    what: str, given: Sequence[T] | Mapping[str, T] | None, names: Sequence[str]
) -> dict[str, T]:
    """What was given for each model, in their order or by their names."""
    if given is None:
        return {}
    if isinstance(given, Mapping):
        unknown = [
            f"{what}: there is no model '{name}'{closest(name, names)}"
            for name in given
            if name not in names
        ]
        if unknown:
            raise RecipeError(unknown)
        return dict(given)
    if isinstance(given, (str, Path)) or not isinstance(given, Sequence):
        raise RecipeError(f"{what}: expected one for each model, in order or by name")
    if len(given) != len(names):
        num = len(given)
        raise RecipeError(f"{num} {what} for {len(names)} models; give one for each, in order")
    return dict(zip(names, given, strict=True))


def _named(models: Sequence[Source]) -> dict[str, Source]:
    if isinstance(models, (str, Path, nn.Module, Checkpoint)):
        raise RecipeError("models must be a list of models, or a mapping from names to models")
    paths = [m if isinstance(m, (str, Path)) else f"model_{i}" for i, m in enumerate(models)]
    return dict(zip(short_names([str(path) for path in paths]), models, strict=True))


def _refuse_twice(models: Mapping[str, Source]) -> None:
    seen: dict[int, str] = {}
    for name, source in models.items():
        if not isinstance(source, (str, Path)) and id(source) in seen:
            raise RecipeError(
                f"the models '{seen[id(source)]}' and '{name}' are the same object; "
                "change its weight instead"
            )
        seen[id(source)] = name
