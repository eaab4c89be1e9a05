"""Merging block after block, on what the blocks merged before make of each task's data."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from matsmerge.adapters.adapter_folder import is_adapter
from matsmerge.checkpoints.alignment import AlignedModel, Alignment
from matsmerge.checkpoints.checkpoint import Checkpoint, dtype_name
from matsmerge.data.rows import Data
from matsmerge.engine.executor import Executor
from matsmerge.engine.plan import Job, Plan
from matsmerge.engine.worker import Receipt, Sinks, Worker
from matsmerge.errors import DataError, MatsError
from matsmerge.methods.objectives.objective import Evidence
from matsmerge.methods.site import Measured
from matsmerge.models.pretrained import choose_dtype
from matsmerge.problems import noted
from matsmerge.progress import Progress
from matsmerge.recipes.model_data import ModelData
from matsmerge.recipes.recipe import Recipe
from matsmerge.statistics.collection_options import CollectionOptions
from matsmerge.statistics.collection_run import Output
from matsmerge.statistics.joined_statistics import put_together, with_own, without_values
from matsmerge.statistics.prefix_model import PrefixModel, Seen, TaskData
from matsmerge.statistics.prepared_collection import PreparedCollection
from matsmerge.statistics.prepared_collection import prepare as prepare_collection
from matsmerge.statistics.sections import Section
from matsmerge.statistics.statistics import Statistics
from matsmerge.statistics.statistics_file import open_statistics
from matsmerge.tasks.loaded_model import LoadedModel, load_model
from matsmerge.tasks.splits import read_split
from matsmerge.tasks.task_file import TaskFile

_REHEARSED_EXAMPLES = 3

Turn = tuple[int, int]  # the number of a section, and within it that of a group of linear maps
_ANY_TIME: Turn = (-1, 0)  # of what depends on no inputs


@dataclass(frozen=True)
class _Asked:
    """A model and its data, as the recipe has it and as it was read."""

    model: AlignedModel
    entry: ModelData
    described: TaskFile
    rows: Data

    def load(self, dtype: torch.dtype) -> LoadedModel:
        assert self.model.checkpoint.folder is not None
        return load_model(
            self.model.checkpoint.folder,
            self.described,
            need_targets=False,
            dtype=dtype_name(dtype),
            also=["*"],
        )

    def few(self) -> "_Asked":
        """The first examples alone."""
        changes = {"num_examples": _REHEARSED_EXAMPLES, "held_out": 0.0, "shuffle": False}
        return replace(self, entry=self.entry.model_copy(update=changes))

    def prepare(self, loaded: LoadedModel, kinds: Sequence[str] = ()) -> PreparedCollection:
        """Choose and encode examples; Fisher information is the true one, which needs no labels."""
        options = self.entry.statistics_options
        if kinds:
            options = options.model_copy(update={"statistics": tuple(kinds), "fisher": "true"})
        return prepare_collection(loaded, self.rows, options, self.entry.choice(self.described))


@dataclass(frozen=True)
class PrefixTask:
    """One of the models and its data."""

    asked: _Asked
    data: TaskData
    own: Evidence | None  # the model's own statistics, for all that is not about inputs
    names: Mapping[str, str]  # of the running model's tensors in this one's checkpoint
    heads: Mapping[str, str]  # the same for what is not merged
    num_held_bytes: int = 0  # about, when all examples have been through all blocks

    @property
    def model(self) -> AlignedModel:
        return self.asked.model

    @property
    def options(self) -> CollectionOptions:
        return self.asked.entry.statistics_options

    @property
    def label(self) -> str:
        return self.model.checkpoint.label

    def load(self, tensor: str) -> Tensor:
        """The value that the model has of a tensor."""
        return self.model.checkpoint[self.names.get(tensor) or self.heads[tensor]]

    def num_bytes(self, tensors: Iterable[str]) -> int:
        return sum(self.model.checkpoint.spec(self.names[n]).num_bytes for n in tensors)

    def evidence(self, inputs: Statistics) -> Evidence:
        """Statistics of inputs as evidence, with this model's own for all else."""
        if self.own is None:
            return Evidence(self.label, inputs, self.model.names)
        return replace(self.own, statistics=with_own(inputs, self.own.statistics))


@dataclass(frozen=True)
class PrefixMerge:
    """A merge along the blocks of a model, which is in memory and takes everyone's weights.

    `evidence` says what there will be for each parameter; only what is not about inputs can be
    read of it, and of statistics that are still to be collected nothing.
    """

    running: PrefixModel
    names: Mapping[str, str]  # of the running model's tensors in all models
    tasks: tuple[PrefixTask, ...]
    evidence: tuple[Evidence, ...]
    groups: Mapping[Turn, Sequence[str]]  # linear maps in the order in which they are merged
    matches_outputs: bool  # those of each model's own layers, or what these would make of inputs
    collected: tuple[str, ...]  # kinds of the models' own statistics to collect before all else
    notes: tuple[str, ...]

    @property
    def num_held_bytes(self) -> int:
        """About the memory for what blocks give on all data."""
        return sum(task.num_held_bytes for task in self.tasks)

    def notes_on(self, plan: Plan) -> list[str]:
        """What was decided without being asked."""
        outline = self.running.outline
        shared = [
            name
            for job in plan.jobs
            if (turn := self._turn_of(job)) != _ANY_TIME and outline.sections[turn[0]].is_whole
            for name in job.names
        ]
        along = ", ".join(f"{name} ({num} blocks)" for name, num in outline.stacks.items())
        notes = [*self.notes, f"merged block after block: {along}"]
        if self.collected:
            notes.append(
                f"collected from the data beforehand: {', '.join(self.collected)} (true Fisher); "
                "`mats collect` does that once for many merges"
            )
        if shared:
            notes.append(
                "merged on what they receive in their own models, since both the blocks' inputs "
                f"and outputs depend on them: {', '.join(shared)}"
            )
        return notes

    def run(
        self,
        plan: Plan,
        worker: Worker,
        executor: Executor,
        measured: Mapping[str, Measured],
        sinks: Sinks,
        merged: Checkpoint,
        progress: Progress,
    ) -> Iterator[Receipt]:
        """Do all jobs of a plan in order; `merged` reads back what has been written to sinks."""
        if self.collected:
            with TemporaryDirectory() as folder:
                tasks = tuple(
                    self._with_statistics(task, Path(folder) / f"{n}.safetensors", progress)
                    for n, task in enumerate(self.tasks)
                )
                evidence = tuple(task.own for task in tasks if task.own is not None)
                ready = replace(self, tasks=tasks, evidence=evidence, collected=())
                yield from ready.run(plan, worker, executor, measured, sinks, merged, progress)
            return
        jobs: dict[Turn, list[Job]] = {}
        for job in plan.jobs:
            jobs.setdefault(self._turn_of(job), []).append(job)
        last, _ = max(jobs)
        sections = dict(enumerate(self.running.outline.sections[: last + 1]))
        advancing = {n for n, s in sections.items() if s.block is not None and n < last}
        passes = [number for number, _ in jobs if number in sections] + [*advancing]
        num_bytes = (
            task.num_bytes(self._own(sections[number])) for number in passes for task in self.tasks
        )
        progress.stage("merging block after block", plan.num_input_bytes + sum(num_bytes))
        done: set[str] = set()

        def merge(turn: Turn, evidence: tuple[Evidence, ...]) -> Iterator[Receipt]:
            own = replace(worker, evidence=evidence)
            function = partial(own.merge, measured=measured, sinks=sinks)
            for receipt in executor.map(function, jobs.get(turn, [])):
                yield receipt
                progress.advance(plan.jobs[receipt.job_index].num_input_bytes)
            done.update(name for job in jobs.get(turn, []) for name in job.names)

        def put_merged(section: Section) -> None:
            names = [name for name in self._merged(section) if self.names[name] in done]
            self.running.put(names, lambda name: merged[self.names[name]])

        yield from merge(_ANY_TIME, self.evidence)
        for task in self.tasks:
            task.data.begin()
        for number, section in sections.items():
            for turn in sorted(turn for turn in jobs if turn[0] == number):
                put_merged(section)
                yield from merge(
                    turn, tuple(self._collect(turn, task, progress) for task in self.tasks)
                )
            put_merged(section)
            for task in self.tasks if number in advancing else ():
                seen = self._seen(section, task, progress)
                self.running.put(task.heads, task.load)
                self.running.advance(section, task.data, seen)
                if self.matches_outputs:
                    own = self.running.values_like(self._on_the_way(section), task.load)
                    self.running.advance(section, task.data, own=own)
        for task in self.tasks:
            task.data.begin()

    def _with_statistics(self, task: PrefixTask, path: Path, progress: Progress) -> PrefixTask:
        """A task with statistics of its model, which are in a file meanwhile."""
        with _naming(task.label):
            loaded = task.asked.load(self.running.dtype)
            task.asked.prepare(loaded, self.collected).run(Output(path), progress)
        own = Evidence(task.label, open_statistics(path), task.model.names)
        return replace(task, own=own)

    def _collect(self, turn: Turn, task: PrefixTask, progress: Progress) -> Evidence:
        """A task's statistics of what is merged in a turn."""
        section = self.running.outline.sections[turn[0]]
        is_paired = self.matches_outputs and not section.is_whole
        own = None
        if is_paired:
            own = self.running.values_like(self._on_the_way(section), task.load)
        else:
            self.running.put(self._own(section), task.load)
        self.running.put(task.heads, task.load)
        group = self.groups.get(turn, ()) if is_paired else ()
        seen = self._seen(section, task, progress)
        with _naming(task.label):
            inputs = self.running.collect(
                section, task.data, task.names, task.options, seen, own=own, group=group
            )
        return task.evidence(inputs)

    def _merged(self, section: Section) -> list[str]:
        """The tensors that are merged with a section."""
        return [name for name in section.tensors if name in self.names]

    def _own(self, section: Section) -> list[str]:
        """The tensors that are a task's own while statistics of a section are collected."""
        sections = self.running.outline.sections if section.is_whole else (section,)
        return [name for part in sections for name in self._merged(part)]

    def _on_the_way(self, section: Section) -> list[str]:
        """What a pass through a section uses: its own tensors, and those outside of blocks."""
        before = (
            other
            for other in self.running.outline.sections
            if other.block is None and other.start <= section.start
        )
        return list(dict.fromkeys(n for part in (*before, section) for n in self._merged(part)))

    def _turn_of(self, job: Job) -> Turn:
        """When a job's layers are merged: after all that their inputs depend on."""
        layers = (site.layer for site in job.sites if site.layer)
        modules = {module for layer in layers for module in layer.input_modules}
        turns = (turn for turn, group in self.groups.items() if modules & set(group))
        return max(turns, default=_ANY_TIME)

    def _seen(self, section: Section, task: PrefixTask, progress: Progress) -> Seen:
        """Spread a section's bytes over a task's examples."""
        num_bytes, num_examples = task.num_bytes(self._own(section)), task.data.num_examples
        done = 0

        def seen(num: int) -> None:
            nonlocal done
            before, done = done, done + num
            progress.advance(num_bytes * done // num_examples - num_bytes * before // num_examples)

        return seen


def prepare_prefix(
    recipe: Recipe,
    alignment: Alignment,
    own: tuple[Evidence, ...],
    *,
    matches_outputs: bool,
    collected: tuple[str, ...] = (),
) -> PrefixMerge:
    """Read data, load models one at a time, and go through all blocks once with a few examples.

    `own` are the models' own statistics, if any are needed; kinds that will be `collected` are
    seen on a few examples here.
    """
    all_asked = _read_all(recipe, alignment)
    loaded = _load_all(all_asked, collected)
    running = PrefixModel(loaded.first.model, loaded.data[0].first(_REHEARSED_EXAMPLES))
    stored = _stored_names(loaded.first)
    shared = _by_target(alignment)
    names = {tensor: shared[target] for tensor, target in stored.items() if target in shared}
    tasks, evidence = [], []
    groups: dict[Turn, Sequence[str]] = {}
    for number, asked in enumerate(all_asked):
        model = asked.model
        task = PrefixTask(
            asked,
            loaded.data[number],
            (own or loaded.own)[number] if own or collected else None,
            {tensor: model.names[name] for tensor, name in names.items()},
            _heads(model, alignment.models[0], stored, running),
        )
        few = task.data.first(_REHEARSED_EXAMPLES)
        with _naming(task.label):
            found = running.rehearse(few, task.names, task.options, are_paired=matches_outputs)
        for at, one in enumerate(found):
            maps = one.header.maps
            in_turn = running.in_order(maps) if matches_outputs else [[m.module for m in maps]]
            for position, group in enumerate(in_turn):
                groups.setdefault((at, position), group)
        scale = _num_tokens(task.data) / _num_tokens(few)
        tasks.append(replace(task, num_held_bytes=round(few.num_held_bytes * scale)))
        evidence.append(task.evidence(put_together(found)))
    return PrefixMerge(
        running,
        names,
        tuple(tasks),
        tuple(evidence),
        groups,
        matches_outputs,
        collected,
        (*loaded.notes, *running.notes),
    )


def _read_all(recipe: Recipe, alignment: Alignment) -> list[_Asked]:
    """Everyone's data; all that is wrong is said before a model is loaded."""
    found, problems = [], []
    for entry, model in zip(recipe.models, alignment.models, strict=True):
        assert entry.data is not None  # the recipe has been checked
        folder = model.checkpoint.folder
        if folder is None or not ((folder / "config.json").is_file() or is_adapter(folder)):
            problems.append(
                f"{model.checkpoint.label}: inputs: merged runs the model on its data, for which "
                "it must be a folder with config.json and, for text, a tokenizer"
            )
        with noted(problems):
            described = entry.data.task_file
            found.append(_Asked(model, entry.data, described, read_split(described)))
    DataError.raise_all(problems)
    return found


@dataclass(frozen=True)
class _Loaded:
    """What loading all models has shown."""

    first: LoadedModel
    data: list[TaskData]
    own: list[Evidence]  # what there will be of statistics that are still to be collected
    notes: list[str]


def _load_all(all_asked: Sequence[_Asked], collected: Sequence[str]) -> _Loaded:
    """Load one model after the other; the first comes last and stays, so that no two are there."""
    dtype = choose_dtype(None, all_asked[0].model.checkpoint)
    for asked in all_asked[1:]:
        dtype = torch.promote_types(dtype, choose_dtype(None, asked.model.checkpoint))
    data: list[TaskData] = []
    own: list[Evidence] = []
    notes: list[str] = []
    problems: list[str] = []
    loaded: LoadedModel | None = None
    for asked in reversed(all_asked):
        if loaded is not None:
            loaded.model.to("meta")  # its task holds on to it, but needs none of its values
        try:
            loaded = asked.load(dtype)
            prepared = asked.prepare(loaded)
            if collected:
                few = asked.few().prepare(loaded, collected)
                seen = without_values(few.run())
                own.insert(0, Evidence(asked.model.checkpoint.label, seen, asked.model.names))
        except MatsError as error:
            problems = error.problems + problems
            continue
        # Names instead of folders: notes are published with the merged model.
        name, folder = asked.model.name, f"{asked.model.checkpoint.folder}: "
        notes = [f"{name}: {note.removeprefix(folder)}" for note in prepared.notes] + notes
        data.insert(0, TaskData(loaded.task, prepared.batches, prepared.model, prepared.data))
    DataError.raise_all(problems)
    assert loaded is not None
    return _Loaded(loaded, data, own, notes)


def _stored_names(loaded: LoadedModel) -> dict[str, str]:
    """The names of a model's parameters and buffers in its checkpoint."""
    known = {**loaded.names, **loaded.head_names}
    unknown = [name for name, _ in loaded.model.named_parameters() if name not in known]
    if unknown:
        raise DataError(
            f"{loaded.checkpoint.label}: '{unknown[0]}' is not one tensor of the checkpoint but "
            "made from others when it is loaded, so weights cannot be put in block by block; use "
            "inputs: own"
        )
    names = dict(loaded.names)
    # Buffers such as running means are stored beside the parameters of their module.
    for module_name, module in loaded.model.named_modules():
        own = [n for n, _ in module.named_parameters(recurse=False)]
        stored = names.get(f"{module_name}.{own[0]}") if own else None
        for buffer, values in module.named_buffers(recurse=False):
            beside = f"{stored.removesuffix(own[0])}{buffer}" if stored is not None else ""
            spec = loaded.checkpoint.specs.get(beside)
            if spec is not None and spec.shape == tuple(values.shape):
                names[f"{module_name}.{buffer}"] = beside
    return names


def _by_target(alignment: Alignment) -> dict[str, str]:
    """The shared names of the first model's tensors."""
    first = alignment.models[0]
    found: dict[str, str] = {}
    for name, target in first.names.items():
        if target in found:
            raise DataError(
                f"{first.checkpoint.label}: '{found[target]}' and '{name}' are one tensor, but two "
                "in other models; inputs: merged runs everyone's weights in one model, so store "
                "them alike"
            )
        found[target] = name
    return found


def _heads(
    model: AlignedModel, first: AlignedModel, stored: Mapping[str, str], running: PrefixModel
) -> dict[str, str]:
    """What a model has of its own in place of the running model's heads."""
    names = {tensor: target for tensor, target in stored.items() if target in first.heads}
    checkpoint = model.checkpoint
    fitting = {
        tensor: target
        for tensor, target in names.items()
        if target in model.heads
        and checkpoint.spec(target).shape == first.checkpoint.spec(target).shape
    }
    after_all = running.outline.sections[-1]
    problems = [
        f"{checkpoint.label}: has no '{target}' of the size that {first.checkpoint.label} has; "
        "what is kept for each model may differ in size after the last block, but not before, "
        "where inputs: merged runs all data through one model"
        for tensor, target in names.items()
        if tensor not in fitting and tensor not in after_all.tensors
    ]
    if problems:
        raise DataError(problems)
    return fitting


def _num_tokens(data: TaskData) -> int:
    """With padding, in all batches."""
    return sum(len(batch) * max(e.length for e in batch) for _, batch in data.batches)


@contextmanager
def _naming(label: str) -> Iterator[None]:
    """Say whose problem it is."""
    try:
        yield
    except MatsError as error:
        raise type(error)([f"{label}: {problem}" for problem in error.problems]) from error
