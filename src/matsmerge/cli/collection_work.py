"""What `mats collect` does for each model, here or on other machines."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matsmerge.cli.collected_display import describe_collected, show_collected
from matsmerge.cli.display import Screen
from matsmerge.cli.needs_display import describe_least, describe_needs, show_least, show_needs
from matsmerge.errors import DataError, MatsError
from matsmerge.problems import noted

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from matsmerge import Executor
    from matsmerge.data.rows import Data
    from matsmerge.models.kept_base import KeptBase
    from matsmerge.statistics.collection_options import CollectionOptions
    from matsmerge.statistics.collection_run import Output
    from matsmerge.statistics.prepared_collection import PreparedCollection
    from matsmerge.statistics.processes import Process
    from matsmerge.tasks.task_file import TaskFile

_BEGINS_AGAIN = (
    "all of the model does not fit into --max-memory: it is collected block by block, and when "
    "interrupted begins again"
)


@dataclass(frozen=True)
class CollectionWork:
    """Models, what each is asked, and how; torch is only imported when it is done."""

    models: list[str]
    outputs: "list[Output]"
    asked: "list[tuple[TaskFile, Data]]"
    options: "CollectionOptions"
    parameters: list[str]
    choice: dict[str, Any]  # of examples, as `Choice` takes it
    dtype: str | None
    device: str | None
    device_map: str | None
    max_bytes: int | None

    @cached_property
    def _kept(self) -> "KeptBase":
        from matsmerge.models.kept_base import KeptBase

        return KeptBase()

    def ready(
        self, i: int, screen: Screen, *, is_empty: bool = False, part: "Process | None" = None
    ) -> "PreparedCollection":
        """A model that is loaded, or one without values, and its examples."""
        from matsmerge.models.streamed_model import EMPTY
        from matsmerge.statistics.prepared_collection import ExampleChoice, prepare_collection
        from matsmerge.tasks.loaded_model import load_model

        described, rows = self.asked[i]
        with screen.status(f"loading {self.models[i]}"):
            loaded = load_model(
                self.models[i],
                described,
                need_targets=self.options.wants_targets,
                dtype=self.dtype,
                device=None if is_empty else self.device,
                device_map=EMPTY if is_empty else self.device_map,
                also=self.parameters,
                kept=self._kept,
            )
        choice = ExampleChoice(
            columns=described.columns, wordings=described.wordings, **self.choice
        )
        return prepare_collection(loaded, rows, self.options, choice, part)

    def check(self, screen: Screen, adapters: "Container[str]") -> None:
        """Say what is wrong with any of the models or their data before the first one runs.

        Only adapters, which share their base, are loaded with values for that.
        """
        problems: list[str] = []
        for i, model in enumerate(self.models):
            with noted(problems):
                self.ready(i, screen, is_empty=model not in adapters)
        MatsError.raise_all(problems)

    def describe(self, i: int, screen: Screen) -> dict[str, Any]:
        """What collecting would take."""
        from matsmerge.statistics.prepared_blocks import least_bytes, prepare_blocks

        prepared, path = self.ready(i, screen, is_empty=True), self.path(i)
        try:
            blocks = prepare_blocks(prepared, self.device)
        except DataError as error:
            least = least_bytes(prepared)
            if self.max_bytes is not None and least > self.max_bytes:
                raise
            report = describe_least(prepared, least, path, str(error))
            show_least(report, screen)
            return report
        report = describe_needs(blocks, self.max_bytes, path)
        show_needs(blocks, self.max_bytes, path, screen)
        return report

    def path(self, i: int) -> Path:
        return self.outputs[i].path

    def collect(self, i: int, screen: Screen, part: "Process | None" = None) -> dict[str, Any]:
        """Collect from a model into its file; what that holds, or of a part of it only notes."""
        from matsmerge.statistics.prepared_blocks import prepare_within

        output = replace(self.outputs[i], part=part)
        prepared = self.ready(i, screen, is_empty=self.max_bytes is not None, part=part)
        within = None
        if self.max_bytes is not None:
            within = prepare_within(prepared, self.max_bytes, self.device)
            prepared = prepared if within else self.ready(i, screen, part=part)
        screen.notes([*prepared.notes, _BEGINS_AGAIN] if within else prepared.notes)
        with screen.bars() as bars:
            statistics = (within or prepared).run(output, bars)
        screen.notes(prepared.collection.notes)
        notes = [*prepared.notes, *prepared.collection.notes]
        if part is not None:
            return {"notes": notes}
        if not output.process.is_first:
            return {}
        show_collected(statistics, self.path(i), screen)
        return describe_collected(notes, statistics, self.path(i))

    def collect_part(self, which: "tuple[int, Process | None]") -> "tuple[int, list[str]]":
        """As a job of an executor: from a part of the data of a model; what is to be said of it."""
        i, part = which
        return i, self.collect(i, Screen(quiet=True), part)["notes"]


def collect_on(
    executor: "Executor", work: CollectionWork, screen: Screen, parts: "Sequence[Process | None]"
) -> list[dict[str, Any]]:
    """Collect from each part of each model's data in a job of its own, and add them up."""
    from matsmerge.checkpoints.source import open_checkpoint
    from matsmerge.engine.executor import Piece, map_pieces
    from matsmerge.statistics.collection_run import add_parts
    from matsmerge.statistics.statistics_file import open_statistics

    pieces: list[Piece[tuple[int, Process | None]]] = []
    for i, model in enumerate(work.models):
        num_bytes = sum(spec.num_bytes for spec in open_checkpoint(model).specs.values())
        pieces += [Piece((i, part), num_bytes, work.max_bytes or num_bytes) for part in parts]
    notes: dict[int, dict[str, None]] = {i: {} for i in range(len(work.models))}
    away = replace(work)  # without a base that was loaded here
    with screen.bars() as bars:
        for i, said in map_pieces(executor, bars, "collecting", away.collect_part, pieces):
            notes[i] |= dict.fromkeys(said)
    reports = []
    for i, output in enumerate(work.outputs):
        screen.notes(list(notes[i]))
        own = [replace(output, part=part) for part in parts]
        total = add_parts(own) if len(own) > 1 else open_statistics(output.path)
        show_collected(total, output.path, screen)
        reports.append(describe_collected(list(notes[i]), total, output.path))
    return reports
