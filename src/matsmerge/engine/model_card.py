"""The merged model's `README.md`, with the metadata the hub reads."""

from collections.abc import Mapping
from typing import Any

import yaml

from matsmerge.checkpoints.public_names import public_name, without_paths
from matsmerge.markdown_text import escape, fenced
from matsmerge.recipes.recipe import Recipe
from matsmerge.version import __version__


def make_model_card(
    recipe: Recipe,
    title: str,
    notes: list[str],
    library: str | None,
    adapted: str | None = None,
    inherited: Mapping[str, Any] | None = None,
) -> str:
    """A model card that says what was merged and how; `library` is what loads the model.

    `adapted` is the model that a merged adapter is on. `inherited` is what the models' own cards
    say, such as their license.
    """
    base = recipe.base or adapted
    sources = [entry.model for entry in recipe.models]
    metadata = {
        **(inherited or {}),
        # The hub lists an adapter with the model it is on.
        "base_model": [_hub_name(s) for s in ([base] if base else []) + sources]
        if adapted is None
        else _hub_name(adapted),
        **({"library_name": library} if library else {}),
        "tags": ["merge", "matsmerge"],
    }
    rows = "\n".join(
        f"| {escape(_hub_name(e.model))} | {_number(e.weight)} |" for e in recipe.models
    )
    on = f"\nBase model: {escape(_hub_name(base))}\n" if base else ""
    listed = "".join(f"- {escape(note)}\n" for note in notes)
    noted = f"\n## Notes\n\n{listed}" if notes else ""
    code = yaml.safe_dump(public_recipe(recipe), sort_keys=False)
    return (
        f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---\n\n# {escape(title)}\n\n"
        f"Merged by **{escape(recipe.method.name)}** with matsmerge {__version__}.\n{on}\n"
        f"| model | weight |\n|---|---|\n{rows}\n{noted}\n## Recipe\n\n{fenced(code, 'yaml')}\n"
    )


def public_recipe(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain data, without what was left at its default and without local paths."""
    data = without_paths(recipe.model_dump(mode="json", exclude_defaults=True))
    assert isinstance(data, dict)
    return data


def _hub_name(source: str) -> str:
    """A public name without a revision, which the hub does not understand in a card."""
    name = public_name(source)
    return name.partition("@")[0] if name == source else name


def _number(value: float | list[float]) -> str:
    return f"{value:g}" if isinstance(value, float) else ", ".join(f"{v:g}" for v in value)
