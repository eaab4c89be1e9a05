"""Which method, with which settings and weights, for models like these."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from matsmerge.advice.verdicts import OTHER_CONFIDENCE
from matsmerge.engine.merge_inputs import AdapterView

# How much a poor model counts: what searches on validation data chose in intermediate-small (first
# seed), for task arithmetic with one of two donors (1 with the other), and for K-FAC with both.
POOR_WEIGHT, POOR_WEIGHT_MATCHED = 0.3, 0.1
# Language models that moved less than this, relative to their weights, hardly disturb each other;
# there methods that cost a system of equations for each layer have little to gain.
CLOSE_CHANGE = 0.005
# Between averaging (one over the number of models) and what task arithmetic is usually given.
_LEAST_SCALE = 0.3
_LEAST_WEIGHT = 0.05
# With task vectors of the same length the long one's own task suffers most, with all as they are
# the others do; half way was the best of six weights, where one was 3.6 times as long.
_ARITHMETIC_POWER = 0.5
# What is kept on a poor model's data: the others help it more than in an average.
_START_OF_POOR = {"name": "task_arithmetic", "scale": _LEAST_SCALE}


@dataclass(frozen=True)
class Situation:
    """All that a choice of method depends on."""

    models: tuple[str, ...]
    view: AdapterView  # full models, or how adapters are merged
    change: float  # how far a typical matrix of a typical model moved, relative to its norm
    is_language_model: bool = False  # one that writes text from left to right
    has_data: bool = False  # of all models
    kinds: frozenset[str] = frozenset()  # of statistics that all models have
    poor: tuple[str, ...] = ()  # models that did not learn their task
    large: Mapping[str, float] = field(default_factory=dict)  # models far out, how many times
    fisher: Mapping[str, float] = field(default_factory=dict)  # model -> its size


@dataclass(frozen=True)
class Candidate:
    """A method that suits, and why."""

    method: dict[str, Any]
    why: str
    statistics: bool = False  # whether it uses those that there are
    data: bool = False
    output: str | None = None
    is_close: bool = True  # whether it matches models closely, mistakes and all
    norm_power: float = 0.0  # by which power of its length a long task vector counts less
    adds_fisher: bool = False  # whether models count by their Fisher information

    @property
    def name(self) -> str:
        return str(self.method["name"])


def candidates(now: Situation) -> Iterator[Candidate]:
    """Methods that suit, the best first; the last one can always be used."""
    if 2 * len(now.poor) >= len(now.models):
        yield _arithmetic(
            now,
            "half of the models or more are poor, and methods that match models closely would "
            "repeat their mistakes; added up, the good ones help them (in our suite "
            "intermediate-small 87.9 % by task arithmetic, 76.7 % by mats_kfac)",
        )
        return
    if now.has_data:
        yield _along_data(now)
    if now.view == "vectors":
        if "block_fisher" in now.kinds:
            yield Candidate(
                {"name": "mats"},
                "there are blocks of Fisher information, with which (IA)^3 vectors merge best in "
                "our suite text-small",
                statistics=True,
                adds_fisher=True,
            )
        yield _arithmetic(now, "the best for (IA)^3 vectors without statistics (text-small)")
        return
    if "kfac" in now.kinds:
        yield Candidate(
            {"name": "mats_kfac"},
            "every model has K-FAC statistics; the best that can be done without its data",
            statistics=True,
        )
    elif now.kinds & {"gram"}:
        yield Candidate(
            {"name": "regmean"},
            "every model has Gram matrices; K-FAC statistics (mats collect --statistics kfac) "
            "would be better",
            statistics=True,
        )
    if now.is_language_model and now.change < CLOSE_CHANGE:
        yield _arithmetic(
            now,
            "there is no data, and these language models hardly moved, so that their task vectors "
            "can be added up; ties is worth a try",
        )
    elif now.large:
        yield Candidate(
            {"name": "wudi"},
            "there is neither data nor statistics of every model, and some moved much farther than "
            "others; it is actmat with all task vectors brought to the same length",
            norm_power=1.0,
        )
    else:
        yield Candidate(
            {"name": "actmat"},
            "there is neither data nor statistics of every model; the best method that needs "
            "neither",
        )
    yield _arithmetic(now, "it can always be used")


def _along_data(now: Situation) -> Candidate:
    """The method that runs the models."""
    held: dict[str, Any] = {}
    if now.poor:
        held = {"from_init": list(now.poor), "otherwise": "init", "init": _START_OF_POOR}
    output = "dense" if now.view in ("folded", "joint") else None
    return Candidate(
        {"name": "mats_cross", **held},
        "there is data for every model; layer after layer, the merged model is made to output "
        "what each model's own outputs. No labels are needed"
        + (". For poor models it is what the init outputs (from_init)" if held else "")
        + (
            ". Without `output: dense` the result is an adapter again, cut to a rank"
            if output
            else ""
        ),
        statistics="kfac" in now.kinds,
        data=True,
        output=output,
        is_close=not held,
    )


def _arithmetic(now: Situation, why: str) -> Candidate:
    scale = round(max(_LEAST_SCALE, 1 / len(now.models)), 2)
    method = {"name": "task_arithmetic", "scale": scale}
    return Candidate(method, why, is_close=False, norm_power=_ARITHMETIC_POWER)


def propose_weights(now: Situation, candidate: Candidate) -> dict[str, float]:
    """How much each model should count; 1 where nothing speaks against it."""
    weights = dict.fromkeys(now.models, 1.0)
    for name, ratio in now.large.items():
        weights[name] = ratio**-candidate.norm_power
    if candidate.adds_fisher:
        weights |= _by_confidence(now.fisher)
    poor = POOR_WEIGHT_MATCHED if candidate.is_close else POOR_WEIGHT
    weights |= dict.fromkeys(now.poor, poor)
    return {name: max(_LEAST_WEIGHT, float(f"{w:.2g}")) for name, w in weights.items()}


def _by_confidence(fisher: Mapping[str, float]) -> dict[str, float]:
    """Weights under which all models have as much Fisher information, where it differs much."""
    sizes = {name: size for name, size in fisher.items() if size > 0}
    if not sizes or max(sizes.values()) < OTHER_CONFIDENCE * min(sizes.values()):
        return {}
    middle = median(sizes.values())
    return {name: middle / size for name, size in sizes.items()}
