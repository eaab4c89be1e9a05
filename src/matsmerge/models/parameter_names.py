"""Which tensor of a checkpoint each parameter of a model was loaded from."""

import importlib
import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterator

from torch import nn

from matsmerge.checkpoints.checkpoint import Checkpoint
from matsmerge.checkpoints.fused_experts import separate_experts
from matsmerge.models.experts import find_fused, parameter_shapes

# What transformers reads under either spelling.
_OLD_SPELLINGS = ((".weight", ".gamma"), (".bias", ".beta"))

_EXPERT = re.compile(r"\.experts\.(\d+)\.")

Renaming = tuple[str, str]  # the beginning of a parameter's name, and what stands there instead


def match_names(model: nn.Module, checkpoint: Checkpoint) -> dict[str, str]:
    """Names in `model.named_parameters()` to names in `checkpoint.specs`, where there is one.

    As transformers renames them; else the same name; else with or without the prefix of the
    model's encoder (`bert.`); else with the change of prefix that fits most parameters. Tied
    parameters have several names. Fused experts have a name for each part, as `ExpertsApart` and
    `separate_experts` call them, whether the checkpoint has them apart or fused.
    """
    checkpoint = separate_experts(checkpoint)
    all_names = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        all_names[id(parameter)].append(name)
    stored_names, converted = _names_when_loaded(model, checkpoint)
    renamings = list(_renamings(model, checkpoint))
    names = {}
    for name, parameter in model.named_parameters():
        tied = all_names[id(parameter)]
        if converted.intersection(tied):
            continue
        renamed = [stored_names[n] for n in tied if n in stored_names]
        for other in (*renamed, *_candidates(tied, renamings)):
            stored = checkpoint.aliases.get(other, other)
            spec = checkpoint.specs.get(stored)
            if spec is not None and spec.shape == tuple(parameter.shape):
                names[name] = stored
                break
    for module, _, pieces in find_fused(model):
        for part, piece in pieces.items():
            name = f"{module}.{part}"
            for other in (stored_names.get(name, name), *_candidates([name], renamings)):
                spec = checkpoint.specs.get(other)
                if spec is not None and spec.shape == piece.shape:
                    names[name] = other
                    break
    return names


def unmatched_names(model: nn.Module, known: Container[str]) -> list[str]:
    """The parameters of a model, its experts one by one, that are not among known ones."""
    return [name for name in parameter_shapes(model) if name not in known]


def _names_when_loaded(model: nn.Module, checkpoint: Checkpoint) -> tuple[dict[str, str], set[str]]:
    """Stored names of parameters that transformers renames, and the parameters it computes.

    Versions before 5 have no rules that could be asked for.
    """
    renamed: dict[str, str] = {}
    converted: set[str] = set()
    try:
        core = importlib.import_module("transformers.core_model_loading")
        mapping = importlib.import_module("transformers.conversion_mapping")
        rules = mapping.get_model_conversion_mapping(model)
        renaming_class, converter_class = core.WeightRenaming, core.WeightConverter
        rename, sort_key = core.rename_source_key, core.dot_natural_key
    except (ImportError, AttributeError):
        return renamed, converted
    renamings = [rule for rule in rules if isinstance(rule, renaming_class)]
    converters = [rule for rule in rules if isinstance(rule, converter_class)]
    prefix = getattr(model, "base_model_prefix", "")
    state = model.state_dict()
    # In the order of loading, on which some rules depend.
    for stored in sorted((*checkpoint.specs, *checkpoint.aliases), key=sort_key):
        name, pattern = rename(stored, renamings, converters, prefix, state)
        if name not in state and stored in state:
            name, pattern = rename(stored, [], [], prefix, state)
        if pattern is None:
            renamed[name] = stored
            continue
        converted.add(name)
        if expert := _EXPERT.search(stored):
            # Of the tensors that are put one after the other, gate comes first.
            sources = next(c.source_patterns for c in converters if pattern in c.source_patterns)
            module, _, attribute = name.rpartition(".")
            parts = ["gate_proj", "up_proj"] if attribute == "gate_up_proj" else [attribute]
            if len(parts) == len(sources):
                part = parts[sources.index(pattern)]
                renamed[f"{module}.{expert[1]}.{part}.weight"] = stored
    return renamed, converted


def _candidates(names: list[str], renamings: list[Renaming]) -> Iterator[str]:
    for ours, theirs in renamings:
        for name in names:
            if name.startswith(ours):
                renamed = theirs + name[len(ours) :]
                yield renamed
                for new, old in _OLD_SPELLINGS:
                    if renamed.endswith(new):
                        yield renamed.removesuffix(new) + old


def _renamings(model: nn.Module, checkpoint: Checkpoint) -> Iterator[Renaming]:
    yield "", ""
    prefix = getattr(model, "base_model_prefix", "")
    if prefix:
        yield f"{prefix}.", ""
        yield "", f"{prefix}."
    stored = {*checkpoint.specs, *checkpoint.aliases}
    endings: dict[str, list[str]] = defaultdict(list)
    for name in stored:
        for ending in _endings(name):
            endings[ending].append(name)
    votes: Counter[Renaming] = Counter()
    for name, parameter in model.named_parameters():
        for longer in endings.get(name, []):
            if checkpoint.spec(longer).shape == tuple(parameter.shape):
                votes["", longer.removesuffix(name)] += 1
        for shorter in _endings(name):
            if shorter in stored and checkpoint.spec(shorter).shape == tuple(parameter.shape):
                votes[name.removesuffix(shorter), ""] += 1
    if votes:
        yield min(votes, key=lambda renaming: (-votes[renaming], renaming))


def _endings(name: str) -> Iterator[str]:
    """`b.c` and `c` of `a.b.c`."""
    while "." in name:
        name = name.partition(".")[2]
        yield name
