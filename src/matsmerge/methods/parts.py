"""The parts of MaTS as recipes write them: names, or names with options."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Union

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Tag,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from matsmerge.errors import closest
from matsmerge.methods.method import Method
from matsmerge.methods.objectives import OBJECTIVES
from matsmerge.methods.objectives.gram import GramObjective
from matsmerge.methods.objectives.objective import Objective
from matsmerge.methods.options import Options, written
from matsmerge.methods.solver import Solver
from matsmerge.methods.solvers import SOLVERS, ConjugateGradients


def part_classes() -> Mapping[str, Mapping[str, type[Options]]]:
    """Where the name of each part is looked up."""
    from matsmerge.methods import METHODS  # it lists the classes of this file

    return {"init": METHODS, "objective": OBJECTIVES, "solver": SOLVERS}


@dataclass(frozen=True)
class OneOf:
    """In a type's annotation: a union of the classes of a table, told apart by their names.

    The union is made when it is first used, since an init is any method, also one that has an
    init itself.
    """

    part: str  # a key of `tables`
    what: str  # what errors call it

    def __get_pydantic_core_schema__(self, _: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        tagged = tuple(Annotated[cls, Tag(cls.name)] for cls in self.classes)
        union: Any = Annotated[Union[tagged], Discriminator(_name)]  # noqa: UP007
        return handler.generate_schema(Annotated[union, BeforeValidator(self._with_name)])

    def __get_pydantic_json_schema__(
        self, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """A name, or a name with options; without a name, options of the default."""
        schema = handler(core_schema)
        return {"anyOf": [{"enum": [cls.name for cls in self.classes]}, *schema["oneOf"]]}

    @property
    def classes(self) -> list[type[Options]]:
        return list(part_classes()[self.part].values())

    def _with_name(self, value: Any) -> Any:
        """A name alone is a name without options; a name that nothing has is an error."""
        given = value if isinstance(value, (Mapping, Options)) else {"name": value}
        name, table = _name(given), part_classes()[self.part]
        if isinstance(name, str) and name in table:
            return given
        text = "unknown {what} '{name}'{hint}"
        hint = closest(str(name), table)
        if isinstance(name, list):
            hint = ": expected one name; several rounds are stages"
        elif name is None:
            text = "name: is required"
        details = {"what": self.what, "name": str(name), "hint": hint}
        raise PydanticCustomError("own", text, details)


def _name(given: Any) -> Any:
    return given.get("name") if isinstance(given, Mapping) else given.name


AnyMethod = Annotated[Method, OneOf("init", "method")]
InitPart = Annotated[Method, OneOf("init", "init"), Field(description="where to start: any method")]
ObjectivePart = Annotated[
    Objective,
    OneOf("objective", "objective"),
    Field(description="what the covariances C_m are"),
]
SolverPart = Annotated[
    Solver, OneOf("solver", "solver"), Field(description="how far to go, and which way")
]


class Parts(Options):
    """Options that are made of others: of an init, an objective or a solver.

    An option of a part may also be given without saying which part it belongs to. A part that is
    not named, or named as the default is, keeps what the default has been given.
    """

    model_config = ConfigDict(defer_build=True)  # until all methods are known

    @model_validator(mode="before")
    @classmethod
    def _assemble(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        values = dict(data)
        options: dict[str, dict[str, Any]] = {}
        for part in cls._parts():
            value, default = values.get(part), cls.model_fields[part].default
            given = {"name": value} if isinstance(value, str) else value or {}
            if isinstance(given, Mapping):  # else it is one already, or an error
                is_default = given.get("name", default.name) == default.name
                kept = {key: getattr(default, key) for key in default.model_fields_set}
                options[part] = {"name": default.name, **(kept if is_default else {}), **given}
        for key in values.keys() - cls.model_fields.keys():
            for part, chosen in options.items():
                owner = part_classes()[part].get(str(chosen["name"]))
                if owner is not None and key in owner.model_fields:
                    chosen[key] = values.pop(key)
                    values[part] = chosen
                    break
        return values | {part: options[part] for part in options if part in values}

    @classmethod
    def hint(cls, key: str) -> str:
        known = list(cls.model_fields)
        for part in cls._parts():
            owners = [
                name for name, other in part_classes()[part].items() if key in other.model_fields
            ]
            if owners and part != "init":
                return f": it belongs to the {part} {' or '.join(owners)}"
            known += [
                option for other in part_classes()[part].values() for option in other.model_fields
            ]
        return closest(key, dict.fromkeys(known))

    def written(self) -> dict[str, Any]:
        return written(self, self.model_fields_set)

    @classmethod
    def _parts(cls) -> list[str]:
        return [part for part in part_classes() if part in cls.model_fields]

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """The options of all parts beside the own."""
        reference = super().__get_pydantic_json_schema__(core_schema, handler)
        properties = handler.resolve_ref_schema(reference)["properties"]
        for part in cls._parts():
            for other in part_classes()[part].values():
                if not issubclass(other, Parts):
                    for key, field in _schema_of_options(other).items():
                        properties.setdefault(key, deepcopy(field))
        return reference


@cache
def _schema_of_options(part: type[Options]) -> dict[str, Any]:
    """Made once: the schema of a recipe has it a hundred times."""
    properties: dict[str, Any] = part.model_json_schema()["properties"]
    return properties


class Stage(Parts):
    """One system that is solved, from wherever the last one ended."""

    objective: ObjectivePart = GramObjective()
    solver: SolverPart = ConjugateGradients()
