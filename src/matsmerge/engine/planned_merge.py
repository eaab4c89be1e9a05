"""A merge that has been checked: what it will need, and doing it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from matsmerge.checkpoints.source import local_path, open_checkpoint
from matsmerge.engine.executor import Executor, check_executor
from matsmerge.engine.layout import DEFAULT_SHARD_BYTES
from matsmerge.engine.local_executor import LocalExecutor
from matsmerge.engine.manifest import MergeOutcome, describe_inputs, make_manifest
from matsmerge.engine.merge_file import read_merge_file
from matsmerge.engine.merge_run import RunOptions, merge_in_memory, merge_to_folder
from matsmerge.engine.merge_series import merge_series
from matsmerge.engine.merged import Merged
from matsmerge.engine.output_folder import MANIFEST
from matsmerge.engine.prepared_merge import PreparedMerge
from matsmerge.engine.ray_executor import RayExecutor
from matsmerge.engine.worker import FINAL
from matsmerge.errors import RecipeError
from matsmerge.notebook_table import notebook_table
from matsmerge.progress import AnyProgress, Stopwatch, listener
from matsmerge.recipes.recipe import Recipe


@dataclass(frozen=True)
class PlannedMerge:
    """A merge that has been checked, of which nothing but headers has been read."""

    prepared: PreparedMerge
    notes: tuple[str, ...]  # what was decided without being asked
    earlier: tuple[PreparedMerge, ...] = ()  # merges whose results it uses, in their order

    def __repr__(self) -> str:
        names = ", ".join(str(entry.name) for entry in self.recipe.models)
        size = f"{self.num_parameters:,} parameters"
        return f"<PlannedMerge {names} by {self.recipe.method.name}: {size}>"

    def _repr_html_(self) -> str:
        names = ", ".join(str(entry.name) for entry in self.recipe.models)
        method, num = self.recipe.method.name, f"{self.num_parameters:,}"
        rows = {"models": names, "method": method, "parameters": num, "notes": len(self.notes)}
        return notebook_table("Planned merge", rows)

    @property
    def recipe(self) -> Recipe:
        return self.prepared.recipe

    @property
    def num_parameters(self) -> int:
        return sum(spec.num_elements for spec in self.prepared.written.values())

    def peak_bytes(self, executor: Executor | None = None) -> int:
        """Memory that the merge takes at most, beyond the interpreter's own, about."""
        executor = self._executor(executor)
        all_of_them = (*self.earlier, self.prepared)
        working = max(one.plan.peak_bytes(executor.num_workers) for one in all_of_them)
        return min(working, executor.max_bytes) + self._held_bytes

    @property
    def least_bytes(self) -> int:
        """Memory that it takes at least, with one job after the other."""
        least = max(one.plan.peak_bytes(1) for one in (*self.earlier, self.prepared))
        return least + self._held_bytes

    @property
    def _held_bytes(self) -> int:
        """Memory that is taken however many jobs run at once."""
        prefix = self.prepared.prefix
        return self.prepared.plan.measuring_bytes + (prefix.num_held_bytes if prefix else 0)

    def merge(
        self,
        out: str | Path | None = None,
        *,
        executor: Executor | None = None,
        progress: AnyProgress | None = None,
        overwrite: bool = False,
        resume: bool = False,
        verify: bool = False,
        allow_nonfinite: bool = False,
        max_shard_bytes: int = DEFAULT_SHARD_BYTES,
        trace: str | Path | None = None,
        intermediates: str | Path | None = None,
    ) -> Merged:
        """Merge into memory, or into a folder; see `matsmerge.merge`.

        Merges that this one uses the results of are written to folders first, in a hidden one that
        is deleted at the end, or to be kept in `intermediates`.
        """
        watch = Stopwatch(listener(progress))
        options = RunOptions(
            executor=self._executor(executor),
            progress=watch,
            overwrite=overwrite,
            resume=resume,
            verify=verify,
            allow_nonfinite=allow_nonfinite,
            max_shard_bytes=max_shard_bytes,
            trace=None if trace is None else local_path(trace),
        )
        if out is None and self.earlier:
            raise RecipeError("a recipe of several documents is merged into a folder; give out=")
        if out is None:
            return self._merge_in_memory(options, watch)
        target = local_path(out)
        if self.earlier:
            recipes = [one.recipe for one in (*self.earlier, self.prepared)]
            kept = None if intermediates is None else local_path(intermediates)
            merge_series(recipes, target, kept, options)
        else:
            target = merge_to_folder(self.prepared, target, options)
        seconds, models = watch.stop(), self.prepared.models
        made = {at: self._read(target / models[at], seconds) for at in self.recipe.trajectory}
        if not made:
            return self._read(target, seconds)
        report = read_merge_file(target / MANIFEST)
        return replace(made[max(made)], report=report, trajectory=made, _place=target)

    def _executor(self, given: Executor | None) -> Executor:
        """The given executor, which must have the recipe's device, or what the recipe wants."""
        asked = self.recipe.device
        if given is None and self.recipe.executor == "ray":
            given = RayExecutor()
        if given is None:
            return LocalExecutor(device=asked)
        check_executor(given)
        kinds = {device.partition(":")[0] for device in given.devices}
        if asked in (None, "auto") or asked in (*given.devices, *kinds):
            return given
        raise RecipeError(
            f"device: {asked} is not among those of the executor ({', '.join(given.devices)}); "
            f'make it with device="{asked}", or leave out either'
        )

    def _read(self, folder: Path, seconds: Mapping[str, float]) -> Merged:
        report = read_merge_file(folder / MANIFEST)
        return Merged(report, self.notes, seconds, {}, open_checkpoint(folder), folder)

    def _merge_in_memory(self, options: RunOptions, watch: Stopwatch) -> Merged:
        outcome = merge_in_memory(self.prepared, options)
        manifest = make_manifest(self.prepared, describe_inputs(self.prepared), outcome)
        report = json.loads(json.dumps(manifest))  # as it would be read from merge.json
        seconds, models = watch.stop(), outcome.models
        made = {
            at: Merged({**report, "iteration": at}, self.notes, seconds, {}, models[at])
            for at in self.recipe.trajectory
        }
        save = partial(self._save, outcome, options.allow_nonfinite)
        last = models[max(made, default=FINAL)]
        return Merged(report, self.notes, seconds, made, last, _write=save)

    def _save(
        self, outcome: MergeOutcome, allow_nonfinite: bool, folder: str | Path, overwrite: bool
    ) -> Path:
        options = RunOptions(overwrite=overwrite, allow_nonfinite=allow_nonfinite)
        return merge_to_folder(self.prepared, local_path(folder), options, outcome)
