"""Many models on many tasks: everything is checked, then each model is run."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from matsmerge.checkpoints.companions import companion_files
from matsmerge.checkpoints.fingerprint import fingerprint
from matsmerge.checkpoints.public_names import public_name, public_text
from matsmerge.checkpoints.source import local_path, open_checkpoint
from matsmerge.data.rows import Data
from matsmerge.errors import DataError, closest
from matsmerge.lab.evaluation.contestants import ComparedModels, name_models
from matsmerge.lab.evaluation.ensemble_model import EnsembleModel
from matsmerge.lab.evaluation.harness import Harness
from matsmerge.lab.evaluation.metrics import choose_metrics
from matsmerge.lab.evaluation.outcome import Outcome
from matsmerge.lab.evaluation.outcome import ensemble as average
from matsmerge.lab.evaluation.results import ENSEMBLE, INDIVIDUAL, Reading, Results, ScoredTask
from matsmerge.lab.evaluation.task_evaluation import (
    EvaluationSettings,
    Examined,
    answer_examples,
    encode_task,
    resolve_head,
)
from matsmerge.models.kept_base import KeptBase
from matsmerge.models.model_folder import open_model
from matsmerge.problems import noted
from matsmerge.progress import AnyProgress, Progress, listener
from matsmerge.tasks.loaded_model import LoadedModel, load_model
from matsmerge.tasks.splits import read_split
from matsmerge.tasks.task_file import TaskFile, read_task_file
from matsmerge.version import versions

DEFAULT_SPLIT = "test"


def evaluate(
    models: ComparedModels,
    tasks: str | Path | TaskFile | Sequence[str | Path | TaskFile] = (),
    split: str | None = None,
    individual: Mapping[str, str | Path] | None = None,
    ensemble: bool = False,
    *,
    lm_eval: Sequence[str] = (),
    num_examples: int | None = None,
    batch_size: int = 32,
    max_tokens: int = 4096,
    device: str | None = None,
    dtype: str | None = None,
    progress: AnyProgress | None = None,
) -> Results:
    """Score every model on every task.

    `models` are paths or hub ids, or a mapping from names to them; `tasks` are task files; one of
    either need not be in a list. The split is `test`, unless given; of a single file without
    splits, all rows. `individual` maps each task's name to the model that was trained for it, to
    whose scores averages are normalised; `ensemble` adds the mean of all models' probabilities, of
    the next token where answers are text.
    `lm_eval` are tasks of lm-evaluation-harness: names, or files of its own format.
    """
    settings = EvaluationSettings(num_examples, batch_size, max_tokens, device, dtype)
    named = name_models(models)
    if isinstance(tasks, (str, Path, TaskFile)):
        tasks = [tasks]
    harness = Harness(lm_eval) if lm_eval else None
    if harness is not None and not tasks:
        return harness.run(named, settings)
    results = prepare_evaluation(named, tasks, split, individual or {}, ensemble, settings).run(
        progress
    )
    return results if harness is None else results.beside(harness.run(named, settings))


@dataclass(frozen=True)
class AskedTask:
    """A task and the rows to score models on."""

    file: TaskFile
    data: Data


@dataclass(frozen=True)
class _TaskRun:
    """A model that is run on a task."""

    row: str
    source: str
    task: str
    head: str | None
    signature: str  # models with the same one are built alike

    @property
    def key(self) -> tuple[str, str]:
        """Two runs with the same key see the same encoded examples."""
        return self.signature, self.task


@dataclass
class Prepared:
    """An evaluation that can begin: everything was read and checked."""

    runs: list[_TaskRun]
    tasks: dict[str, AskedTask]
    same_rows: Mapping[str, str]  # by task: the row whose model is also the task's individual one
    ensemble: bool
    settings: EvaluationSettings
    arguments: dict[str, Any]
    notes: list[str]
    kept: KeptBase = field(default_factory=KeptBase)
    examined: dict[tuple[str, str], Examined] = field(default_factory=dict)  # by key of a run

    def check(self) -> None:
        """Encode all data; models that are built alike need it once.

        So a head that does not fit the last model is found before the first one is run.
        """
        problems: list[str] = []
        for one in self.runs:
            with noted(problems):
                if one.key not in self.examined:
                    loaded, asked = self._load(one), self.tasks[one.task]
                    self.examined[one.key] = encode_task(
                        loaded.task, asked.data, asked.file, num_examples=self.settings.num_examples
                    )
                    self._note(loaded.notes)
        DataError.raise_all(problems)
        for name in self.tasks:
            found = {e.kind.kind: e.kind for (_, task), e in self.examined.items() if task == name}
            if len(found) > 1:
                problems.append(
                    f"{name}: the models would do different tasks with it, "
                    f"{' and '.join(sorted(found))}; say which in the task file (task:)"
                )
            elif name in self._written_together:
                problems += self._tokenizer_problems(name)
        DataError.raise_all(problems)
        for examined in self.examined.values():
            self._note(examined.notes)

    @property
    def _written_together(self) -> dict[str, list[_TaskRun]]:
        """Tasks whose answers are text, which an ensemble writes with all its models at once."""
        found: dict[str, list[_TaskRun]] = {}
        for one in self.runs if self.ensemble else ():
            if one.row != INDIVIDUAL and self.examined[one.key].kind.writes_text:
                found.setdefault(one.task, []).append(one)
        return found

    def _tokenizer_problems(self, task: str) -> list[str]:
        first, *others = self._written_together[task]
        expected = self.examined[first.key]
        return [
            f"{task}: an ensemble that writes text needs models with one tokenizer, and that of "
            f"{one.row} differs from that of {first.row} in its tokens or in how it reads the rows"
            for one in others
            if not self.examined[one.key].is_read_like(expected)
        ]

    def run(self, progress: AnyProgress | None = None) -> Results:
        """Run every model."""
        told = listener(progress)
        together = self._written_together
        asked = [*self.runs, *(runs[0] for runs in together.values())]
        num_examples = sum(len(self.examined[one.key].examples) for one in asked)
        told.stage("evaluating", num_examples, "examples")
        outcomes: dict[str, dict[str, Outcome]] = {}
        about: dict[str, dict[str, Any]] = {}
        for one in self.runs:
            told.advance(0, f"{one.row} on {one.task}")
            outcome, what = self._run_one(one, told)
            outcomes.setdefault(one.row, {})[one.task] = outcome
            mine = about.setdefault(one.row, {})
            if one.row == INDIVIDUAL:
                mine = mine.setdefault(one.task, {})
            mine.update(what)
            if one.head is not None:
                mine.setdefault("heads", {})[one.task] = fingerprint(open_checkpoint(one.head))
        self.kept = KeptBase()
        written = {}
        for name, runs in together.items():
            told.advance(0, f"{ENSEMBLE} on {name}")
            written[name] = self._run_together(runs, told)
        return self._results(outcomes, about, written)

    def _run_together(self, runs: Sequence[_TaskRun], progress: Progress) -> Outcome:
        """What several models write together; all of them are in memory, each with its base."""
        each = [self._load(one, KeptBase()) for one in runs]
        whole = replace(each[0], model=EnsembleModel([loaded.model for loaded in each]))
        return answer_examples(whole, self.examined[runs[0].key], self.settings, progress)

    def _run_one(self, one: _TaskRun, progress: Progress) -> tuple[Outcome, dict[str, Any]]:
        """A model's answers and its description; the model itself is freed on return."""
        loaded = self._load(one)
        outcome = answer_examples(loaded, self.examined[one.key], self.settings, progress)
        about = {
            "source": public_name(one.source),
            "fingerprint": fingerprint(loaded.checkpoint),
        }
        if loaded.base is not None:
            about["base"] = fingerprint(loaded.base)
        return outcome, about

    def _load(self, one: _TaskRun, kept: KeptBase | None = None) -> LoadedModel:
        return load_model(
            one.source,
            self.tasks[one.task].file,
            head=one.head,
            dtype=self.settings.dtype,
            device=self.settings.device,
            kept=kept or self.kept,
        )

    def _note(self, notes: Sequence[str]) -> None:
        self.notes += [note for note in notes if note not in self.notes]

    def _results(
        self,
        outcomes: dict[str, dict[str, Outcome]],
        about: dict[str, dict[str, Any]],
        written: Mapping[str, Outcome],
    ) -> Results:
        of_task = {name: examined for (_, name), examined in self.examined.items()}
        # These two rows come last.
        individual = outcomes.pop(INDIVIDUAL, {})
        about_individual = about.pop(INDIVIDUAL, {})
        if self.ensemble:
            rows = list(outcomes)
            outcomes[ENSEMBLE] = {
                name: written[name]
                if name in written
                else average(
                    [outcomes[row][name] for row in rows],
                    length_normalize=asked.file.length_normalize,
                )
                for name, asked in self.tasks.items()
            }
            about[ENSEMBLE] = {"of": rows}
        for name, row in self.same_rows.items():
            individual[name] = outcomes[row][name]
            about_individual[name] = {"row": row}
        if individual:
            outcomes[INDIVIDUAL] = {n: individual[n] for n in self.tasks if n in individual}
            about[INDIVIDUAL] = about_individual
        return Results(
            {
                name: ScoredTask(
                    kind=of_task[name].kind.kind,
                    metrics={metric: Reading.of(metric) for metric in of_task[name].metrics},
                    num_examples=len(of_task[name].examples),
                    split=asked.data.split,
                    data=public_name(asked.data.name.removesuffix(f" ({asked.data.split})")),
                    fingerprint=of_task[name].data,
                    seed=asked.file.seed,
                )
                for name, asked in self.tasks.items()
            },
            about,
            {
                row: {name: o.scores(of_task[name].metrics) for name, o in by_task.items()}
                for row, by_task in outcomes.items()
            },
            self.arguments,
            versions("torch", "transformers"),
            [public_text(note, [one.source for one in self.runs]) for note in self.notes],
            outcomes,
        )


def prepare_evaluation(
    models: Mapping[str, str],
    tasks: Sequence[str | Path | TaskFile],
    split: str | None,
    individual: Mapping[str, str | Path],
    ensemble: bool,
    settings: EvaluationSettings,
) -> Prepared:
    """Read and check everything, all problems at once."""
    trained = {name: str(source) for name, source in individual.items()}
    problems: list[str] = []
    notes: list[str] = []
    asked: dict[str, AskedTask] = {}
    if isinstance(tasks, (str, Path)) or not tasks:
        raise DataError("give at least one task, as a list of task files")
    for given in tasks:
        with noted(problems):
            file = given if isinstance(given, TaskFile) else read_task_file(given)
            if file.title in asked:
                raise DataError(f"two tasks are named '{file.title}'; rename one (name:)")
            choose_metrics(file)
            asked[file.title] = AskedTask(file, _rows(file, split, notes))
    problems += [
        f"individual: there is no task '{name}'{closest(name, asked)}"
        for name in trained
        if name not in asked and not problems
    ]
    if ensemble and len(models) < 2:
        problems.append("an ensemble needs at least two models")
    rows = {_place(source): row for row, source in models.items()}
    same_rows = {n: rows[_place(s)] for n, s in trained.items() if _place(s) in rows}
    wanted = [(row, source, list(asked)) for row, source in models.items()]
    wanted += [
        (INDIVIDUAL, source, [name])
        for name, source in trained.items()
        if name in asked and name not in same_rows
    ]
    runs: list[_TaskRun] = []
    for row, source, names in wanted:
        with noted(problems):
            open_model(source)  # says what is wrong with it
            for name in names:
                with noted(problems):
                    head = resolve_head(source, asked[name].file)
                    runs.append(_TaskRun(row, source, name, head, _signature(source, head)))
    DataError.raise_all(problems)
    if trained and (lacking := [name for name in asked if name not in trained]):
        notes.append(
            f"averages are normalised without {', '.join(lacking)}, for which no individual model "
            "is given"
        )
    arguments = {
        "models": {name: public_name(source) for name, source in models.items()},
        "tasks": list(asked),
        "split": split,
        "individual": {name: public_name(source) for name, source in trained.items()},
        "ensemble": ensemble,
        **vars(settings),
    }
    prepared = Prepared(runs, asked, same_rows, ensemble, settings, arguments, notes)
    prepared.check()
    return prepared


def _rows(file: TaskFile, split: str | None, notes: list[str]) -> Data:
    """The split asked for, or `test`, or all rows of a single file that has no splits."""
    if split is None and file.splits is None and isinstance(file.data, str):
        if file.split is None and local_path(file.data).is_file():
            notes.append(f"{file.title}: has one file and no splits; all its rows are used")
            return read_split(file)
        split = file.split
    return read_split(file, split or DEFAULT_SPLIT)


def _signature(source: str, head: str | None) -> str:
    """A digest of all that decides how a model is built and how it encodes a task."""
    digest = hashlib.sha256()
    checkpoint = open_checkpoint(source)
    for part in (checkpoint, None if head is None else open_checkpoint(head)):
        specs = sorted((name, str(spec)) for name, spec in part.specs.items()) if part else []
        digest.update(repr(specs).encode())
    for path in companion_files(checkpoint.folder):
        digest.update(path.name.encode() + b"\0")
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _place(source: str) -> str:
    path = local_path(source)
    return str(path.resolve()) if path.exists() else source
