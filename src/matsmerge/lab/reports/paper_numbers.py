"""The paper's numbers, to stand beside ours where a suite says that the setting is the same."""

import re
from functools import cache
from importlib import resources

import yaml
from pydantic import BaseModel, ConfigDict, Field

from matsmerge.errors import DataError, closest


class PaperColumn(BaseModel):
    """One setting of the paper's tables; scores are in percent, methods have our names."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    setting: str
    mean: dict[str, float] = Field(default_factory=dict)
    tasks: list[str] = Field(default_factory=list)
    by_task: dict[str, list[float]] = Field(default_factory=dict)
    fisher: dict[str, dict[str, dict[str, float]]] = Field(default_factory=dict)
    operations: dict[str, float] = Field(default_factory=dict)
    seconds: dict[str, tuple[float, float]] = Field(default_factory=dict)  # mean, deviation
    donors: dict[str, dict[str, float]] = Field(default_factory=dict)

    def of_task(self, method: str, task: str) -> float | None:
        """A task's score, whatever way its name is written."""
        names = [_plain(name) for name in self.tasks]
        if method not in self.by_task or _plain(task) not in names:
            return None
        return self.by_task[method][names.index(_plain(task))]

    def of_donor(self, method: str, donor: str) -> float | None:
        found = {_plain(name): scores for name, scores in self.donors.items()}
        return found.get(_plain(donor), {}).get(method)

    def of_fisher(self, method: str, expectation: str, split: str) -> float | None:
        return self.fisher.get(method, {}).get(expectation, {}).get(split)


NO_COLUMN = PaperColumn(setting="")  # of a suite that is not like any of the paper's


@cache
def paper_columns() -> dict[str, PaperColumn]:
    """All settings, by the name suites use in `paper`."""
    text = (
        resources.files("matsmerge.lab.reports").joinpath("paper_numbers.yaml").read_text("utf-8")
    )
    return {name: PaperColumn.model_validate(part) for name, part in yaml.safe_load(text).items()}


def paper_column(name: str) -> PaperColumn:
    columns = paper_columns()
    if name not in columns:
        raise DataError(f"paper: the paper has no column '{name}'{closest(name, columns)}")
    return columns[name]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
