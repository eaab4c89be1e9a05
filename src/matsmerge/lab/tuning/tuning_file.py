"""A search in a file: a recipe, tasks, and values to try."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from matsmerge.errors import RecipeError
from matsmerge.files.guarded_files import parse_as
from matsmerge.files.strict_yaml import read_yaml
from matsmerge.limits import MOST_COMBINATIONS, MOST_COUNTED, NUM_SEEDS
from matsmerge.recipes.recipe import make_recipe
from matsmerge.recipes.recipe_file import read_recipe


class Search(BaseModel):
    """Options of a search that a file may set."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_by_name=True)

    strategy: Literal["grid", "optuna"] = "grid"
    num_trials: int = Field(default=50, ge=1, le=MOST_COMBINATIONS, alias="trials")  # of optuna
    seed: int = Field(default=0, ge=0, lt=NUM_SEEDS)
    split: str = "validation"
    num_examples: int | None = Field(default=None, ge=1, le=MOST_COUNTED)  # of each task, at most
    unlabelled: bool = False  # score by the distance to each task's own model


class TuningOptions(Search):
    """All options of a search."""

    batch_size: int = 32
    allow_overlap: bool = False
    lm_eval: list[str] = Field(default_factory=list)  # tasks of lm-evaluation-harness


class TuningFile(Search):
    """Paths of the recipe and of tasks are relative to the file's folder.

    Those within a recipe are relative to the current one, as in any recipe.
    """

    recipe: str | dict[str, Any]
    tasks: list[str] = Field(default_factory=list)
    lm_eval: list[str] = Field(default_factory=list)
    search: dict[str, Any] = Field(default_factory=dict)

    def plain_recipe(self) -> dict[str, Any]:
        """The recipe as data that has been checked once."""
        if isinstance(self.recipe, str):
            recipe, _ = read_recipe(Path(self.recipe))
        else:
            recipe = make_recipe(self.recipe)
        return recipe.model_dump(mode="json", exclude_defaults=True)

    def options(self, **more: Any) -> TuningOptions:
        """The options of the search, with those that a file does not set."""
        known = {*Search.model_fields, "lm_eval"}
        return TuningOptions(**{**self.model_dump(include=known), **more})


def read_tuning_file(path: Path, **given: Any) -> TuningFile:
    """Read a search, or a recipe alone; what is given and not None takes its keys' place."""
    content = read_yaml(path, RecipeError)
    if not isinstance(content, Mapping):
        raise RecipeError(f"{path}: expected a mapping with keys such as 'recipe' and 'search'")
    if "recipe" not in content:
        content = {"recipe": path.name}
    given = {key: value for key, value in given.items() if value is not None}
    found = parse_as({**content, **given}, TuningFile, str(path), RecipeError)
    update: dict[str, Any] = {"tasks": [str(path.parent / task) for task in found.tasks]}
    files = (".yaml", ".yml")
    update["lm_eval"] = [
        str(path.parent / task) if Path(task.partition(":")[0]).suffix in files else task
        for task in found.lm_eval
    ]
    if isinstance(found.recipe, str):
        update["recipe"] = str(path.parent / found.recipe)
    return found.model_copy(update=update)
