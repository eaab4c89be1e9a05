"""Models that advice is wanted on, opened and compared by their headers, with their data."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matsmerge.advice.advice import Finding
from matsmerge.advice.own_layers import find_unshared, make_patterns, name_tables
from matsmerge.checkpoints.alignment import Alignment, align
from matsmerge.checkpoints.companions import read_object
from matsmerge.checkpoints.source import Source
from matsmerge.checkpoints.tokenizers import digest_files
from matsmerge.checkpoints.vocabularies import TokenizerComparison, compare_tokenizers
from matsmerge.data.rows import Data
from matsmerge.engine.evidence import StatisticsSource, find_beside
from matsmerge.engine.merge_inputs import MergeInputs, gather_inputs
from matsmerge.errors import DataError, RecipeError, StatisticsError
from matsmerge.problems import listed, noted
from matsmerge.recipes.recipe import make_recipe
from matsmerge.statistics.kinds import KINDS, includes
from matsmerge.statistics.statistics import Statistics, check_belongs
from matsmerge.statistics.statistics_file import open_statistics
from matsmerge.tasks.kinds import continues_input
from matsmerge.tasks.splits import read_split
from matsmerge.tasks.task_file import TaskFile


@dataclass(frozen=True)
class AdviceSubject:
    """What advice is wanted on."""

    models: Mapping[str, Source]  # by name
    base: Source | None = None  # adapters know theirs
    statistics: Mapping[str, StatisticsSource] | None = None
    data: Mapping[str, Any] | None = None  # paths, or mappings with `path` and options
    ignore_tokenizers: bool = False

    @property
    def sources(self) -> dict[str, Source]:
        """Models and base, by the names that a recipe has for them."""
        return dict(self.models) | ({} if self.base is None else {"base": self.base})

    def entries(self) -> dict[str, dict[str, Any]]:
        """What a recipe says of each model, so far."""
        return {
            name: {"model": str(s) if isinstance(s, (str, Path)) else name, "name": name}
            for name, s in self.models.items()
        }

    def recipe(self, **content: Any) -> dict[str, Any]:
        """A recipe for these models, as plain data; `content` is the rest of it."""
        base: str | None = None
        if self.base is not None:
            base = str(self.base) if isinstance(self.base, (str, Path)) else "base"
        settings = {"ignore_tokenizers": True} if self.ignore_tokenizers else {}
        return {"models": list(self.entries().values()), "base": base, **settings, **content}


@dataclass(frozen=True)
class OpenedModels:
    """Models that fit together, and all that was given with them."""

    subject: AdviceSubject
    inputs: MergeInputs
    alignment: Alignment
    names: frozenset[str]  # of all parameters, in whichever model
    unshared: tuple[str, ...]  # parameters that belong to one task alone, by headers
    statistics: Mapping[str, Statistics]
    places: Mapping[str, StatisticsSource]  # where the statistics come from
    rows: Mapping[str, tuple[TaskFile, Data]]
    findings: tuple[Finding, ...]

    @property
    def kinds(self) -> frozenset[str]:
        """Kinds of statistics that all models have."""
        if len(self.statistics) < len(self.subject.models):
            return frozenset()
        own = [s.kinds for s in self.statistics.values()]
        return frozenset(k for k in KINDS if all(includes(kinds, k) for kinds in own))

    @property
    def is_language_model(self) -> bool:
        """Do the models write text from left to right, by the base's configuration?"""
        base = self.inputs.pretrained or self.inputs.base
        path = None if base is None or base.folder is None else base.folder / "config.json"
        if path is None or not path.is_file():
            return False
        found = read_object(path).get("architectures") or [""]
        return continues_input(str(found[0]))


def open_models(subject: AdviceSubject) -> OpenedModels:
    """Open and compare everything; all that is wrong is said at once, as far as it can be seen."""
    if len(subject.models) < 2:
        raise RecipeError("give at least two models: there is nothing to merge otherwise")
    rows = _read_data(subject)
    inputs = gather_inputs(make_recipe(subject.recipe(method="task_arithmetic")), subject.sources)
    if inputs.base is None:
        raise RecipeError(
            "say which model these were fine-tuned from with --base: advice is about how they "
            "moved away from it"
        )
    everyone = [*inputs.models.values(), inputs.base]
    names = frozenset(name for table in name_tables(everyone) for name in table)
    unshared = [name for name in find_unshared(everyone) if name not in inputs.heads]
    tokenizers = compare_tokenizers(
        {name: model.folder for name, model in inputs.models.items()},
        ("the base", (inputs.pretrained or inputs.base).folder),
        (inputs.pretrained or inputs.base).folder,
    )
    alignment = align(
        inputs.models,
        inputs.base,
        heads=[*(make_patterns(unshared, names)), *inputs.heads],
        tokenizer_problems=() if subject.ignore_tokenizers else tokenizers.problems,
    )
    statistics, places, findings = _open_statistics(subject, inputs)
    return OpenedModels(
        subject,
        inputs,
        alignment,
        names,
        tuple(unshared),
        statistics,
        places,
        rows,
        (
            *_adapter_findings(inputs),
            *_tokenizer_findings(tokenizers, (inputs.pretrained or inputs.base).folder),
            *_head_findings(unshared, names),
            *findings,
        ),
    )


def _read_data(subject: AdviceSubject) -> dict[str, tuple[TaskFile, Data]]:
    """The data of those models that have some."""
    given = subject.data or {}
    entries = subject.entries()
    of_data = [{**entries[name], "data": data} for name, data in given.items()]
    if not of_data:
        return {}
    recipe = make_recipe({"models": of_data, "base": "base", "method": "mats_cross"})
    found: dict[str, tuple[TaskFile, Data]] = {}
    problems = [
        f"{name}: to be run on its data it must be a model's folder or hub id, not an object"
        for name in given
        if not isinstance(subject.models[name], (str, Path))
    ]
    for entry in recipe.models:
        assert entry.data is not None
        with noted(problems):
            described = entry.data.task_file
            found[str(entry.name)] = described, read_split(described)
    DataError.raise_all(problems)
    return found


def _open_statistics(
    subject: AdviceSubject, inputs: MergeInputs
) -> tuple[dict[str, Statistics], dict[str, StatisticsSource], list[Finding]]:
    """Statistics that were given, which must be the models'; else those beside a model, if any."""
    found: dict[str, Statistics] = {}
    places: dict[str, StatisticsSource] = {}
    findings: list[Finding] = []
    problems: list[str] = []
    for name, model in inputs.models.items():
        given = (subject.statistics or {}).get(name)
        place = given or find_beside(model)
        if place is None:
            continue
        wrong: list[str] = []
        with noted(wrong):
            own = place if isinstance(place, Statistics) else open_statistics(place)
            check_belongs(own, model, can_be_forced=False)
            found[name], places[name] = own, place
        if given is not None:
            problems += wrong
        elif wrong:
            text = f"The statistics beside {name} are not used: {wrong[0]}"
            findings.append(Finding("statistics", "warning", text, (name,)))
    StatisticsError.raise_all(problems)
    lacking = [name for name in inputs.models if name not in found]
    if found and lacking:
        text = f"There are no statistics of {listed(lacking)}; they are of use for all or for none."
        findings.append(Finding("statistics", "note", text, tuple(lacking)))
    return found, places, findings


def _adapter_findings(inputs: MergeInputs) -> Iterator[Finding]:
    if not inputs.adapters:
        return
    kinds = sorted({adapter.kind.peft_type for adapter in inputs.adapters.values()})
    how = {
        "vectors": "their vectors are merged",
        "folded": "merged as the full weights that they make of their base",
        "joint": "merged in a space that they share",
    }
    yield Finding(
        "adapters",
        "note",
        f"Adapters ({', '.join(kinds)}): {listed(list(inputs.adapters))}; {how[inputs.view]}.",
        tuple(inputs.adapters),
    )


def _tokenizer_findings(found: TokenizerComparison, folder: Path | None) -> Iterator[Finding]:
    for problem in found.problems:  # which were to be ignored
        yield Finding("tokenizers", "warning", problem)
    for note in found.notes:
        yield Finding("tokenizers", "note", note)
    if not (found.problems or found.notes) and digest_files(folder):
        yield Finding("tokenizers", "good", "The tokenizers do not differ.")


def _head_findings(unshared: list[str], names: frozenset[str]) -> Iterator[Finding]:
    if unshared:
        yield Finding(
            "heads",
            "note",
            f"{listed(make_patterns(unshared, names))}: not in all models and the base, or of "
            "another size: part of each task's head, kept with its model and not merged.",
        )
