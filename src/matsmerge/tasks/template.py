"""Text made of several columns: `"premise: {premise} hypothesis: {hypothesis}"`."""

import string
from collections.abc import Mapping, Sequence
from typing import Any

from matsmerge.errors import DataError, closest
from matsmerge.tasks.problems import describe


class Template:
    """Text with the names of columns in braces; `{{` and `}}` are braces themselves."""

    def __init__(self, text: str) -> None:
        try:
            self._parts = list(string.Formatter().parse(text))
        except ValueError as error:
            raise DataError(f"template '{text}': {error}; write a brace itself as {{{{") from error
        for _, name, form, conversion in self._parts:
            # No attributes, items or formats: a template only ever puts values into text.
            if name is not None and (not name or set(name) & set(".[") or form or conversion):
                found = (
                    name + (f"!{conversion}" if conversion else "") + (f":{form}" if form else "")
                )
                raise DataError(
                    f"template '{text}': expected the plain name of a column in braces, "
                    f"found '{{{found}}}'"
                )
        self.columns = [name for _, name, _, _ in self._parts if name is not None]
        if not self.columns:
            raise DataError(f"template '{text}': names no column in braces")

    def problems(self, name: str, columns: Sequence[str]) -> list[str]:
        """Columns that the data with this name does not have."""
        return [
            f"{name}: has no column '{column}', which the template names{closest(column, columns)}"
            for column in dict.fromkeys(self.columns)
            if column not in columns
        ]

    def fill(self, row: Mapping[str, Any]) -> str:
        """The text for a row."""
        text = ""
        for literal, name, _, _ in self._parts:
            text += literal
            if name is None:
                continue
            value = row.get(name)
            if isinstance(value, bool) or not isinstance(value, (str, int, float)):
                raise DataError(
                    f"'{name}': expected text for the template, found {describe(value)}"
                )
            text += str(value)
        return text
