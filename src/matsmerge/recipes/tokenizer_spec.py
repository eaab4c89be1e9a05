"""The tokenizer of a merge: whose it is, and where rows of embeddings come from.

Accepts what mergekit has under `tokenizer` and `tokenizer_source`.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from matsmerge.limits import MOST_PADDED


def _as_reference(value: Any) -> Any:
    """Mergekit's `{model: {path: X, revision: Y}}` as `X@Y`."""
    if isinstance(value, Mapping) and value.keys() == {"model"}:
        value = value["model"]
    if isinstance(value, Mapping) and "path" in value and value.keys() <= {"path", "revision"}:
        return f"{value['path']}@{value['revision']}" if value.get("revision") else value["path"]
    return value


ModelName = Annotated[str, BeforeValidator(_as_reference, json_schema_input_type=str)]


class _SpecPart(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ZeroRow(_SpecPart):
    """A row of zeros."""

    kind: Literal["zero"]


class MeanRow(_SpecPart):
    """The mean of the rows that models have for the token."""

    kind: Literal["mean"]


class TokenRow(_SpecPart):
    """A model's row of another token."""

    kind: Literal["model_token"]
    model: ModelName = Field(description="the model, by its name or as it is given; or base")
    token: str | None = Field(None, description="the token's text")
    token_id: Annotated[int, Field(strict=True, ge=0)] | None = Field(
        None, description="its id in that model, instead of its text"
    )

    @model_validator(mode="after")
    def _says_one(self) -> "TokenRow":
        if (self.token is None) == (self.token_id is None):
            raise ValueError("expected either token or token_id")
        return self


class TokenRule(_SpecPart):
    """Where the row of a token comes from, for models that lack it or for all."""

    source: (
        Annotated[ZeroRow | MeanRow | TokenRow, Field(discriminator="kind")] | ModelName | None
    ) = Field(
        None,
        description="a model that has the token, or a row by its kind; by default the base's, or "
        "else the mean of those that have it",
    )
    force: bool = Field(False, description="for all models, not only for those that lack it")


class TokenizerSpec(_SpecPart):
    """The tokenizer of the output, to whose ids the rows of all embeddings are brought."""

    source: ModelName = Field(
        "union", description="union of all models' tokens, base, or a model whose tokenizer to take"
    )
    tokens: Annotated[
        dict[str, TokenRule], BeforeValidator(lambda value: {} if value is None else value)
    ] = Field(default_factory=dict, description="where rows of single tokens come from")
    pad_to_multiple_of: Annotated[int, Field(strict=True, ge=1, le=MOST_PADDED)] | None = Field(
        None, description="embeddings get so many rows that this divides them"
    )

    @model_serializer(mode="wrap")
    def _with_source(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Said even where it is the default, since nothing else might be."""
        return {"source": self.source, **handler(self)}


def as_tokenizer_spec(value: Any) -> Any:
    """Accept a source alone in place of a mapping."""
    is_source = isinstance(value, str) or _as_reference(value) is not value
    return {"source": value} if is_source else value
