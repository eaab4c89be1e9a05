"""The kinds of tasks, and which of them a model is for."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from matsmerge.adapters.adapter import Adapter
from matsmerge.adapters.adapter_folder import names_in
from matsmerge.checkpoints.checkpoint import Checkpoint
from matsmerge.errors import DataError
from matsmerge.models.parameter_names import match_names
from matsmerge.models.pretrained import architecture_of, empty_model
from matsmerge.optional_import import import_optional
from matsmerge.tasks.causal_lm import CausalLM
from matsmerge.tasks.image_classification import ImageClassification
from matsmerge.tasks.multiple_choice import MultipleChoice
from matsmerge.tasks.seq2seq import Seq2Seq
from matsmerge.tasks.sequence_classification import SequenceClassification
from matsmerge.tasks.task import Task
from matsmerge.tasks.text_task import AnswerTask
from matsmerge.tasks.token_classification import TokenClassification

TaskKind = type[Task[Any]]

TASKS: Mapping[str, TaskKind] = {
    kind.kind: kind
    for kind in (
        SequenceClassification,
        TokenClassification,
        Seq2Seq,
        CausalLM,
        MultipleChoice,
        ImageClassification,
    )
}


def kind_of_model(config: Any, adapter: Adapter | None = None) -> TaskKind | None:
    """The kind of task that a model, or the adapter on it, was made for by its configuration."""
    kinds = list(TASKS.values())
    task_type = None if adapter is None else adapter.config.task_type
    of_adapter = [kind for kind in kinds if task_type is not None and kind.peft_type == task_type]
    return next(iter([*of_adapter, *(kind for kind in kinds if kind.is_for(config))]), None)


def continues_input(architecture: str) -> bool:
    """Whether models of this class predict at each token the next one, from left to right."""
    kinds = [kind for kind in TASKS.values() if issubclass(kind, AnswerTask)]
    return any(k.continues_prompt and architecture.endswith(k.architectures) for k in kinds)


def kind_of_encoder(main_input: str) -> TaskKind | None:
    """The kind that an encoder with a linear head on it is for."""
    return next((kind for kind in TASKS.values() if kind.main_input == main_input), None)


def choose_kind(
    label: str, asked: TaskKind | None, inferred: TaskKind | None, config: Any
) -> TaskKind:
    """The kind asked for, if the model can do it; else the one the model is for."""
    kind = asked or inferred
    if kind is None:
        raise DataError(
            f"{label}: its architecture '{architecture_of(config)}' does not say what task it "
            f"is for; say it with `task:` in a task file (mats collect: --task), one of "
            f"{', '.join(TASKS)}"
        )
    if inferred is not None and inferred not in (kind, kind.model_kind(config)):
        raise DataError(
            f"{label}: is a {architecture_of(config)}, made for {inferred.kind}, and cannot do "
            f"{kind.kind}"
        )
    return kind


def names_in_base(adapter: Adapter, base: Checkpoint) -> dict[str, str] | None:
    """Tensors of the base by the adapter's parameters, where transformers stores other names.

    None where the names are alike, or where the class of the model is not known.
    """
    folder, weights = base.folder, {names_in(adapter, base)[w] for w in adapter.weights}
    if folder is None or weights <= {*base.specs}:
        return None
    model = empty_model(folder, partial(_class_of_base, adapter))
    # Without a model, fitting the adapter will say what does not fit.
    return None if model is None else match_names(model, base)


def _class_of_base(adapter: Adapter, config: Any) -> Any:
    """The class of model that an adapter was made for."""
    transformers = import_optional("transformers")
    mapping = adapter.config.content.get("auto_mapping") or {}
    named = getattr(transformers, str(mapping.get("base_model_class")), None)
    if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel):
        return named
    kind = kind_of_model(config, adapter)
    return transformers.AutoModel if kind is None else kind.model_class(adapter.label, config)
