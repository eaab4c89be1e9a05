"""The merged model's `README.md`, with the metadata the hub reads."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from matsmerge.checkpoints.opening import local_path
from matsmerge.recipes.recipe import Recipe
from matsmerge.version import __version__

# What a model card's metadata says that holds for a merge too if it holds for all models.
_INHERITED = ("license", "language", "pipeline_tag")


def make_model_card(
    recipe: Recipe,
    title: str,
    notes: list[str],
    library: str | None,
    adapted: str | None = None,
    folders: Sequence[Path] = (),
) -> str:
    """A model card that says what was merged and how; `library` is what loads the model.

    `adapted` is the model that a merged adapter is on. `folders` are those of the models, whose
    own cards say under which license they are, say.
    """
    base = recipe.base or adapted
    sources = [entry.model for entry in recipe.models]
    metadata = {
        **inherited_metadata(folders),
        # The hub lists an adapter with the model it is on.
        "base_model": [public_name(s) for s in ([base] if base else []) + sources]
        if adapted is None
        else public_name(adapted),
        **({"library_name": library} if library else {}),
        "tags": ["merge", "matsmerge"],
    }
    rows = "\n".join(f"| {public_name(e.model)} | {_number(e.weight)} |" for e in recipe.models)
    on = f"\nBase model: {public_name(base)}\n" if base else ""
    listed = "".join(f"- {note}\n" for note in notes)
    noted = f"\n## Notes\n\n{listed}" if notes else ""
    return (
        f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---\n\n# {title}\n\n"
        f"Merged by **{recipe.method.name}** with matsmerge {__version__}.\n{on}\n"
        f"| model | weight |\n|---|---|\n{rows}\n{noted}\n## Recipe\n\n```yaml\n"
        f"{yaml.safe_dump(public_recipe(recipe), sort_keys=False)}```\n"
    )


def inherited_metadata(folders: Sequence[Path]) -> dict[str, Any]:
    """What the models' own cards agree on, and all data sets they name."""
    cards = [_metadata(folder / "README.md") for folder in folders]
    if not cards or not all(cards):
        return {}
    agreed = {k: cards[0][k] for k in _INHERITED if k in cards[0]}
    result = {k: v for k, v in agreed.items() if all(card.get(k) == v for card in cards)}
    datasets = [name for card in cards for name in _as_list(card.get("datasets"))]
    return result | ({"datasets": list(dict.fromkeys(datasets))} if datasets else {})


def _as_list(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else [str(v) for v in value or []]


def _metadata(card: Path) -> dict[str, Any]:
    """The YAML at the beginning of a model card; a card that cannot be read has none."""
    try:
        text = card.read_text()
        parts = text.split("---\n", 2)
        found = yaml.safe_load(parts[1]) if text.startswith("---\n") and len(parts) == 3 else None
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def public_name(source: str) -> str:
    """A hub id as it is; of a local path only its last part, for nobody needs the rest."""
    path = local_path(source)
    return path.resolve().name if path.exists() else source.partition("@")[0]


def public_recipe(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain data, without what was left at its default and without local paths."""
    data: dict[str, Any] = recipe.model_dump(mode="json", exclude_defaults=True)
    if recipe.base and local_path(recipe.base).exists():
        data["base"] = public_name(recipe.base)
    for entry in data["models"]:
        hide_path(entry, "model")
        hide_path(entry, "statistics")
        hide_path(entry["data"] if isinstance(entry.get("data"), dict) else entry, "path")
        hide_path(entry, "data")
    return data


def hide_path(entry: dict[str, Any], key: str) -> None:
    """Leave only the last part of a local path."""
    if isinstance(entry.get(key), str) and local_path(entry[key]).exists():
        entry[key] = public_name(entry[key])


def _number(value: float | list[float]) -> str:
    return f"{value:g}" if isinstance(value, float) else ", ".join(f"{v:g}" for v in value)
