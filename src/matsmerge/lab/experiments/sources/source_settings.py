"""Settings of a source, as a suite gives them."""

from collections.abc import Mapping
from typing import Any

from matsmerge.errors import RecipeError, closest


def read_settings(given: Mapping[str, Any], known: Mapping[str, int | None]) -> dict[str, Any]:
    """Whole numbers from 0 on by name; what is not given is as known."""
    for name, value in given.items():
        if name not in known:
            raise RecipeError(f"settings: unknown key '{name}'{closest(name, known)}")
        if type(value) is not int or value < 0:
            raise RecipeError(f"settings: {name}: expected a whole number, found {value!r}")
    return {**known, **given}
