"""Which parameters are solved for together, and with what: known from headers alone."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from matsmerge.checkpoints.summary import kind_of
from matsmerge.engine.parameter import Parameter
from matsmerge.errors import StatisticsError
from matsmerge.methods.mats import Mats, Stage
from matsmerge.methods.objectives.objective import Evidence, Found, Subject, View

# Weights of these layers are (in, out) in GPT-2 and its kin.
_TRANSPOSED = re.compile(r"\.(c_attn|q_attn|c_proj|c_fc)\.weight$")


@dataclass(frozen=True)
class Round:
    """A system for one parameter, and for its bias where that is joined."""

    parameter: str
    number: int  # of the stage
    is_last: bool  # is it the method's last?
    stage: Stage
    found: Found


@dataclass(frozen=True)
class Layer:
    """A parameter and perhaps its bias, with all systems they go through."""

    parameters: tuple[Parameter, ...]
    rounds: tuple[Round, ...]

    @property
    def name(self) -> str:
        return self.parameters[0].name

    @property
    def shares(self) -> object:
        """Layers for which this is equal have the same matrices to decompose."""
        grams = (r.found for r in self.rounds if r.stage.objective.statistic != "kfac")
        sharing = next((found.sharing for found in grams if found.sharing), None)
        return (self.parameters[0].rule, sharing) if sharing else self.name


def find_layers(parameters: Sequence[Parameter], evidence: Sequence[Evidence]) -> list[Layer]:
    """All layers that some objective has something for, in order; every problem at once."""
    problems: list[str] = []
    rounds: dict[str, list[Round]] = {}
    by_name = {p.name: p for p in parameters}
    is_transposed = _has_transposed_weights(parameters)
    for parameter in parameters:
        is_number = parameter.compute_dtype is not None and parameter.spec.num_elements > 0
        if isinstance(parameter.rule.method, Mats) and is_number:
            subject = Subject(
                parameter.name,
                tuple(parameter.spec.shape),
                _view(parameter, is_transposed),
                tuple(evidence),
            )
            found, failed = _find_rounds(parameter.rule.method, subject)
            problems += failed
            if found:
                rounds[parameter.name] = found
    if problems:
        raise StatisticsError(list(dict.fromkeys(problems)))
    return list(_join(rounds, by_name))


def _find_rounds(method: Mats, subject: Subject) -> tuple[list[Round], list[str]]:
    rounds, problems = [], []
    method_stages = method.rounds
    for number, stage in enumerate(method_stages):
        try:
            found = stage.objective.find(subject)
        except StatisticsError as error:
            problems += error.problems
            continue
        if found is None:
            continue
        num_products = sum(map(len, found.keys))
        reason = stage.solver.refusal(stage.objective.statistic, num_products)
        if reason is not None and num_products > len(found.keys):
            problems.append(f"'{subject.parameter}' is used by several modules: {reason}")
        else:
            rounds.append(
                Round(subject.parameter, number, stage is method_stages[-1], stage, found)
            )
    return rounds, problems


def _join(
    rounds: Mapping[str, Sequence[Round]], parameters: Mapping[str, Parameter]
) -> Iterator[Layer]:
    """Put weights together with the biases that are solved for with them."""
    owners: dict[str, set[str]] = {}
    for name, own in rounds.items():
        for bias in {r.found.bias for r in own if r.found.bias is not None}:
            owners.setdefault(bias, set()).add(name)
    # An override for the bias, or a second weight it belongs to, lets it go its own way.
    joined = {
        bias: next(iter(names))
        for bias, names in owners.items()
        if len(names) == 1 and parameters[bias].rule == parameters[next(iter(names))].rule
    }
    for name, own in rounds.items():
        if name in joined:
            continue
        kept = [r if r.found.bias in joined else replace(r, found=_apart(r.found)) for r in own]
        biases = list(dict.fromkeys(r.found.bias for r in kept if r.found.bias is not None))
        for bias in biases:
            together = {r.number for r in kept if r.found.bias == bias}
            kept += [r for r in rounds.get(bias, ()) if r.number not in together]
        kept.sort(key=lambda r: r.number)
        yield Layer((parameters[name], *(parameters[b] for b in biases)), tuple(kept))


def _apart(found: Found) -> Found:
    """What there is for a weight without its bias."""
    if found.bias is None:
        return found
    sharing = None if found.sharing is None else (*found.sharing, "without bias")
    return replace(found, bias=None, num_inputs=found.num_inputs - 1, sharing=sharing)


def _view(parameter: Parameter, is_transposed: bool) -> View:
    """What a parameter's shape and name say of it."""
    kind = kind_of(parameter.name, parameter.spec)
    if kind == "matrix":
        turned = is_transposed and _TRANSPOSED.search(parameter.name)
        return View("conv1d" if turned else "linear")
    return View("vector") if kind == "vector" else View("as it is")


def _has_transposed_weights(parameters: Sequence[Parameter]) -> bool:
    """Is this GPT-2 or its kin? Its c_attn makes queries, keys and values, and is (d, 3 d)."""
    shapes = [p.spec.shape for p in parameters if p.name.endswith(".c_attn.weight")]
    return bool(shapes) and all(len(s) == 2 and s[1] == 3 * s[0] for s in shapes)
