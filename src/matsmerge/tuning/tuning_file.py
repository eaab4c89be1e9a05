"""A search in a file: a recipe, tasks, and values to try."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from matsmerge.errors import RecipeError
from matsmerge.limits import MOST_COMBINATIONS, MOST_COUNTED, NUM_SEEDS
from matsmerge.recipes.reading import read_recipe
from matsmerge.recipes.recipe import make_recipe
from matsmerge.strict_yaml import read_yaml


class TuningFile(BaseModel):
    """Paths of the recipe and of tasks are relative to the file's folder.

    Those within a recipe are relative to the current one, as in any recipe.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    recipe: str | dict[str, Any]
    tasks: list[str] = Field(default_factory=list)
    search: dict[str, Any] = Field(default_factory=dict)
    strategy: str | None = None
    trials: int | None = Field(default=None, ge=1, le=MOST_COMBINATIONS)
    split: str | None = None
    num_examples: int | None = Field(default=None, ge=1, le=MOST_COUNTED)
    seed: int | None = Field(default=None, ge=0, lt=NUM_SEEDS)

    def plain_recipe(self) -> dict[str, Any]:
        """The recipe as data that has been checked once."""
        if isinstance(self.recipe, str):
            recipe, _ = read_recipe(Path(self.recipe))
        else:
            recipe = make_recipe(self.recipe)
        return recipe.model_dump(mode="json", exclude_defaults=True)


def read_tuning_file(path: Path) -> TuningFile:
    """Read a search, or a recipe alone, for which options say the rest."""
    content = read_yaml(path, RecipeError)
    if not isinstance(content, Mapping):
        raise RecipeError(f"{path}: expected a mapping with keys such as 'recipe' and 'search'")
    if "recipe" not in content:
        return TuningFile(recipe=str(path))
    try:
        found = TuningFile.model_validate(content)
    except ValidationError as error:
        raise RecipeError(
            [f"{path}: {'.'.join(map(str, e['loc']))}: {e['msg'].lower()}" for e in error.errors()]
        ) from error
    beside = {"tasks": [str(path.parent / task) for task in found.tasks]}
    if isinstance(found.recipe, str):
        return found.model_copy(update={**beside, "recipe": str(path.parent / found.recipe)})
    return found.model_copy(update=beside)
