"""`mats mergekit`, which takes the command lines of mergekit-yaml and mergekit-multi."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from matsmerge.byte_sizes import parse_bytes
from matsmerge.cli.display import Screen
from matsmerge.cli.field_options import CommandOptions, argument, flag_of, option, takes_options
from matsmerge.cli.merge_command import check_memory
from matsmerge.cli.merge_display import show_what_is_next
from matsmerge.errors import RecipeError
from matsmerge.limits import MOST_COUNTED, NUM_SEEDS
from matsmerge.problems import counted

if TYPE_CHECKING:
    from matsmerge import Recipe


class PlaceOptions(CommandOptions):
    """What to merge, and where to."""

    config_file: Path = argument()
    """mergekit's YAML (or a recipe of ours), with one or several documents."""

    out: Path | None = argument(None)
    """Folder to write the merged model to."""

    out_path: Path | None = None
    """The same, as mergekit-multi has it."""

    intermediate_dir: Path | None = option(short="-I")
    """Folder to keep results of documents that have a name. Default: they are deleted."""

    resume: bool = False
    """Continue an earlier run that was interrupted."""


class Flags(CommandOptions):
    """Flags of mergekit that have a meaning here."""

    panel = "Flags of mergekit"

    out_shard_size: str = option("5B", metavar="SIZE")
    """Largest file to write, in bytes: 500M, 5B."""

    random_seed: int | None = option(ge=0, lt=NUM_SEEDS)
    """Seed of methods that choose at random."""

    num_threads: int | None = option(short="-j", ge=1, le=MOST_COUNTED)
    """Jobs at once."""

    transformers_cache: Path | None = None
    """Where downloaded models are kept."""

    unsafe_truncate_embeddings: bool | None = None
    """Rows of embeddings are those of the base's tokenizer, as with tokenizer: {source: base}."""

    lazy: bool | None = None
    """Results of named documents that are there are used again; they always are, if unchanged."""


class Ignored(CommandOptions):
    """Flags of mergekit without a meaning here; each is noted."""

    panel = "Flags of mergekit that change nothing here"

    allow_crimes: bool | None = None
    """Models are compared by their tensors."""

    trust_remote_code: bool | None = None
    """No code of models is run."""

    lora_merge_cache: str | None = None
    """Adapters are folded in as they are read."""

    lora_merge_dtype: str | None = None
    """Adapters are folded in with more digits than are stored."""

    cuda: bool | None = None
    """The processor computes."""

    device: str | None = None
    """The processor computes."""

    low_cpu_memory: bool | None = None
    """Models are read a block at a time."""

    lazy_unpickle: bool | None = None
    """Models are read a block at a time."""

    read_to_gpu: bool | None = None
    """The processor computes."""

    multi_gpu: bool | None = None
    """The processor computes."""

    gpu_rich: bool = False
    """The processor computes."""

    async_write: bool | None = None
    """Writing always goes on beside computing."""

    write_threads: int | None = option(ge=1, le=MOST_COUNTED)
    """Writing always goes on beside computing."""

    copy_tokenizer: bool | None = None
    """The tokenizer is always copied."""

    clone_tensors: bool | None = None
    """A layer may always occur several times."""

    write_model_card: bool | None = None
    """The card is always written."""

    safe_serialization: bool | None = None
    """Always safetensors."""

    verbose: bool = option(False, short="-v")
    """Notes are always shown."""

    no_quiet: bool = False
    """Notes are always shown."""

    def notes(self) -> Iterator[str]:
        """What to say of flags that were given, but for those that ask for what is done anyway."""
        kept = ("copy_tokenizer", "write_model_card", "safe_serialization", "verbose", "no_quiet")
        for name, field in type(self).model_fields.items():
            given = getattr(self, name)
            if given not in (None, False) and name not in kept:
                yield f"{flag_of(name)}: {field.description}"
            elif given is False and name in kept[:3]:
                yield f"--no-{name.replace('_', '-')}: {field.description}"


@takes_options
def mergekit(place: PlaceOptions, flags: Flags, ignored: Ignored, screen: Screen) -> None:
    """Merge as mergekit does, from its YAML with its flags.

        mats mergekit recipe.yml merged --copy-tokenizer --lazy-unpickle

        mats mergekit several.yml --out-path merged --intermediate-dir others

    An earlier merge in the output folder is replaced, as mergekit does it.
    """
    import matsmerge
    from matsmerge.engine.machine import keep_freed_memory
    from matsmerge.recipes.recipe_file import read_recipes
    from matsmerge.recipes.tokenizer_spec import TokenizerSpec

    if flags.transformers_cache is not None:
        os.environ["HF_HUB_CACHE"] = str(flags.transformers_cache)
    recipes, notes = read_recipes(place.config_file)
    if flags.unsafe_truncate_embeddings:
        own = {"tokenizer": TokenizerSpec(source="base")}
        recipes = [r if r.tokenizer else r.model_copy(update=own) for r in recipes]
        notes = [
            *notes,
            "--unsafe-truncate-embeddings: no rows are cut off blindly; they are those of the "
            "base's tokenizer, as with tokenizer: {source: base}",
        ]
    if flags.random_seed is not None:
        recipes = [_seeded(recipe, flags.random_seed) for recipe in recipes]
    out = place.out or place.out_path
    if out is None and place.intermediate_dir is not None and recipes[-1].name is not None:
        out = place.intermediate_dir / recipes[-1].name
    if out is None:
        raise RecipeError("say where to write the merged model: OUT, or --out-path")
    keep_freed_memory()
    executor = matsmerge.LocalExecutor(flags.num_threads, fork=True)
    planned = matsmerge.plan(recipes)
    screen.notes([*ignored.notes(), *notes, *planned.notes])
    check_memory(planned, executor)
    with screen.bars() as bars:
        merged = planned.merge(
            out,
            executor=executor,
            progress=bars,
            overwrite=True,
            resume=place.resume,
            max_shard_bytes=_parse_size(flags.out_shard_size),
            intermediates=place.intermediate_dir,
        )
    screen.say(f"{counted(planned.recipe.models, 'model')} merged into {out}")
    show_what_is_next(merged, out, screen)


def _parse_size(text: str) -> int:
    """Bytes as mergekit writes them, with B for a billion; other sizes as everywhere here."""
    found = re.fullmatch(r"([0-9]+)([kmb]?)", text.strip().lower())
    if found is None:
        return parse_bytes(text)
    return int(found[1]) * {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}[found[2]]


def _seeded(recipe: "Recipe", seed: int) -> "Recipe":
    """A recipe whose method, if it chooses at random, does so by a seed."""
    from matsmerge.methods import METHODS
    from matsmerge.recipes.recipe import make_recipe

    data = recipe.model_dump(mode="json", exclude_defaults=True)
    for part in (data, *data.get("overrides", ())):
        method = part.get("method") or {}
        if "seed" in METHODS[method.get("name", recipe.method.name)].model_fields:
            part["method"] = {**method, "seed": seed}
    return make_recipe(data)
