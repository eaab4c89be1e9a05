"""Model cards: metadata that a merge takes over from its models' cards, and the card of the merge.

The models' cards are written by anybody and nothing of a merge depends on them. One that cannot be
read says nothing, and so does a value of another type than expected.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from matsmerge.checkpoints.public_names import path_names, public_name
from matsmerge.errors import CheckpointError
from matsmerge.files.guarded_files import read_text
from matsmerge.files.strict_yaml import parse_yaml
from matsmerge.markdown_text import escape, fenced
from matsmerge.recipes.mergekit_export import to_mergekit
from matsmerge.recipes.recipe import Recipe
from matsmerge.recipes.recipe_parts import ModelEntry
from matsmerge.version import __version__

if TYPE_CHECKING:
    from matsmerge.engine.prepared_merge import PreparedMerge

# What holds for a merge too if it holds for all models.
_INHERITED = ("license", "language", "pipeline_tag")
_FRONT = re.compile(r"---[ \t]*\n(.*?)(?<=\n)---[ \t]*(?:\n|$)", re.DOTALL)


def inherit_metadata(folders: Mapping[str, Path | None]) -> tuple[dict[str, Any], list[str]]:
    """The metadata that all models share and all data sets they name; notes on unusable cards.

    From the folder of each model by its name; a model without one has no card.
    """
    notes: list[str] = []
    cards = [
        {} if folder is None else _metadata(folder / "README.md", name, notes)
        for name, folder in folders.items()
    ]
    if not cards or not all(cards):
        return {}, notes
    found: dict[str, Any] = {
        key: cards[0][key]
        for key in _INHERITED
        if _texts(cards[0].get(key)) and all(card.get(key) == cards[0][key] for card in cards)
    }
    datasets = [name for card in cards for name in _texts(card.get("datasets"))]
    return found | ({"datasets": list(dict.fromkeys(datasets))} if datasets else {}), notes


def _metadata(card: Path, model: str, notes: list[str]) -> dict[str, Any]:
    """The YAML at the beginning of a card."""
    if not card.exists():
        return {}
    try:
        text = read_text(card, CheckpointError).replace("\r\n", "\n")
        front = _FRONT.match(text)
        found = parse_yaml(front[1], "README.md", CheckpointError) if front else {}
    except CheckpointError as error:
        reason = error.problems[0].replace(str(card), card.name)
        notes.append(f"{model}: its card says nothing for the merge's card ({reason})")
        return {}
    return found if isinstance(found, dict) else {}


def _texts(value: Any) -> list[str]:
    """A text, or the texts of a list; nothing of anything else."""
    values = value if isinstance(value, list) else [value]
    return [text for text in values if isinstance(text, str)]


def make_model_card(
    prepared: "PreparedMerge", title: str, library: str | None, loader: str | None = None
) -> str:
    """A model card that says what was merged and how; `loader` of a `library` loads the model."""
    recipe, notes = prepared.recipe, prepared.public_notes
    adapted = (prepared.output.config or {}).get("base_model_name_or_path")
    base = recipe.base or adapted
    sources = [_shown_name(entry) for entry in recipe.models]
    metadata = {
        **prepared.inherited,
        # The hub lists an adapter with the model it is on.
        "base_model": list(
            dict.fromkeys(
                part
                for source in [*([_hub_name(base)] if base else []), *sources]
                for own in _made_of(source, prepared.earlier)
                for part in own.split("+")  # a model and an adapter on it
            )
        )
        if adapted is None
        else _hub_name(adapted),
        **({"base_model_relation": "merge"} if adapted is None else {}),
        **({"library_name": library} if library else {}),
        "tags": ["merge", "mergekit", "matsmerge"],
    }
    rows = "\n".join(
        f"| {escape(shown)} | {_number(entry.weight)} |"
        for shown, entry in zip(sources, recipe.models, strict=True)
    )
    on = f"\nBase model: {escape(_hub_name(base))}\n" if base else ""
    listed = "".join(f"- {escape(note)}\n" for note in notes)
    noted = f"\n## Notes\n\n{listed}" if notes else ""
    tasks = list(prepared.heads_apart)
    use = (
        f"\n## Use\n\n{fenced(_usage(title, tasks, library, loader), 'python')}\n"
        if library
        else ""
    )
    documents = [one.published for one in (*prepared.earlier, recipe)]
    code = yaml.safe_dump_all(documents, sort_keys=False)
    return (
        f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---\n\n# {escape(recipe.name or title)}\n"
        "\n"
        f"Merged by **{escape(recipe.method.name)}** with matsmerge {__version__}.\n{on}\n"
        f"| model | weight |\n|---|---|\n{rows}\n{use}{noted}\n"
        f"## Recipe\n\n{fenced(code, 'yaml')}\n"
    )


def load_call(place: str, tasks: Sequence[str]) -> str:
    """How a merged model is loaded in Python, with the head of the first of its tasks."""
    task = f", task={json.dumps(tasks[0])}" if tasks else ""
    return f"matsmerge.load({json.dumps(place, ensure_ascii=False)}{task})"


def _usage(place: str, tasks: Sequence[str], library: str, loader: str | None) -> str:
    """The lines of Python that load the model; a head of a task needs matsmerge."""
    if not tasks and loader is not None:
        return f"from {library} import {loader}\n\nmodel = {loader}.from_pretrained({place!r})\n"
    others = f"  # or {', '.join(tasks[1:])}" if tasks[1:] else ""
    return (
        "import matsmerge\n\n"
        "# A model of transformers, with its tokenizer and the names of its classes.\n"
        f"model = {load_call(place, tasks)}{others}\n"
    )


def _made_of(source: str, earlier: Sequence[Recipe]) -> list[str]:
    """What a model that is the result of an earlier merge was made of, or the model itself."""
    name, plus, adapter = source.partition("+")
    for recipe in earlier:
        if recipe.name == name:
            base = [_hub_name(recipe.base)] if recipe.base else []
            given = [*base, *map(_shown_name, recipe.models)]
            own = [part for one in given for part in _made_of(one, earlier)]
            return [*own, *([adapter] if plus else [])]
    return [source]


def make_mergekit_config(recipe: Recipe, earlier: Sequence[Recipe] = ()) -> str | None:
    """The recipe as mergekit's YAML, with names in place of paths; None if it cannot be said.

    After those of earlier merges whose results it uses, if there are any.
    """
    configs = []
    for one in (*earlier, recipe):
        names = [entry.model for entry in one.models] + ([one.base] if one.base else [])
        configs.append(to_mergekit(one, {name: public_name(name) for name in names}))
    return None if None in configs else yaml.safe_dump_all(configs, sort_keys=False)


def _shown_name(entry: ModelEntry) -> str:
    """A model's hub id, or its name where the last part of its path is not what it is called."""
    shown = _hub_name(entry.model)
    made = next(path_names([entry.model]))[0]
    return shown if shown == entry.model or entry.name in (None, made) else str(entry.name)


def _hub_name(source: str) -> str:
    """A public name without a revision, which the hub does not understand in a card."""
    name = public_name(source)
    return name.partition("@")[0] if name == source else name


def _number(value: float | list[float]) -> str:
    return f"{value:g}" if isinstance(value, float) else ", ".join(f"{v:g}" for v in value)
