"""A merged model ready to use: with the head of one task, its labels, and its tokenizer."""

from pathlib import Path
from typing import Any

from matsmerge.adapters.adapter import Adapter
from matsmerge.checkpoints.companions import copy_processor
from matsmerge.checkpoints.source import local_path, open_checkpoint
from matsmerge.errors import DataError, closest
from matsmerge.files.output_place import check_folder
from matsmerge.files.whole_outputs import StagedFolder, writing
from matsmerge.models.model_folder import ModelFolder, open_model
from matsmerge.models.peft_model import fold_into, peft_saved, put_adapter_on
from matsmerge.models.pretrained import architecture_of, choose_dtype, quiet, read_with
from matsmerge.optional_import import import_optional
from matsmerge.tasks.head_record import HeadRecord, find_heads, read_record
from matsmerge.tasks.image_classification import ImageClassification
from matsmerge.tasks.kinds import kind_of_model
from matsmerge.tasks.loaded_model import Loading, move
from matsmerge.tasks.task import has_any
from matsmerge.tasks.text_encoder import TOKENIZER_FILES

_TEXT = ("tokenizer", "AutoTokenizer", TOKENIZER_FILES)
_IMAGES = ("image_processor", "AutoImageProcessor", ImageClassification.files)
_MARK = ".exported"  # says that a folder is an export, which may be replaced by another


def load(
    model: str | Path,
    task: str | None = None,
    *,
    dtype: str | None = None,
    device: str | None = None,
    device_map: str | None = None,
) -> Any:
    """Load a merged model, or any other, as a model of transformers that is ready to use.

    `task` names the head to put on it, one of the files in the model's folder `heads/`; classes
    have the names they had in the model that was merged. An adapter is folded into its base. The
    model's own `tokenizer` or `image_processor` is an attribute of it:

        model = matsmerge.load("merged", task="amazon")
        classify = pipeline("text-classification", model=model, tokenizer=model.tokenizer)

    The dtype is the one that is stored, the device a GPU if there is one, unless given.
    """
    if device is not None and device_map is not None:
        raise DataError("give either a device or a device_map, not both")
    opened = open_model(model)
    path = _find_head(opened, task)
    head = None if path is None else open_checkpoint(path)
    loading = Loading(
        opened, opened.read_config(), head, choose_dtype(dtype, opened.base), device_map
    )
    adapter = opened.adapter
    of_adapter = {} if adapter is None else peft_saved(opened.checkpoint.specs)
    model_class = _model_class(opened, loading.config, read_record(head))
    made, head_names, _ = loading.place(model_class, of_adapter)
    ready: Any = made
    if adapter is not None and adapter.kind.is_folded:
        fold_into(made, adapter, opened.base, (), set(head_names))
    elif adapter is not None:
        apart = {name: made.get_parameter(name).detach() for name in head_names}
        adapted: Any = put_adapter_on(made, opened.checkpoint, apart)
        with quiet():
            ready = adapted.merge_and_unload()
    for parameter in ready.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    ready.eval()
    if device_map is None:
        move(ready, device)
    name, reader, files = _TEXT if ready.main_input_name == "input_ids" else _IMAGES
    folder = next((f for f in opened.folders if has_any(f, files)), None)
    if folder is not None:
        setattr(ready, name, read_with(reader, folder, f"{folder}: its {name}"))
    return ready


def export(
    model: str | Path,
    out: str | Path,
    task: str | None = None,
    *,
    dtype: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write what `load` returns as a folder that transformers understands by itself.

    `AutoModelForSequenceClassification.from_pretrained` and `pipeline` need nothing else then. The
    folder appears when it is complete.
    """
    target = local_path(out)
    opened = open_model(model)
    inputs = {opened.label: place} if (place := opened.checkpoint.place) is not None else {}
    check_folder(target, "export", _is_export, inputs=inputs, overwrite=overwrite)
    ready = load(model, task, dtype=dtype, device="cpu")
    staged = StagedFolder(target.absolute(), "export")
    staged.open()
    try:
        with writing(target):
            staged.clear()
            staged.output.mkdir()
            with quiet():
                ready.save_pretrained(str(staged.output))
            copy_processor(opened.folders, staged.output)
            (staged.output / _MARK).write_text(f"{task or ''}\n", encoding="utf-8")
            staged.put_in_place()
    finally:
        staged.discard()
    return target


def _is_export(folder: Path) -> bool:
    return (folder / _MARK).is_file()


def _find_head(opened: ModelFolder, task: str | None) -> Path | None:
    """The file of the head for a task; None where the model has a head itself, or needs none."""
    heads = find_heads(opened.checkpoint.folder)
    known, first = ", ".join(heads), next(iter(heads), "")
    if task in heads:
        return heads[task]
    if task is None and not heads:
        return None
    if task is None:
        raise DataError(
            f"{opened.label}: has a head for each of {known}; say for which task: "
            f"task={first!r} in Python, --task {first} on the command line"
        )
    if not heads:
        raise DataError(
            f"{opened.label}: has no heads/ to choose '{task}' from; leave out the task"
        )
    raise DataError(
        f"{opened.label}: has heads for {known}, and none for the task '{task}'"
        f"{closest(task, heads)}"
    )


def _model_class(opened: ModelFolder, config: Any, record: HeadRecord) -> Any:
    """The class of transformers to load a model with: what the head was on, or the model says."""
    if record.architecture is None and (kind := record.kind) is not None:
        return kind.model_class(opened.label, config)
    transformers = import_optional("transformers")
    adapter: Adapter | None = opened.adapter
    for name in (record.architecture, None if adapter else architecture_of(config)):
        own = getattr(transformers, name or "", None)
        if isinstance(own, type) and issubclass(own, transformers.PreTrainedModel):
            return own
    kind = kind_of_model(config, adapter)
    return transformers.AutoModel if kind is None else kind.model_class(opened.label, config)
