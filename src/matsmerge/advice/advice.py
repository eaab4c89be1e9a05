"""Advice on a merge: what was found, what was measured, and a recipe."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from matsmerge.advice.answers import Answers
from matsmerge.notebook_table import notebook_table
from matsmerge.problems import counted
from matsmerge.recipes.recipe import Recipe
from matsmerge.recipes.recipe_file import recipe_text

Level = Literal["good", "note", "warning"]


@dataclass(frozen=True)
class Finding:
    """Something that was found, in a sentence or two; `subject` says in a word what it is about."""

    subject: str
    level: Level
    text: str
    models: tuple[str, ...] = ()  # which it is about, if not about all


@dataclass(frozen=True)
class ModelFigures:
    """What was measured of one model."""

    change: float  # norm of its task vector, relative to the base's norm; heads do not count
    norm: float  # of its task vector
    weight: float  # that the recipe gives it
    fisher: float | None = None  # Fisher information by its statistics
    answers: Answers | None = None  # on its own data


@dataclass(frozen=True)
class LayerFigures:
    """How far the models moved in one layer, relative to the base, and how alike."""

    name: str
    changes: tuple[float, ...]  # in the order of the models
    cosine: float  # mean over pairs of models


@dataclass(frozen=True)
class Advice:
    """What to know before merging models, and how to merge them."""

    summary: str
    findings: tuple[Finding, ...]
    recipe: Recipe
    models: Mapping[str, ModelFigures]
    layers: tuple[LayerFigures, ...]
    cosines: tuple[tuple[float, ...], ...]  # between whole task vectors
    notes: tuple[str, ...]  # what planning the recipe had to say
    arguments: Mapping[str, Any]  # `matsmerge.merge(models, base, **arguments)` does the same

    def __repr__(self) -> str:
        found = counted(self.warnings, "warning")
        return f"<Advice {', '.join(self.models)}: {self.recipe.method.name}, {found}>"

    def _repr_html_(self) -> str:
        found = {f"{i + 1}. {f.subject} ({f.level})": f.text for i, f in enumerate(self.findings)}
        rows: dict[str, object] = {"in short": self.summary, "method": self.recipe.method.name}
        return notebook_table(f"Advice on {', '.join(self.models)}", rows | found)

    @property
    def warnings(self) -> list[str]:
        return [found.text for found in self.findings if found.level == "warning"]

    @property
    def recipe_text(self) -> str:
        """The recipe as a file has it."""
        return recipe_text(self.recipe)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for scripts, with None for what is infinite: JSON has no word for it."""
        return {
            "summary": self.summary,
            "findings": [asdict(found) for found in self.findings],
            "models": {name: _plain(asdict(figures)) for name, figures in self.models.items()},
            "layers": [_plain(asdict(layer)) for layer in self.layers],
            "cosines": self.cosines,
            "notes": self.notes,
            "recipe": self.recipe.model_dump(mode="json", exclude_defaults=True),
        }


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
