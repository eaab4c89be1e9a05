"""Merges by statistics that are known by their leading directions, against whole matrices."""

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from solved_models import State, make_nets, make_statistics, solve_dense
from torch import Tensor

import matsmerge
from matsmerge.checkpoints.checkpoint import TensorSpec
from matsmerge.checkpoints.filled_checkpoint import FilledCheckpoint
from matsmerge.errors import StatisticsError
from matsmerge.linalg.operators import Paired, TruncatedProduct
from matsmerge.linalg.triangle import pack_upper, unpack_upper
from matsmerge.linalg.truncated import Truncated, truncate
from matsmerge.methods.layer import Round
from matsmerge.methods.objectives.gram import GramObjective
from matsmerge.methods.objectives.kfac import Kfac
from matsmerge.methods.objectives.objective import Evidence, Found, Part, Subject, View
from matsmerge.methods.parts import Stage
from matsmerge.methods.solvers import ConjugateGradients
from matsmerge.statistics.statistics import MAIN, Statistics, in_memory

pytestmark = pytest.mark.filterwarnings("ignore:merged by:UserWarning")

BASE, *MODELS = (
    {name: values.double() for name, values in net.state_dict().items()}
    for net in (make_nets()[0], *make_nets()[1])
)
LAYERS = ["first", "gate", "second", "out"]
METHODS = ["mats", "mats_kfac", "regmean", "block_fisher"]
WEIGHTS = [0.5, 2.0, 1.0]
CHANGES: list[dict[str, Any]] = [
    {"bias": True},
    {"ridge": 0.1, "equalize": True},
    {"anchor": 0.1, "weights": WEIGHTS},
    {"bias": True, "ridge": 0.1, "equalize": True, "anchor": 0.1, "weights": WEIGHTS},
]


def regular(statistics: Statistics) -> Statistics:
    """In float64, with a little of every direction, no two eigenvalues alike.

    And no entry halfway between two numbers of float32, to which K-FAC rounds its factors.
    """
    arrays = {}
    for name in statistics.arrays.specs:
        values = statistics.arrays[name].double()
        if statistics.header.forms[name] == "symmetric":
            matrix = unpack_upper(values) * 0.987
            diagonal = matrix.diagonal(dim1=-2, dim2=-1)
            diagonal += 0.05 * diagonal.mean() * torch.linspace(0.5, 1.5, matrix.shape[-1])
            values = pack_upper(matrix)
        arrays[name] = values * (0.987 if "/mean/" in name else 1.0)
    return in_memory(statistics.header, arrays)


WHOLE = [regular(s) for s in make_statistics()]


@dataclass(frozen=True)
class Truncating(Statistics):
    """Statistics that give the leading directions of whole second moments."""

    rank: int = 1

    def truncated_gram(
        self, module: str, of: str = MAIN, *, bias: bool = False
    ) -> Truncated | None:
        gram = Statistics(self.header, self.arrays).gram(module, of, bias=bias)
        return truncate(gram, self.rank) if gram.ndim == 2 else None

    def truncated_output_factor(self, module: str, of: str = MAIN) -> Truncated | None:
        factor = Statistics(self.header, self.arrays).output_factor(module, of)
        return truncate(factor, self.rank) if factor.ndim == 2 else None


def truncating(*ranks: int | None) -> list[Statistics]:
    """Statistics of some ranks; None keeps them whole."""
    return [
        s if r is None else Truncating(s.header, s.arrays, rank=r)
        for s, r in zip(WHOLE, ranks, strict=True)
    ]


def written_out(statistics: Statistics, kfac: bool, bias: bool) -> dict[str, Tensor]:
    """The dense covariance of each layer."""
    found = {}
    for module in LAYERS:
        has_bias = bias and module != "second"
        gram = statistics.truncated_gram(module, bias=has_bias)
        inputs = statistics.gram(module, bias=has_bias) if gram is None else gram.dense()
        factor = statistics.truncated_output_factor(module)
        outputs = statistics.output_factor(module) if factor is None else factor.dense()
        num = len(outputs)
        found[module] = torch.kron(outputs if kfac else torch.eye(num, dtype=torch.float64), inputs)
    return found


def merge(method: str, statistics: Any, **parameters: Any) -> State:
    merged = matsmerge.merge(MODELS, BASE, method, statistics=statistics, force=True, **parameters)
    return merged.state_dict()


def off(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("changes", [*CHANGES, {"stop": "held_out"}], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_all_directions_are_the_whole(method: str, changes: dict[str, Any]) -> None:
    if method == "regmean" and "stop" in changes:
        changes = {"off_diagonal": 0.5}
    if method == "block_fisher":  # a hundred plain iterations let the last bit grow
        changes = {**changes, "iterations": 20}
    expected = merge(method, WHOLE, **changes)
    found = merge(method, truncating(99, 99, 99), **changes)
    for name, values in expected.items():
        assert off(found[name], values) < 1e-8, name


def test_all_directions_in_closed_form_and_on_the_way() -> None:
    """K-FAC of two models, and an iterate that is kept."""
    for parameters in (
        {"solver": "closed_form"},
        {"iterations": 4},
        {"iterations": 4, "preconditioner": "jacobi"},
    ):
        expected, found = (
            matsmerge.merge(
                MODELS[:2],
                BASE,
                "mats",
                statistics=statistics[:2],
                force=True,
                objective="kfac",
                **parameters,
            )
            for statistics in (WHOLE, truncating(99, 99, 99))
        )
        for name, values in expected.items():
            assert off(found[name], values) < 1e-8, name


@pytest.mark.parametrize("ranks", [(1, 1, 1), (1, 2, 1), (1, None, 2)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("objective", ["gram", "kfac"])
def test_a_few_directions_against_dense_covariances(
    objective: str, bias: bool, ranks: tuple[int | None, ...]
) -> None:
    statistics = truncating(*ranks)
    parameters: dict[str, Any] = {"solver": "closed_form"}
    if objective == "kfac":
        parameters = {"preconditioner": "kronecker", "iterations": 2000}
    found = merge("mats", statistics, objective=objective, init="average", bias=bias, **parameters)
    dense = [written_out(s, objective == "kfac", bias) for s in statistics]
    for module in LAYERS:
        names = [f"{module}.weight", *([f"{module}.bias"] if bias and module != "second" else [])]

        def joined(state: State, names: list[str] = names) -> Tensor:
            return torch.cat([state[n].reshape(len(state[n]), -1) for n in names], 1)

        thetas = [joined(m) for m in MODELS]
        start = torch.stack(thetas).mean(0)
        expected = solve_dense([d[module] for d in dense], thetas, start)
        assert off(joined(found), expected) < 1e-6, module


def test_many_directions_of_all_models_are_cut_in_wide_layers() -> None:
    """Three models have one direction each where three are to be used of all, and not where a layer
    has no more than three."""
    few, more = (merge("mats_kfac", truncating(r, r, r), joint_rank=99) for r in (1, 2))
    cut = merge("mats_kfac", truncating(2, 2, 2), joint_rank=3)
    num_cut = 0
    for module in LAYERS:
        name = f"{module}.weight"
        if min(BASE[name].shape) > 3:
            num_cut += 1
            assert off(cut[name], few[name]) < 1e-9, name
            assert off(cut[name], more[name]) > 1e-6, name
        elif max(BASE[name].shape) <= 3:
            assert off(cut[name], more[name]) < 1e-9, name
    assert num_cut


@pytest.mark.parametrize("rank", [1, 2])
def test_regmean_scales_what_is_off_the_diagonal(rank: int) -> None:
    statistics = truncating(rank, rank, rank)
    found = merge("regmean", statistics)
    by_products = merge("regmean", statistics, solver="cg", iterations=400, form="plain")
    for module in LAYERS:
        grams = []
        for one in statistics:
            truncated = one.truncated_gram(module)
            assert truncated is not None
            gram = truncated.dense()
            grams.append(0.9 * gram + 0.1 * gram.diagonal().diag())
        name = f"{module}.weight"
        right = torch.stack([m[name] @ g for m, g in zip(MODELS, grams, strict=True)]).sum(0)
        expected = right @ torch.linalg.inv(torch.stack(grams).sum(0))
        assert off(found[name], expected) < 1e-9, name
        assert off(by_products[name], expected) < 1e-5, name


@pytest.mark.parametrize(
    "parameters",
    [
        {"objective": "kfac", "per": "token"},
        {"objective": "kfac", "output_ridge": 0.1, "preconditioner": "kronecker"},
        {"objective": "kfac", "off_diagonal": 0.5},
        {"objective": "kfac", "preconditioner": "jacobi"},
        {"objective": "kfac", "stop": "held_out"},
        {"objective": "gram", "stop": "held_out"},
        {"objective": "gram", "preconditioner": "jacobi"},
        {"objective": "gram", "embeddings": True},
        {"objective": "gram", "solver": "spectral_filter"},
        {"objective": "gram", "solver": "spectral_filter", "off_diagonal": 0.5},
        {"objective": "gram", "solver": "essential_subspaces"},
        {"objective": "gram", "solver": "svc"},
        {"stages": [{"objective": "gram", "iterations": 3}, {"objective": "fisher"}]},
    ],
    ids=str,
)
def test_everything_runs_and_one_model_stays_the_same(parameters: dict[str, Any]) -> None:
    merged = merge("mats", truncating(1, 2, 1), init="average", **parameters)
    assert all(bool(values.isfinite().all()) for values in merged.values())
    if parameters.get("solver") != "essential_subspaces":
        one = matsmerge.merge(
            MODELS[:1],
            BASE,
            "mats",
            statistics=truncating(1, 2, 1)[:1],
            force=True,
            init="average",
            **parameters,
        )
        for name, values in MODELS[0].items():
            torch.testing.assert_close(one[name], values)


@pytest.mark.parametrize("method", METHODS)
def test_invariants(method: str) -> None:
    """Identical models stay the same, and the order of models does not matter."""
    copies = [{n: t.clone() for n, t in MODELS[0].items()} for _ in range(3)]
    same = matsmerge.merge(
        copies, BASE, method, statistics=truncating(1, 2, 1), force=True, init="average"
    )
    for name, values in MODELS[0].items():
        torch.testing.assert_close(same[name], values)
    found = []
    for order in itertools.islice(itertools.permutations(range(3)), 0, 6, 3):
        statistics = truncating(1, 2, 1)
        found.append(
            matsmerge.merge(
                {f"m{i}": MODELS[i] for i in order},
                BASE,
                method,
                statistics={f"m{i}": statistics[i] for i in order},
                weights=[WEIGHTS[i] for i in order],
                force=True,
            )
        )
    for name, values in found[0].items():
        assert off(found[1][name], values) < 1e-4, name


def test_only_outputs_are_truncated_where_inputs_are_the_merged_model_s() -> None:
    """Moments of [z; δ] are whole, and O beside them is not written out."""

    @dataclass(frozen=True)
    class WithPairs(Truncating):
        def truncated_gram(
            self,
            module: str,
            of: str = MAIN,
            *,
            bias: bool = False,
        ) -> Truncated | None:
            return None

        def pairs(self, module: str, of: str = MAIN, *, bias: bool = False) -> Tensor | None:
            gram = self.gram(module, of, bias=bias)
            both: Tensor = torch.block_diag(gram, 0.1 * gram)
            return both

    one = WithPairs(WHOLE[0].header, WHOLE[0].arrays, rank=2)
    evidence = Evidence("one", one, {"first.weight": "first.weight"})
    found = Found(View("linear"), 8, 6, (("first",),))
    part = Part(("first",), evidence, MAIN, lambda: torch.zeros(8, 6))
    operator = Kfac().operator(found, part)
    assert isinstance(operator, Paired)
    x = torch.randn(8, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    truncated = one.truncated_output_factor("first")
    assert truncated is not None
    expected = truncated.dense() @ x[:, :6] @ one.gram("first")
    torch.testing.assert_close(operator.own(x[:, :6]), expected, rtol=1e-5, atol=1e-8)
    pairs = one.pairs("first")
    assert pairs is not None
    expected = truncated.dense() @ x @ pairs
    torch.testing.assert_close(operator.both(x), expected, rtol=1e-5, atol=1e-8)
    assert isinstance(operator.own, TruncatedProduct)


def test_embeddings_have_whole_output_factors() -> None:
    """Beside how often tokens occur, which is a diagonal."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(9, 40), torch.nn.Linear(40, 3)).double()
    tokens = torch.randint(9, (12, 4))
    one = matsmerge.collect(
        model, [tokens], "kfac", rank=2, loss=lambda net, x: net(x).square().sum((1, 2))
    )
    truncated = one.truncated_output_factor("0")
    assert truncated is not None
    evidence = Evidence("one", one, {"0.weight": "0.weight"})
    objective = Kfac(embeddings=True)
    found = objective.find(Subject("0.weight", (9, 40), View("as it is"), (evidence,)))
    assert found is not None
    assert found.output_rank is None
    operator = objective.operator(found, Part(found.keys[0], evidence, MAIN, lambda: tokens))
    x = torch.randn(40, 9, dtype=torch.float64)
    expected = truncated.dense() @ x * one.gram("0")
    torch.testing.assert_close(operator(x), expected, rtol=1e-5, atol=1e-8)
    diagonal = truncated.diagonal()[:, None] * one.gram("0")
    torch.testing.assert_close(operator.diagonal(), diagonal, rtol=1e-5, atol=1e-8)


def sketched(num_inputs: int, num_outputs: int, num: int, *, mean: bool) -> Statistics:
    """The header of a linear layer's sketches, with shapes alone."""
    header = WHOLE[0].header
    maps = tuple(m for m in header.maps if m.module == "first")
    shapes: dict[str, tuple[int, ...]] = {
        "main/inputs/first": (num_inputs + mean, num + 1),
        "main/outputs/first": (num_outputs, num + 1),
    }
    if mean:
        shapes["main/mean/first"] = (num_inputs,)
    forms = {name: "sketch" if len(shape) == 2 else "full" for name, shape in shapes.items()}
    header = header.model_copy(update={"maps": maps, "forms": forms})
    specs = {name: TensorSpec(torch.float32, shape) for name, shape in shapes.items()}
    return Statistics(header, FilledCheckpoint("sketches", specs, {}))


def find(*statistics: Statistics, shape: tuple[int, int], bias: bool = True) -> Found | None:
    names = {"first.weight": "first.weight", "first.bias": "first.bias"}
    evidence = tuple(Evidence(f"model {i}", s, names) for i, s in enumerate(statistics))
    return Kfac(bias=bias).find(Subject("first.weight", shape, View("linear"), evidence))


@pytest.mark.parametrize("mean", [False, True])
def test_shapes_of_sketches(mean: bool) -> None:
    models = [sketched(300, 200, num, mean=mean) for num in (10, 20)]
    found = find(*models, shape=(200, 300), bias=mean)
    assert found is not None
    assert (found.input_rank, found.output_rank) == (30, 30)
    assert found.num_inputs == 300 + mean
    assert found.num_bytes == 4 * (300 + mean + 200) * (11 + 21)  # both factors of both models
    with pytest.raises(StatisticsError, match=r"has shape \[30[01], 11\].*needs \[29[89], 11\]"):
        find(*models, shape=(200, 298), bias=mean)
    with pytest.raises(StatisticsError, match=r"has shape \[200, 11\].*needs \[150, 11\]"):
        find(*models, shape=(150, 300), bias=mean)


def test_memory_goes_with_the_rank() -> None:
    stage = Stage(objective=Kfac(), solver=ConjugateGradients(preconditioner="kronecker"))

    def peak(stage: Stage, input_rank: int | None = None, output_rank: int | None = None) -> int:
        found = Found(
            View("linear"),
            2816,
            1024,
            is_dense=True,
            input_rank=input_rank,
            output_rank=output_rank,
        )
        return Round("w", 0, True, stage, found).peak_bytes(8, 0)

    weights = 12 * 8 * 2816 * 1024
    few = peak(stage, input_rank=256, output_rank=256)
    more = peak(stage, input_rank=512, output_rank=512)
    whole = peak(stage)
    assert weights < few < more < whole / 4
    assert peak(stage, input_rank=1024, output_rank=2816) == whole
    gram = Stage(objective=GramObjective(), solver=ConjugateGradients())
    assert peak(gram, input_rank=256) < peak(gram)
