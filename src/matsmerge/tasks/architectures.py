"""Which kind of task a model is for, and which class of transformers loads it."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from matsmerge.checkpoints.checkpoint import TensorSpec, first_line
from matsmerge.errors import DataError
from matsmerge.tasks.optional_import import import_optional

AUTO_CLASSES = {
    "sequence_classification": "AutoModelForSequenceClassification",
    "token_classification": "AutoModelForTokenClassification",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "causal_lm": "AutoModelForCausalLM",
    "image_classification": "AutoModelForImageClassification",
}
_ENDINGS = {
    "ForSequenceClassification": "sequence_classification",
    "ForTokenClassification": "token_classification",
    "ForCausalLM": "causal_lm",
    "LMHeadModel": "causal_lm",
    "ForImageClassification": "image_classification",
    "ForImageClassificationWithTeacher": "image_classification",
}
_ADAPTER_TYPES = {
    "SEQ_CLS": "sequence_classification",
    "TOKEN_CLS": "token_classification",
    "SEQ_2_SEQ_LM": "seq2seq",
    "CAUSAL_LM": "causal_lm",
}


def kind_of_model(config: Any) -> str | None:
    """The kind of task that a model's configuration says it is for."""
    architecture = architecture_of(config)
    for ending, kind in _ENDINGS.items():
        if architecture.endswith(ending):
            return kind
    if getattr(config, "is_encoder_decoder", False) and architecture.endswith(
        ("ForConditionalGeneration", "Model")
    ):
        return "seq2seq"
    return None


def kind_of_adapter(task_type: str | None) -> str | None:
    """The kind of task that an adapter's configuration says it is for."""
    return _ADAPTER_TYPES.get(str(task_type))


def architecture_of(config: Any) -> str:
    """The name of the class a model was saved from, or nothing."""
    architectures = getattr(config, "architectures", None) or [""]
    return str(architectures[0])


def choose_kind(label: str, task: str | None, inferred: str | None, config: Any) -> str:
    """The kind asked for, if the model can do it; else the one the model is for."""
    kinds = (*AUTO_CLASSES, "multiple_choice")
    if task is None:
        if inferred is None:
            raise DataError(
                f"{label}: its architecture '{architecture_of(config)}' does not say what task it "
                f"is for; say it with --task, one of {', '.join(kinds)}"
            )
        return inferred
    if task not in kinds:
        raise DataError(f"there is no task '{task}'; expected one of {', '.join(kinds)}")
    fitting = ("seq2seq", "causal_lm") if task == "multiple_choice" else (task,)
    if inferred is not None and inferred not in fitting:
        raise DataError(
            f"{label}: is a {architecture_of(config)}, made for {inferred}, and cannot do {task}"
        )
    return task


def model_class(label: str, kind: str, config: Any) -> Any:
    """The Auto class of transformers for a kind of task, if it has one for this model."""
    if kind == "multiple_choice":
        kind = "seq2seq" if getattr(config, "is_encoder_decoder", False) else "causal_lm"
    auto_class = getattr(import_optional("transformers"), AUTO_CLASSES[kind])
    if type(config) not in auto_class._model_mapping:
        raise DataError(
            f"{label}: transformers has no {config.model_type} model for {kind}; "
            "for an encoder of another kind, give a linear head with --head FILE that holds "
            "'weight' (classes, size) and optionally 'bias'"
        )
    return auto_class


def skeleton(auto_class: Any, config: Any, num_labels: int | None = None) -> nn.Module:
    """The model without values: names and shapes of its parameters."""
    if num_labels is not None:
        config = copy.deepcopy(config)
        config.num_labels = num_labels
    make = getattr(auto_class, "from_config", auto_class)  # a class of its own is just called
    try:
        with torch.device("meta"):
            model: nn.Module = make(config)
    except Exception as error:  # whatever a configuration can say
        raise DataError(
            f"{config.name_or_path or 'config.json'}: transformers can make no model of its "
            f"config.json ({first_line(error)})"
        ) from error
    return model


def num_classes_of_head(auto_class: Any, config: Any, head: Mapping[str, TensorSpec]) -> int | None:
    """How many classes a head with these tensors has: the size of what grows with `num_labels`."""
    two, three = (
        {name: tuple(p.shape) for name, p in skeleton(auto_class, config, n).named_parameters()}
        for n in (2, 3)
    )
    for name, shape in two.items():
        if name in head and shape != three[name] and len(head[name].shape) == len(shape):
            axis = next(i for i in range(len(shape)) if shape[i] != three[name][i])
            return head[name].shape[axis]
    return None
