"""The merged model, the models it was made of and their statistics, opened to be compared."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from matsmerge.checkpoints.checkpoint import Checkpoint
from matsmerge.checkpoints.source import open_checkpoint
from matsmerge.engine.merge_file import read_merged_recipe
from matsmerge.engine.private_paths import read_paths
from matsmerge.errors import CheckpointError, RecipeError
from matsmerge.lab.subspaces.subspace_view import SubspaceTask
from matsmerge.problems import noted
from matsmerge.recipes.recipe import short_names
from matsmerge.statistics.statistics_file import BESIDE, open_statistics

T = TypeVar("T")


def open_tasks(files: Sequence[str]) -> list[SubspaceTask]:
    """Tasks by their statistics alone."""
    names = short_names([file.removesuffix(".safetensors") for file in files])
    opened = _open_all(open_statistics, files)
    return [SubspaceTask(name, found) for name, found in zip(names, opened, strict=True)]


def open_merge(
    path: str, models: Sequence[str], statistics: Sequence[str], base: str | None
) -> tuple[Checkpoint, Checkpoint | None, list[SubspaceTask]]:
    """A merged model, its base and its tasks; `merge.json` names what is not given."""
    merged = open_checkpoint(path)
    file = None if merged.folder is None else merged.folder / "merge.json"
    recipe = {} if file is None or not file.exists() else read_merged_recipe(file)
    paths, entries = read_paths(merged.folder), recipe.get("models", [])
    named = [(str(entry.get("name") or ""), entry) for entry in entries]
    sources = list(models) or [paths.models.get(n) or str(e["model"]) for n, e in named]
    if not sources or len(statistics) not in (0, len(sources)):
        raise RecipeError(
            f"there are {len(sources)} models and {len(statistics)} files of statistics; give "
            "--model MODEL --statistics FILE for each task, in the same order, or a merged model "
            "whose merge.json names them"
        )
    opened = _open_all(open_checkpoint, sources, None if models else "--model")
    recorded = [paths.statistics.get(n) or e.get("statistics") for n, e in named]
    recorded = recorded if len(recorded) == len(sources) else [None] * len(sources)
    files = list(statistics) or _find_statistics(recorded, opened)
    found = _open_all(open_statistics, files, None if statistics else "--statistics")
    wanted = base or (None if models else paths.base or recipe.get("base"))
    bases = _open_all(open_checkpoint, [wanted] if wanted else [], None if base else "--base")
    names = [name for name, _ in named]
    if models or not all(names):
        names = short_names(sources)
    tasks = [SubspaceTask(n, s, m) for n, s, m in zip(names, found, opened, strict=True)]
    return merged, bases[0] if bases else None, tasks


def _find_statistics(recorded: Sequence[str | None], models: Sequence[Checkpoint]) -> list[str]:
    """The statistics that a recipe names, or else those beside each model."""
    found, problems = [], []
    for name, model in zip(recorded, models, strict=True):
        place = model.place if model.place is None or model.place.is_dir() else model.place.parent
        if name is not None:
            found.append(name)
        elif place is not None and (place / BESIDE).exists():
            found.append(str(place / BESIDE))
        else:
            problems.append(
                f"{model.label}: no merge.json names its statistics, and there is no {BESIDE} "
                "beside it; give one file for each model with --statistics, in the same order"
            )
    RecipeError.raise_all(problems)
    return found


def _open_all(
    opener: Callable[[str], T], names: Sequence[str], option: str | None = None
) -> list[T]:
    """Open everything, or say of all that cannot be; with an option, `merge.json` named them."""
    opened: list[T] = []
    problems: list[str] = []
    hint = f"; merge.json names it, say with {option} where it is now" if option else ""
    for name in names:
        with noted(problems, after=hint):
            opened.append(opener(name))
    CheckpointError.raise_all(problems)
    return opened
