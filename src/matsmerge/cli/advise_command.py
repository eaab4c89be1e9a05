"""`mats advise`."""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from matsmerge.cli.display import JsonScreen
from matsmerge.cli.field_options import CommandOptions, argument, option, takes_options
from matsmerge.cli.shared_options import Replacing
from matsmerge.errors import RecipeError
from matsmerge.files.output_place import check_file
from matsmerge.limits import MOST_COUNTED

if TYPE_CHECKING:
    from matsmerge import Advice

_MARKS = {"good": "+", "note": "-", "warning": "!"}


class AdviceOptions(CommandOptions):
    """What advice is wanted on."""

    models: list[str] = argument(metavar="MODEL...")
    """The models to merge: files, folders or hub ids, or PEFT adapters' folders; NAME=MODEL to
    name one."""

    base: str | None = option(metavar="MODEL")
    """The model they were fine-tuned from; adapters know theirs."""

    statistics: list[str] = option([], metavar="FILE")
    """What `mats collect` wrote, in the order of the models. Repeat for each. Default:
    statistics.safetensors beside each model, where there is one."""

    data: list[str] = option([], metavar="FILE")
    """A model's data, labelled or not, or a task file (.yaml) that names it; in the order of the
    models. Repeat for each."""

    split: str | None = None
    """Of data with several, such as train: the one to look at."""

    num_examples: int = option(300, ge=1, le=MOST_COUNTED)
    """Of each model's data so many examples are looked at, drawn at random."""

    ignore_tokenizers: bool = False
    """Go on where tokenizers give tokens different ids."""

    out: Path | None = option(short="-o", metavar="FILE")
    """Write the recipe to this file (.yaml)."""


@takes_options
def advise(asked: AdviceOptions, earlier: Replacing, screen: JsonScreen) -> None:
    """Say whether models fit together, what to expect, and how to merge them.

        mats advise tuned/sst2 tuned/trec --base B --out recipe.yaml

    With data, which need no labels, models that are poor or unsure are recognised, and the best
    method can be used:

        mats advise tuned/sst2 tuned/trec --base B --data sst2.jsonl --data trec.jsonl
    """
    import matsmerge
    from matsmerge.checkpoints.public_names import split_name
    from matsmerge.files.whole_outputs import whole_file, writing
    from matsmerge.recipes.recipe import short_names

    if asked.out is not None:
        check_file(asked.out, ".yaml", ".yml", overwrite=earlier.overwrite)
    pairs = [split_name(model) for model in asked.models]
    made = iter(short_names([s for n, s in pairs if not n], [n for n, _ in pairs if n]))
    named = [(name or next(made), source) for name, source in pairs]
    of_split = [{"path": path, "split": asked.split} for path in asked.data]
    if len(dict(named)) < len(named):
        raise RecipeError("two models have the same name; name them apart as in NAME=MODEL")
    with screen.bars() as bars:
        advice = matsmerge.advise(
            dict(named),
            asked.base,
            statistics=asked.statistics or None,
            data=(of_split if asked.split else asked.data) or None,
            num_examples=asked.num_examples,
            ignore_tokenizers=asked.ignore_tokenizers,
            progress=bars,
        )
    screen.notes(advice.notes)
    if asked.out is not None:
        with writing(asked.out), whole_file(asked.out) as file:
            file.write(advice.recipe_text.encode())
    screen.result(advice.as_dict() | {"next": _next_command(asked.out)})
    _show(advice, asked.out, screen)


def _next_command(out: Path | None) -> str:
    return f"mats merge {shlex.quote(str(out or 'recipe.yaml'))} --out merged"


def _show(advice: "Advice", out: Path | None, screen: JsonScreen) -> None:
    names = list(advice.models)
    screen.table(*_model_table(advice))
    screen.say("")
    layers = [
        (layer.name, *(f"{c:.1%}" for c in layer.changes), f"{layer.cosine:.2f}")
        for layer in advice.layers
    ]
    screen.table(("moved, by layer", *names, "mean cosine"), layers)
    screen.say("")
    cosines = [
        (name, *(f"{c:.2f}" for c in row)) for name, row in zip(names, advice.cosines, strict=True)
    ]
    screen.table(("cosines of task vectors", *names), cosines)
    screen.say("", *(f"{_MARKS[f.level]} {f.text}" for f in advice.findings), "")
    screen.say(advice.summary, style="bold")
    screen.say("", advice.recipe_text.rstrip(), "")
    where = "" if out else "save this as recipe.yaml, then "
    screen.next(f"{where}{_next_command(out)}")


def _model_table(advice: "Advice") -> tuple[list[str], Iterator[list[str]]]:
    """A row for each model; columns that no model has anything for are left out."""
    rows = {
        name: {
            "moved": f"{own.change:.1%}",
            "weight": f"{own.weight:g}",
            "Fisher information": "" if own.fisher is None else f"{own.fisher:.2g}",
            **_answer_cells(advice, name),
        }
        for name, own in advice.models.items()
    }
    columns = dict.fromkeys(c for row in rows.values() for c, value in row.items() if value)
    return ["model", *columns], (
        [name, *(row.get(column, "") for column in columns)] for name, row in rows.items()
    )


def _answer_cells(advice: "Advice", name: str) -> dict[str, str]:
    own = advice.models[name].answers
    if own is None:
        return {}
    return {
        "sure": f"{own.confidence:.0%}",
        "commonest answer": f"{own.commonest_share:.0%}",
        "variety": f"{own.variety:.0%}",
        "right": "" if own.accuracy is None else f"{own.accuracy:.0%}",
    }
