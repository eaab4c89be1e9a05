"""`tuning.json`, which `mats tune` writes beside a model, as it is read again."""

from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from matsmerge.errors import DataError
from matsmerge.guarded_files import Content, parse_as, read_json
from matsmerge.tuning.trials import TrialContent


class _TuningReport(Content):
    options: dict[str, Any] = Field(default_factory=dict)
    best: TrialContent
    trials: list[TrialContent] = Field(default_factory=list)

    @model_validator(mode="after")
    def _check_best(self) -> "_TuningReport":
        if self.best.score is None:
            raise ValueError("the best trial has no score")
        if self.trials and all(trial.choice != self.best.choice for trial in self.trials):
            raise ValueError("the best trial is none of the trials")
        return self


def read_tuning_report(path: Path) -> dict[str, Any]:
    """What a tuning.json says, each part of which there is being of the type it should be."""
    content = read_json(path, DataError)
    parse_as(content, _TuningReport, str(path), DataError)
    assert isinstance(content, dict)
    return content
