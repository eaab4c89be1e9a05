"""Merging from Python."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from torch import Tensor, nn

from matsmerge.checkpoints.checkpoint import Checkpoint
from matsmerge.checkpoints.opening import Source, local_path
from matsmerge.engine.merging import merge_in_memory, merge_to_folder, prepare
from matsmerge.engine.output_folder import check_target
from matsmerge.errors import RecipeError
from matsmerge.recipes.recipe import make_recipe, short_names

Models = Sequence[Source] | Mapping[str, Source]


@overload
def merge(
    models: Models,
    base: Source | None = None,
    method: str | Mapping[str, Any] = "average",
    *,
    out: None = None,
    weights: Sequence[float] | None = None,
    overrides: Sequence[Mapping[str, Any]] = (),
    heads: str | Sequence[str] = (),
    dtype: str | None = None,
    allow_nonfinite: bool = False,
    **parameters: Any,
) -> dict[str, Tensor]: ...
@overload
def merge(
    models: Models,
    base: Source | None = None,
    method: str | Mapping[str, Any] = "average",
    *,
    out: str | Path,
    weights: Sequence[float] | None = None,
    overrides: Sequence[Mapping[str, Any]] = (),
    heads: str | Sequence[str] = (),
    dtype: str | None = None,
    allow_nonfinite: bool = False,
    overwrite: bool = False,
    resume: bool = False,
    **parameters: Any,
) -> Path: ...
def merge(
    models: Models,
    base: Source | None = None,
    method: str | Mapping[str, Any] = "average",
    *,
    out: str | Path | None = None,
    weights: Sequence[float] | None = None,
    overrides: Sequence[Mapping[str, Any]] = (),
    heads: str | Sequence[str] = (),
    dtype: str | None = None,
    allow_nonfinite: bool = False,
    overwrite: bool = False,
    resume: bool = False,
    **parameters: Any,
) -> dict[str, Tensor] | Path:
    """Merge models given as paths, hub ids, state dicts or modules.

    Returns the merged state dict, or with `out` writes a model folder and returns its path.
    `models` may be a mapping from names, which then name the files in `heads/`; `parameters` are
    the method's own, as in `merge(models, base, "task_arithmetic", scale=0.3)`. What is decided
    without being asked, such as parameters kept apart as heads, is said as a warning.
    """
    named = dict(models) if isinstance(models, Mapping) else _named(models)
    if weights is not None and len(weights) != len(named):
        raise RecipeError(f"{len(weights)} weights for {len(named)} models")
    _refuse_twice(named)
    spec = {"name": method} if isinstance(method, str) else dict(method)
    recipe = make_recipe(
        {
            "models": [
                {
                    "model": str(source) if isinstance(source, (str, Path)) else name,
                    "name": name,
                    "weight": weight,
                }
                for (name, source), weight in zip(
                    named.items(), weights or [1.0] * len(named), strict=True
                )
            ],
            "base": str(base) if isinstance(base, (str, Path)) else base and "base",
            "method": {**spec, **parameters},
            "overrides": list(overrides),
            "heads": heads if isinstance(heads, str) else list(heads),
            "dtype": dtype,
        }
    )
    target = None if out is None else local_path(out)
    if target is not None:
        check_target(target, 0, {}, overwrite=overwrite, resume=resume)
    prepared = prepare(recipe, named | ({} if base is None else {"base": base}))
    for note in prepared.notes:
        warnings.warn(note, stacklevel=2)
    if target is None:
        return merge_in_memory(prepared, allow_nonfinite=allow_nonfinite)
    return merge_to_folder(
        prepared,
        target,
        overwrite=overwrite,
        resume=resume,
        allow_nonfinite=allow_nonfinite,
    )


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
