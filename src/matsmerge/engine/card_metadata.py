"""License, language and data sets from the models' cards, for the card of the merge.

Cards are written by anybody and nothing of a merge depends on them. One that cannot be read says
nothing, and so does a value of another type than expected.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matsmerge.errors import CheckpointError
from matsmerge.files.guarded_files import read_text
from matsmerge.files.strict_yaml import parse_yaml

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
