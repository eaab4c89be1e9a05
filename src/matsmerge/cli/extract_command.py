"""`mats extract-lora`."""

from pathlib import Path

from matsmerge.cli.display import JsonScreen
from matsmerge.cli.field_options import CommandOptions, argument, option, takes_options
from matsmerge.cli.merge_display import show_energies, show_what_is_next
from matsmerge.cli.shared_options import Replacing
from matsmerge.limits import MOST_RANK


class Extraction(CommandOptions):
    """What to extract, and where to."""

    model: str = argument()
    """A full model: folder, or hub id with an optional @revision."""

    base: str = option(..., metavar="MODEL")
    """The model it was fine-tuned from."""

    rank: int = option(..., ge=1, le=MOST_RANK)
    """Rank of the LoRA."""

    modules: list[str] = option([], metavar="PATTERN")
    """Modules to factor, e.g. '*.q_proj'. Repeatable. Default: all linear ones that changed."""

    keep_rest: bool = False
    """Bring what else changed whole: norms, embeddings (modules_to_save), biases."""

    dtype: str | None = option(metavar="DTYPE")
    """Dtype of the adapter. Default: the model's."""

    out: Path = option(..., short="-o", metavar="FOLDER")
    """Folder to write the adapter to."""


@takes_options
def extract_lora(asked: Extraction, earlier: Replacing, screen: JsonScreen) -> None:
    """Write the difference of two full models as a LoRA that PEFT loads.

        mats extract-lora finetuned --base pretrained --rank 32 --out lora

    Each layer's change is replaced by the nearest one of that rank (singular value
    decomposition); how much of it that keeps is shown, and in merge.json for each layer.
    """
    import matsmerge
    from matsmerge.engine.machine import keep_freed_memory

    keep_freed_memory()
    with screen.bars() as bars:
        made = matsmerge.extract_lora(
            asked.model,
            asked.base,
            asked.rank,
            modules=asked.modules,
            keep_rest=asked.keep_rest,
            dtype=asked.dtype,
            out=asked.out,
            executor=matsmerge.LocalExecutor(fork=True),
            progress=bars,
            overwrite=earlier.overwrite,
        )
    layers = made.report["lora"]
    screen.result({"out": str(asked.out), "layers": layers, "notes": list(made.notes)})
    screen.notes(made.notes)
    show_energies(layers, screen)
    screen.say(f"the LoRA is in {asked.out}")
    show_what_is_next(made, asked.out, screen)
