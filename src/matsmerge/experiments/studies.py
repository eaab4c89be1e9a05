"""What a suite finds out: the steps of each study, and what they found as results.

A study names its steps once: they are planned by walking through it, and gathered by walking
through it again with what has been found.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from matsmerge.experiments.results import (
    BASE,
    ENSEMBLE,
    INDIVIDUAL,
    JOINT,
    Cell,
    Cost,
    Curve,
    CurvePoint,
    FisherScore,
    Intermediate,
    Landscape,
    Row,
    Scores,
    VariantResults,
)
from matsmerge.experiments.setup import Local, Setup
from matsmerge.experiments.step import Step, with_needs
from matsmerge.experiments.store import Record, Store
from matsmerge.experiments.suite import MethodOfSuite, Study, Suite

SUBSPACE_ENERGY = 0.9
_OF_ONE_SEED = ("landscape", "subspaces")  # pictures, not numbers to average


@dataclass(frozen=True)
class Asked:
    """A step whose outcome is part of the results, and what it is about."""

    step: Step
    study: str
    setup: Setup
    about: dict[str, Any]


def plan(suite: Suite, local: Local) -> list[Step]:
    """All steps, those that others need first."""
    return list(with_needs(asked.step for asked in _ask(suite, local)))


def gather(suite: Suite, local: Local, store: Store) -> dict[str, VariantResults]:
    """The results of what is done so far."""
    found: dict[str, dict[str, Any]] = {name: {} for name in suite.variants}
    for asked in _ask(suite, local):
        record = store.load(asked.step)
        if record is not None:
            mine = found[asked.setup.variant_name].setdefault(asked.study, [])
            mine.extend(_RESULTS[asked.study](asked, record, store))
    return {name: _variant(suite, parts) for name, parts in found.items()}


def _variant(suite: Suite, parts: dict[str, Any]) -> VariantResults:
    study = suite.studies.intermediate
    single = {name: parts.pop(name)[0] for name in _OF_ONE_SEED if name in parts}
    return VariantResults(
        tasks=list(suite.tasks), target=None if study is None else study.target, **parts, **single
    )


def _ask(suite: Suite, local: Local) -> Iterator[Asked]:
    studies = suite.studies
    setups = {
        name: [Setup(suite, name, seed, local) for seed in variant.seeds or suite.seeds]
        for name, variant in suite.variants.items()
    }
    for of_variant in setups.values():
        for setup in of_variant:
            if studies.intermediate is None:
                yield from _comparison(setup)
            elif _is_for(studies.intermediate, setup):
                yield from _intermediate(setup)
    for name, ask in _STUDIES.items():
        study = getattr(studies, name)
        for of_variant in setups.values():
            chosen = [s for s in of_variant if study is not None and _is_for(study, s)]
            for setup in chosen[:1] if name in _OF_ONE_SEED else chosen:
                yield from ask(setup)


def _is_for(study: Study, setup: Setup) -> bool:
    return (study.variants is None or setup.variant_name in study.variants) and (
        study.seeds is None or setup.seed in study.seeds
    )


def _comparison(setup: Setup) -> Iterator[Asked]:
    yield Asked(setup.individual(), "comparison", setup, {"row": INDIVIDUAL})
    for name in setup.methods:
        yield Asked(setup.compared(name), "comparison", setup, {"row": name})
    yield Asked(setup.untouched(), "comparison", setup, {"row": BASE})
    if (joint := setup.joint()) is not None:
        tested = setup.testing(JOINT, {JOINT: joint})
        yield Asked(tested, "comparison", setup, {"row": JOINT})
    if setup.suite.ensemble:
        yield Asked(setup.ensemble(), "comparison", setup, {"row": ENSEMBLE})


def _row(asked: Asked, record: Record, _: Store) -> Iterator[Row]:
    found = record.found
    keys = ("validation", "chosen", "num_tried", "recipe", "merge")
    kept = {key: found[key] for key in keys if key in found}
    yield Row(
        method=asked.about["row"],
        seed=asked.setup.seed,
        test=Scores.model_validate(found["test"]),
        **kept,
    )


def _heat_map(setup: Setup) -> Iterator[Asked]:
    study = setup.suite.studies.heat_map
    assert study is not None
    for init in study.inits:
        if init not in setup.methods:
            continue
        start = setup.compared(init)
        for label, objective in study.objectives.items():
            if not _fits(setup, objective):
                continue
            method = MethodOfSuite(
                method={"name": "mats", "objective": objective},
                search={"iterations": study.iterations},
            )
            cell = setup.merging(f"{init} to {label}", method, init=start)
            yield Asked(cell, "heat_map", setup, {"init": init, "label": label, "start": start})


def _fits(setup: Setup, objective: str | dict[str, Any]) -> bool:
    """Is there what the objective needs among the variant's statistics?"""
    from matsmerge.methods.objectives import OBJECTIVES

    name = objective if isinstance(objective, str) else str(objective["name"])
    needed = OBJECTIVES[name]().statistic
    there = setup.variant.statistics
    return needed is None or needed in there or (needed == "gram" and "kfac" in there)


def _cell(asked: Asked, record: Record, store: Store) -> Iterator[Cell]:
    start = store.load(asked.about["start"])
    assert start is not None, "a step is done after those it needs"
    yield Cell(
        init=asked.about["init"],
        objective=asked.about["label"],
        seed=asked.setup.seed,
        score=_mean(record.found["test"]["tasks"]),
        of_init=_mean(start.found["test"]["tasks"]),
        chosen=record.found["chosen"],
    )


def _fisher(setup: Setup) -> Iterator[Asked]:
    study = setup.suite.studies.fisher
    assert study is not None
    for name in study.methods:
        if name not in setup.methods:
            continue
        for expectation in ("empirical", "true"):
            for split in study.splits:
                step = setup.merging(
                    f"{name} {expectation} {split}",
                    setup.methods[name],
                    expectation=expectation,
                    split=split,
                )
                about = {"method": name, "expectation": expectation, "split": split}
                yield Asked(step, "fisher", setup, about)


def _fisher_score(asked: Asked, record: Record, _: Store) -> Iterator[FisherScore]:
    yield FisherScore(**asked.about, seed=asked.setup.seed, score=record.found["validation"])


def _curves(setup: Setup) -> Iterator[Asked]:
    study = setup.suite.studies.curves
    assert study is not None
    for name, method in study.curves.items():
        step = setup.following(name, method, study.iterations)
        yield Asked(step, "curves", setup, {"name": name})


def _curve(asked: Asked, record: Record, _: Store) -> Iterator[Curve]:
    points = [CurvePoint(**point) for point in record.found["points"]]
    yield Curve(name=asked.about["name"], seed=asked.setup.seed, points=points)


def _costs(setup: Setup) -> Iterator[Asked]:
    study = setup.suite.studies.costs
    assert study is not None
    yield Asked(setup.costs(study.repeats), "costs", setup, {})


def _cost(asked: Asked, record: Record, store: Store) -> Iterator[Cost]:
    setup = asked.setup
    records = [store.load(setup.statistics(task)) for task in setup.suite.tasks]
    collecting = sum(r.seconds for r in records if r is not None)
    for cost in record.found["costs"]:
        seconds = cost["seconds"]
        with_statistics = None
        if cost["method"] == JOINT:
            joint = setup.joint()
            trained = None if joint is None else store.load(joint)
            seconds = [] if trained is None else [trained.seconds]
        elif any(n.startswith("statistics:") for n in setup.compared(cost["method"]).needs):
            with_statistics = collecting
        yield Cost(
            method=cost["method"],
            operations=cost["operations"],
            seconds=seconds,
            statistics_seconds=with_statistics,
        )


def _landscape(setup: Setup) -> Iterator[Asked]:
    study = setup.suite.studies.landscape
    assert study is not None
    step = setup.landscape(study.tasks, study.layer, study.size, study.num_examples)
    yield Asked(step, "landscape", setup, {})


def _level_sets(_: Asked, record: Record, __: Store) -> Iterator[Landscape]:
    yield Landscape.model_validate(record.found)


def _subspaces(setup: Setup) -> Iterator[Asked]:
    yield Asked(setup.subspaces(SUBSPACE_ENERGY), "subspaces", setup, {})


def _overlaps(_: Asked, record: Record, __: Store) -> Iterator[dict[str, Any]]:
    yield dict(record.found)


def _intermediate(setup: Setup) -> Iterator[Asked]:
    study = setup.suite.studies.intermediate
    assert study is not None
    target = study.target
    alone = setup.individual([target])
    for donor in study.donors:
        about = {"donor": donor}
        yield Asked(alone, "intermediate", setup, {**about, "method": INDIVIDUAL})
        for name, method in setup.methods.items():
            step = setup.merging(
                f"{target} with {donor} {name}", method, merged=[target, donor], scored=[target]
            )
            yield Asked(step, "intermediate", setup, {**about, "method": name})
        if study.sequential is not None:
            trained = setup.sequential(donor, target, study.sequential)
            tested = setup.testing(f"{donor} then {target}", {target: trained}, [target])
            yield Asked(tested, "intermediate", setup, {**about, "method": "sequential"})


def _target_score(asked: Asked, record: Record, _: Store) -> Iterator[Intermediate]:
    test = record.found["test"]
    (score,), (error,) = test["tasks"].values(), test["errors"].values()
    kept = {key: record.found[key] for key in ("validation", "chosen") if key in record.found}
    yield Intermediate(**asked.about, seed=asked.setup.seed, score=score, error=error, **kept)


def _mean(scores: dict[str, float]) -> float:
    return sum(scores.values()) / len(scores)


_STUDIES = {
    "heat_map": _heat_map,
    "fisher": _fisher,
    "curves": _curves,
    "costs": _costs,
    "landscape": _landscape,
    "subspaces": _subspaces,
}
_RESULTS: dict[str, Any] = {
    "comparison": _row,
    "heat_map": _cell,
    "fisher": _fisher_score,
    "curves": _curve,
    "costs": _cost,
    "landscape": _level_sets,
    "subspaces": _overlaps,
    "intermediate": _target_score,
}
