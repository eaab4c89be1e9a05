"""Results of a suite that nobody ran, with something in every part."""

import itertools
import math
import random
from typing import Any

from matsmerge.lab.experiments.suite_results import (
    Curve,
    CurvePoint,
    FisherScore,
    HeatMapCell,
    Intermediate,
    Landscape,
    MergeCost,
    MethodRow,
    Point,
    RankScore,
    Scores,
    StepRecord,
    SuiteResults,
    VariantResults,
)

TASKS = ["paws", "qasc", "quartz", "wiki_qa", "wsc"]
MEANS = {
    "base": 0.31,
    "individual": 0.919,
    "joint": 0.885,
    "ensemble": 0.81,
    "average": 0.747,
    "task_arithmetic": 0.765,
    "ties": 0.779,
    "diagonal_fisher": 0.741,
    "regmean": 0.838,
    "mats": 0.840,
    "mats_kfac": 0.897,
}
REFERENCES = ("base", "individual", "joint", "ensemble")
NUM_EXAMPLES = 200
INITS = ["average", "task_arithmetic", "ties", "regmean"]
RANKS = [(4, 0.8, 10**6), (16, 0.88, 3 * 10**6), (64, 0.896, 10**7), (None, 0.897, 10**8)]
OBJECTIVES = ["identity", "fisher", "gram", "kfac"]


def make_results(
    *, seeds: int = 3, variants: tuple[str, ...] = ("full",), paper: bool = True, **changes: Any
) -> SuiteResults:
    """A whole suite; `changes` replace parts of it."""
    chance = random.Random(0)
    suite = {
        "base": "tiny/base",
        "methods": {m: {"method": m} for m in MEANS if m not in REFERENCES}
        | {"mats": {"method": "mats", "label": "mats (Gram)"}},
        "paper": {v: f"ties-7/{v}" for v in variants} if paper else {},
    }
    content: dict[str, Any] = {
        "name": "made-up",
        "title": "Seven small tasks, merged",
        "about": "Small models, each fine-tuned for one task, merged by every method and tuned alike.",
        "suite": suite,
        "seeds": list(range(seeds)),
        "variants": {v: make_variant(chance, seeds) for v in variants},
        "steps": [
            StepRecord(name=f"{kind}-{i}", kind=kind, key="0", seconds=chance.uniform(2, 90))
            for kind in ("train", "collect", "merge", "evaluate")
            for i in range(4)
        ],
        "versions": {"matsmerge": "0.1.0", "torch": "2.13.0"},
        "commit": "0123456789abcdef",
        "machine": {"processor": "two cores", "memory": "8 GB"},
        "notes": ["wsc: 7 examples were longer than 32 tokens and cut"],
    }
    return SuiteResults.model_validate(content | changes)


def make_variant(chance: random.Random, seeds: int) -> VariantResults:
    return VariantResults(
        tasks=TASKS,
        comparison=[make_row(m, seed, chance) for m in MEANS for seed in range(seeds)],
        heat_map=[
            HeatMapCell(
                init=init,
                objective=objective,
                seed=seed,
                score=MEANS[init] + 0.04 * i - 0.03 + chance.gauss(0, 0.01),
                of_init=MEANS[init],
            )
            for init in INITS
            for i, objective in enumerate(OBJECTIVES)
            for seed in range(seeds)
        ],
        fisher=[
            FisherScore(method=m, expectation=e, split=s, seed=0, score=chance.uniform(0.5, 0.8))
            for m in ("diagonal_fisher", "block_fisher")
            for e in ("empirical", "true")
            for s in ("train", "validation")
        ],
        ranks=[
            RankScore(method="mats_kfac", rank=rank, seed=seed, score=score, num_bytes=size)
            for rank, score, size in RANKS
            for seed in range(seeds)
        ],
        curves=[
            Curve(
                name=name,
                seed=0,
                points=[
                    CurvePoint(
                        iterations=at,
                        score=0.7 + 0.15 * (1 - math.exp(-at / 8)) - slope * math.log1p(at) / 300,
                        residual=math.exp(-math.sqrt(at)) / 10,
                        objective=math.exp(-at / 10),
                    )
                    for at in (0, 1, 2, 5, 10, 20, 50, 100, 500, 1000, 5000)
                ],
            )
            for slope, name in enumerate(["mats", "mats_kfac", "actmat"])
        ],
        costs=[
            MergeCost(
                method=m,
                operations=10.0 ** (7 + i),
                seconds=[0.2 * 2**i, 0.21 * 2**i, 0.22 * 2**i],
                statistics_seconds=40.0 if i > 2 else None,
            )
            for i, m in enumerate(m for m in MEANS if m not in REFERENCES)
        ],
        landscape=make_landscape(),
        subspaces=make_subspaces(chance),
        target="wsc",
        intermediate=[
            Intermediate(donor=d, method=m, seed=s, score=chance.uniform(0.7, 0.8), error=0.02)
            for d in ("paws", "qasc")
            for m in ("individual", "average", "ties", "mats", "sequential")
            for s in range(seeds)
        ],
    )


def make_row(method: str, seed: int, chance: random.Random) -> MethodRow:
    scores = {
        task: min(0.99, MEANS[method] + 0.05 * math.sin(3 * i) + chance.gauss(0, 0.012))
        for i, task in enumerate(TASKS)
    }
    right = {task: make_answers(share, i) for i, (task, share) in enumerate(scores.items())}
    scores = {task: answers.count("1") / NUM_EXAMPLES for task, answers in right.items()}
    test = Scores(tasks=scores, errors=dict.fromkeys(TASKS, 0.015), right=right)
    if method in REFERENCES:
        return MethodRow(method=method, seed=seed, test=test)
    recipe = {"models": [{"model": t} for t in TASKS], "base": "tiny/base", "method": method}
    return MethodRow(
        method=method,
        seed=seed,
        test=test,
        validation=test.mean,
        chosen={"iterations": 10} if "mats" in method else {},
        num_tried=10,
        recipe=recipe,
        merge=make_merge(method, recipe),
    )


def make_answers(share: float, task: int) -> str:
    """Right answers to this share of examples, which are hard for all models or for none."""
    hardness = random.Random(task)
    return "".join("01"[hardness.random() < share] for _ in range(NUM_EXAMPLES))


def make_merge(method: str, recipe: dict[str, Any]) -> dict[str, Any]:
    """A merge.json, with convergence if the method solves."""
    parameters: dict[str, Any] = {"norm.weight": {"shape": [8], "otherwise": "mats" in method}}
    for i, module in itertools.product(range(12), ("query", "dense")):
        name = f"encoder.layer.{i}.{module}.weight"
        parameters[name] = {"shape": [8, 8]}
        if "mats" in method:
            rate = 0.5 + 0.03 * i
            residuals = [0.1 * rate**step for step in range(21)]
            parameters[name]["solved"] = [
                {
                    "stage": 0,
                    "objective": "gram",
                    "solver": "cg",
                    "status": "finished",
                    "iterations": 20,
                    "residual": residuals[-1],
                    "objective_value": 0.2,
                    "objective_of_start": 1.0,
                    "residuals": residuals,
                    "objective_values": [0.2 + 0.8 * rate ** (2 * step) for step in range(21)],
                }
            ]
    return {
        "format": 1,
        "versions": {"matsmerge": "0.1.0"},
        "recipe": recipe,
        "rules": [{"method": method, "otherwise": "average"}],
        "parameters": parameters,
    }


def make_landscape() -> Landscape:
    places = {"paws": (0.0, 0.0), "qasc": (1.0, 0.0), "wsc": (0.4, 0.9)}
    grid = [-0.5 + 0.1 * i for i in range(21)]
    stretch = {"paws": (1.0, 4.0), "qasc": (5.0, 1.0), "wsc": (2.0, 2.5)}
    return Landscape(
        layer="encoder.layer.3.dense.weight",
        xs=grid,
        ys=grid,
        losses={
            task: [
                [
                    0.2 + stretch[task][0] * (x - a) ** 2 + stretch[task][1] * (y - b) ** 2
                    for x in grid
                ]
                for y in grid
            ]
            for task, (a, b) in places.items()
        },
        models=[Point(name=task, x=x, y=y) for task, (x, y) in places.items()],
        merges=[
            Point(name="average", x=0.47, y=0.3),
            Point(name="diagonal_fisher", x=0.55, y=0.22),
            Point(name="regmean", x=0.62, y=0.33),
            Point(name="mats_kfac", x=0.68, y=0.28),
        ],
        paths={
            "mats_kfac": [
                Point(name=str(i), x=0.3 + 0.38 * (1 - 0.6**i), y=0.5 - 0.22 * (1 - 0.4**i))
                for i in range(9)
            ]
        },
    )


def make_subspaces(chance: random.Random) -> dict[str, Any]:
    table = [[1.0] * len(TASKS) for _ in TASKS]
    for a in range(len(TASKS)):
        for b in range(a):
            table[a][b] = table[b][a] = chance.uniform(0.4, 0.8)
    return {
        "tasks": [{"name": task} for task in TASKS],
        "rank": None,
        "energy": 0.9,
        "overlap": table,
        "overlap_at_random": [[0.2] * len(TASKS) for _ in TASKS],
        "relative_to": "base",
        "distances": {
            task: {
                "inside": 0.3,
                "outside": 0.6,
                "at_outputs": 0.12,
                "inside_share": 0.2,
                "inside_share_at_random": 0.1,
            }
            for task in TASKS
        },
    }
