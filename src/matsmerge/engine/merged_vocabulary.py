"""One vocabulary for models that have different ones: tokens, rows of embeddings, files.

The output has the tokenizer of one model, with tokens added. A row of a token is each model's own;
a model that lacks the token sees what `tokenizer: tokens:` says, or else the row of the base, or
else the mean of all rows that there are. Then methods run as for any other parameter.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from matsmerge.checkpoints.checkpoint import Checkpoint
from matsmerge.checkpoints.companions import companion_files
from matsmerge.checkpoints.input_file import InputFile
from matsmerge.checkpoints.token_rows import TokenRows
from matsmerge.checkpoints.tokenizer_edits import AddedToken, TokenizerEdits, read_token_ids
from matsmerge.checkpoints.tokenizers import TOKENIZER, is_tokenizer_file
from matsmerge.engine.merge_inputs import MergeInputs
from matsmerge.engine.model_tokenizers import ModelTokenizers
from matsmerge.errors import RecipeError
from matsmerge.problems import counted, listed, noted, reworded
from matsmerge.recipes.recipe import Recipe
from matsmerge.recipes.tokenizer_spec import MeanRow, TokenizerSpec, TokenRow, TokenRule


@dataclass(frozen=True)
class MergedVocabulary:
    """The tokens of the output, and where the rows of its embeddings come from."""

    folder: Path  # whose tokenizer it is
    tokens: Mapping[str, int]
    rows: TokenRows
    edits: TokenizerEdits
    rules: Mapping[str, TokenRule]  # of single tokens
    files: tuple[InputFile, ...]  # of all tokenizers
    assumed: tuple[str, ...]  # what was decided about tokenizers without being asked

    def companions(self, others: Iterable[Path]) -> tuple[Path, ...]:
        """The files beside the weights, with this tokenizer's in place of another."""
        kept = [path for path in others if not is_tokenizer_file(path.name)]
        own = [path for path in companion_files(self.folder) if is_tokenizer_file(path.name)]
        return *kept, *own

    def view_rows(
        self, everyone: Mapping[str, Checkpoint], tables: Mapping[str, Mapping[str, str]]
    ) -> dict[str, Checkpoint]:
        """All models with the rows of this vocabulary."""
        if self.rows.changes_nothing:
            return dict(everyone)
        return self.rows.view(everyone, tables, self.files)

    def view_inputs(self, inputs: MergeInputs) -> MergeInputs:
        """The same by the names of the models' own files, for a stack, which gives others."""
        base = {} if inputs.base is None else {"base": inputs.base}
        everyone = {**inputs.models, **base}
        tables = {m: {n: n for n in c.specs} | dict(c.aliases) for m, c in everyone.items()}
        views = self.view_rows(everyone, tables)
        return replace(inputs, base=views.pop("base", None), models=views)

    def describe(self) -> dict[str, Any]:
        """How many rows come from whom; `rows` lists all that not every model has as its own."""
        names, num_models = self.rows.names, len(self.rows.names)
        own, given = self.rows.own.T.tolist(), self.rows.given.T.tolist()
        by_model: Counter[str] = Counter()
        found: list[dict[str, Any]] = []
        for token, row in sorted(self.tokens.items(), key=itemgetter(1)):
            has, gives = (
                {n: at for n, at in zip(names, rows[row], strict=True) if at >= 0}
                for rows in (own, given)
            )
            if len(has) < num_models:
                by_model.update(list(gives) if len(gives) == 1 else ())
                found.append({"row": row, "token": token, "own": has, "given": gives})
        return {
            "num_rows": self.rows.num_rows,
            "num_tokens": len(self.tokens),
            "in_all_models": len(self.tokens) - len(found),
            "given_by": dict(by_model),
            "averaged": sum(len(one["given"]) > 1 for one in found),
            "zero": sum(not one["given"] for one in found),
            "padding": int(self.rows.is_padding.sum()),
            "rows": found,
        }

    @property
    def notes(self) -> list[str]:
        """What is decided without being asked."""
        has, gives = (rows.T.max(1).values >= 0 for rows in (self.rows.own, self.rows.given))
        is_zero = (~has & ~gives).tolist()
        ruled = {token for token, rule in self.rules.items() if rule.source is not None}
        zero = [repr(t) for t, row in self.tokens.items() if is_zero[row] and t not in ruled]
        said = (
            f"no model has a row for {counted(zero, 'token')}, so that it is zero: {listed(zero)}; "
            "say where it comes from with tokenizer: tokens:"
        )
        return [*self.assumed, *([said] if zero else [])]


def merge_vocabularies(
    recipe: Recipe, inputs: MergeInputs, of: Checkpoint | None
) -> MergedVocabulary:
    """The vocabulary that a recipe asks for; `of` is the model whose configuration is written."""
    spec = recipe.tokenizer
    assert spec is not None
    if inputs.view not in ("full", "folded") or inputs.writes_adapter:
        raise RecipeError(
            "tokenizer: is for full models, whose embeddings get other rows; of adapters write one "
            "with output: dense / --output dense"
        )
    models = ModelTokenizers(recipe, inputs)
    models.read_all()
    with reworded(before="tokenizer: source: "):
        name, folder, source = models.source(spec.source)
    given = source.ids or {}
    tokens = dict(given)
    added = _add_tokens(tokens, spec, models)
    problems = []
    if added and not (folder / TOKENIZER).is_file():
        problems.append(
            f"{folder}: has no tokenizer.json to add {added[0].content!r} to; load it with "
            "transformers' AutoTokenizer and save it with save_pretrained"
        )
    if len(tokens) > len(given) and max(given.values()) + 1 != len(given):
        problems.append(
            f"{folder}: ids of its tokens have gaps, so that none can be added to it; choose "
            "another model's with tokenizer: source:"
        )
    rows = _find_rows(tokens, spec, models, problems)
    RecipeError.raise_all(problems)
    owner = next((n for n, model in models.models.items() if model is of), models.first)
    own_ids = models.read[owner].ids or {}
    # Rows without a token keep their places where the tokenizer stays the same.
    unused = range(rows.num_rows) if name == owner else ()
    new_ids: dict[int, int | None] = {i: i for i in unused}
    new_ids |= dict.fromkeys(own_ids.values())
    new_ids |= {i: tokens[token] for token, i in own_ids.items() if token in tokens}
    edits = TokenizerEdits(
        rows.num_rows,
        models.sizes[owner],
        tuple(added),
        new_ids,
        read_token_ids(folder) if name != owner else {},
    )
    files, notes = tuple(models.files), tuple(models.notes)
    return MergedVocabulary(folder, tokens, rows, edits, spec.tokens, files, notes)


def _add_tokens(
    tokens: dict[str, int], spec: TokenizerSpec, models: ModelTokenizers
) -> list[AddedToken]:
    """Give ids to tokens that a tokenizer lacks: first those of other vocabularies proper."""
    found = []
    if spec.source == "union":
        order, own = models.order, models.read
        described = {t: flags for name in order[::-1] for t, flags in own[name].added.items()}
        known = [t for n in order for t, _ in sorted(models.ids(n).items(), key=itemgetter(1))]
        plain = [t for t in known if t not in described and t not in tokens]
        apart = [t for t in known if t in described and t not in own[models.first].added]
        for token in dict.fromkeys([*plain, *apart]):
            place = tokens.setdefault(token, len(tokens))
            found.append(AddedToken.of(token, place, described.get(token, {})))
    for token in spec.tokens:
        if token not in tokens:
            tokens[token] = len(tokens)
            found.append(AddedToken.of(token, tokens[token], {}))
    return found


def _find_rows(
    tokens: Mapping[str, int], spec: TokenizerSpec, models: ModelTokenizers, problems: list[str]
) -> TokenRows:
    names = tuple(models.models)
    multiple = spec.pad_to_multiple_of or 1
    num_rows = -(-(max(tokens.values()) + 1) // multiple) * multiple
    own = torch.full((len(names), num_rows), -1)
    places = torch.tensor(list(tokens.values()))
    for number, name in enumerate(names):
        known = models.ids(name)
        own[number, places] = torch.tensor([known.get(token, -1) for token in tokens])
    given = own.clone()
    if "base" in names:
        others = [number for number, name in enumerate(names) if name != "base"]
        given[others] = given[others].masked_fill(own[names.index("base")] >= 0, -1)
    is_padding = torch.ones(num_rows, dtype=torch.bool)
    is_padding[places] = False
    is_forced = torch.zeros(num_rows, dtype=torch.bool)
    for token, rule in spec.tokens.items():
        row, source = tokens[token], rule.source
        is_forced[row] = rule.force
        if source is not None:
            given[:, row] = own[:, row] if isinstance(source, MeanRow) else -1
        if isinstance(source, (TokenRow, str)):
            with noted(problems, RecipeError, before=f"tokenizer: tokens: {token!r}: "):
                model, place = models.place(token, source)
                given[names.index(model), row] = place
    own[:, is_forced] = -1
    return TokenRows(names, tuple(models.sizes[n] for n in names), own, given, is_padding)
