"""Named sets of options: what methods, objectives and solvers are to recipes."""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    GetJsonSchemaHandler,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from matsmerge.errors import closest


class Options(BaseModel):
    """The hyperparameters of something that recipes call by its name.

    In plain data the name stands beside the options: `{"name": "ties", "density": 0.1}`. Where a
    `depth` is given as the context of validation, a number may be a list of numbers spread evenly
    over the depth of the network, and becomes the number at that depth.
    """

    # Of tens of classes a merge uses one or two: the others are not made ready.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    name: ClassVar[str] = ""  # of what recipes never name, nothing

    @classmethod
    def hint(cls, key: str) -> str:
        """What may have been meant by an option that there is not."""
        return closest(key, cls.model_fields)

    def written(self) -> dict[str, Any]:
        """The plain data that a recipe would have to say to get the same."""
        return written(self, type(self).model_fields)

    @property
    def in_short(self) -> str:
        """Its name with the options that are not as they are by default: `ties(density=0.1)`."""
        options = self.model_dump(exclude_defaults=True)
        chosen = ", ".join(f"{key}={value!r}" for key, value in options.items() if key != "name")
        return f"{self.name}({chosen})" if chosen else self.name

    @model_validator(mode="before")
    @classmethod
    def _without_name(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or not cls.name or "name" not in data:
            return data
        if data["name"] != cls.name:
            raise PydanticCustomError(
                "own",
                "the name is {name}, found {found}",
                {"name": cls.name, "found": repr(data["name"])},
            )
        return {key: value for key, value in data.items() if key != "name"}

    @field_validator("*", mode="wrap")
    @classmethod
    def _at_depth(
        cls, value: Any, check: ValidatorFunctionWrapHandler, info: ValidationInfo
    ) -> Any:
        is_number = cls.model_fields[str(info.field_name)].annotation is float
        if info.context is None or not is_number or not isinstance(value, list) or not value:
            return check(value)
        return at_depth([check(one) for one in value], info.context["depth"])

    @model_serializer(mode="wrap")
    def _with_name(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {**({"name": self.name} if self.name else {}), **serialize(self)}

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        reference = handler(core_schema)
        schema = handler.resolve_ref_schema(reference)
        own = schema.get("properties", {})
        schema["properties"] = {
            **({"name": {"const": cls.name}} if cls.name else {}),
            **{key: _or_over_depth(field) for key, field in own.items()},
        }
        return reference


def written(options: Options, keys: Iterable[str]) -> dict[str, Any]:
    """The name of options, and what some of them are, as plain data."""

    def plain(value: Any) -> Any:
        if isinstance(value, Options):
            return value.written()
        return [plain(one) for one in value] if isinstance(value, tuple) else value

    name = {"name": options.name} if options.name else {}
    return name | {key: plain(getattr(options, key)) for key in keys}


def at_depth(value: Any, depth: float) -> Any:
    """Interpolate a list of numbers at a depth between 0 and 1; anything else is itself."""
    if not isinstance(value, list):
        return value
    position = depth * (len(value) - 1)
    lower = int(position)
    upper = min(lower + 1, len(value) - 1)
    return value[lower] + (position - lower) * (value[upper] - value[lower])


def _or_over_depth(field: dict[str, Any]) -> dict[str, Any]:
    """The schema of a number that may also be a list of numbers over depth."""
    if field.get("type") != "number":
        return field
    outer: dict[str, Any] = {
        key: field[key] for key in ("description", "default", "title") if key in field
    }
    number = {key: value for key, value in field.items() if key not in outer}
    return {**outer, "anyOf": [number, {"type": "array", "items": number, "minItems": 1}]}


T = TypeVar("T", bound=Options)


def by_name(*classes: type[T]) -> Mapping[str, type[T]]:
    """Classes by their names."""
    return {cls.name: cls for cls in classes}
