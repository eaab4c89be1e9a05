"""Every objective and solver through a whole merge, against systems that are written out."""

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from solved_models import State, make_nets, make_statistics, solve_dense
from torch import Tensor

import matsmerge
from matsmerge.statistics.statistics import HELD_OUT, Statistics, in_memory

pytestmark = pytest.mark.filterwarnings("ignore:merged by:UserWarning")

BASE, MODELS = make_nets()
STATES = [model.state_dict() for model in MODELS]
BASE_STATE = BASE.state_dict()
STATISTICS = make_statistics()
LAYERS = ["first", "gate", "second", "out"]


def merge(method: str, **parameters: Any) -> State:
    merged = matsmerge.merge(MODELS, BASE, method, statistics=STATISTICS, **parameters)
    return merged.state_dict()


def average(name: str) -> Tensor:
    return torch.stack([s[name].double() for s in STATES]).mean(0)


def task_arithmetic(name: str, scale: float = 0.3) -> Tensor:
    deltas = torch.stack([s[name].double() - BASE_STATE[name].double() for s in STATES]).sum(0)
    start: Tensor = BASE_STATE[name].double() + scale * deltas
    return start


def grams(module: str, **options: Any) -> list[Tensor]:
    return [s.gram(module, **options).double() for s in STATISTICS]


def gram_matrix(gram: Tensor, num_outputs: int) -> Tensor:
    return torch.kron(torch.eye(num_outputs, dtype=torch.float64), gram)


def total(tensors: Iterable[Tensor]) -> Tensor:
    return torch.stack([t.double() for t in tensors]).sum(0)


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-4) -> None:
    assert found.shape == expected.shape
    off = float((found.double() - expected.double()).norm() / expected.double().norm())
    assert off < tolerance, off


@pytest.mark.parametrize("module", LAYERS)
def test_regmean(module: str) -> None:
    merged = merge("regmean", off_diagonal=0.8)[f"{module}.weight"]
    scaled = [0.8 * g + 0.2 * g.diagonal().diag() for g in grams(module)]
    top = total(s[f"{module}.weight"].double() @ g for s, g in zip(STATES, scaled, strict=True))
    close(merged, top @ torch.linalg.inv(total(scaled)))


@pytest.mark.parametrize("solver", ["closed_form", {"name": "closed_form", "precision": "float32"}])
def test_regmean_in_either_precision(solver: Any) -> None:
    merged = merge("regmean", off_diagonal=0.0, solver=solver)["out.weight"]
    diagonals = [g.diagonal() for g in grams("out")]
    top = total(s["out.weight"].double() * d for s, d in zip(STATES, diagonals, strict=True))
    close(merged, top / total(diagonals), 1e-5)
    exact = merge("regmean", off_diagonal=0.0)["out.weight"]
    assert torch.equal(merged, exact) == (solver == "closed_form")


def test_what_regmean_has_nothing_for_is_averaged() -> None:
    merged = merge("regmean")
    for name in ("embed.weight", "norm.weight", "norm.bias", "first.bias", "out.bias"):
        close(merged[name], average(name), 1e-6)


def test_regmean_weights_and_ridge() -> None:
    weights = [0.5, 2.0, 1.0]
    merged = merge("regmean", off_diagonal=1.0, ridge=0.1, weights=weights)["out.weight"]
    ridged = [
        w * (g + 0.1 * g.diagonal().mean() * torch.eye(len(g)))
        for g, w in zip(grams("out"), weights, strict=True)
    ]
    thetas = [s["out.weight"] for s in STATES]
    dense = [gram_matrix(g, 3) for g in ridged]
    close(merged, solve_dense(dense, thetas, torch.zeros(3, 12)))


@pytest.mark.parametrize("method", ["gram", "kfac"])
def test_joined_bias(method: str) -> None:
    merged = merge(
        "mats", init="average", objective=method, bias=True, solver="cg", iterations=3000
    )
    dense, thetas = [], []
    for state, statistics in zip(STATES, STATISTICS, strict=True):
        gram = statistics.gram("out", bias=True).double()
        outer = statistics.output_factor("out").double() if method == "kfac" else torch.eye(3)
        dense.append(torch.kron(outer.double(), gram))
        thetas.append(torch.cat([state["out.weight"], state["out.bias"][:, None]], 1))
    start = torch.stack([t.double() for t in thetas]).mean(0)
    expected = solve_dense(dense, thetas, start)
    found = torch.cat([merged["out.weight"], merged["out.bias"][:, None]], 1).double()
    # K-FAC is singular (gradients of a softmax sum to zero): there the init stays. Elsewhere what
    # rounding does to the statistics is amplified by their condition.
    values = torch.linalg.eigvalsh(total(dense))
    smallest = float(values[values > 1e-6 * values[-1]][0])
    rounding = torch.finfo(torch.float32).eps * float(values[-1]) / smallest
    moved = float((expected - start).norm()) + float(start.norm()) * 1e-3
    assert float((found - expected).norm()) < 4 * rounding * moved


@pytest.mark.parametrize("preconditioner", ["none", "kronecker"])
def test_a_ridge_of_kfac_is_on_both_factors(preconditioner: str) -> None:
    options = {"init": "average", "iterations": 2000, "preconditioner": preconditioner}
    found = merge("mats", objective="kfac", ridge=0.3, **options)
    for module in LAYERS:
        name = f"{module}.weight"
        ridged = [
            [
                factor.double() + 0.3 * factor.double().diagonal().mean() * torch.eye(len(factor))
                for factor in (s.output_factor(module), s.gram(module))
            ]
            for s in STATISTICS
        ]
        dense = [torch.kron(outputs, inputs) for outputs, inputs in ridged]
        close(found[name], solve_dense(dense, [s[name] for s in STATES], average(name)))


@pytest.mark.parametrize("module", ["first", "second"])
def test_kfac_of_two_models_in_closed_form(module: str) -> None:
    name = f"{module}.weight"
    merged = matsmerge.merge(
        MODELS[:2], BASE, "mats", statistics=STATISTICS[:2], objective="kfac", solver="closed_form"
    )[name]
    dense = [
        torch.kron(s.output_factor(module).double(), s.gram(module).double())
        for s in STATISTICS[:2]
    ]
    deltas = [s[name].double() - BASE_STATE[name].double() for s in STATES[:2]]
    start = BASE_STATE[name].double() + 0.3 * (deltas[0] + deltas[1])
    expected = solve_dense(dense, [s[name] for s in STATES[:2]], start)
    off = (merged.double() - expected).flatten()
    a = dense[0] + dense[1]
    assert float(off @ a @ off / (expected.flatten() @ a @ expected.flatten())) < 1e-9


def test_preconditioned_kfac_reaches_the_solution_of_plain_kfac() -> None:
    plain = merge("mats", objective="kfac", iterations=5000)
    quick = merge("mats", objective="kfac", preconditioner="kronecker", iterations=300)
    for module in LAYERS:
        name = f"{module}.weight"
        a = total(
            torch.kron(s.output_factor(module).double(), s.gram(module).double())
            for s in STATISTICS
        )
        off = (plain[name].double() - quick[name].double()).flatten()
        size = plain[name].double().flatten()
        assert float(off @ a @ off / (size @ a @ size)) < 1e-7


@pytest.mark.parametrize("objective", ["gram", "kfac"])
def test_equalized_covariances_have_the_same_trace(objective: str) -> None:
    name = "second.weight"
    models, statistics = MODELS[:2], STATISTICS[:2]
    merged = matsmerge.merge(
        models,
        BASE,
        "mats",
        statistics=statistics,
        init="average",
        objective=objective,
        equalize=True,
        solver="closed_form",
    )[name]
    dense = []
    for one in statistics:
        outer = one.output_factor("second") if objective == "kfac" else torch.eye(6)
        matrix = torch.kron(outer.double(), one.gram("second").double())
        dense.append(matrix / matrix.trace())
    thetas = [s[name] for s in STATES[:2]]
    start = (thetas[0].double() + thetas[1].double()) / 2
    expected = solve_dense(dense, thetas, start)
    off, a = (merged.double() - expected).flatten(), dense[0] + dense[1]
    assert float(off @ a @ off / (expected.flatten() @ a @ expected.flatten())) < 1e-8


def test_diagonal_fisher() -> None:
    merged = merge("diagonal_fisher")
    for name in BASE_STATE:
        fishers = [s.fisher(name).double() for s in STATISTICS]
        bottom = total(fishers)
        top = total(f * s[name].double() for f, s in zip(fishers, STATES, strict=True))
        # Every other output of `second` goes nowhere: there the Fisher is zero, and the init stays.
        expected = torch.where(bottom > 0, top / bottom, average(name))
        close(merged[name], expected)


def test_block_fisher_of_vectors() -> None:
    merged = merge("mats", objective="block_fisher", solver="closed_form", init="average")
    for name in ("norm.weight", "out.bias", "first.bias"):
        blocks = [s.block_fisher(name).double() for s in STATISTICS]
        expected = solve_dense(blocks, [s[name] for s in STATES], average(name))
        a = total(blocks)
        off = merged[name].double() - expected
        assert float(off @ a @ off / (expected @ a @ expected)) < 1e-8


def test_grouped_convolution() -> None:
    merged = merge("regmean", off_diagonal=1.0)["conv.weight"]
    for group in range(2):
        own = slice(2 * group, 2 * group + 2)
        blocks = [gram_matrix(s.gram("conv").double()[group], 2) for s in STATISTICS]
        thetas = [s["conv.weight"][own].flatten(1) for s in STATES]
        expected = solve_dense(blocks, thetas, torch.zeros(2, 2))
        close(merged[own].flatten(1), expected)


def test_embeddings_by_counts() -> None:
    merged = merge("regmean", embeddings=True)["embed.weight"]
    counts = [s.gram("embed").double() for s in STATISTICS]
    top = total(
        c[:, None] * s["embed.weight"].double() for c, s in zip(counts, STATES, strict=True)
    )
    close(merged, top / total(counts)[:, None])


def test_averaging_comes_out_of_the_frame_exactly() -> None:
    for solver in ("closed_form", "cg"):
        merged = merge("mats", objective="identity", solver=solver)
        for name in BASE_STATE:
            torch.testing.assert_close(merged[name], average(name).float(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("init", ["average", "task_arithmetic", "ties", "dare_linear"])
def test_any_init_converges_to_the_same_solution(init: str) -> None:
    merged = merge("mats", init=init, iterations=200)
    expected = merge("regmean", off_diagonal=1.0)
    for module in LAYERS:
        close(merged[f"{module}.weight"], expected[f"{module}.weight"], 1e-3)


def test_forms_of_conjugate_gradients_agree() -> None:
    for iterations in (1, 3, 5):
        plain = merge("mats", iterations=iterations, solver={"form": "plain"})
        other = merge("mats", iterations=iterations, solver={"form": "eigenbasis"})
        for module in LAYERS:
            close(plain[f"{module}.weight"], other[f"{module}.weight"], 1e-6)


def test_no_iterations_is_the_init() -> None:
    merged = merge("mats", iterations=0)
    close(merged["first.weight"], task_arithmetic("first.weight"), 1e-6)


def test_otherwise() -> None:
    merged = merge("mats", otherwise="init")
    close(merged["norm.weight"], task_arithmetic("norm.weight"), 1e-6)


def test_stages_start_where_the_last_ended() -> None:
    stages = [{"objective": "gram", "iterations": 4}, {"objective": "kfac", "iterations": 3}]
    merged = merge("mats", stages=stages)
    first = merge("mats", objective="gram", iterations=4)
    # As an init, the first round is a stage of its own.
    again = merge(
        "mats", init={"name": "mats", "objective": "gram", "iterations": 4}, objective="kfac",
        iterations=3,
    )  # fmt: skip
    name = "second.weight"
    assert torch.equal(merged[name], again[name])
    assert not torch.equal(merged[name], first[name])
    a = total(
        torch.kron(s.output_factor("second").double(), s.gram("second").double())
        for s in STATISTICS
    )
    b = total(
        torch.kron(s.output_factor("second").double(), s.gram("second").double())
        @ state["second.weight"].double().flatten()
        for s, state in zip(STATISTICS, STATES, strict=True)
    )
    x = first[name].double().flatten()
    r = b - a @ x
    p, rr = r, r @ r
    for _ in range(3):
        q = a @ p
        alpha = rr / (p @ q)
        x, r = x + alpha * p, r - alpha * q
        p, rr = r + (r @ r) / rr * p, r @ r
    close(merged[name].flatten(), x, 1e-5)


def test_held_out_stops_at_its_lowest_objective() -> None:
    many = list(range(30))
    steps = matsmerge.merge(MODELS, BASE, "mats", statistics=STATISTICS, trajectory=many).trajectory
    chosen = merge("mats", iterations=29, stop="held_out")
    for module in LAYERS:
        name = f"{module}.weight"

        def objective(x: Tensor, module: str = module, name: str = name) -> float:
            total = 0.0
            for statistics, state in zip(STATISTICS, STATES, strict=True):
                d = x.double() - state[name].double()
                total += float((d @ statistics.gram(module, HELD_OUT).double() * d).sum())
            return total

        values = [objective(steps[i][name]) for i in many]
        assert objective(chosen[name]) == pytest.approx(min(values), rel=1e-4)


def delta(state: State, name: str) -> Tensor:
    difference: Tensor = state[name].double() - BASE_STATE[name].double()
    return difference


@pytest.mark.parametrize("method", ["actmat", "wudi", "tact", "centered_actmat"])
def test_covariances_from_weights(method: str) -> None:
    merged = matsmerge.merge(MODELS, BASE, method, init="average", solver="closed_form")
    name = "first.weight"
    moments = []
    for state in STATES:
        d = delta(state, name)
        if method == "tact":
            limit = d.abs().flatten().sort(descending=True).values[round(0.5 * d.numel()) - 1]
            d = torch.where(d.abs() >= limit, d, 0)
        if method == "centered_actmat":
            d = d - d.mean(0)
        moment = d.T @ d
        if method == "wudi":
            moment = moment / d.square().sum()
        if method == "centered_actmat":
            moment = moment + 0.01 * moment.diagonal().mean() * torch.eye(6)
        moments.append(gram_matrix(moment, 8))
    expected = solve_dense(moments, [s[name] for s in STATES], average(name))
    close(merged[name], expected, 1e-3)


@pytest.mark.parametrize(("time", "share"), [(300.0, 0.65), (5.0, 1.0), (20.0, 0.2)])
def test_swudi(time: float, share: float) -> None:
    """As published: the sum of the task vectors, filtered, and the filtered solution."""
    merged = merge("swudi", time=time, share=share)
    for module in LAYERS:
        name = f"{module}.weight"
        deltas = [delta(s, name) for s in STATES]
        c = total(d.T @ d / d.square().sum() for d in deltas)
        right = total(d @ d.T @ d / d.square().sum() for d in deltas)
        values, vectors = torch.linalg.eigh(c)
        num_kept = -int(-len(values) * share // 1)
        kept = torch.arange(len(values)) >= len(values) - num_kept
        factors = (1 - torch.exp(-values * time)) * kept
        start = total(deltas)
        expected = (
            start
            - start @ vectors @ factors.diag() @ vectors.T
            + right @ vectors @ (factors / values).diag() @ vectors.T
        )
        close(delta(merged, name), expected)
    close(merged["norm.weight"], average("norm.weight"), 1e-6)


def calibrated(change: Tensor, deltas: list[Tensor], alpha: float) -> Tensor:
    u, s, v = torch.linalg.svd(change, full_matrices=False)
    for r in range(len(s)):
        own = [u[:, r] @ d for d in deltas]
        counted = [max(float((u[:, r] @ change) @ a / (a @ a)), alpha) for a in own]
        s[r] *= len(own) / sum(counted)
    result: Tensor = u @ s.diag() @ v
    return result


@pytest.mark.parametrize("init", ["task_arithmetic", "ties", "tsv_m", "mats_kfac", "svc"])
def test_svc_after_any_merge(init: str) -> None:
    """Weights of linear layers are calibrated, all else is as the init leaves it."""
    merged, before = merge("svc", init=init, least=1.2), merge(init)
    if init == "task_arithmetic":
        before = merge(init, scale=0.3)
    for name, values in merged.items():
        if name not in {f"{module}.weight" for module in LAYERS}:
            assert torch.equal(values, before[name]), name
            continue
        expected = calibrated(delta(before, name), [delta(s, name) for s in STATES], 0.4)
        close(delta(merged, name), expected)


def test_svc_turns_weights_that_are_stored_the_other_way() -> None:
    """As GPT-2's are; which way round they are matters."""
    generator = torch.Generator().manual_seed(0)
    name = "h.0.attn.c_attn.weight"
    base, *models = ({name: torch.randn(4, 12, generator=generator).double()} for _ in range(4))
    merged = matsmerge.merge(models, base, "svc")[name] - base[name]
    deltas = [m[name] - base[name] for m in models]
    change = 0.3 * total(deltas)
    close(merged, calibrated(change.T, [d.T for d in deltas], 1 / 3).T, 1e-9)
    other = calibrated(change, deltas, 1 / 3)
    assert float((merged - other).norm() / other.norm()) > 1e-3


def test_svc_starts_from_what_the_init_leaves_where_it_has_no_statistics() -> None:
    """One layer's statistics are missing: RegMean averages it, SVC calibrates the average."""
    partial = []
    for one in STATISTICS:
        maps = tuple(m for m in one.header.maps if m.module != "out")
        arrays = {name: one.arrays[name] for name in one.arrays.specs}
        partial.append(in_memory(one.header.model_copy(update={"maps": maps}), arrays))
    merged = matsmerge.merge(MODELS, BASE, "svc", statistics=partial, init="regmean")
    name = "out.weight"
    change = average(name) - BASE_STATE[name].double()
    expected = calibrated(change, [delta(s, name) for s in STATES], 1 / 3)
    close(delta(merged.state_dict(), name), expected)


@pytest.mark.parametrize(("task_power", "input_power"), [(0.0, 0.0), (2.0, 1.5)])
@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [0.5, 0.0, 2.0]])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(9, 6), (6, 9), (30, 4)])
def test_essential_subspaces(
    num_outputs: int,
    num_inputs: int,
    weights: list[float],
    task_power: float,
    input_power: float,
) -> None:
    """From rows of inputs: principal components of what changes in the layer's outputs."""
    torch.manual_seed(0)
    base = torch.nn.Linear(num_inputs, num_outputs).double()
    models = [copy.deepcopy(base) for _ in weights]
    rows = [torch.randn(50, num_inputs) @ torch.randn(num_inputs, num_inputs) for _ in weights]
    rows = [r.double() for r in rows]
    lefts, rights, sizes = [], [], []
    counted = [w for w in weights if w != 0]
    for model, weight, x in zip(models, weights, rows, strict=True):
        with torch.no_grad():
            model.weight += 0.1 * torch.randn_like(model.weight)
        if weight == 0:
            continue
        change = weight * (model.weight - base.weight).detach()
        num = num_outputs // len(counted)
        _, s, v = torch.linalg.svd(x @ change.T)
        values = torch.nn.functional.pad(s, (0, num_outputs - len(s)))[:num].square()
        values[num_inputs:] = 0  # more outputs than that depend on each other
        raised = (values / values.mean()) ** 0.15
        raised = raised / raised.mean()
        lefts.append(v.T[:, :num] @ raised.diag())
        rights.append(change.norm() ** task_power * raised.diag() @ v[:num] @ change)
        sizes.append(change.norm())
    right = torch.cat(rights) / torch.stack(sizes).mean() ** task_power
    norms = right.square().sum(0).sqrt()
    right = right @ (norms / norms.mean()).pow(input_power).diag()

    def evened(matrix: Tensor) -> Tensor:
        """The mean singular value times A (AᵀA)^(-1/2), on what A is not zero on."""
        values, vectors = torch.linalg.eigh(matrix.T @ matrix)
        sizes = values.clamp(min=0).sqrt()
        sizes = torch.where(sizes > 1e-6 * sizes.max(), sizes, 0)
        inverse = torch.where(sizes > 0, 1 / sizes, 0)
        mean = sizes.sum() / min(matrix.shape)
        result: Tensor = mean * matrix @ vectors @ inverse.diag() @ vectors.T
        return result

    expected = evened(torch.cat(lefts, 1)) @ evened(right)
    statistics = [
        matsmerge.collect(m, [x], "gram", dtype="float64")
        for m, x in zip(models, rows, strict=True)
    ]
    solver = {
        "name": "essential_subspaces",
        "task_power": task_power,
        "input_power": input_power,
    }
    merged = matsmerge.merge(
        models, base, "essential_subspaces", statistics=statistics, weights=weights, solver=solver
    )
    close(merged["weight"] - base.weight.detach(), expected, 1e-6)
    plain = matsmerge.merge(models, base, "tsv_m", weights=weights)
    assert torch.equal(merged["bias"], plain["bias"])


def test_essential_subspaces_where_nothing_changed() -> None:
    copies = [copy.deepcopy(BASE) for _ in range(2)]
    merged = matsmerge.merge(
        copies, BASE, "essential_subspaces", statistics=STATISTICS[:2], force=True
    )
    assert all(torch.equal(merged[name], values) for name, values in BASE_STATE.items())


@pytest.mark.parametrize(
    "init",
    ["magmax", "localize_and_stitch", "ace", "swudi", "svc", "essential_subspaces", "iso_cts"],
)
def test_strong_inits_of_kfac(init: str) -> None:
    """No iterations leave what the init merged; some move from there towards the solution."""
    before = merge(init)
    assert all(
        torch.equal(values, before[name])
        for name, values in merge("mats_kfac", init=init, iterations=0, otherwise="init").items()
    )
    many = merge("mats_kfac", init=init, iterations=300)
    few = merge("mats_kfac", init=init, iterations=1)
    expected = merge("mats_kfac", init="average", iterations=300)
    for module in LAYERS:
        name = f"{module}.weight"
        assert not torch.equal(few[name], before[name])
        close(many[name], expected[name], 1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_checkpoints(dtype: torch.dtype) -> None:
    models = [{n: t.to(dtype) for n, t in s.items()} for s in STATES]
    base = {n: t.to(dtype) for n, t in BASE_STATE.items()}
    with pytest.warns(UserWarning, match="merged by average"):
        merged = matsmerge.merge(
            models, base, "mats_kfac", statistics=STATISTICS, force=True, iterations=50
        )
    expected = merge("mats_kfac", iterations=50)
    for name, values in merged.items():
        assert values.dtype == dtype
        close(values, expected[name], 0.1)


def test_statistics_may_be_of_any_precision(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("statistics")
    merged = {}
    for dtype in ("float64", "float32", "bfloat16"):
        files = []
        for i, statistics in enumerate(STATISTICS):
            files.append(folder / f"{dtype}-{i}.safetensors")
            _save(statistics, files[-1], dtype)
        merged[dtype] = matsmerge.merge(MODELS, BASE, "mats", statistics=files, iterations=5)
    close(merged["float32"]["out.weight"], merged["float64"]["out.weight"], 1e-5)
    # Directions below 1 % of the largest eigenvalue may be rounding in bfloat16, and stay.
    close(merged["bfloat16"]["out.weight"], merged["float64"]["out.weight"], 0.1)


def _save(statistics: Statistics, path: Any, dtype: str) -> None:
    from matsmerge.statistics.statistics_file import save_statistics

    save_statistics(statistics, path, dtype)


@pytest.mark.parametrize("stored", [torch.float32, torch.float64])
@pytest.mark.parametrize("iterations", [30, 100, 1000])
def test_softmax_layer_moves_only_where_the_fisher_information_is(
    iterations: int, stored: torch.dtype
) -> None:
    """Gradients at its outputs sum to zero: along (1, ..., 1) no model says anything.

    Up to float32, which they were computed in, whatever they are stored in.
    """
    generator = torch.Generator().manual_seed(0)

    def layer(spread: float) -> torch.nn.Linear:
        made = torch.nn.Linear(12, 5, bias=False)
        with torch.no_grad():
            made.weight.copy_(start + spread * torch.randn(5, 12, generator=generator))
        return made

    def loss(model: torch.nn.Module, x: Tensor) -> Tensor:
        labels = (x[:, 0] > 0).long() * 2 + 1
        return torch.nn.functional.cross_entropy(model(x), labels, reduction="none")

    start = torch.randn(5, 12, generator=generator) / 4
    base, models = layer(0.0), [layer(0.02) for _ in range(3)]
    batches = [[torch.randn(8, 12, generator=generator) for _ in range(20)] for _ in models]
    statistics = [
        matsmerge.collect(model, own, "kfac", loss=loss)
        for model, own in zip(models, batches, strict=True)
    ]
    files = [
        in_memory(s.header, {name: s.arrays[name].to(stored) for name in s.arrays.specs})
        for s in statistics
    ]
    found = matsmerge.merge(models, base, "block_fisher", statistics=files, iterations=iterations)[
        "weight"
    ].double()
    thetas = [model.weight.detach() for model in models]
    init = base.weight.detach().double() + 0.3 * total(t - base.weight.detach() for t in thetas)
    dense = [torch.kron(s.output_factor("").double(), s.gram("").double()) for s in statistics]
    solution = solve_dense(dense, thetas, init)
    size = float((solution - init).norm())
    assert float((found - init).sum(0).norm()) < 1e-5 * size
    if iterations > 30:
        assert float((found - solution).norm()) < 1e-3 * size
