"""Parts of a recipe: its models, and what is different for some parameters."""

from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from matsmerge.methods.site import Shares
from matsmerge.recipes.method_spec import WrittenMethod, as_plain
from matsmerge.recipes.model_data import ModelData, as_model_data
from matsmerge.recipes.stack import LayerRange, Patterns

# A number, or numbers spread evenly over the depth of the network.
Number = Annotated[float, Field(allow_inf_nan=False)]
Depthwise = Number | Annotated[list[Number], Field(min_length=1)]
SHARES = tuple(field.name for field in fields(Shares))  # what models may have of their own


class ModelEntry(BaseModel, extra="forbid", frozen=True):
    """One model: where it is, what to call it, and how much it counts."""

    model: str = Field(description="a file, a folder, or a hub id with an optional @revision")
    name: str | None = Field(
        None, pattern=r"^[\w.-]+$", description="a short name; by default from the path"
    )
    weight: Depthwise = Field(1.0, description="how much this model counts")
    density: Depthwise | None = Field(
        None, description="this model's own density, for methods that have one"
    )
    gamma: Depthwise | None = Field(
        None, description="this model's own share of outliers to drop, for breadcrumbs"
    )
    epsilon: Depthwise | None = Field(
        None, description="this model's own width of probabilities around the density, for della"
    )
    importance: Depthwise | None = Field(
        None,
        description="how much more this model counts in the systems of mats than in its init, "
        "for which its weight counts",
    )
    statistics: str | None = Field(
        None,
        description="what `mats collect` wrote of this model; by default statistics.safetensors "
        "beside it, for methods that need it",
    )
    data: Annotated[
        ModelData | None,
        BeforeValidator(as_model_data, json_schema_input_type=str | ModelData | None),
    ] = Field(
        None,
        description="this model's data, or a task file, for methods with inputs: merged; a path, "
        "or a path with options",
    )


class ModelOverride(BaseModel, extra="forbid", frozen=True):
    """What is different for one model."""

    weight: Depthwise | None = None
    density: Depthwise | None = None
    gamma: Depthwise | None = None
    epsilon: Depthwise | None = None
    importance: Depthwise | None = None


class Override(BaseModel):
    """What is different for the parameters whose names match. Later overrides win.

    With `layers` it is for those of these layers only, over which lists of numbers are spread.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        json_schema_extra={"anyOf": [{"required": ["match"]}, {"required": ["layers"]}]},
    )

    match: Patterns = Field(
        default_factory=lambda: ["*"],
        min_length=1,
        description="patterns of parameter names, e.g. '*.mlp.*'; with layers, by default all",
    )
    layers: LayerRange | Literal["before", "after"] | None = Field(
        None,
        description="[8, 16] for the layers 8 to 15 of the result; or what comes before all layers "
        "(embeddings) or after them (norm, head)",
    )
    method: Annotated[
        dict[str, Any] | None, BeforeValidator(as_plain), WrittenMethod(is_optional=True)
    ] = Field(None, description="parameters to change, or another method by its name")
    models: dict[str, ModelOverride] = Field(
        default_factory=dict, description="other weights or densities, by model name"
    )
    only: list[str] | None = Field(
        None, min_length=1, description="the models that take part; by default all"
    )
    required: bool | Literal["any"] = Field(
        True,
        description="whether it is an error if a pattern matches nothing; any: if all of them do",
    )

    @model_validator(mode="after")
    def _changes_something(self) -> "Override":
        if not self.method and not self.models and self.only is None:
            raise ValueError("changes nothing; give it a method, models or only")
        if self.layers is None and "match" not in self.model_fields_set:
            raise ValueError("say which parameters it is for, by match or layers")
        return self

    def __str__(self) -> str:
        layers = "" if self.layers is None else f", layers {self.layers}"
        return f"override {self.match}{layers}"
