"""Text made of several columns, in one of several wordings, as PromptSource has them."""

import random
import string
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from matsmerge.data.row_problems import describe_value
from matsmerge.errors import DataError, closest


class Wording(BaseModel):
    """One way to put an example into words: `"{premise} Is it true that {hypothesis}?"`.

    `choices` are the answers to choose from, `target` the answer to give; names of columns in
    braces stand for their values.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    text: str
    choices: list[str] | None = Field(default=None, min_length=2)
    target: str | None = None


class Wordings:
    """Several wordings, one of which each example has for good.

    Scoring every example once is then as good as averaging over all wordings.
    """

    def __init__(self, wordings: Sequence[Wording], seed: int = 0) -> None:
        self._wordings = list(wordings)
        self._seed = seed
        self._templates = {
            text: Template(text, needs_columns=i == 0)
            for w in wordings
            for i, text in enumerate(
                (w.text, *(w.choices or ()), *([] if w.target is None else [w.target]))
            )
        }

    @property
    def answers_filled(self) -> set[str]:
        """The task's columns beside the text that every wording fills."""
        return {
            column
            for column in ("choices", "target")
            if all(getattr(wording, column) is not None for wording in self._wordings)
        }

    def problems(self, name: str, columns: Sequence[str]) -> list[str]:
        """Columns that the data with this name does not have."""
        found = [p for t in self._templates.values() for p in t.problems(name, columns)]
        return list(dict.fromkeys(found))

    def fill(self, row: Mapping[str, Any], number: int, prompt: str) -> dict[str, Any]:
        """The task's columns for a row, by the wording that its number has."""
        drawn = random.Random(f"{self._seed} {number}").randrange(len(self._wordings))
        wording = self._wordings[drawn]
        filled: dict[str, Any] = {prompt: self._templates[wording.text].fill(row)}
        if wording.choices is not None:
            filled["choices"] = [self._templates[choice].fill(row) for choice in wording.choices]
        if wording.target is not None:
            filled["target"] = self._templates[wording.target].fill(row)
        return filled


class Template:
    """Text with the names of columns in braces; `{{` and `}}` are braces themselves."""

    def __init__(self, text: str, *, needs_columns: bool = True) -> None:
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
        if needs_columns and not self.columns:
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
                    f"'{name}': expected text for the template, found {describe_value(value)}"
                )
            text += str(value)
        return text
