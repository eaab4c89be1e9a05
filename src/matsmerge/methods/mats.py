"""Matching models in their task parameter subspaces: init x objective x solver.

    start from an init, and move towards the solution of  sum_m C_m(X) = sum_m C_m(W_m)

MaTS (Tam, Bansal & Raffel, 2024). The methods in `named.py` differ from it in their defaults alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError
from torch import Tensor

from matsmerge.errors import closest
from matsmerge.methods.average import Average
from matsmerge.methods.method import Measured, Measuring, Method, Site, Task
from matsmerge.methods.objectives import OBJECTIVES
from matsmerge.methods.objectives.fisher import BlockFisher
from matsmerge.methods.objectives.gram import Gram
from matsmerge.methods.objectives.objective import Objective
from matsmerge.methods.passthrough import Passthrough
from matsmerge.methods.solvers import SOLVERS, ConjugateGradients, Solver
from matsmerge.methods.task_arithmetic import TaskArithmetic


def tables() -> Mapping[str, Mapping[str, type[BaseModel]]]:
    """Where the name of each part is looked up."""
    from matsmerge.methods import METHODS  # it lists the classes of this file

    return {"init": METHODS, "objective": OBJECTIVES, "solver": SOLVERS}


def name_of(part: str, value: BaseModel) -> str:
    """The name a recipe has for a part."""
    return next(name for name, cls in tables()[part].items() if cls is type(value))


def _in_recipes(part: str) -> tuple[PlainSerializer, WithJsonSchema]:
    return (
        PlainSerializer(lambda v: {"name": name_of(part, v), **v.model_dump(mode="json")}),
        WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]}),
    )


class Parts(BaseModel):
    """Something made of an init, an objective or a solver, each a name, or a name with options.

    An option of a part may also be given without saying which part it belongs to. A part that is
    not named, or named as the default is, keeps what the default has been given.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def part_classes(cls, given: Mapping[str, Any]) -> dict[str, type[BaseModel]]:
        """The class of each part, as far as it is said what it is."""
        classes = {}
        for part, table in tables().items():
            if part in cls.model_fields:
                value = given.get(part)
                if isinstance(value, BaseModel):
                    classes[part] = type(value)
                    continue
                name = value.get("name") if isinstance(value, Mapping) else value
                if name is None:
                    classes[part] = type(cls.model_fields[part].default)
                elif isinstance(name, str) and name in table:
                    classes[part] = table[name]
                else:
                    hint = closest(str(name), table)
                    if isinstance(name, list):
                        hint = ": expected one name; several rounds are stages"
                    raise PydanticCustomError(
                        "method_parameters",
                        "unknown {part} '{name}'{hint}",
                        {"part": part, "name": str(name), "hint": hint},
                    )
        return classes

    @classmethod
    def known_parameters(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """What may be given, with its type: own fields, and those of the parts."""
        known: dict[str, Any] = {}
        for part in reversed(cls.part_classes(given).values()):
            known |= {key: field.annotation for key, field in part.model_fields.items()}
        return known | {key: field.annotation for key, field in cls.model_fields.items()}

    @model_validator(mode="before")
    @classmethod
    def _assemble(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        values = dict(data)
        classes = cls.part_classes(values)
        options: dict[str, dict[str, Any]] = {}
        for part, part_class in classes.items():
            value, default = values.get(part), cls.model_fields[part].default
            if isinstance(value, BaseModel):
                continue
            kept = default.model_fields_set if part_class is type(default) else ()
            options[part] = {key: getattr(default, key) for key in kept}
            if isinstance(value, Mapping):
                options[part] |= {key: v for key, v in value.items() if key != "name"}
        given = {part for part in options if part in data}
        for key in values.keys() - cls.model_fields.keys():
            owner = next((p for p in options if key in classes[p].model_fields), None)
            if owner is not None:
                options[owner][key] = values.pop(key)
                given.add(owner)
        for part in given:
            values[part] = _make(part, classes[part], options[part])
        return values


def _make(part: str, cls: type[BaseModel], options: Mapping[str, Any]) -> BaseModel:
    try:
        return cls(**options)
    except ValidationError as error:
        problems = []
        for item in error.errors():
            key = ".".join(map(str, item["loc"]))
            if item["type"] == "extra_forbidden":
                problems.append(f"unknown parameter '{key}'{closest(key, cls.model_fields)}")
            elif item["type"] == "method_parameters":
                problems.append(item["msg"])
            else:
                message = f"{item['msg'][0].lower()}{item['msg'][1:]}"
                problems.append(f"{key}: {message}, found {item['input']!r}")
        text = "; ".join(f"{part}: {problem}" for problem in problems)
        raise PydanticCustomError("method_parameters", "{text}", {"text": text}) from error


InitPart = Annotated[Method, *_in_recipes("init"), Field(description="where to start: any method")]
ObjectivePart = Annotated[
    Objective, *_in_recipes("objective"), Field(description="what the covariances C_m are")
]
SolverPart = Annotated[
    Solver, *_in_recipes("solver"), Field(description="how far to go, and which way")
]


class Stage(Parts):
    """One system that is solved, from wherever the last one ended."""

    objective: ObjectivePart = Gram()
    solver: SolverPart = ConjugateGradients()


class Mats(Parts, Method):
    """From an init towards the solution of sum_m C_m(X) = sum_m C_m(W_m).

    Defaults as in the paper: task arithmetic, and then conjugate gradients on Gram matrices for
    full models, on exact blocks of the Fisher information for (IA)^3.
    """

    chooses_for_adapters: ClassVar[bool] = True  # block Fisher for (IA)^3 unless told otherwise

    init: InitPart = TaskArithmetic(scale=0.3)
    objective: ObjectivePart = Gram()
    solver: SolverPart = ConjugateGradients()
    stages: tuple[Stage, ...] = Field(
        (), description="several objectives and solvers, one after the other, instead of one"
    )
    otherwise: Literal["average", "init"] = Field(
        "average", description="what parameters get that no objective has anything for"
    )
    inputs: Literal["own", "merged"] = Field(
        "own", description="merged: Gram matrices along the merged model, layer after layer"
    )

    @model_validator(mode="after")
    def _one_or_many(self) -> "Mats":
        if self.stages and self.model_fields_set & {"objective", "solver"}:
            raise PydanticCustomError(
                "method_parameters",
                "stages have objectives and solvers of their own; leave out both",
            )
        return self

    @property
    def own_stages(self) -> tuple[Stage, ...]:
        return self.stages or (Stage(objective=self.objective, solver=self.solver),)

    @property
    def rounds(self) -> tuple[Stage, ...]:
        """All systems to solve; an init that solves some comes first."""
        before = self.init.rounds if isinstance(self.init, Mats) else ()
        return (*before, *self.own_stages)

    @property
    def start(self) -> Method:
        """The method that makes the values all systems start from."""
        return self.init.start if isinstance(self.init, Mats) else self.init

    @property
    def needed_statistics(self) -> list[str]:
        """Kinds of statistics, in the order in which they are used."""
        kinds = (stage.objective.statistic for stage in self.rounds)
        return list(dict.fromkeys(kind for kind in kinds if kind is not None))

    @property
    def uses_merged_inputs(self) -> bool:
        inner = isinstance(self.init, Mats) and self.init.uses_merged_inputs
        return inner or self.inputs == "merged"

    @property
    def reads_base(self) -> bool:
        return self.start.reads_base or any(s.objective.needs_base for s in self.rounds)

    @property
    def needed_models(self) -> int | None:
        return self.start.needed_models

    @property
    def own_density(self) -> float | None:
        return self.start.own_density

    @property
    def divides_by_weights(self) -> bool:
        return True

    @property
    def works_on_changes(self) -> bool:
        return False  # statistics are about weights

    @property
    def weights_covariances(self) -> bool:
        return True

    @property
    def measured_over(self) -> Literal["parameter", "model"] | None:
        return self.start.measured_over

    @property
    def measured_as(self) -> type[Method]:
        return self.start.measured_as

    def measure(self, tasks: Sequence[Task], num_elements: int) -> Measuring:
        return self.start.measure(tasks, num_elements)

    def merge(self, site: Site, measured: Measured) -> Tensor:
        """What a parameter gets that no objective has anything for."""
        if self.otherwise == "init":
            return self.start.merge(site, measured)
        return Average().merge(site, {})

    def for_adapters(self) -> "Mats":
        """The method for (IA)^3 vectors."""
        init = self.init.for_adapters() if isinstance(self.init, Mats) else self.init
        changes: dict[str, Any] = {"init": init}
        chosen = "objective" in self.model_fields_set or self.stages
        if self.chooses_for_adapters and not chosen:
            changes["objective"] = BlockFisher()
        return self.model_copy(update=changes)

    def refusals(self, num_models: int) -> Iterator[str]:
        """Why this combination has no meaning."""
        if isinstance(self.start, Passthrough):
            yield "passthrough is for overrides; name a method that merges as the init"
        for stage in self.rounds:
            reason = stage.solver.refusal(stage.objective.statistic, num_models)
            if reason is not None:
                yield reason
        if self.uses_merged_inputs and not any(isinstance(s.objective, Gram) for s in self.rounds):
            yield (
                "inputs: merged is about the Gram matrices of gram and kfac, and the objective is "
                f"{name_of('objective', self.own_stages[-1].objective)}"
            )
