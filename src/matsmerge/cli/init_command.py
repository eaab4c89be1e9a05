"""`mats init`."""

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


class Described(CommandOptions):
    """What the recipe is to say; what lacks is asked for."""

    models: list[str] = argument([], metavar="[MODEL...]")
    """The models to merge: files, folders or hub ids; NAME=MODEL to name one."""

    base: str | None = option(metavar="MODEL")
    """The model they were fine-tuned from; adapters know theirs."""

    method: str | None = option(metavar="NAME")
    """How to merge. Default: the best one for what there is."""

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
    from matsmerge.checkpoints.public_names import split_name
    from matsmerge.files.whole_outputs import put_bytes
    from matsmerge.recipes.recipe import make_recipe
    from matsmerge.recipes.recipe_file import recipe_text

    check_file(given.out, ".yaml", ".yml", overwrite=earlier.overwrite)
    if not given.models:
        given = _ask(given)
    if not given.models:
        raise RecipeError("no models: a recipe needs at least one")
    if given.data and len(given.data) != len(given.models):
        raise RecipeError(f"{len(given.data)} times --data for {len(given.models)} models")
    entries: list[dict[str, Any]] = []
    for i, (name, source) in enumerate(map(split_name, given.models)):
        entry = {"name": name, "model": source, "data": given.data[i] if given.data else None}
        entries.append({key: value for key, value in entry.items() if value})
    recipe = make_recipe(
        {
            "models": entries,
            "base": given.base,
            "method": given.method or _default_method(given),
            "heads": given.heads,
        }
    )
    put_bytes(given.out, recipe_text(recipe).encode())
    place = shlex.quote(str(given.out))
    screen.say(f"a recipe for {len(entries)} models by {recipe.method.name} is in {given.out}")
    screen.next(f"mats merge {place} --out merged", "with --dry-run: what that would do")


def _default_method(given: Described) -> str:
    """The recommended method for what there is to merge by."""
    if given.data and given.base:
        return "mats_cross"
    return "task_arithmetic" if given.base else "average"


def _ask(given: Described) -> Described:
    """The answers of whoever sits at the terminal."""
    if not sys.stdin.isatty():
        raise RecipeError("no models: give those to merge, as in mats init A B --base C")
    models: list[str] = []
    while text := _answer("a model to merge (folder, file or hub id; empty: no more)"):
        models.append(text)
    base = given.base or _answer("the model they were fine-tuned from (empty: none, or adapters)")
    data = list(given.data)
    if base and not data and typer.confirm("is there data of their tasks, labels not needed?"):
        data = [_answer(f"data of {model} (a file, or a task file)") for model in models]
    return given.model_copy(update={"models": models, "base": base or None, "data": data})


def _answer(question: str) -> str:
    return str(typer.prompt(question, default="", show_default=False)).strip()
