"""Loading weights through transformers, quietly, and refusing what did not fit."""

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import nn

from matsmerge.checkpoints.checkpoint import FLOAT_DTYPES, Checkpoint, dtype_name, first_line
from matsmerge.data.row_problems import library_errors, refuse
from matsmerge.errors import DataError
from matsmerge.files.guarded_files import Content, Count, read_json_as, reading
from matsmerge.files.mirror import fetch_whole
from matsmerge.models.experts import avoid_grouped_products
from matsmerge.optional_import import import_optional
from matsmerge.problems import listed

Size = Annotated[int, Field(ge=1, lt=2**31)]
NumLayers = Annotated[int, Field(ge=0, lt=10_000)]  # a model is made layer by layer

DTYPES = {dtype_name(dtype): dtype for dtype in FLOAT_DTYPES}


_Digits = Annotated[str, Field(pattern=r"^\d{1,9}$")]


class ConfigContent(Content):
    """The parts of a config.json that are used; transformers does not check their types."""

    model_type: str | None = None
    architectures: list[str] | None = None
    num_labels: Count | None = None
    id2label: dict[str, str | int] | None = None
    label2id: dict[str, Count | _Digits] | None = None  # some scripts write them as texts
    problem_type: str | None = None
    image_size: Size | list[Size] | None = None
    patch_size: Size | list[Size] | None = None
    num_channels: Size | None = None
    hidden_size: Size | None = None
    hidden_sizes: list[Size] | None = None
    num_hidden_layers: NumLayers | None = None
    num_layers: NumLayers | None = None
    n_layer: NumLayers | None = None
    max_position_embeddings: int | float | None = None
    pad_token_id: int | None = None
    decoder_start_token_id: int | list[int] | None = None
    tie_word_embeddings: bool | None = None


def read_config(folder: Path) -> Any:
    """The configuration in a model's folder; code in the folder is never run."""
    path = folder / "config.json"
    if not path.is_file():
        raise DataError(f"{folder}: has no config.json, which says what model it is")
    read_json_as(path, ConfigContent, DataError)
    return read_with("AutoConfig", folder, f"{path}: the configuration")


def read_with(auto_class: str, folder: Path, what: str) -> Any:
    """What a class of transformers makes of files in a folder; code in it is never run."""
    transformers = import_optional("transformers")
    with library_errors(f"{what} cannot be read by transformers"), quiet(), refusing_panics():
        return getattr(transformers, auto_class).from_pretrained(
            str(folder), trust_remote_code=False, local_files_only=True
        )


def architecture_of(config: Any) -> str:
    """The name of the class a model was saved from, or nothing."""
    architectures = getattr(config, "architectures", None) or [""]
    return str(architectures[0])


def skeleton(auto_class: Any, config: Any, num_labels: int | None = None) -> nn.Module:
    """The model without values: names and shapes of its parameters."""
    if num_labels is not None:
        config = copy.deepcopy(config)
        config.num_labels = num_labels
    make = getattr(auto_class, "from_config", auto_class)  # a class of its own is just called
    where = config.name_or_path or "config.json"
    with (
        library_errors(f"{where}: transformers can make no model of its config.json"),
        quiet(),
        torch.device("meta"),
    ):
        model: nn.Module = make(config)
    return model


def empty_model(folder: Path, class_of: Callable[[Any], Any]) -> nn.Module | None:
    """The model of a folder without values, or None; `class_of` chooses its class by config."""
    try:
        config = read_config(folder)
        return skeleton(class_of(config), config)
    except Exception:  # such as a class and a configuration that do not belong together
        return None


def choose_dtype(name: str | None, checkpoint: Checkpoint) -> torch.dtype:
    """The dtype asked for, or the one that holds all stored values exactly."""
    if name is None or name == "auto":
        found = {spec.dtype for spec in checkpoint.specs.values() if spec.dtype in FLOAT_DTYPES}
        return reduce(torch.promote_types, found) if found else torch.float32
    if name not in DTYPES:
        raise DataError(f"there is no dtype '{name}'; expected auto or one of {', '.join(DTYPES)}")
    return DTYPES[name]


def load_pretrained(
    loading_class: Any,
    checkpoint: Checkpoint,
    config: Any,
    dtype: torch.dtype,
    device_map: Any,
    *,
    supplied: Set[str] = frozenset(),
    partly_used: bool = False,
) -> tuple[nn.Module, list[str]]:
    """A model from a checkpoint's folder, with notes on what of the checkpoint it does not use.

    `supplied` are parameters that come from elsewhere. Any other that is missing or has another
    shape is an error; so is a tensor without a place, unless the checkpoint is `partly_used`.
    """
    if device_map is not None:
        import_optional("accelerate")
    transformers = import_optional("transformers")
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    options = {"dtype" if version >= (4, 56) else "torch_dtype": dtype, "device_map": device_map}
    label = checkpoint.label
    for file in checkpoint.files:  # transformers reads them by itself
        with reading(label, DataError):
            fetch_whole(file.path)
    with library_errors(f"{label}: transformers cannot load it"), quiet():
        model, info = loading_class.from_pretrained(
            str(checkpoint.folder),
            config=config,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # found below, with names and shapes
            local_files_only=True,
            **options,
        )
    name = type(model).__name__
    problems = [
        f"{label}: '{key}' is {list(found)}, {name} expects {list(expected)}"
        for key, found, expected in sorted(info["mismatched_keys"])
        if key not in supplied
    ]
    problems += [f"{label}: {message}" for message in info.get("error_msgs", [])]
    problems += _missing(label, model, sorted(set(info["missing_keys"]) - supplied))
    notes = []
    if unexpected := sorted(set(info["unexpected_keys"]) - supplied):
        few = _few(unexpected)
        if partly_used:
            notes.append(f"{label}: {name} does not use {few}")
        else:
            problems.append(
                f"{label}: holds {few}, for which {name} has no place; "
                "is config.json that of another model?"
            )
    refuse(problems)
    avoid_grouped_products(model)
    return model, notes


def _missing(label: str, model: nn.Module, names: Sequence[str]) -> list[str]:
    if not names:
        return []
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    if any(name.startswith(prefix) for name in names):
        return [f"{label}: lacks {_few(names)}, which {type(model).__name__} needs"]
    return [
        f"{label}: has no head for this task: {type(model).__name__} needs {_few(names)}, which "
        "would be random; give the head as `head:` of a task file (mats collect: --head FILE)"
    ]


def _few(names: Sequence[str]) -> str:
    return listed([f"'{name}'" for name in names], 5)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' reports, bars and warnings; what they report is checked instead."""
    logging = import_optional("transformers.utils.logging")
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def refusing_panics() -> Iterator[None]:
    """Turn a panic of the tokenizers library, which is no `Exception`, into a `DataError`."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise DataError(
            f"the tokenizer is damaged: the tokenizers library gave up ({first_line(error)}); "
            "take its files from where the model came from"
        ) from error
