"""What `mats collect` does for each model, here or on other machines."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matsmerge.cli.collected_display import describe_collected, show_collected
from matsmerge.cli.display import Screen
from matsmerge.cli.needs_display import describe_needs, show_needs

if TYPE_CHECKING:
    from matsmerge import Executor
    from matsmerge.data.rows import Data
    from matsmerge.models.kept_base import KeptBase
    from matsmerge.statistics.collection_options import CollectionOptions
    from matsmerge.statistics.collection_run import Output
    from matsmerge.statistics.prepared_collection import PreparedCollection
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

    def ready(self, i: int, screen: Screen, *, is_empty: bool = False) -> "PreparedCollection":
        """A model that is loaded, or one without values, and its examples."""
        from matsmerge.models.streamed_model import EMPTY
        from matsmerge.statistics.prepared_collection import Choice, prepare
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
        choice = Choice(columns=described.columns, wordings=described.wordings, **self.choice)
        return prepare(loaded, rows, self.options, choice)

    def describe(self, i: int, screen: Screen) -> dict[str, Any]:
        """What collecting would take."""
        from matsmerge.statistics.prepared_blocks import prepare_blocks

        blocks, path = (
            prepare_blocks(self.ready(i, screen, is_empty=True), self.device),
            self.path(i),
        )
        report = describe_needs(blocks, self.max_bytes, path)
        show_needs(blocks, self.max_bytes, path, screen)
        return report

    def path(self, i: int) -> Path:
        return self.outputs[i].path

    def collect(self, i: int, screen: Screen) -> dict[str, Any]:
        """Collect from a model into its file; what that holds."""
        from matsmerge.statistics.prepared_blocks import prepare_within
        from matsmerge.statistics.processes import this_process

        prepared = self.ready(i, screen, is_empty=self.max_bytes is not None)
        within = None
        if self.max_bytes is not None:
            within = prepare_within(prepared, self.max_bytes, self.device)
            prepared = prepared if within else self.ready(i, screen)
        screen.notes([*prepared.notes, _BEGINS_AGAIN] if within else prepared.notes)
        with screen.bars() as bars:
            statistics = (within or prepared).run(self.outputs[i], bars)
        screen.notes(prepared.collection.notes)
        if not this_process().is_first:
            return {}
        show_collected(statistics, self.path(i), screen)
        return describe_collected(prepared, statistics, self.path(i))

    def collect_silently(self, i: int) -> tuple[int, dict[str, Any]]:
        """As a job of an executor."""
        return i, self.collect(i, Screen(quiet=True))


def collect_on(executor: "Executor", work: CollectionWork, screen: Screen) -> list[dict[str, Any]]:
    """Collect from each model in a job of its own; what each file holds is said as it is done."""
    from matsmerge.checkpoints.source import open_checkpoint
    from matsmerge.engine.executor import Piece, map_pieces
    from matsmerge.statistics.statistics_file import open_statistics

    pieces = []
    for i, model in enumerate(work.models):
        num_bytes = sum(spec.num_bytes for spec in open_checkpoint(model).specs.values())
        pieces.append(Piece(i, num_bytes, work.max_bytes or num_bytes))
    away = replace(work)  # without a base that was loaded here
    with screen.bars() as bars:
        found = dict(map_pieces(executor, bars, "collecting", away.collect_silently, pieces))
    for i in sorted(found):
        screen.notes(found[i]["notes"])
        show_collected(open_statistics(work.path(i)), work.path(i), screen)
    return [found[i] for i in sorted(found)]
