"""Merges that use each other's results: planned together, made one after the other."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from matsmerge.checkpoints.checkpoint import Checkpoint
from matsmerge.checkpoints.decoded_checkpoint import decode_checkpoint
from matsmerge.checkpoints.filled_checkpoint import FilledCheckpoint, Stored
from matsmerge.checkpoints.source import Source
from matsmerge.engine.manifest import describe_inputs
from matsmerge.engine.merge_file import read_merge_file
from matsmerge.engine.merge_inputs import fold_adapter
from matsmerge.engine.merge_run import RunOptions, merge_to_folder
from matsmerge.engine.output_folder import MANIFEST, is_merge
from matsmerge.engine.prepared_merge import PreparedMerge, prepare_merge
from matsmerge.errors import MatsError, RecipeError
from matsmerge.problems import noted
from matsmerge.recipes.recipe import Recipe
from matsmerge.recipes.recipe_file import uses_of
from matsmerge.version import versions


def prepare_series(recipes: Sequence[Recipe], *, force: bool = False) -> list[PreparedMerge]:
    """Check and plan recipes, each after those it uses; of these nothing needs to be made yet."""
    if len(recipes) == 1:
        return [prepare_merge(recipes[0], force=force)]
    made: dict[str, Checkpoint] = {}
    prepared: list[PreparedMerge] = []
    problems: list[str] = []
    names = [recipe.name for recipe in recipes]
    for recipe in recipes:
        if any(name not in made for name in uses_of(recipe, names)):
            continue  # what it uses has problems already
        with noted(problems, before=f"{recipe.name or 'the result'}: "):
            one = prepare_merge(recipe, _sources(recipe, made), force=force)
            prepared.append(one)
            if recipe.name is not None:
                made[recipe.name] = _stand_in(one, recipe.name)
    RecipeError.raise_all(problems)
    return prepared


def merge_series(
    recipes: Sequence[Recipe], target: Path, kept: Path | None, options: RunOptions
) -> None:
    """Make recipes that were planned, each after those it uses; the last becomes the target.

    The others are written into the folder `kept`; without one, into a hidden folder beside the
    target, which is deleted when that is complete. A result that is there already is used again
    if it is of the very same merge.
    """
    folder = kept or target.absolute().parent / f".{target.name}.merges"
    folder.mkdir(parents=True, exist_ok=True)
    made: dict[str, Path] = {}
    for recipe in recipes[:-1]:
        place = made[str(recipe.name)] = folder / str(recipe.name)
        prepared = _prepare(recipe, made, recipes)
        if not _is_made(prepared, place):
            overwrite = options.overwrite or kept is None
            merge_to_folder(prepared, place, replace(options, overwrite=overwrite, trace=None))
    merge_to_folder(_prepare(recipes[-1], made, recipes), target, options)
    if kept is None:
        shutil.rmtree(folder)


def _prepare(recipe: Recipe, made: Mapping[str, Path], recipes: Sequence[Recipe]) -> PreparedMerge:
    """A merge that knows the recipes of the results it uses, and of those these use."""
    used: set[str | None] = {recipe.name}
    for one in reversed(recipes):  # each comes after those it uses
        if one.name in used:
            used |= set(uses_of(one, list(made)))
    earlier = tuple(one for one in recipes if one.name in used - {recipe.name})
    return replace(prepare_merge(recipe, _sources(recipe, made)), earlier=earlier)


def _is_made(prepared: PreparedMerge, folder: Path) -> bool:
    """Whether a folder holds the result of this very merge."""
    if not is_merge(folder):
        return False
    try:
        found = read_merge_file(folder / MANIFEST)
    except MatsError:
        return False
    expected = {
        "recipe": prepared.recipe.published,
        "inputs": describe_inputs(prepared),
        "versions": versions("torch", "python"),
    }
    return all(found.get(key) == value for key, value in expected.items())


def _sources(recipe: Recipe, made: Mapping[str, Source]) -> dict[str, Source]:
    """What to open for models that are results of others, by the names of the models."""
    given = {str(entry.name): entry.model for entry in recipe.models}
    if recipe.base is not None:
        given["base"] = recipe.base
    found: dict[str, Source] = {}
    for name, model in given.items():
        used, plus, adapter = model.partition("+")
        if used not in made:
            continue
        source = made[used]
        if plus and isinstance(source, Checkpoint):
            found[name] = fold_adapter(source, adapter, model)
        else:
            found[name] = f"{source}+{adapter}" if plus else source
    return found


def _stand_in(prepared: PreparedMerge, name: str) -> Checkpoint:
    """The result of a planned merge as far as it is known: all but what is computed."""
    if prepared.output.config is not None or prepared.recipe.trajectory:
        raise RecipeError(
            "others use it as a model, and it makes an adapter, or several models; say output: "
            "dense, and leave out trajectory"
        )
    models = {model.name: model for model in prepared.alignment.everyone}
    copied = {}
    for p in prepared.plan.parameters:
        if p.compute_dtype is None:
            source = models[p.rule.method.only_model or p.rule.models[0]]
            copied[p.written_as] = Stored(source.checkpoint, source.names[p.name])
    result = FilledCheckpoint(name, prepared.written, copied)
    result.folder = prepared.companions[0].parent if prepared.companions else None
    return decode_checkpoint(result)
