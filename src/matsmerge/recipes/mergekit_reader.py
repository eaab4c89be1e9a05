"""Reading the pieces of mergekit's YAML, whatever is in their place."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from matsmerge.errors import closest
from matsmerge.recipes.mergekit_methods import PARAMETERS

_REFERENCE = {"model", "lora", "path", "revision", "override_architecture"}


@dataclass
class MergekitReader:
    """Notes what is wrong with pieces and what mergekit ignores, and goes on."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    misplaced: list[str] = field(default_factory=list)  # notes that may explain a problem

    def read_entries(self, given: Any, where: str) -> list[Mapping[str, Any]]:
        """A list of mappings."""
        if isinstance(given, list) and all(isinstance(entry, Mapping) for entry in given):
            return given
        self.problems.append(f"'{where}' must be a list of mappings, found {str(given)[:60]!r}")
        return []

    def read_source(
        self, entry: Mapping[str, Any], where: str, *more: str
    ) -> tuple[str, Mapping[str, Any]]:
        """The path of a model, and its own parameters."""
        path = self.read_path(entry.get("model"))
        self.note_unknown(entry, ("model", "parameters", *more), f"{where}: {path}: ")
        return path, self.read_mapping(entry.get("parameters"), path)

    def note_unknown(self, given: Mapping[str, Any], known: Sequence[str], where: str) -> None:
        """Note keys that mergekit does not look at."""
        for key in sorted(given.keys() - set(known)):
            said = f"{where}mergekit ignores the key '{key}'"
            if key in PARAMETERS:
                self.misplaced.append(f"{said}; it belongs under 'parameters'")
            else:
                self.notes.append(f"{said}{closest(key, known)}")

    def read_range(self, given: Any, where: str) -> Any:
        """A range of layers, whose numbers may be text; None if it is none."""
        found = [_as_number(value) for value in given] if isinstance(given, list) else []
        if len(found) == 2 and -1 < found[0] < found[1]:
            return found
        self.problems.append(f"{where}: expected layer_range: [FIRST, LAST + 1], found {given!r}")
        return None

    def read_mapping(self, value: Any, where: str) -> Mapping[str, Any]:
        """A mapping; empty where there is none."""
        if value is None or isinstance(value, Mapping):
            return value or {}
        self.problems.append(f"{where}: expected a mapping, found {value!r}")
        return {}

    def read_path(self, reference: Any) -> str:
        """`path@revision+adapter@revision` of any of the ways to write it."""
        if isinstance(reference, str):
            return reference
        if isinstance(reference, Mapping) and reference.keys() <= _REFERENCE:
            if reference.get("override_architecture"):
                self.notes.append(
                    "override_architecture: models are compared by their tensors; not needed"
                )
            if "path" in reference:
                revision = reference.get("revision")
                return f"{reference['path']}@{revision}" if revision else str(reference["path"])
            if reference.get("model"):
                lora = reference.get("lora")
                return self.read_path(reference["model"]) + (
                    f"+{self.read_path(lora)}" if lora else ""
                )
        self.problems.append(f"expected the name of a model, found {reference!r}")
        return "?"


def _as_number(value: Any) -> int:
    """A whole number, which may be written as text or as 4.0; -1 if it is none."""
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)
    is_whole = type(value) is int or (type(value) is float and value.is_integer())
    return int(value) if is_whole else -1
