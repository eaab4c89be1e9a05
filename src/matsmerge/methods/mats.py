"""Matching models in their task parameter subspaces: init x objective x solver.

    start from an init, and move towards the solution of  sum_m C_m(X) = sum_m C_m(W_m)

MaTS (Tam, Bansal & Raffel, 2024). The methods in `named.py` differ from it in their defaults alone.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from matsmerge.errors import RecipeError, StatisticsError
from matsmerge.methods.average import Average
from matsmerge.methods.layer import Layer, ParameterHeader, find_layers
from matsmerge.methods.layer_solution import LayerSolver
from matsmerge.methods.merge_steps import SingularValueCalibration
from matsmerge.methods.method import Measuring, Method, merge_whole
from matsmerge.methods.objectives.fisher import BlockFisher
from matsmerge.methods.objectives.gram import GramObjective
from matsmerge.methods.objectives.objective import Evidence
from matsmerge.methods.parts import (
    InitPart,
    ObjectivePart,
    Parts,
    SolverPart,
    Stage,
)
from matsmerge.methods.site import Grain, Measured, MergedSite, Shares, Site, SiteTask
from matsmerge.methods.solvers import ClosedForm, ConjugateGradients
from matsmerge.methods.task_arithmetic import TaskArithmetic

Inputs = Annotated[
    Literal["own", "merged"],
    Field(
        description="what layers are matched on: own, each model's statistics; merged, what they "
        "receive in the merged model, layer after layer, which needs the data"
    ),
]
Targets = Annotated[
    Literal["outputs", "weights"],
    Field(
        description="with merged inputs, match what a model's layer outputs for the same example, "
        "or what its weights make of the merged inputs (RegMean++)"
    ),
]
Otherwise = Annotated[
    Literal["average", "init"],
    Field(description="what parameters get that no objective has anything for"),
]


class Mats(Parts, Method):
    """From an init towards the solution of sum_m C_m(X) = sum_m C_m(W_m).

    Defaults as in the paper: task arithmetic, and then conjugate gradients on Gram matrices for
    full models, on exact blocks of the Fisher information for (IA)^3.
    """

    name = "mats"
    grain = Grain.LAYER
    chooses_for_adapters: ClassVar[bool] = True  # block Fisher for (IA)^3 unless told otherwise

    init: InitPart = TaskArithmetic(scale=0.3)
    objective: ObjectivePart = GramObjective()
    solver: SolverPart = ConjugateGradients()
    stages: tuple[Stage, ...] = Field(
        (), description="several objectives and solvers, one after the other, instead of one"
    )
    otherwise: Otherwise = "average"
    inputs: Inputs = "own"
    targets: Targets = "outputs"
    from_init: tuple[str, ...] = Field(
        (),
        description="names of poor models: what the init does on their data is kept, instead of "
        "what they do",
    )

    @field_validator("from_init", mode="before")
    @classmethod
    def _from_text(cls, given: Any) -> Any:
        """`a,b` is two names, as on the command line."""
        return [name.strip() for name in given.split(",")] if isinstance(given, str) else given

    @model_validator(mode="after")
    def _one_or_many(self) -> "Mats":
        if self.stages and self.model_fields_set & {"objective", "solver"}:
            raise PydanticCustomError(
                "method_parameters",
                "stages have objectives and solvers of their own; leave out both",
            )
        return self

    def merge(self, site: Site) -> MergedSite:
        """Solve all systems of a layer, from the values that the init gives its parameters."""
        work = site.layer
        assert work is not None
        start = {
            name: merge_whole(self._start_of(name, work.layer), own).double().view(own.shape)
            for name, own in work.sites.items()
        }
        try:
            return LayerSolver(work, self.held_models).solve(start)
        except StatisticsError as error:
            problems = [f"'{work.layer.name}': {problem}" for problem in error.problems]
            raise StatisticsError(problems) from error

    def layers(
        self,
        own: Collection[str],
        parameters: Mapping[str, ParameterHeader],
        evidence: Sequence[Evidence],
    ) -> list[Layer]:
        return find_layers(self.rounds, own, parameters, evidence)

    @property
    def fallback(self) -> Method:
        return self.init.fallback if self.otherwise == "init" else Average()

    def _start_of(self, parameter: str, layer: Layer) -> Method:
        """What makes the values that a parameter's first system starts from."""
        if not isinstance(self.init, Mats):
            return self.init
        num_before = len(self.init.rounds)
        is_solved = any(parameter in r.parameters and r.number < num_before for r in layer.rounds)
        return self.init._start_of(parameter, layer) if is_solved else self.init.fallback

    def tensor_bytes(self, shape: Sequence[int], num_models: int) -> int:
        is_whole = self.start.grain is Grain.TENSOR
        return self.start.tensor_bytes(shape, num_models) if is_whole else 0

    @property
    def rounds(self) -> tuple[Stage, ...]:
        """All systems to solve; an init that solves some comes first."""
        before = self.init.rounds if isinstance(self.init, Mats) else ()
        return (*before, *self.own_stages)

    @property
    def own_stages(self) -> tuple[Stage, ...]:
        return self.stages or (Stage(objective=self.objective, solver=self.solver),)

    @property
    def start(self) -> Method:
        """The method that makes the values all systems start from."""
        return self.init.start if isinstance(self.init, Mats) else self.init

    @property
    def held_models(self) -> frozenset[str]:
        return self.init.held_models | {*self.from_init}

    @property
    def needed_statistics(self) -> list[str]:
        kinds = (stage.objective.statistic for stage in self.rounds)
        return list(dict.fromkeys(kind for kind in kinds if kind is not None))

    @property
    def uses_held_out(self) -> bool:
        return any(stage.solver.uses_held_out for stage in self.rounds)

    @property
    def uses_inputs(self) -> bool:
        return any(stage.objective.uses_inputs for stage in self.rounds)

    @property
    def uses_merged_inputs(self) -> bool:
        return self.inputs == "merged" or self.init.uses_merged_inputs

    @property
    def matches_outputs(self) -> bool:
        own = self.inputs == "merged" and self.targets == "outputs"
        return own or self.init.matches_outputs

    @property
    def matches_heads(self) -> bool:
        return self.init.matches_heads

    def without_inputs(self) -> Self | None:
        stages = tuple(stage for stage in self.rounds if stage.objective.needs_own_statistics)
        if not stages:
            return None
        return self.model_copy(update={"init": self.start, "stages": stages})

    def idle_objectives(self, layers: Sequence[Layer]) -> Iterator[str]:
        used = {r.stage.objective.name for x in layers for r in x.rounds}
        wanted = {stage.objective.name for stage in self.rounds}
        return iter(sorted(wanted - used))

    @property
    def iterates(self) -> bool:
        return self.rounds[-1].solver.iterates

    @property
    def reads_base(self) -> bool:
        parts = (part for s in self.rounds for part in (s.objective, s.solver))
        return self.start.reads_base or any(part.needs_base for part in parts)

    @property
    def needed_models(self) -> int | None:
        return self.start.needed_models

    def own_share(self, key: str) -> float | None:
        return 1.0 if key == "importance" else self.start.own_share(key)

    def share_problem(self, shares: Shares) -> str | None:
        if shares.importance < 0:
            return f"the importance {shares.importance} must not be negative"
        return self.start.share_problem(shares)

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
    def measured_as(self) -> object:
        return self.start.measured_as

    def measure(self, tasks: Sequence[SiteTask], num_elements: int) -> Measuring:
        return self.start.measure(tasks, num_elements)

    def measured_of(self, parameter: str, measured: Measured) -> Measured:
        return self.start.measured_of(parameter, measured)

    def for_vectors(self) -> Self:
        """Exact blocks of the Fisher information for (IA)^3, unless an objective was chosen.

        Along the merged model what a vector scales is matched.
        """
        changes: dict[str, Any] = {"init": self.init.for_vectors()}
        chosen = "objective" in self.model_fields_set or self.stages
        if self.inputs == "merged":
            changes["stages"] = tuple(_for_features(stage) for stage in self.own_stages)
        elif self.chooses_for_adapters and not chosen:
            changes["objective"] = BlockFisher()
        method = self.model_copy(update=changes)
        for stage in method.rounds:
            is_possible = stage.objective.for_vectors
            if stage.objective.uses_inputs and self.uses_merged_inputs:
                is_possible = self.matches_outputs
            if not is_possible:
                raise RecipeError(
                    f"{stage.objective.name} is about the inputs of linear "
                    "layers, and (IA)^3 trains none: its vectors scale activations elementwise. "
                    "Use the objective block_fisher, exact for vectors, kfac_scales or fisher; or "
                    "match what they scale with mats_cross or featcal"
                )
            if not stage.solver.for_vectors:
                raise RecipeError(
                    f"{stage.solver.name} is about the singular values of matrices, and (IA)^3 "
                    "trains vectors; merge them with its init alone"
                )
        return method

    def refusals(self, num_models: int) -> Iterator[str]:
        if self.start.only_model is not None:
            yield "passthrough is for overrides; name a method that merges as the init"
        for stage in self.rounds:
            reason = stage.solver.refusal(stage.objective, num_models)
            if reason is not None:
                yield reason
        if self.start.is_isotropic and isinstance(self.rounds[0].solver, SingularValueCalibration):
            yield (
                f"svc scales singular directions, and those of {self.start.name} are all of one "
                "size, so that any directions would do; use another init"
            )
        if not self.matches_outputs and any(s.objective.merges_norms for s in self.rounds):
            yield (
                "norms: are merged where outputs are matched along the merged model; add inputs: "
                "merged (and targets: outputs), or leave it out"
            )
        if self.uses_merged_inputs and not self.uses_inputs:
            yield (
                "inputs: merged is about the Gram matrices of gram and kfac, and the objective is "
                f"{self.rounds[-1].objective.name}"
            )

    @property
    def summary(self) -> str:
        stages = (f"{s.objective.in_short} by {s.solver.in_short}" for s in self.rounds)
        return ", then ".join([self.start.in_short, *stages])


def _for_features(stage: Stage) -> Stage:
    """A stage whose systems are of vectors that scale, and have a closed form."""
    objective = stage.objective.for_features
    if objective is stage.objective:
        return stage
    return Stage(objective=objective, solver=ClosedForm())
