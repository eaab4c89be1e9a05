"""Merging block after block, on what the blocks merged before make of each task's data."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import Tensor

from matsmerge.checkpoints.checkpoint import Checkpoint
from matsmerge.engine.devices import spread
from matsmerge.engine.executor import Executor
from matsmerge.engine.machine import available_bytes
from matsmerge.engine.plan import Job, Plan
from matsmerge.engine.prefix_task import PrefixTask, naming
from matsmerge.engine.worker import Receipt, Sinks, Worker
from matsmerge.methods.objectives.objective import Evidence
from matsmerge.methods.site import Measured
from matsmerge.progress import Progress
from matsmerge.statistics.collection_run import Output
from matsmerge.statistics.held_tensors import Room
from matsmerge.statistics.kinds import includes
from matsmerge.statistics.kinds.gram_matrix import GRAM
from matsmerge.statistics.prefix_model import CountSeen, PrefixModel
from matsmerge.statistics.sections import Section
from matsmerge.statistics.statistics_file import open_statistics

Turn = tuple[int, int]  # the number of a section, and within it that of a group of linear maps
Load = Callable[[str], Tensor]  # the value of one of the running model's tensors
_ANY_TIME: Turn = (-1, 0)  # of what depends on no inputs


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
    knows_own_inputs: bool = False  # of this very data, from what was collected beforehand

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
        finished: AbstractSet[int] = frozenset(),
        folder: Path | None = None,
    ) -> Iterator[Receipt]:
        """Do all jobs of a plan in order that are not finished.

        `merged` reads back what has been written to sinks, now or before. Blocks that are finished
        are run again, for what they give, but not merged again. Statistics are in files meanwhile,
        in a `folder` that all workers see.
        """
        jobs: dict[Turn, list[Job]] = {}
        left: dict[Turn, list[Job]] = {}
        for job in plan.jobs:
            turn = self._turn_of(job)
            jobs.setdefault(turn, []).append(job)
            if job.index not in finished:
                left.setdefault(turn, []).append(job)
        if not left:
            return
        if self.collected:
            first = self.tasks[0]
            with TemporaryDirectory(prefix="statistics-", dir=folder) as scratch:
                # Models are loaded one after the other, and no two at once.
                with self.running.released([*first.names, *first.heads], first.load):
                    tasks = tuple(
                        self._with_statistics(task, Path(scratch) / f"{n}.safetensors", progress)
                        for n, task in enumerate(self.tasks)
                    )
                evidence = tuple(task.own for task in tasks if task.own is not None)
                knows = includes(self.collected, GRAM.name)
                ready = replace(
                    self, tasks=tasks, evidence=evidence, collected=(), knows_own_inputs=knows
                )
                yield from ready.run(
                    plan, worker, executor, measured, sinks, merged, progress, finished
                )
            return
        last, _ = max(left)
        sections = dict(enumerate(self.running.outline.sections[: last + 1]))
        advancing = {n for n, s in sections.items() if s.block is not None and n < last}
        own = {n for n, s in sections.items() if self._runs_own(s)}
        own &= advancing | {number for number, _ in left}
        passes = [number for number, _ in left if number in sections] + [*advancing, *own]
        passes = [n for n in passes if not (sections[n].is_whole and self.knows_own_inputs)]
        num_bytes = (
            task.num_bytes(self._own(sections[number])) for number in passes for task in self.tasks
        )
        progress.stage("merging block after block", plan.num_input_bytes + sum(num_bytes))
        progress.advance(sum(plan.jobs[index].num_input_bytes for index in finished))
        done: set[str] = set()

        def merge(turn: Turn, evidence: tuple[Evidence, ...]) -> Iterator[Receipt]:
            function = partial(
                replace(worker, evidence=evidence).merge, measured=measured, sinks=sinks
            )
            for receipt in executor.map(function, spread(left.get(turn, []), executor.devices)):
                yield receipt
                progress.advance(plan.jobs[receipt.job_index].num_input_bytes)

        parameters = {parameter.name: parameter for parameter in plan.parameters}
        held = {name for p in plan.parameters for name in p.rule.method.held_models}

        def teacher(task: PrefixTask) -> Load:
            """What says how a task's data is to be answered: its model, or the init."""
            if task.model.name not in held:
                return task.load

            def load(name: str) -> Tensor:
                parameter = parameters.get(self.names[name])
                is_merged = parameter is not None and parameter.is_merged
                if parameter is None or not is_merged:
                    return task.load(name)
                return worker.start_of(parameter, measured)

            return load

        def put_merged(section: Section) -> None:
            names = [name for name in self._merged(section) if self.names[name] in done]
            self.running.put(names, lambda name: merged[self.names[name]])

        yield from merge(_ANY_TIME, self.evidence)
        done.update(name for job in jobs.get(_ANY_TIME, ()) for name in job.names)
        room = self._room(plan, executor)
        for task in self.tasks:
            task.data.begin(room)
        for number, section in sections.items():
            turns = sorted(turn for turn in jobs if turn[0] == number)
            for task in self.tasks if number in own else ():
                modules = {m for turn in turns if turn in left for m in self.groups[turn]}
                self._run_own(section, task, teacher(task), modules, progress)
            for turn in turns:
                if turn in left:
                    put_merged(section)
                    unsettled = [n for n in self._merged(section) if self.names[n] not in done]
                    found = tuple(
                        self._collect(turn, task, teacher(task), unsettled, progress)
                        for task in self.tasks
                    )
                    yield from merge(turn, found)
                    for task in self.tasks:
                        task.data.own_inputs.forget(self.groups[turn])
                # Not before all of a turn is: what a pass uses is then the same after a resume.
                done.update(name for job in jobs[turn] for name in job.names)
            put_merged(section)
            for task in self.tasks:
                if number in advancing:
                    self.running.put(task.heads, task.load)
                    self.running.advance(section, task.data, self._seen(section, task, progress))
                task.data.end_section()
        for task in self.tasks:
            task.data.begin()

    def _room(self, plan: Plan, executor: Executor) -> Room:
        """The memory that is left for what has been reached, beside the model and a job."""
        num_bytes = plan.peak_bytes(1) + self.running.num_bytes
        # Other machines' memory is of no use here.
        return Room(max(0, min(executor.max_bytes, available_bytes()) - num_bytes))

    def _with_statistics(self, task: PrefixTask, path: Path, progress: Progress) -> PrefixTask:
        """A task with statistics of its model, which are in a file meanwhile."""
        with naming(task.label):
            loaded = task.asked.load(self.running.dtype)
            task.asked.prepare(loaded, self.collected).run(Output(path), progress)
        own = Evidence(task.label, open_statistics(path), task.model.names)
        return replace(task, own=own)

    def _runs_own(self, section: Section) -> bool:
        """Whether layers of a section are compared with what each model's own receive."""
        return self.matches_outputs and not section.is_whole

    def _run_own(
        self,
        section: Section,
        task: PrefixTask,
        load: Load,
        modules: set[str],
        progress: Progress,
    ) -> None:
        """Run a section of a task's own model, or teacher, and note what linear maps receive."""
        own = self.running.values_like(self._on_the_way(section), load)
        self.running.put(task.heads, task.load)
        maps = [module for module in self.running.maps_of(section) if module in modules]
        seen = self._seen(section, task, progress)
        self.running.run_own(section, task.data, own, maps, seen)

    def _collect(
        self,
        turn: Turn,
        task: PrefixTask,
        load: Load,
        unsettled: Sequence[str],
        progress: Progress,
    ) -> Evidence:
        """A task's statistics of what is merged in a turn."""
        section = self.running.outline.sections[turn[0]]
        are_paired = self._runs_own(section)
        if section.is_whole and self.knows_own_inputs:
            own = task.own
            # In the model of its own, modules may have other names.
            if own and {*self.groups[turn]} <= {m.module for m in own.statistics.header.maps}:
                return own
        if not are_paired:
            self.running.put(self._own(section), load)
        self.running.put(task.heads, task.load)
        with naming(task.label):
            inputs = self.running.collect(
                section,
                task.data,
                task.names,
                task.options,
                self._seen(section, task, progress),
                are_paired=are_paired,
                group=self.groups.get(turn, ()) if are_paired else (),
                unsettled=unsettled if are_paired else None,
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

    def _seen(self, section: Section, task: PrefixTask, progress: Progress) -> CountSeen:
        """Spread a section's bytes over a task's examples."""
        num_bytes, num_examples = task.num_bytes(self._own(section)), task.data.num_examples
        done = 0

        def seen(num: int) -> None:
            nonlocal done
            before, done = done, done + num
            progress.advance(num_bytes * done // num_examples - num_bytes * before // num_examples)

        return seen
