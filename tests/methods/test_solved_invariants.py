"""Methods that solve systems: one model in, the same out; identical in, the same; any order."""

import itertools
from typing import Any

import pytest
import torch
from solved_models import make_nets, make_statistics

import matsmerge
from matsmerge import RecipeError
from matsmerge.methods import METHODS
from matsmerge.methods.mats import Mats
from matsmerge.methods.objectives import OBJECTIVES
from matsmerge.statistics.statistics import Statistics, in_memory

pytestmark = pytest.mark.filterwarnings("ignore:merged by:UserWarning")

BASE, MODELS = make_nets()
STATISTICS = make_statistics()
# RegMean++ has its own tests: it needs data.
# Those that go along the merged model have theirs in tests/engine.
SOLVED = [n for n, c in METHODS.items() if issubclass(c, Mats) and not c().uses_merged_inputs]
# Made orthogonal to each other, not even the parts of a single change add up to it again.
CHANGING = ["essential_subspaces"]
RETURNING = [name for name in SOLVED if name not in CHANGING]
SOLVERS: list[dict[str, Any]] = [
    {"solver": "closed_form"},
    {"solver": "cg", "iterations": 7},
    {"solver": "cg", "iterations": 7, "preconditioner": "jacobi"},
]


@pytest.mark.parametrize("init", ["average", "task_arithmetic"])
@pytest.mark.parametrize("method", RETURNING)
def test_one_model_in_the_same_out(method: str, init: str) -> None:
    """Bit for bit from an init that is the model already."""
    scale = {"scale": 1.0} if init == "task_arithmetic" else {}
    merged = matsmerge.merge(
        MODELS[:1], BASE, method, statistics=STATISTICS[:1], init={"name": init, **scale}
    )
    for name, values in MODELS[0].state_dict().items():
        torch.testing.assert_close(merged[name], values, rtol=1e-6, atol=1e-7)
        if init == "average":
            assert torch.equal(merged[name], values), name


@pytest.mark.parametrize("method", RETURNING)
def test_identical_models_in_the_same_out(method: str) -> None:
    model = MODELS[0].state_dict()
    copies = [{n: t.clone() for n, t in model.items()} for _ in range(3)]
    merged = matsmerge.merge(copies, BASE, method, statistics=[STATISTICS[0]] * 3, init="average")
    for name, values in model.items():
        torch.testing.assert_close(merged[name], values, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("objective", [n for n in OBJECTIVES if n != "kfac_scales"])  # of (IA)^3
@pytest.mark.parametrize("parameters", SOLVERS)
def test_identical_models_under_any_statistics(objective: str, parameters: dict[str, Any]) -> None:
    """Whatever their covariances say, models that agree leave nothing to solve."""
    model = MODELS[0].state_dict()
    num = 2 if objective == "kfac" else 3
    copies = [{n: t.clone() for n, t in model.items()} for _ in range(num)]
    merged = matsmerge.merge(
        copies,
        BASE,
        "mats",
        statistics=STATISTICS[:num],
        force=True,
        init="average",
        objective=objective,
        **parameters,
    )
    for name, values in model.items():
        torch.testing.assert_close(merged[name], values, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("method", SOLVED)
def test_order_does_not_matter(method: str) -> None:
    weights = [0.5, 1.0, 2.0]
    found = []
    for order in itertools.islice(itertools.permutations(range(3)), 0, 6, 2):
        found.append(
            matsmerge.merge(
                {f"m{i}": MODELS[i] for i in order},
                BASE,
                method,
                statistics={f"m{i}": STATISTICS[i] for i in order},
                weights=[weights[i] for i in order],
            )
        )
    for other in found[1:]:
        for name, values in found[0].items():
            off = float((values - other[name]).norm() / values.norm())
            # A hundred plain iterations let the last bit of the sum grow; what they reach is equal.
            assert off < (1e-2 if method == "block_fisher" else 1e-4), (name, off)


def test_a_model_with_weight_zero_does_not_count() -> None:
    two = matsmerge.merge(MODELS[:2], BASE, "mats", statistics=STATISTICS[:2], init="average")
    three = matsmerge.merge(
        MODELS, BASE, "mats", statistics=STATISTICS, init="average", weights=[1.0, 1.0, 0.0]
    )
    for name, values in two.items():
        torch.testing.assert_close(values, three[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"objective": "kfac", "solver": "closed_form"}, "no closed form for 3 models"),
        (
            {"objective": "kfac", "solver": {"name": "closed_form", "precision": "float32"}},
            "precision float32 is for Gram matrices, the objective is kfac",
        ),
        ({"objective": "gram", "preconditioner": "kronecker"}, "K-FAC factors"),
        ({"objective": "fisher", "inputs": "merged"}, "is about the Gram matrices"),
        ({"objective": "kfac", "solver": "spectral_filter"}, "about eigenvalues of second moments"),
        ({"objective": "fisher", "solver": "spectral_filter"}, "about eigenvalues of second mom"),
        ({"solver": "spectral_filter", "share": 0}, "share: input should be greater than 0"),
        ({"solver": "svc", "least": 0}, "least: input should be greater than 0"),
        ({"objective": "identity", "solver": "svc", "init": "iso_cts"}, "any directions would do"),
        ({"objective": "kfac", "solver": "essential_subspaces"}, "are those of outputs"),
        ({"time": 3}, "it belongs to the solver spectral_filter"),
        ({"weights": [1.0, -1.0, 1.0]}, "must not be negative"),
        ({"weights": [0.0, 0.0, 0.0]}, "sum to zero"),
        ({"init": "slerp"}, "exactly 2 models"),
        ({"objective": "grm"}, "did you mean 'gram'"),
        ({"objective": ["gram", "kfac"]}, "several rounds are stages"),
        ({"init": {"name": "passthrough", "model": "base"}}, "passthrough is for overrides"),
        ({"objective": {"name": "gram", "ridge": float("inf")}}, "finite"),
        ({"iterations": 2.5}, "iterations"),
        ({"solver": "closed_form", "iterations": 3}, "'iterations': it belongs to the solver cg"),
        ({"statistics_of": 3}, "unknown parameter 'statistics_of'"),
        ({"stages": [{"objective": "gram"}], "iterations": 3}, "leave out both"),
    ],
)
def test_what_has_no_meaning_is_refused(parameters: dict[str, Any], reason: str) -> None:
    with pytest.raises(RecipeError, match=reason):
        matsmerge.merge(MODELS, BASE, "mats", statistics=STATISTICS, **parameters)


def test_base_is_needed_where_it_is_used() -> None:
    for method in ("mats", "actmat", "svc", "essential_subspaces"):
        with pytest.raises(RecipeError, match="needs a base"):
            matsmerge.merge(MODELS, None, method, statistics=STATISTICS)
    matsmerge.merge(MODELS, None, "mats", statistics=STATISTICS, init="average")
    with pytest.raises(RecipeError, match="needs a base"):
        matsmerge.merge(MODELS, None, "svc", init="average")


def test_named_methods_may_have_stages() -> None:
    merged = matsmerge.merge(
        MODELS,
        BASE,
        "mats_kfac",
        statistics=STATISTICS,
        stages=[{"objective": "gram", "iterations": 3}],
    )
    same = matsmerge.merge(MODELS, BASE, "mats", statistics=STATISTICS, iterations=3)
    assert all(torch.equal(values, same[name]) for name, values in merged.items())


def test_equal_entries_are_trimmed_by_number() -> None:
    base = {"w.weight": torch.zeros(6, 5)}
    signs = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).sign()
    models = [{"w.weight": 0.01 * signs}, {"w.weight": 0.01 * signs.flip(0)}]
    merged = matsmerge.merge(models, base, "tact", density=0.5, init="average")["w.weight"]
    assert bool(merged.isfinite().all())
    one, two = (float((merged - m["w.weight"]).norm()) for m in models)
    assert one > 0
    assert two > 0


@pytest.mark.parametrize("exponent", [-80, -40, 75, 110])
@pytest.mark.parametrize("method", ["regmean", "mats", "mats_kfac", "block_fisher"])
def test_the_size_of_statistics_does_not_matter(method: str, exponent: int) -> None:
    size = 2.0**exponent  # exact, so that rounding is the same

    def scaled(statistics: Statistics) -> Statistics:
        arrays = {
            name: statistics.arrays[name] * size
            if name.split("/")[1] in ("inputs", "outputs")
            else statistics.arrays[name]
            for name in statistics.arrays.specs
        }
        return in_memory(statistics.header, arrays)

    options: dict[str, Any] = {"bias": False} if method == "mats_kfac" else {}
    expected = matsmerge.merge(MODELS, BASE, method, statistics=STATISTICS, **options)
    found = matsmerge.merge(
        MODELS, BASE, method, statistics=[scaled(s) for s in STATISTICS], **options
    )
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, rtol=1e-5, atol=1e-7)
