"""A method as a recipe writes it."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import (
    BaseModel,
    ConfigDict,
    GetJsonSchemaHandler,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema

from matsmerge.methods import METHODS
from matsmerge.methods.method import Method
from matsmerge.methods.parts import AnyMethod
from matsmerge.problems import problems_of

_HINTS = {
    "t": ": the models' weights say where to stop (t = 0.3 is weights 0.7 and 0.3)",
    "weight": ": weights belong to the models",
    "weights": ": weights belong to the models",
    "statistics": ": statistics belong to the models",
}


class MethodSpec(BaseModel):
    """A method's name and its options; a number may be a list over depth."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str

    @property
    def written(self) -> dict[str, Any]:
        return {"name": self.name, **self.parameters}

    @property
    def parameters(self) -> dict[str, Any]:
        return dict(self.__pydantic_extra__ or {})

    def at_depth(self, depth: float) -> Method:
        """The method with the values its options have at a depth between 0 and 1."""
        context = {"depth": depth}
        if self.name in METHODS:
            with suppress(ValidationError):  # which is found again, and then says the method's name
                return METHODS[self.name].model_validate(self.written, context=context)
        return _methods().validate_python(self.written, context=context)

    @model_validator(mode="after")
    def _makes_a_method(self) -> "MethodSpec":
        try:
            self.at_depth(0)  # which checks all values of a list
        except ValidationError as error:
            problems = problems_of(error, *METHODS.values(), hints=_HINTS)
            raise ValueError("\n".join(problems)) from error
        return self


@cache
def _methods() -> TypeAdapter[Method]:
    return TypeAdapter(AnyMethod)


@dataclass(frozen=True)
class WrittenMethod:
    """In a type's annotation: its JSON Schema is that of a method's name, or a name with options.

    It is made when it is asked for: pydantic would make it with the class, which takes long.
    """

    is_optional: bool = False

    def __get_pydantic_json_schema__(
        self, _: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        forms = handler(_methods().core_schema)["anyOf"]
        return {"anyOf": [*forms, {"type": "null"}] if self.is_optional else forms}


def as_plain(value: Any) -> Any:
    """What a recipe would say for a method that is given as its name or as an object."""
    if isinstance(value, Method):
        return value.written()
    return {"name": value} if isinstance(value, str) else value


def set_parameter(method: dict[str, Any], key: str, value: Any) -> None:
    """Set an option of a method's plain data, or with dots in its name one of a part."""
    *parts, last = key.split(".")
    place = method
    for part in parts:
        found = place.get(part, {})
        place[part] = place = dict(found) if isinstance(found, Mapping) else {"name": found}
    place[last] = value
