"""Everything beside the weights that makes a folder a model."""

import json
import shutil
from pathlib import Path

from matsmerge.adapters.adapter import CONFIG
from matsmerge.checkpoints.checkpoint import dtype_name
from matsmerge.checkpoints.companions import add_chat_template, copy_companions, read_object
from matsmerge.checkpoints.safetensors_file import write_tensors
from matsmerge.engine.model_card import make_mergekit_config, make_model_card
from matsmerge.engine.prepared_merge import PreparedMerge
from matsmerge.engine.private_paths import write_paths
from matsmerge.engine.worker import FINAL
from matsmerge.tasks.head_record import HEADS


def write_companions(
    prepared: PreparedMerge, folder: Path, name: str, iteration: int | None
) -> None:
    """Write heads, configuration, tokenizer, card and paths into a model's folder."""
    _write_heads(prepared, folder)
    copy_companions(prepared.companions, folder, _single_dtype(prepared), prepared.config_changes)
    if prepared.vocabulary is not None:
        prepared.vocabulary.edits.apply(folder)
    if prepared.chat_template is not None:
        add_chat_template(prepared.chat_template, folder)
    config = prepared.output.config
    if config is not None:
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    write_paths(prepared, folder)
    name = name.encode(errors="backslashreplace").decode()  # of a folder whose name is no text
    title = name if iteration is FINAL else f"{name}, iteration {iteration}"
    card = make_model_card(prepared, title, *loader_of(folder))
    (folder / "README.md").write_text(card, encoding="utf-8")
    config_for_mergekit = make_mergekit_config(prepared.recipe, prepared.earlier)
    if config_for_mergekit is not None and config is None:
        (folder / "mergekit_config.yml").write_text(config_for_mergekit, encoding="utf-8")


def _write_heads(prepared: PreparedMerge, folder: Path) -> None:
    if prepared.heads_apart:
        (folder / HEADS).mkdir(exist_ok=True)
    for path in prepared.earlier_heads.values():
        shutil.copyfile(path, folder / HEADS / path.name)
    for model in prepared.alignment.models:
        if model.heads:
            tensors = {name: model.checkpoint[name] for name in model.heads}
            record = prepared.head_records[model.name]
            write_tensors(folder / HEADS / f"{model.name}.safetensors", tensors, record.metadata)


def loader_of(folder: Path) -> tuple[str | None, str | None]:
    """The library that loads a folder, and what of it, by its configuration files."""
    if (folder / CONFIG).exists():
        return "peft", "AutoPeftModel"
    if not (folder / "config.json").exists():
        return None, None
    classes = read_object(folder / "config.json").get("architectures")
    name = str(classes[0]) if isinstance(classes, list) and classes else ""
    return "transformers", name if name.isidentifier() else "AutoModel"


def _single_dtype(prepared: PreparedMerge) -> str | None:
    dtypes = {s.dtype for s in prepared.written.values() if s.dtype.is_floating_point}
    return dtype_name(dtypes.pop()) if len(dtypes) == 1 else None
