"""The merged model's `README.md`, with the metadata the hub reads."""

import yaml

from matsmerge.checkpoints.public_names import public_name
from matsmerge.engine.manifest import public_notes, public_recipe
from matsmerge.engine.prepared_merge import PreparedMerge
from matsmerge.markdown_text import escape, fenced
from matsmerge.version import __version__


def make_model_card(prepared: PreparedMerge, title: str, library: str | None) -> str:
    """A model card that says what was merged and how; `library` is what loads the model."""
    recipe, notes = prepared.recipe, public_notes(prepared)
    adapted = (prepared.output.config or {}).get("base_model_name_or_path")
    base = recipe.base or adapted
    sources = [entry.model for entry in recipe.models]
    metadata = {
        **prepared.inherited,
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


def _hub_name(source: str) -> str:
    """A public name without a revision, which the hub does not understand in a card."""
    name = public_name(source)
    return name.partition("@")[0] if name == source else name


def _number(value: float | list[float]) -> str:
    return f"{value:g}" if isinstance(value, float) else ", ".join(f"{v:g}" for v in value)
