"""Fisher information: its diagonal for any parameter, its exact blocks for vectors."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from pydantic import Field

from matsmerge.errors import StatisticsError
from matsmerge.linalg.operators import Diagonal, Gram, LowRank, Operator
from matsmerge.methods.objectives.objective import (
    Evidence,
    Found,
    Objective,
    Part,
    Subject,
    View,
)
from matsmerge.statistics.statistics import MAIN


class Fisher(Objective):
    """C_m = diag(F_m), F_m the mean square of single examples' gradients.

    Diagonal Fisher merging (Matena & Raffel, 2022).
    """

    name = "fisher"
    statistic = "fisher"

    floor: float = Field(0.0, ge=0, description="smallest Fisher value to divide by")

    def find(self, subject: Subject) -> Found | None:
        keys = find_keys("fisher", subject)
        if keys is None:
            return None
        check_shapes(subject, keys, subject.shape)
        return Found(
            View("as it is"),
            1,
            math.prod(subject.shape),
            tuple((key,) for key in keys),
            num_bytes=stored_bytes(keys, subject.evidence),
        )

    def operator(self, found: Found, part: Part) -> Operator:  # noqa: ARG002
        assert part.evidence is not None
        values = part.evidence.statistics.array(part.keys[0], part.of)
        return Diagonal(values.double().clamp(min=self.floor))


class BlockFisher(Objective):
    """C_m = F_m, the whole block of the Fisher information for a vector: (d, d).

    Exact, where K-FAC approximates; for (IA)^3 scales, norms and biases.
    """

    name = "block_fisher"
    statistic = "block_fisher"

    def find(self, subject: Subject) -> Found | None:
        keys = find_keys("block_fisher", subject)
        if keys is None:
            return None
        d = math.prod(subject.shape)
        is_dense = False
        for key, one in zip(keys, subject.evidence, strict=True):
            form = one.statistics.header.forms[f"{MAIN}/{key}"]
            stored = one.statistics.arrays.specs[f"{MAIN}/{key}"].shape
            wanted = (stored[0], d) if form == "rows" else (d * (d + 1) // 2,)
            check_shapes(replace(subject, evidence=(one,)), [key], wanted)
            is_dense |= form != "rows"
        return Found(
            View("vector"),
            1,
            d,
            tuple((key,) for key in keys),
            num_bytes=stored_bytes(keys, subject.evidence),
            is_dense=is_dense,
        )

    def operator(self, found: Found, part: Part) -> Operator:  # noqa: ARG002
        assert part.evidence is not None
        statistics, key = part.evidence.statistics, part.keys[0]
        if statistics.header.forms[f"{part.of}/{key}"] == "rows":
            num_examples = statistics.header.sets[part.of].num_examples
            return LowRank(statistics.stored(key, part.of), 1 / num_examples)
        return Gram(statistics.array(key, part.of).double())


def find_keys(kind: str, subject: Subject) -> list[str] | None:
    """Where each model has a kind of array for a parameter; None if none has."""
    found = [_key(kind, subject.parameter, one) for one in subject.evidence]
    check_everyone_has(kind, subject, [key is not None for key in found])
    return [key for key in found if key is not None] or None


def _key(kind: str, parameter: str, evidence: Evidence) -> str | None:
    statistics = evidence.statistics
    names = evidence.names_of(parameter)
    return next((f"{kind}/{n}" for n in names if statistics.has(f"{kind}/{n}")), None)


def check_everyone_has(kind: str, subject: Subject, has: Sequence[bool]) -> None:
    """Refuse what only some of the models have, but for experts that a model does not use."""
    lacking = [one for one, there in zip(subject.evidence, has, strict=True) if not there]
    is_unused = all(one.is_unused(subject.parameter) for one in lacking)
    if any(has) and not is_unused:
        other = subject.evidence[has.index(True)]
        raise StatisticsError(
            [
                f"{one.label}: has no {kind} of '{subject.parameter}'"
                f"{_why(kind, subject.parameter, one)}, but {other.label} has; collect it with the "
                "same options on data that uses it, or leave the parameter out with an override"
                for one in lacking
            ]
        )


def _why(kind: str, parameter: str, evidence: Evidence) -> str:
    reason = evidence.statistics.header.without.get(kind, {}).get(evidence.names[parameter])
    return f" ({reason})" if reason else ""


def check_shapes(subject: Subject, keys: Iterable[str], wanted: Sequence[int]) -> None:
    """Refuse arrays, one of each model, that are not of the wanted shape."""
    problems = []
    for key, one in zip(keys, subject.evidence, strict=True):
        found = one.statistics.arrays.specs[f"{MAIN}/{key}"].shape
        if tuple(found) != tuple(wanted):
            problems.append(
                f"{one.label}: the array '{key}' has shape {list(found)}, but the parameter "
                f"'{subject.parameter}' needs {list(wanted)}; it was collected from another model"
            )
    if problems:
        raise StatisticsError(problems)


def stored_bytes(keys: Iterable[str], evidence: Iterable[Evidence]) -> int:
    return sum(
        one.statistics.arrays.specs[f"{MAIN}/{key}"].num_bytes
        for key, one in zip(keys, evidence, strict=True)
    )
