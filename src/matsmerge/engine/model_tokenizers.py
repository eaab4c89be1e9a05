"""The tokenizers of the models to merge, and the rows that their embeddings have."""

from dataclasses import dataclass, field
from pathlib import Path

from matsmerge.checkpoints.checkpoint import Checkpoint
from matsmerge.checkpoints.input_file import InputFile, look_at
from matsmerge.checkpoints.source import contained, local_path, open_checkpoint, resolved
from matsmerge.checkpoints.token_rows import num_embedded
from matsmerge.checkpoints.tokenizers import Tokenizer, digest_files, read_tokenizer
from matsmerge.engine.merge_inputs import MergeInputs
from matsmerge.errors import CheckpointError, RecipeError, closest
from matsmerge.problems import listed, noted
from matsmerge.recipes.recipe import Recipe
from matsmerge.recipes.tokenizer_spec import TokenRow

_MAX_TOKENS = 1 << 24


@dataclass
class ModelTokenizers:
    """The tokenizers of all models, by name; that of the base as `base`."""

    recipe: Recipe
    inputs: MergeInputs
    read: dict[str, Tokenizer] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)  # rows of each model's embeddings
    notes: list[str] = field(default_factory=list)
    files: list[InputFile] = field(default_factory=list)

    @property
    def models(self) -> dict[str, Checkpoint]:
        base = self.inputs.base
        return dict(self.inputs.models) | ({} if base is None else {"base": base})

    @property
    def first(self) -> str:
        """The model whose tokenizer others are taken to have that have none: the base, if any."""
        return "base" if self.inputs.base is not None else next(iter(self.inputs.models))

    @property
    def order(self) -> list[str]:
        """All models, the first of them first."""
        return sorted(self.models, key=lambda name: name != self.first)

    def read_all(self) -> None:
        """Read those of all models, or raise an error with all that is wrong."""
        problems: list[str] = []
        for name in self.order:
            label, folder = self.models[name].label, self.models[name].folder
            size = num_embedded(self.models[name])
            if size is None:
                problems.append(f"{label}: has no embeddings to give other rows")
                continue
            self.sizes[name] = size
            with noted(problems, CheckpointError):
                tokenizer = self._read(folder, label)
                if tokenizer is None and size == self.sizes.get(self.first):
                    tokenizer = self.read.get(self.first)
                    self.notes.append(f"{name} has no tokenizer; it is taken to be {self.first}'s")
                if tokenizer is None:
                    raise CheckpointError(
                        f"{label}: has no tokenizer, which would say what its {size:,} rows mean; "
                        "put its tokenizer.json beside it"
                    )
                self.read[name] = tokenizer
        CheckpointError.raise_all(problems)

    def _read(self, folder: Path | None, label: str) -> Tokenizer | None:
        digests = digest_files(folder)
        if folder is None or not digests:
            return None
        self.files += [look_at(contained(folder, name)) for name in digests]
        tokenizer = read_tokenizer(folder, digests)
        if tokenizer.closed:
            raise CheckpointError(
                f"{label}: its tokenizer is in a format that is not looked into "
                f"({', '.join(tokenizer.closed)}); load it with transformers' AutoTokenizer and "
                "save it with save_pretrained, which writes tokenizer.json"
            )
        ids = tokenizer.ids or {}
        wrong = [f"{token!r}: {i}" for token, i in ids.items() if not 0 <= i < _MAX_TOKENS]
        if wrong:
            expected = f"expected ids of tokens from 0 to {_MAX_TOKENS - 1:,}"
            raise CheckpointError(f"{label}: {expected}, found {listed(wrong, 3)}")
        return tokenizer if ids else None

    def ids(self, name: str) -> dict[str, int]:
        """Tokens for which a model has a row."""
        found = self.read[name].ids or {}
        return {token: i for token, i in found.items() if i < self.sizes[name]}

    def name_of(self, reference: str) -> str | None:
        """A model by its name, as it is given in the recipe, or as mergekit's `model+adapter`."""
        given = {str(entry.name): entry.model for entry in self.recipe.models}
        given |= {} if self.inputs.base is None else {"base": self.inputs.base.label}
        model, _, adapter = reference.partition("+")
        for one in filter(None, (reference, adapter, model)):
            for name, source in given.items():
                if one == name or resolved(one) == resolved(source):
                    return name
        return None

    def source(self, source: str) -> tuple[str | None, Path, Tokenizer]:
        """The model whose tokenizer the output has, its folder, and the tokenizer.

        A tokenizer may also be that of no model.
        """
        name = self.first if source in ("union", "base") else self.name_of(source)
        if source == "base" and name != "base":
            self.notes.append(f"there is no base; the tokenizer is that of {name}, the first model")
        if name is not None:
            own = self.models[name].folder
            folder = own if digest_files(own) else self.models[self.first].folder
            assert folder is not None, "tokenizers have been read"
            return name, folder, self.read[name]
        path = local_path(source)
        found = path if path.is_dir() else open_checkpoint(source).folder
        tokenizer = self._read(found, source)
        if found is None or tokenizer is None:
            raise CheckpointError(f"{source}: has no tokenizer")
        return None, found, tokenizer

    def place(self, token: str, source: TokenRow | str) -> tuple[str, int]:
        """A model, and the row of it that a rule for a token means."""
        reference = source if isinstance(source, str) else source.model
        name = self.name_of(reference)
        if name is None:
            raise RecipeError(f"there is no model '{reference}'{closest(reference, self.models)}")
        if isinstance(source, TokenRow) and source.token_id is not None:
            if source.token_id >= self.sizes[name]:
                num = self.sizes[name]
                raise RecipeError(f"{name} has {num:,} rows, and none for id {source.token_id}")
            return name, source.token_id
        wanted = token if isinstance(source, str) else str(source.token)
        known = self.ids(name)
        if wanted not in known:
            raise RecipeError(f"{name} has no row for a token {wanted!r}")
        return name, known[wanted]
