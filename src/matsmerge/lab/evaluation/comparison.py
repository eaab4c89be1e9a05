"""Many models on many tasks: everything is checked, then each model is run."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matsmerge.checkpoints.companions import companion_files
from matsmerge.checkpoints.fingerprint import fingerprint
from matsmerge.checkpoints.public_names import public_name, public_text
from matsmerge.checkpoints.source import local_path, open_checkpoint
from matsmerge.data.rows import Data
from matsmerge.errors import DataError, MatsError, closest
from matsmerge.lab.evaluation.contestants import Models, name_models
from matsmerge.lab.evaluation.ensemble import ensemble as average
from matsmerge.lab.evaluation.metrics import choose_metrics
from matsmerge.lab.evaluation.outcome import Outcome
from matsmerge.lab.evaluation.results import ENSEMBLE, INDIVIDUAL, Reading, Results, ScoredTask
from matsmerge.lab.evaluation.task_evaluation import Examined, Settings, encode, resolve_head, run
from matsmerge.models.kept_base import KeptBase
from matsmerge.models.model_folder import open_model
from matsmerge.progress import AnyProgress, Progress, listener
from matsmerge.tasks.loaded_model import LoadedModel, load_for_task
from matsmerge.tasks.splits import read_split
from matsmerge.tasks.task_file import TaskFile, read_task_file
from matsmerge.version import versions

DEFAULT_SPLIT = "test"


def evaluate(
    models: Models,
    tasks: Sequence[str | Path | TaskFile],
    split: str | None = None,
    individual: Mapping[str, str | Path] | None = None,
    ensemble: bool = False,
    *,
    num_examples: int | None = None,
    batch_size: int = 32,
    max_tokens: int = 4096,
    device: str | None = None,
    dtype: str | None = None,
    progress: AnyProgress | None = None,
) -> Results:
    """Score every model on every task.

    `models` are paths or hub ids, or a mapping from names to them; `tasks` are task files. The
    split is `test`, unless given; of a single file without splits, all rows. `individual` maps each
    task's name to the model that was trained for it, to whose scores averages are normalised;
    `ensemble` adds the mean of all models' probabilities.
    """
    settings = Settings(num_examples, batch_size, max_tokens, device, dtype)
    prepared = prepare(
        name_models(models), tasks, split, individual or {}, ensemble=ensemble, settings=settings
    )
    return prepared.run(progress)


@dataclass(frozen=True)
class AskedTask:
    """A task and the rows to score models on."""

    file: TaskFile
    data: Data

    @property
    def name(self) -> str:
        return self.file.title


@dataclass(frozen=True)
class _Entry:
    """A model that is run on some of the tasks."""

    row: str
    source: str
    heads: Mapping[str, str | None]  # by task: only those the model is run on
    signatures: Mapping[str, str]  # by task: what is the same is built alike

    @classmethod
    def of(cls, row: str, source: str, tasks: Mapping[str, AskedTask]) -> "_Entry":
        heads = _heads(source, tasks)
        return cls(row, source, heads, {t: _signature(source, head) for t, head in heads.items()})


@dataclass
class Prepared:
    """An evaluation that can begin: everything was read and checked."""

    entries: list[_Entry]
    tasks: dict[str, AskedTask]
    individual: Mapping[str, str]
    ensemble: bool
    settings: Settings
    arguments: dict[str, Any]
    notes: list[str]
    kept: KeptBase = field(default_factory=KeptBase)
    examined: dict[tuple[str, str], Examined] = field(default_factory=dict)  # by signature, task

    @property
    def num_examples(self) -> int:
        """Of all models and tasks together."""
        return sum(self._num_rows(task) for entry in self.entries for task in entry.heads)

    def run(self, progress: AnyProgress | None = None) -> Results:
        """Run every model."""
        told = listener(progress)
        told.stage("evaluating", self.num_examples, "examples")
        outcomes: dict[str, dict[str, Outcome]] = {}
        about: dict[str, dict[str, Any]] = {}
        for entry in self.entries:
            for name, head in entry.heads.items():
                told.advance(0, f"{entry.row} on {name}")
                outcome, what = self._run_one(entry, name, told)
                outcomes.setdefault(entry.row, {})[name] = outcome
                if entry.row == INDIVIDUAL:
                    mine = about.setdefault(INDIVIDUAL, {}).setdefault(name, what)
                else:
                    mine = about.setdefault(entry.row, what)
                if head is not None:
                    mine.setdefault("heads", {})[name] = fingerprint(open_checkpoint(head))
        return self._results(outcomes, about)

    def _run_one(
        self, entry: _Entry, task: str, progress: Progress
    ) -> tuple[Outcome, dict[str, Any]]:
        """A model's answers, and what it is; on return the model itself is gone."""
        loaded = self.load(entry, task)
        examined = self._examine(entry, task, loaded)
        outcome = run(loaded, examined, self.settings, progress)
        about: dict[str, Any] = {
            "source": public_name(entry.source),
            "fingerprint": fingerprint(loaded.checkpoint),
        }
        if loaded.base is not None:
            about["base"] = fingerprint(loaded.base)
        return outcome, about

    def load(self, entry: _Entry, task: str) -> LoadedModel:
        """A model for a task."""
        return load_for_task(
            entry.source,
            self.tasks[task].file,
            head=entry.heads[task],
            dtype=self.settings.dtype,
            device=self.settings.device,
            kept=self.kept,
        )

    def check(self) -> None:
        """Encode all data; models that are built alike need it once.

        So a head that does not fit the last model is found before the first one is run.
        """
        problems: list[str] = []
        for entry in self.entries:
            for name in entry.heads:
                with _noting(problems):
                    if (entry.signatures[name], name) not in self.examined:
                        self._examine(entry, name, self.load(entry, name))
        _raise(problems)
        for name in self.tasks:
            found = {e.kind.kind: e.kind for (_, task), e in self.examined.items() if task == name}
            if len(found) > 1:
                problems.append(
                    f"{name}: the models would do different tasks with it, "
                    f"{' and '.join(sorted(found))}; say which in the task file (task:)"
                )
            elif self.ensemble and any(kind.writes_text for kind in found.values()):
                problems.append(
                    f"{name}: an ensemble needs probabilities of classes or choices, which the "
                    f"task {next(iter(found))} has none of"
                )
        _raise(problems)
        for examined in self.examined.values():
            self.notes += [note for note in examined.notes if note not in self.notes]

    def _examine(self, entry: _Entry, name: str, loaded: LoadedModel) -> Examined:
        key = (entry.signatures[name], name)
        if key not in self.examined:
            asked = self.tasks[name]
            self.examined[key] = encode(
                loaded.task, asked.data, asked.file, num_examples=self.settings.num_examples
            )
            self.notes += [note for note in loaded.notes if note not in self.notes]
        return self.examined[key]

    def _num_rows(self, task: str) -> int:
        num = len(self.tasks[task].data)
        return min(num, self.settings.num_examples or num)

    def _results(
        self, outcomes: dict[str, dict[str, Outcome]], about: dict[str, dict[str, Any]]
    ) -> Results:
        of_task = {name: examined for (_, name), examined in self.examined.items()}
        rows = [row for row in outcomes if row != INDIVIDUAL]
        if self.ensemble:
            for name, asked in self.tasks.items():
                normalize = asked.file.length_normalize
                together = average([outcomes[r][name] for r in rows], length_normalize=normalize)
                outcomes.setdefault(ENSEMBLE, {})[name] = together
            about[ENSEMBLE] = {"of": rows}
        # Those whose model is also a row of its own were not run again.
        places = {_place(entry.source): entry.row for entry in self.entries}
        for name, source in self.individual.items():
            row = places[_place(source)]
            if row != INDIVIDUAL:
                outcomes.setdefault(INDIVIDUAL, {})[name] = outcomes[row][name]
                about.setdefault(INDIVIDUAL, {})[name] = {"row": row}
        order = [*rows, *([ENSEMBLE] if self.ensemble else [])]
        order += [INDIVIDUAL] if INDIVIDUAL in outcomes else []
        outcomes = {
            row: {name: outcomes[row][name] for name in self.tasks if name in outcomes[row]}
            for row in order
        }
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
            {row: about[row] for row in order},
            {
                row: {name: o.scores(of_task[name].metrics) for name, o in by_task.items()}
                for row, by_task in outcomes.items()
            },
            self.arguments,
            versions("torch", "transformers"),
            [public_text(note, [entry.source for entry in self.entries]) for note in self.notes],
            outcomes,
        )


def prepare(
    models: Mapping[str, str],
    tasks: Sequence[str | Path | TaskFile],
    split: str | None = None,
    individual: Mapping[str, str | Path] | None = None,
    *,
    ensemble: bool = False,
    settings: Settings | None = None,
) -> Prepared:
    """Read and check everything, all problems at once."""
    settings = settings or Settings()
    trained = {name: str(source) for name, source in (individual or {}).items()}
    problems: list[str] = []
    notes: list[str] = []
    asked: dict[str, AskedTask] = {}
    if isinstance(tasks, (str, Path)) or not tasks:
        raise DataError("give at least one task, as a list of task files")
    for given in tasks:
        with _noting(problems):
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
    entries = []
    for row, source in models.items():
        with _noting(problems):
            entries.append(_Entry.of(row, source, asked))
    places = {_place(entry.source) for entry in entries}
    for name, source in trained.items():
        if name in asked and _place(source) not in places:
            with _noting(problems):
                entries.append(_Entry.of(INDIVIDUAL, source, {name: asked[name]}))
    _raise(problems)
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
    prepared = Prepared(entries, asked, trained, ensemble, settings, arguments, notes)
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


def _heads(source: str, tasks: Mapping[str, AskedTask]) -> dict[str, str | None]:
    """The head of a model for each task; a model that cannot be opened is an error."""
    problems: list[str] = []
    heads: dict[str, str | None] = {}
    open_model(source)  # says what is wrong with it
    for name, asked in tasks.items():
        with _noting(problems):
            heads[name] = resolve_head(source, asked.file)
            if heads[name] is not None:
                open_checkpoint(str(heads[name]))
    _raise(problems)
    return heads


def _signature(source: str, head: str | None) -> str:
    """What must be the same for two models to be built alike and to see a task alike."""
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


@contextmanager
def _noting(problems: list[str]) -> Iterator[None]:
    """Go on after an error, which is noted."""
    try:
        yield
    except MatsError as error:
        problems += [problem for problem in error.problems if problem not in problems]


def _raise(problems: Sequence[str]) -> None:
    if problems:
        raise DataError(problems)
