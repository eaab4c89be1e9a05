"""`mats export`."""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from matsmerge.cli.display import JsonScreen
from matsmerge.cli.field_options import CommandOptions, argument, option, takes_options
from matsmerge.cli.shared_options import Replacing
from matsmerge.errors import RecipeError

if TYPE_CHECKING:
    from matsmerge.models.model_folder import ModelFolder

# The values that vLLM takes for its limit on ranks (`MaxLoRARanks` in vllm/config/lora.py).
_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_VLLM_DEFAULT = 16


class Exported(CommandOptions):
    """What to export, and where to."""

    model: str = argument()
    """A merged model, or any other: folder or hub id, or a PEFT adapter's."""

    task: str | None = option(short="-t", metavar="NAME")
    """Whose head to put on it, one of the files in heads/."""

    out: Path | None = option(short="-o", metavar="FOLDER")
    """Folder to write. An adapter is folded into its base."""

    dtype: str | None = option(metavar="DTYPE")
    """Dtype of the model. Default: as stored."""

    gguf: bool = False
    """Write nothing; print the command of llama.cpp that makes a GGUF file of it."""

    vllm: bool = False
    """Write nothing; print the command with which vLLM serves it."""


@takes_options
def export(asked: Exported, earlier: Replacing, screen: JsonScreen) -> None:
    """Write a model as a folder that transformers understands by itself.

        mats export merged --task amazon --out amazon

    The folder has the head and the labels of one task, and can be given to
    `AutoModelForSequenceClassification.from_pretrained` and to `pipeline`. Programs that run
    language models read a merged model as it is; their commands are printed with:

        mats export merged --gguf

        mats export merged --vllm
    """
    import matsmerge

    if asked.gguf or asked.vllm:
        if asked.out is not None or asked.task is not None:
            raise RecipeError("--gguf and --vllm print a command; leave out --out and --task")
        commands, notes = _commands(asked)
        screen.notes(notes)
        screen.result({"commands": commands, "notes": notes})
        screen.say(*commands)
        return
    if asked.out is None:
        raise RecipeError("say where to write with --out, or use --gguf or --vllm")
    with screen.status(f"loading {asked.model}"):
        out = matsmerge.export(
            asked.model, asked.out, asked.task, dtype=asked.dtype, overwrite=earlier.overwrite
        )
    screen.result({"out": str(out), "task": asked.task})
    of = f", for the task {asked.task}," if asked.task else ""
    screen.say(f"the model{of} is in {out}; transformers loads it without matsmerge")
    screen.next(f'transformers.pipeline(model="{out}") in Python')


def _commands(asked: Exported) -> tuple[list[str], list[str]]:
    """The commands of other programs for a model, and what to know of them."""
    from matsmerge.models.model_folder import open_model

    opened = open_model(asked.model)
    commands: list[str] = []
    notes: list[str] = []
    for wanted, find in ((asked.gguf, _gguf), (asked.vllm, _vllm)):
        if wanted:
            command, *said = find(opened)
            commands.append(command)
            notes += said
    return commands, notes


def _gguf(opened: "ModelFolder") -> Iterator[str]:
    # Whole paths, since the program is run in a folder of its own.
    folder, base = (str(Path(str(c.folder)).resolve()) for c in (opened.checkpoint, opened.base))
    name = Path(opened.source).name
    written = ("--outfile", f"{name}.gguf", "--outtype", "auto")
    if opened.adapter is None:
        yield shlex.join(["python", "convert_hf_to_gguf.py", folder, *written])
        yield (
            "run it in a clone of llama.cpp; smaller files are made of this one by llama-quantize"
        )
        return
    yield shlex.join(["python", "convert_lora_to_gguf.py", folder, "--base", base, *written])
    yield (
        "run it in a clone of llama.cpp; the file is given to llama-server with --lora, beside "
        "the base, which convert_hf_to_gguf.py converts. For one file of both write the full "
        "model first: mats export MODEL --out FOLDER"
    )


def _vllm(opened: "ModelFolder") -> Iterator[str]:
    folder, name = str(opened.checkpoint.folder), Path(opened.source).name
    if opened.adapter is None:
        yield shlex.join(["vllm", "serve", folder])
        return
    content = opened.adapter.config.content
    rank = max([content.get("r") or 0, *(content.get("rank_pattern") or {}).values()])
    if not rank or rank > _VLLM_RANKS[-1]:
        found = f"has rank {rank}" if rank else "is no LoRA"
        raise RecipeError(
            f"{opened.label}: {found}, and vLLM takes LoRAs of rank {_VLLM_RANKS[-1]} at most; "
            "merge again with a smaller --rank or with --output dense, or write the full model "
            "with mats export MODEL --out FOLDER"
        )
    limit = next(r for r in _VLLM_RANKS if r >= rank)
    serve = ("vllm", "serve", opened.base.label, "--enable-lora")
    which = ("--lora-modules", f"{name}={folder}", "--max-lora-rank", str(limit))
    yield shlex.join([*serve, *which])
    if rank > _VLLM_DEFAULT:
        yield (
            f"the LoRA has rank {rank}, more than the {_VLLM_DEFAULT} that vLLM allows unless "
            "told: by default the rank of a merged LoRA is the sum of its adapters' ranks, and "
            "--rank in mats merge makes it smaller"
        )
