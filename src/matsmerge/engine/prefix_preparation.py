"""From a recipe to a merge along the blocks of a model: reads data, loads models, tries it out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from matsmerge.adapters.adapter_folder import is_adapter
from matsmerge.checkpoints.alignment import AlignedModel, Alignment
from matsmerge.engine.devices import find_devices
from matsmerge.engine.prefix_merge import PrefixMerge, Turn
from matsmerge.engine.prefix_task import REHEARSED_EXAMPLES, AskedModel, PrefixTask, naming
from matsmerge.errors import DataError, MatsError
from matsmerge.methods.objectives.objective import Evidence
from matsmerge.models.pretrained import choose_dtype
from matsmerge.problems import noted
from matsmerge.recipes.recipe import Recipe
from matsmerge.statistics.joined_statistics import put_together, without_values
from matsmerge.statistics.prefix_model import PrefixModel
from matsmerge.statistics.task_data import TaskData
from matsmerge.tasks.loaded_model import LoadedModel
from matsmerge.tasks.splits import read_split


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
    all_asked = read_all_data(recipe, alignment)
    loaded = _load_all(all_asked, collected)
    running = PrefixModel(
        loaded.first.model,
        loaded.data[0].first(REHEARSED_EXAMPLES),
        has_metric=bool(own or collected),
    )
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
        few = task.data.first(REHEARSED_EXAMPLES)
        with naming(task.label):
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


def read_all_data(recipe: Recipe, alignment: Alignment) -> list[AskedModel]:
    """Everyone's data; all that is wrong is said before a model is loaded."""
    found, problems = [], []
    device = find_devices(recipe.device)[0] if recipe.device else None
    for entry, model in zip(recipe.models, alignment.models, strict=True):
        assert entry.data is not None  # the recipe has been checked
        folder = model.checkpoint.folder
        if folder is None or not ((folder / "config.json").is_file() or is_adapter(folder)):
            problems.append(
                f"{model.checkpoint.label}: the model is run on its data, for which "
                "it must be a folder with config.json and, for text, a tokenizer"
            )
        with noted(problems):
            described = entry.data.task_file
            found.append(AskedModel(model, entry.data, described, read_split(described), device))
    DataError.raise_all(problems)
    return found


@dataclass(frozen=True)
class _Loaded:
    """What loading all models has shown."""

    first: LoadedModel
    data: list[TaskData]
    own: list[Evidence]  # what there will be of statistics that are still to be collected
    notes: list[str]


def _load_all(all_asked: Sequence[AskedModel], collected: Sequence[str]) -> _Loaded:
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
    unknown = [
        name
        for name, parameter in loaded.model.named_parameters()
        if parameter.requires_grad and name not in known
    ]
    if unknown:
        raise DataError(
            f"{loaded.checkpoint.label}: '{unknown[0]}' is not merged as one tensor (it is made "
            "from others when it is loaded, or holds all experts of a mixture), so weights cannot "
            "be put in block by block; use inputs: own"
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
