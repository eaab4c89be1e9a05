"""One vocabulary for models that have different ones: tokens, rows of embeddings, files.

The output has the tokenizer of one model, with tokens added. A row of a token is each model's own;
a model that lacks the token sees what `tokenizer: tokens:` says, or else the row of the base, or
else the mean of all rows that there are. Then methods run as for any other parameter.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from matsmerge.checkpoints.checkpoint import Checkpoint
from matsmerge.checkpoints.companions import companion_files
from matsmerge.checkpoints.input_file import InputFile, look_at
from matsmerge.checkpoints.source import contained, local_path, open_checkpoint, resolved
from matsmerge.checkpoints.token_rows import TokenRows, num_embedded
from matsmerge.checkpoints.tokenizer_edits import AddedToken, TokenizerEdits, read_token_ids
from matsmerge.checkpoints.tokenizers import (
    TOKENIZER,
    Tokenizer,
    digest_files,
    is_tokenizer_file,
    read_tokenizer,
)
from matsmerge.engine.merge_inputs import Inputs
from matsmerge.errors import CheckpointError, RecipeError, closest
from matsmerge.problems import counted, listed, noted
from matsmerge.recipes.recipe import Recipe
from matsmerge.recipes.tokenizer_spec import MeanRow, TokenizerSpec, TokenRow, TokenRule

_MAX_TOKENS = 1 << 24


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

    def describe(self) -> dict[str, Any]:
        """How many rows come from whom; `rows` lists all that not every model has as its own."""
        names, num_models = self.rows.names, len(self.rows.names)
        own, given = self.rows.own.T.tolist(), self.rows.given.T.tolist()
        by_model: Counter[str] = Counter()
        found = []
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
        """What is decided, and which rows nobody has."""
        rows = self.describe()["rows"]
        nobodys = [repr(one["token"]) for one in rows if not one["given"] and not one["own"]]
        asked = {repr(token) for token, rule in self.rules.items() if rule.source is not None}
        zero = [token for token in nobodys if token not in asked]
        if not zero:
            return list(self.assumed)
        return [
            *self.assumed,
            f"no model has a row for {counted(zero, 'token')}, so that it is zero: "
            f"{listed(zero)}; say where it comes from with tokenizer: tokens:",
        ]


def merge_vocabularies(recipe: Recipe, inputs: Inputs, of: Checkpoint | None) -> MergedVocabulary:
    """The vocabulary that a recipe asks for; `of` is the model whose configuration is written."""
    spec = recipe.tokenizer
    assert spec is not None
    if inputs.view not in ("full", "folded") or inputs.writes_adapter:
        raise RecipeError(
            "tokenizer: is for full models, whose embeddings get other rows; of adapters write one "
            "with output: dense / --output dense"
        )
    found = _Tokenizers(recipe, inputs)
    found.read_all()
    return found.merged(spec, of)


@dataclass
class _Tokenizers:
    """The tokenizers of all models, and what is wrong with them or what is asked of them."""

    recipe: Recipe
    inputs: Inputs
    read: dict[str, Tokenizer] = field(default_factory=dict)  # by the model's name
    sizes: dict[str, int] = field(default_factory=dict)  # rows of each model's embeddings
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    files: list[InputFile] = field(default_factory=list)

    @property
    def models(self) -> dict[str, Checkpoint]:
        base = self.inputs.base
        return dict(self.inputs.models) | ({} if base is None else {"base": base})

    @property
    def first(self) -> str:
        """The model whose tokenizer is that of all which have none."""
        return "base" if self.inputs.base is not None else next(iter(self.inputs.models))

    def read_all(self) -> None:
        """Read those of all models, or raise an error with all that is wrong."""
        models = self.models
        for name in sorted(models, key=lambda name: name != self.first):
            size = num_embedded(models[name])
            if size is None:
                self.problems.append(f"{models[name].label}: has no embeddings to give other rows")
                continue
            self.sizes[name] = size
            with noted(self.problems, CheckpointError):
                tokenizer = self._read(models[name].folder, models[name].label)
                first = self.read.get(self.first)
                if tokenizer is None and first and size == self.sizes[self.first]:
                    self.notes.append(f"{name} has no tokenizer; it is taken to be {self.first}'s")
                    tokenizer = first
                if tokenizer is not None:
                    self.read[name] = tokenizer
                elif name == self.first or first:
                    self.problems.append(
                        f"{models[name].label}: has no tokenizer, by which its {size:,} rows could "
                        "be told; put its tokenizer.json beside it"
                    )
        CheckpointError.raise_all(self.problems)

    def _read(self, folder: Path | None, label: str) -> Tokenizer | None:
        digests = digest_files(folder)
        if folder is None or not digests:
            return None
        self.files += [look_at(contained(folder, name)) for name in digests]
        tokenizer = read_tokenizer(folder, digests)
        if tokenizer.ids is None and not tokenizer.closed:
            return None
        if tokenizer.ids is None:
            raise CheckpointError(
                f"{label}: its tokenizer is in a format that is not looked into "
                f"({', '.join(tokenizer.closed)}); load it with transformers' AutoTokenizer and "
                "save it with save_pretrained, which writes tokenizer.json"
            )
        wrong = [f"{t!r}: {i}" for t, i in tokenizer.ids.items() if not 0 <= i < _MAX_TOKENS]
        CheckpointError.raise_all(
            [f"{label}: ids of tokens are from 0 to {_MAX_TOKENS:,}, found {listed(wrong, 3)}"]
            if wrong
            else []
        )
        return tokenizer

    def ids(self, name: str) -> dict[str, int]:
        """Tokens for which a model has a row."""
        found = self.read[name].ids or {}
        return {token: i for token, i in found.items() if i < self.sizes[name]}

    def _named(self, reference: str) -> str | None:
        """The name of a model as it is given: its name, its path, or mergekit's `model+adapter`."""
        entries = {str(entry.name): entry.model for entry in self.recipe.models}
        if self.recipe.base is not None:
            entries["base"] = self.recipe.base
        base, _, adapter = reference.partition("+")
        for one in filter(None, (reference, adapter, base)):
            for name, model in entries.items():
                if one == name or resolved(one) == resolved(model):
                    return name if name in self.models else None
        return None

    def _source(self, source: str) -> tuple[str | None, Path | None, Tokenizer | None]:
        """The model whose tokenizer the output has, its folder, and the tokenizer."""
        name = self.first if source in ("union", "base") else self._named(source)
        if source == "base" and name != "base":
            self.notes.append(f"there is no base; the tokenizer is that of {name}, the first model")
        if name is not None:
            folder = self.models[name].folder
            if not digest_files(folder):
                folder = self.models[self.first].folder
            return name, folder, self.read[name]
        with noted(self.problems, CheckpointError, before="tokenizer: source: "):
            path = local_path(source)
            folder = path if path.is_dir() else open_checkpoint(source).folder
            tokenizer = self._read(folder, source)
            if tokenizer is None:
                raise CheckpointError(f"{source}: has no tokenizer")
            return None, folder, tokenizer
        return None, None, None

    def merged(self, spec: TokenizerSpec, of: Checkpoint | None) -> MergedVocabulary:
        name, folder, source = self._source(spec.source)
        if source is None or folder is None:
            raise RecipeError(self.problems)
        ids = dict(source.ids or {})
        added = self._added(ids, spec)
        if added and not (folder / TOKENIZER).is_file():
            self.problems.append(
                f"{folder}: has no tokenizer.json to add {added[0].content!r} to; load it with "
                "transformers' AutoTokenizer and save it with save_pretrained"
            )
        num_given = len(source.ids or {})
        if len(ids) > num_given and max((source.ids or {}).values()) + 1 != num_given:
            self.problems.append(
                f"{folder}: ids of its tokens have gaps, so that none can be added to it; choose "
                "another model's with tokenizer: source:"
            )
        rows = self._rows(spec, ids)
        RecipeError.raise_all(self.problems)
        owner = next((n for n, model in self.models.items() if model is of), self.first)
        texts = {i: token for token, i in (self.read[owner].ids or {}).items()}

        def translate(old: int) -> int | None:
            if old in texts:
                return ids.get(texts[old])
            return old if name == owner and old < rows.num_rows else None

        preferred = read_token_ids(folder) if name != owner else {}
        size = self.sizes[owner]
        edits = TokenizerEdits(rows.num_rows, size, tuple(added), translate, preferred)
        files, notes = tuple(self.files), tuple(self.notes)
        return MergedVocabulary(folder, ids, rows, edits, spec.tokens, files, notes)

    def _added(self, ids: dict[str, int], spec: TokenizerSpec) -> list[AddedToken]:
        """Tokens to add to a tokenizer, which get ids: first those of vocabularies proper."""
        found = []
        if spec.source == "union":
            order = sorted(self.read, key=lambda name: name != self.first)
            described = {t: d for n in order[::-1] for t, d in self.read[n].added.items()}
            tokens = [t for n in order for t, _ in sorted(self.ids(n).items(), key=itemgetter(1))]
            plain = [t for t in tokens if t not in described and t not in ids]
            known = self.read[self.first].added
            special = [t for t in tokens if t in described and t not in known]
            for token in dict.fromkeys([*plain, *special]):
                id_ = ids.setdefault(token, len(ids))
                found.append(AddedToken.of(token, id_, described.get(token, {})))
        for token in spec.tokens:
            if token not in ids:
                ids[token] = len(ids)
                found.append(AddedToken.of(token, ids[token], {}))
        return found

    def _rows(self, spec: TokenizerSpec, ids: Mapping[str, int]) -> TokenRows:
        names = tuple(self.models)
        num_rows = max(ids.values()) + 1
        multiple = spec.pad_to_multiple_of or 1
        num_rows = -(-num_rows // multiple) * multiple
        own = torch.full((len(names), num_rows), -1)
        places = torch.tensor(list(ids.values()))
        for number, name in enumerate(names):
            known = self.ids(name)
            own[number, places] = torch.tensor([known.get(token, -1) for token in ids])
        given = own.clone()
        if self.inputs.base is not None:
            at = names.index("base")
            others = [number for number in range(len(names)) if number != at]
            given[others] = given[others].masked_fill(own[at] >= 0, -1)
        is_padding = torch.ones(num_rows, dtype=torch.bool)
        is_padding[places] = False
        is_forced = torch.zeros(num_rows, dtype=torch.bool)
        for token, rule in spec.tokens.items():
            row, source = ids[token], rule.source
            is_forced[row] = rule.force
            if isinstance(source, MeanRow):
                given[:, row] = own[:, row]
            elif source is not None:
                given[:, row] = -1
            if isinstance(source, (TokenRow, str)):
                with noted(self.problems, RecipeError, before=f"tokenizer: tokens: {token!r}: "):
                    model, place = self._place(token, source)
                    given[names.index(model), row] = place
        own[:, is_forced] = -1
        sizes = tuple(self.sizes[name] for name in names)
        return TokenRows(names, sizes, own, given, is_padding)

    def _place(self, token: str, source: TokenRow | str) -> tuple[str, int]:
        """A model, and its row that a rule means."""
        reference = source if isinstance(source, str) else source.model
        name = self._named(reference)
        if name is None:
            known = closest(reference, self.models)
            raise RecipeError(f"there is no model '{reference}'{known}")
        if isinstance(source, TokenRow) and source.token_id is not None:
            if source.token_id >= self.sizes[name]:
                raise RecipeError(
                    f"{name} has {self.sizes[name]:,} rows, and none for id {source.token_id}"
                )
            return name, source.token_id
        wanted = token if isinstance(source, str) else str(source.token)
        known = self.ids(name)
        if wanted not in known:
            raise RecipeError(f"{name} has no row for a token {wanted!r}")
        return name, known[wanted]
