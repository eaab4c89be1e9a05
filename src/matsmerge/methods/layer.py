"""Which parameters are solved for together, and with what: known from headers alone."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from matsmerge.checkpoints.checkpoint import TensorSpec
from matsmerge.checkpoints.summary import tensor_kind
from matsmerge.errors import StatisticsError
from matsmerge.methods.objectives.objective import Evidence, Found, Subject, View
from matsmerge.methods.parts import Stage
from matsmerge.methods.site import Site

# Weights of these layers are (in, out) in GPT-2 and its kin.
_TRANSPOSED = re.compile(r"\.(c_attn|q_attn|c_proj|c_fc)\.weight$")
# Tensors of a layer's size, and matrices of its inputs', that solving holds at once (measured).
_ITERATES, _MATRICES = 12, 9
_BASES = 4  # of the size of all models' leading directions together


class ParameterHeader(Protocol):
    """What is known of a parameter before it is read."""

    @property
    def name(self) -> str: ...
    @property
    def spec(self) -> TensorSpec: ...
    @property
    def is_merged(self) -> bool: ...


@dataclass(frozen=True)
class Round:
    """A system for one parameter, and for its bias where that is joined."""

    parameter: str
    number: int  # of the stage
    is_last: bool  # is it the method's last?
    stage: Stage
    found: Found

    @property
    def parameters(self) -> tuple[str, ...]:
        bias = self.found.bias
        return (self.parameter,) if bias is None else (self.parameter, bias)

    def peak_bytes(self, num_models: int, num_kept: int) -> int:
        """Memory that solving it takes at most, an upper guess from its shapes."""
        found, stage = self.found, self.stage
        d, o, groups = found.num_inputs, found.num_outputs, found.view.num_groups
        iterates = (_ITERATES + num_kept) * 8 * groups * d * o
        iterates += stage.solver.num_output_matrices * 8 * groups * o * o
        num_sets = 2 if stage.solver.uses_held_out else 1
        if stage.objective.has_output_factors:
            # Factors as they are, and turned; of the held-out set as well.
            num_matrices = 2 * num_sets * num_models + _MATRICES
            matrices = groups * _factor_bytes(o, found.output_rank, num_matrices, num_sets)
            if found.is_dense:
                matrices += groups * _factor_bytes(d, found.input_rank, num_matrices, num_sets)
        elif found.is_dense or stage.solver.needs_matrix:
            matrices = groups * _factor_bytes(d, found.input_rank, _MATRICES, num_sets)
        else:
            matrices = found.num_bytes
        return iterates + matrices


def _factor_bytes(dim: int, rank: int | None, num_matrices: int, num_sets: int) -> int:
    """Memory for the factors of one side: matrices, or bases of all models' leading directions."""
    if rank is None or rank >= dim:
        return 8 * num_matrices * dim * dim
    return 8 * (_BASES * num_sets * dim * rank + _MATRICES * rank * rank)


@dataclass(frozen=True)
class Layer:
    """A parameter and perhaps its bias, with all systems they go through."""

    parameters: tuple[str, ...]
    num_elements: int
    rounds: tuple[Round, ...]

    @property
    def name(self) -> str:
        return self.parameters[0]

    @property
    def num_statistics_bytes(self) -> int:
        return sum(one.found.num_bytes for one in self.rounds)

    @property
    def sharing(self) -> object:
        """Layers of one method for which this is equal have the same matrices to decompose."""
        grams = (r.found for r in self.rounds if not r.stage.objective.has_output_factors)
        return next((found.sharing for found in grams if found.sharing), None)

    @property
    def input_modules(self) -> frozenset[str]:
        """The modules whose inputs its systems are about."""
        return frozenset(
            module
            for one in self.rounds
            if one.stage.objective.uses_inputs
            for modules in one.found.keys
            for module in modules
        )

    def peak_bytes(self, num_models: int, num_kept: int) -> int:
        """Memory that solving it takes at most; `num_kept` iterates are kept besides the last."""
        peak = max(one.peak_bytes(num_models, num_kept) for one in self.rounds)
        return peak + 8 * (2 + num_kept) * self.num_elements


@dataclass(frozen=True)
class LayerWork:
    """A layer when its turn has come: the sites of its parameters, and the models' statistics."""

    layer: Layer
    sites: Mapping[str, Site]
    evidence: tuple[Evidence, ...]
    keep: tuple[int, ...] = ()  # iterations of the last solver whose values are wanted
    num_sharing: int = 1  # layers that have the same matrices


def find_layers(
    stages: Sequence[Stage],
    own: Collection[str],
    parameters: Mapping[str, ParameterHeader],
    evidence: Sequence[Evidence],
) -> list[Layer]:
    """All layers that some stage's objective has something for, in order; every problem at once.

    `own` are the parameters to look for; all others say what kind of model it is.
    """
    problems: list[str] = []
    rounds: dict[str, list[Round]] = {}
    is_transposed = _has_transposed_weights(parameters.values())
    for name in own:
        parameter = parameters[name]
        if parameter.is_merged:
            view = _view(parameter, is_transposed)
            subject = Subject(name, tuple(parameter.spec.shape), view, tuple(evidence))
            found, failed = _find_rounds(stages, subject)
            problems += failed
            if found:
                rounds[name] = found
    if problems:
        raise StatisticsError(list(dict.fromkeys(problems)))
    return list(_join(rounds, own, parameters))


def _find_rounds(stages: Sequence[Stage], subject: Subject) -> tuple[list[Round], list[str]]:
    rounds, problems = [], []
    for number, stage in enumerate(stages):
        try:
            found = stage.objective.find(subject)
        except StatisticsError as error:
            problems += error.problems
            continue
        if found is None or not stage.solver.has_use_for(found):
            continue
        num_products = sum(map(len, found.keys))
        reason = stage.solver.refusal(stage.objective, num_products)
        if reason is not None and num_products > len(found.keys):
            problems.append(f"'{subject.parameter}' is used by several modules: {reason}")
        else:
            rounds.append(Round(subject.parameter, number, stage is stages[-1], stage, found))
    return rounds, problems


def _join(
    rounds: Mapping[str, Sequence[Round]],
    own: Collection[str],
    parameters: Mapping[str, ParameterHeader],
) -> Iterator[Layer]:
    """Put weights together with the biases that are solved for with them."""
    owners: dict[str, set[str]] = {}
    for name, rounds_of_it in rounds.items():
        for bias in {r.found.bias for r in rounds_of_it if r.found.bias is not None}:
            owners.setdefault(bias, set()).add(name)
    # An override for the bias, or a second weight it belongs to, lets it go its own way.
    joined = {bias for bias, names in owners.items() if len(names) == 1 and bias in own}
    for name, rounds_of_it in rounds.items():
        if name in joined:
            continue
        kept = [
            r if r.found.bias in joined else replace(r, found=_apart(r.found)) for r in rounds_of_it
        ]
        biases = list(dict.fromkeys(r.found.bias for r in kept if r.found.bias is not None))
        for bias in biases:
            together = {r.number for r in kept if r.found.bias == bias}
            kept += [r for r in rounds.get(bias, ()) if r.number not in together]
        kept.sort(key=lambda r: r.number)
        names = (name, *biases)
        num_elements = sum(parameters[n].spec.num_elements for n in names)
        yield Layer(names, num_elements, tuple(kept))


def _apart(found: Found) -> Found:
    """What there is for a weight without its bias."""
    if found.bias is None:
        return found
    sharing = None if found.sharing is None else (*found.sharing, "without bias")
    return replace(found, bias=None, num_inputs=found.num_inputs - 1, sharing=sharing)


def _view(parameter: ParameterHeader, is_transposed: bool) -> View:
    """What a parameter's shape and name say of it."""
    kind = tensor_kind(parameter.name, parameter.spec)
    if kind == "matrix":
        turned = is_transposed and _TRANSPOSED.search(parameter.name)
        return View("conv1d" if turned else "linear")
    return View("vector") if kind == "vector" else View("as it is")


def _has_transposed_weights(parameters: Collection[ParameterHeader]) -> bool:
    """Is this GPT-2 or its kin? Its c_attn makes queries, keys and values, and is (d, 3 d)."""
    shapes = [p.spec.shape for p in parameters if p.name.endswith(".c_attn.weight")]
    return bool(shapes) and all(len(s) == 2 and s[1] == 3 * s[0] for s in shapes)
