"""What a search reads: whether it may be tuned on, where it lies, and whether it is the same."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from matsmerge.checkpoints.fingerprint import fingerprint
from matsmerge.engine.prepared_merge import PreparedMerge
from matsmerge.errors import StatisticsError
from matsmerge.lab.tuning.harness_score import HarnessTasks
from matsmerge.lab.tuning.search_space import SearchSpace
from matsmerge.lab.tuning.trial_score import ValidationTask, overlaps
from matsmerge.lab.tuning.tuning_file import TuningOptions
from matsmerge.tasks.task_file import TaskFile
from matsmerge.version import __version__


def check_overlap(
    prepared: Sequence[PreparedMerge], validation: Sequence[ValidationTask], options: TuningOptions
) -> None:
    """Refuse statistics and data of the very split that is tuned on, unless that is allowed.

    What the split is a part of has its rows, too.
    """
    if options.allow_overlap:
        return
    problems = []
    for one in {one.label: one for merge in prepared for one in merge.evidence}.values():
        problems += overlaps(one.statistics, one.label, validation)
    splits = {task.data.split for task in validation} | {"test"}
    cut = {_place(task.described): task for task in validation if task.described.splits is not None}
    for entry in (entry for merge in prepared for entry in merge.recipe.models):
        if entry.data is None:
            continue
        described = entry.data.task_file
        if described.split in splits:
            problems.append(
                f"{entry.name}: its data is the split '{described.split}'; use another one, or "
                "allow it with --allow-overlap"
            )
        elif described.split is None and (task := cut.get(_place(described))) is not None:
            problems.append(
                f"{entry.name}: its data is all of {described.data}, of which '{task.data.split}' "
                f"is a part that '{task.name}' is tuned on; use another split (`split:` beside its "
                "path), or allow it with --allow-overlap"
            )
    StatisticsError.raise_all(dict.fromkeys(problems))


def _place(task: TaskFile) -> str:
    """Where a task's data is; what is not a file here is known by its name."""
    return str(Path(task.data).resolve()) if isinstance(task.data, str) else f"{task.data}"


def places_of(
    prepared: Sequence[PreparedMerge], validation: Sequence[ValidationTask]
) -> dict[str, Path]:
    """Everything that is read, which the output must not replace."""
    places: dict[str, Path | None] = {}
    for merge in prepared:
        places |= {m.checkpoint.label: m.checkpoint.place for m in merge.alignment.everyone}
        places |= {one.label: one.statistics.arrays.place for one in merge.evidence}
    for task in validation:
        sources = task.described.data
        for source in sources.values() if isinstance(sources, dict) else [sources or ""]:
            places[f"data of {task.name}"] = Path(source) if Path(source).exists() else None
    return {label: place for label, place in places.items() if place is not None}


def identify_search(
    space: SearchSpace,
    prepared: Sequence[PreparedMerge],
    validation: Sequence[ValidationTask],
    options: TuningOptions,
    harness: HarnessTasks | None,
) -> str:
    """A digest of all that must be the same for a search to be continued."""
    content = [
        __version__,
        dict(space.recipe),
        {key: list(values) for key, values in space.values.items()},
        [fingerprint(m.checkpoint) for p in prepared for m in p.alignment.everyone],
        [fingerprint(one.statistics.arrays) for p in prepared for one in p.evidence],
        [[t.described.model_dump(mode="json"), t.data.fingerprint] for t in validation],
        [options.strategy, options.num_trials, options.seed, options.num_examples],
        options.unlabelled,
        None if harness is None else harness.identity,
    ]
    return hashlib.sha256(json.dumps(content, default=str).encode()).hexdigest()
