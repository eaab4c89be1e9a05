"""`mats init`."""

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import typer

from matsmerge.cli.display import Screen
from matsmerge.cli.field_options import CommandOptions, argument, option, takes_options
from matsmerge.cli.shared_options import Replacing
from matsmerge.errors import RecipeError
from matsmerge.files.output_place import check_file
from matsmerge.recipes.known_options import known_parts

# `owner/name`, or `name` alone, with or without a revision; what ends as a file does is a file.
_HUB_ID = re.compile(
    r"(?!.*\.(yaml|yml|jsonl?|csv|tsv|gz|parquet|safetensors|bin|pt)$)"
    r"[\w-][\w.-]*(/[\w.-]+)?(@[\w./-]+)?"
)


class Described(CommandOptions):
    """What the recipe is to say; what lacks is asked for."""

    models: list[str] = argument([], metavar="[MODEL...]")
    """The models to merge: files, folders or hub ids; NAME=MODEL to name one."""

    base: str | None = option(metavar="MODEL")
    """The model they were fine-tuned from; adapters know theirs."""

    method: str | None = option(metavar="NAME", values=list(known_parts()["init"]))
    """How to merge. Default: mats_cross with data; mats_kfac if every model has K-FAC statistics
    beside it; else task_arithmetic, without a base average."""

    data: list[str] = option([], metavar="FILE")
    """A model's data, or a task file (.yaml), in the order of the models. Repeat for each."""

    heads: list[str] = option([], metavar="PATTERN")
    """Parameters that belong to one task alone, e.g. 'classifier.*'. Repeatable."""

    out: Path = option(Path("recipe.yaml"), short="-o", metavar="FILE")
    """The recipe file to write (.yaml)."""


@takes_options
def init(given: Described, earlier: Replacing, screen: Screen) -> None:
    """Write a recipe to begin with: asks a few questions, or takes the answers as options.

    mats init

    mats init tuned/amazon tuned/imdb --base B --method task_arithmetic
    """
    check_file(given.out, ".yaml", ".yml", overwrite=earlier.overwrite)
    if not given.models:
        given = _ask(given)
    if not given.models:
        raise RecipeError("no models: a recipe needs at least one")
    if given.data and len(given.data) != len(given.models):
        raise RecipeError(
            f"{len(given.data)} times --data for {len(given.models)} models; give one for each, in "
            "the order of the models"
        )
    # These import torch, for which nobody has to wait before the first question.
    from matsmerge.checkpoints.public_names import split_name
    from matsmerge.files.whole_outputs import put_bytes
    from matsmerge.recipes.recipe import make_recipe
    from matsmerge.recipes.recipe_file import recipe_text

    named = [split_name(model) for model in given.models]
    entries: list[dict[str, Any]] = []
    for i, (name, source) in enumerate(named):
        entry = {"name": name, "model": source, "data": given.data[i] if given.data else None}
        entries.append({key: value for key, value in entry.items() if value})
    recipe = make_recipe(
        {
            "models": entries,
            "base": given.base,
            "method": given.method or _default_method(given, [source for _, source in named]),
            "heads": given.heads,
        }
    )
    put_bytes(given.out, recipe_text(recipe).encode())
    place = shlex.quote(str(given.out))
    screen.say(f"a recipe for {len(entries)} models by {recipe.method.name} is in {given.out}")
    screen.next(f"mats merge {place} --out merged", "with --dry-run: what that would do")


def _default_method(given: Described, sources: list[str]) -> str:
    """The recommended method for what there is to merge by."""
    if not given.base:
        return "average"
    if given.data:
        return "mats_cross"
    return "mats_kfac" if all(map(_has_kfac, sources)) else "task_arithmetic"


def _has_kfac(source: str) -> bool:
    from matsmerge.statistics.statistics_file import BESIDE, open_statistics

    place = Path(source).expanduser()
    path = (place if place.is_dir() else place.parent) / BESIDE
    return path.is_file() and "kfac" in open_statistics(path).kinds


def _ask(given: Described) -> Described:
    """The answers of whoever sits at the terminal."""
    if not sys.stdin.isatty():
        raise RecipeError("no models: give those to merge, as in mats init A B --base C")
    models: list[str] = []
    while text := _place("a model to merge (folder, file or hub id; empty: no more)"):
        models.append(text)
    if not models:
        return given
    base = given.base or _place("the model they were fine-tuned from (empty: none, or adapters)")
    data = list(given.data)
    if base and not data and typer.confirm("is there data of their tasks, labels not needed?"):
        data = [_required(f"data of {model} (a file, or a task file)") for model in models]
    return given.model_copy(update={"models": models, "base": base or None, "data": data})


def _place(question: str) -> str:
    """A file or folder that is there, or what may be a name on a hub; nothing, if so wished."""
    while answer := str(typer.prompt(question, default="", show_default=False)).strip():
        source = answer if Path(answer).exists() else answer.rpartition("=")[2]  # NAME=MODEL
        if Path(source).expanduser().exists() or "://" in source:
            return answer
        if _HUB_ID.fullmatch(source):
            typer.echo(f"  {source} is no file or folder here: it is taken for an id on the hub")
            return answer
        typer.echo(f"  {source} is no file or folder here, nor can it be an id on the hub")
    return ""


def _required(question: str) -> str:
    while not (answer := _place(question)):
        typer.echo("  there has to be one for each model")
    return answer
