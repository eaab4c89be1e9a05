"""Merging from Python: `advise` says how, `plan` checks everything, `merge` does it."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from torch import nn

from matsmerge.advice.advice import Advice
from matsmerge.advice.advisor import give_advice
from matsmerge.advice.opened_models import AdviceSubject
from matsmerge.checkpoints.checkpoint import Checkpoint
from matsmerge.checkpoints.source import Source, local_path
from matsmerge.engine.evidence import StatisticsSource
from matsmerge.engine.executor import Executor
from matsmerge.engine.lora_extraction import prepare_extraction
from matsmerge.engine.merge_series import prepare_series
from matsmerge.engine.merged import Merged
from matsmerge.engine.output_folder import check_target
from matsmerge.engine.planned_merge import PlannedMerge
from matsmerge.engine.prepared_merge import prepare_merge
from matsmerge.errors import RecipeError, closest
from matsmerge.methods.method import Method
from matsmerge.progress import AnyProgress, listener
from matsmerge.recipes.method_spec import as_plain
from matsmerge.recipes.recipe import Recipe, make_recipe, short_names
from matsmerge.recipes.recipe_file import read_recipes

Models = Sequence[Source] | Mapping[str, Source]
Recipes = Recipe | list[Recipe] | str | Path
AllStatistics = Sequence[StatisticsSource] | Mapping[str, StatisticsSource]
# A path, or a mapping with `path` and options, for each model.
DataSource = str | Path | Mapping[str, Any]
AllData = Sequence[DataSource] | Mapping[str, DataSource]


def merge(
    models: Models | Recipes,
    base: Source | None = None,
    method: str | Mapping[str, Any] | Method = "average",
    *,
    out: str | Path | None = None,
    executor: Executor | None = None,
    progress: AnyProgress | None = None,
    overwrite: bool = False,
    resume: bool = False,
    verify: bool = False,
    allow_nonfinite: bool = False,
    **options: Any,
) -> Merged:
    """Merge models given as paths, hub ids, state dicts or modules, or as a recipe says.

    Returns the merged tensors with what became of them, in memory or, with `out`, in a model folder
    that appears when it is complete. `options` are those of `plan`, among them the method's own:
    `merge(models, base, "task_arithmetic", scale=0.3)`.

    `executor` says where the work is done: by default in threads of this process. `progress` is
    called with how far it is. With `resume` a merge into `out` that was interrupted goes on, if its
    inputs are unchanged; with `verify` that is told from every byte of them instead of from sizes
    and times. What is decided without being asked, such as parameters kept apart as heads, is said
    as a warning.
    """
    if out is not None:
        check_target(local_path(out), overwrite=overwrite, resume=resume)
    planned = plan(models, base, method, **options)
    for note in planned.notes:
        warnings.warn(note, stacklevel=2)
    return planned.merge(
        out,
        executor=executor,
        progress=progress,
        overwrite=overwrite,
        resume=resume,
        verify=verify,
        allow_nonfinite=allow_nonfinite,
    )


def plan(
    models: Models | Recipes,
    base: Source | None = None,
    method: str | Mapping[str, Any] | Method = "average",
    *,
    statistics: AllStatistics | None = None,
    data: AllData | None = None,
    weights: Sequence[float] | None = None,
    overrides: Sequence[Mapping[str, Any]] = (),
    heads: str | Sequence[str] = (),
    match_heads: bool | None = None,
    dtype: str | None = None,
    device: str | None = None,
    output: str | None = None,
    rank: int | str | None = None,
    align: str | None = None,
    trajectory: Sequence[int] = (),
    tokenizer: str | Mapping[str, Any] | None = None,
    ignore_tokenizers: bool = False,
    force: bool = False,
    **parameters: Any,
) -> PlannedMerge:
    """Check everything a merge needs, before any weights are read.

    `models` may be a mapping from names, which then name the files in `heads/`; or a recipe, a list
    of recipes that use each other's results, or the path of a recipe file, which say all the rest.
    `method` is a name, a name with options, or an object of `matsmerge.methods`; `parameters` are
    its options. `statistics` are what `collect` returned or wrote, in the order of the models or by
    their names; with `force` also those of other models. `data` is what methods with
    `inputs="merged"`, such as `regmean++`, run the models on: for each a file, or a mapping with
    `path` and what `mats collect` has as options. With `match_heads`, the default of `mats_cross`,
    each model's head is matched to the merged model on that data when it is written to a folder.

    Adapters of PEFT are models like others. Several LoRA or (IA)^3 adapters become one adapter
    again, or with `output="dense"` a full model; `rank` is that of the LoRA to make, and
    `align="knots"` merges LoRA adapters in the space that their outputs share, `"core_space"` in
    that of their outputs and inputs. `trajectory` lists iterations of the last solver, whose models
    are all made from one run.

    Models whose tokenizers give tokens different ids are refused, unless `tokenizer` says how to
    bring them together: `"union"`, `"base"`, a model, or a mapping as in a recipe; or with
    `ignore_tokenizers`. `device` is what to merge on: `cpu`, `cuda` (all GPUs), `cuda:1`, `mps`, or
    `auto`.
    """
    recipes, notes = _given_recipes(models)
    if recipes:
        if base is not None or method != "average" or parameters or weights or statistics or data:
            raise RecipeError("a recipe says models, base, method and weights itself; leave it out")
        if device is not None:
            recipes = [recipe.model_copy(update={"device": device}) for recipe in recipes]
        *earlier, prepared = prepare_series(recipes, force=force)
        said = [note for one in (*earlier, prepared) for note in one.notes]
        return PlannedMerge(prepared, tuple(dict.fromkeys([*notes, *said])), tuple(earlier))
    assert not isinstance(models, (str, Path, Recipe))
    models = cast(Models, models)
    named = dict(models) if isinstance(models, Mapping) else _named(models)
    _refuse_twice(named)
    weight_of: dict[str, float] = _by_name("weights", weights, list(named))
    data_of: dict[str, DataSource] = _by_name("data", data, list(named))
    recipe = make_recipe(
        {
            "models": [
                {
                    "model": str(source) if isinstance(source, (str, Path)) else name,
                    "name": name,
                    "weight": weight_of.get(name, 1.0),
                    "data": data_of.get(name),
                }
                for name, source in named.items()
            ],
            "base": str(base) if isinstance(base, (str, Path)) else base and "base",
            "method": {**as_plain(method), **parameters},
            "overrides": overrides,
            "heads": heads,
            "match_heads": match_heads,
            "dtype": dtype,
            "device": device,
            "output": output,
            "rank": rank,
            "align": align,
            "trajectory": trajectory,
            "tokenizer": tokenizer,
            "ignore_tokenizers": ignore_tokenizers,
        }
    )
    prepared = prepare_merge(
        recipe,
        named | ({} if base is None else {"base": base}),
        _by_name("statistics", statistics, list(named)),
        force=force,
    )
    return PlannedMerge(prepared, prepared.notes)


def advise(
    models: Models,
    base: Source | None = None,
    *,
    statistics: AllStatistics | None = None,
    data: AllData | None = None,
    num_examples: int = 300,
    ignore_tokenizers: bool = False,
    progress: AnyProgress | None = None,
) -> Advice:
    """Whether models fit together, what to expect of merging them, and a recipe for it.

    Weights are read once. With `statistics` and `data`, as in `plan`, advice is better: models that
    are poor or much surer than the others are recognised, and better methods can be used. Each
    model that has data is run on `num_examples` of it; labels are used where there are some.
    The recipe has been planned, so that `matsmerge.merge(advice.recipe)` can be done.
    """
    if isinstance(models, (str, Path)):
        raise RecipeError("models must be a list of models, or a mapping from names to models")
    if num_examples < 1:
        raise RecipeError(f"num_examples: expected at least 1, found {num_examples}")
    named = dict(models) if isinstance(models, Mapping) else _named(models)
    _refuse_twice(named)
    names = list(named)
    subject = AdviceSubject(
        named,
        base,
        _by_name("statistics", statistics, names),
        _by_name("data", data, names),
        ignore_tokenizers,
    )
    return give_advice(subject, num_examples, listener(progress))


def extract_lora(
    model: str | Path,
    base: str | Path,
    rank: int,
    *,
    modules: Sequence[str] = (),
    keep_rest: bool = False,
    dtype: str | None = None,
    out: str | Path | None = None,
    executor: Executor | None = None,
    progress: AnyProgress | None = None,
    overwrite: bool = False,
) -> Merged:
    """The LoRA of a rank that is nearest to the difference of two full models.

    Linear modules that changed are factored, those whose names match a pattern of `modules` if any
    are given. What the base does not have, such as a new head, is brought whole; with `keep_rest`
    so is everything else that changed. The report's `lora` says how much of its change each
    module keeps.
    """
    if out is not None:
        check_target(local_path(out), overwrite=overwrite, resume=False)
    prepared = prepare_extraction(
        str(model), str(base), rank, modules, keep_rest, dtype, listener(progress)
    )
    planned = PlannedMerge(prepared, prepared.notes)
    return planned.merge(out, executor=executor, progress=progress, overwrite=overwrite)


def _given_recipes(given: Any) -> tuple[list[Recipe], list[str]]:
    """Recipes that were given, or are in a file; none where models were given."""
    if isinstance(given, Recipe):
        return [given], []
    if isinstance(given, list) and given and all(isinstance(one, Recipe) for one in given):
        return given, []
    if not isinstance(given, (str, Path)):
        return [], []
    if Path(given).suffix not in (".yaml", ".yml"):
        raise RecipeError(
            "models must be a list of models, a mapping from names to models, or a recipe (.yaml)"
        )
    return read_recipes(local_path(given))


T = TypeVar("T")


def _by_name(
    what: str, given: Sequence[T] | Mapping[str, T] | None, names: Sequence[str]
) -> dict[str, T]:
    """What was given for each model, in their order or by their names."""
    if given is None:
        return {}
    if isinstance(given, Mapping):
        RecipeError.raise_all(
            f"{what}: there is no model '{name}'{closest(name, names)}"
            for name in given
            if name not in names
        )
        return dict(given)
    if isinstance(given, (str, Path)) or not isinstance(given, Sequence):
        raise RecipeError(f"{what}: expected one for each model, in order or by name")
    if len(given) != len(names):
        num = len(given)
        raise RecipeError(f"{num} {what} for {len(names)} models; give one for each, in order")
    return dict(zip(names, given, strict=True))


def _named(models: Sequence[Source]) -> dict[str, Source]:
    if isinstance(models, (nn.Module, Checkpoint)):
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
