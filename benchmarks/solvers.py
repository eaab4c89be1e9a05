"""Solving single layers: us, SciPy's conjugate gradients in float32, and float64 references.

    python benchmarks/solvers.py
    python benchmarks/solvers.py --quick
    python benchmarks/solvers.py --layers 1024x1024 --full --json solvers.json

Eight models are merged, in one thread. The statistics are as ill-conditioned as those of real
layers: 2,000 correlated samples for each model, whose directions are a shared orthogonal basis
disturbed for each model, with sizes falling as 1/k, around a mean that is not zero; stored in
float32. Task vectors are noise, and all start from task arithmetic 0.3. Times leave out what all
need alike, the sums over models before the first iteration (the right-hand side and the summed
Gram matrix).

Gram: the iterates after 10, 20, ..., 100 iterations, for which we need one eigendecomposition, and
SciPy ten runs (550 iterations). Only the run with 100 is made and timed, and counted 5.5 times,
unless --full is given; its iterates on the way serve as those of the other nine. The distance
of iterates (relative, Frobenius norm of the whole weight) is to those of exact arithmetic, computed
with 500 digits in NumPy's eigenbasis, and to plain float64, which itself loses its way after some
ten iterations.

K-FAC: 100 iterations of preconditioned conjugate gradients, all included, against 100 products of
the operator in float32 alone (20 are timed: ten before and ten after); against the same method
with everything in float64 in the models' own basis; and the time it takes us to reach the objective
that SciPy, in float32 and without a preconditioner, reaches after 100 iterations.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

import argparse
import decimal
import gc
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from matsmerge.linalg.conjugate_gradients import conjugate_gradients, solve_kronecker_sum
from matsmerge.linalg.eigenbasis import decompose, follow_trajectory
from matsmerge.linalg.kronecker_sums import decompose_kronecker, nearest_kronecker
from matsmerge.linalg.operators import Gram, Kronecker
from matsmerge.linalg.rounding import without_rounding
from matsmerge.linalg.system import Limits, make_system

LAYERS = ("1024x1024", "2816x1024", "1024x2816")
QUICK_LAYERS = ("256x256", "704x256", "256x704")
NUM_MODELS, NUM_SAMPLES = 8, 2000
ITERATIONS = 100
KEEP = range(10, ITERATIONS + 1, 10)
DAMPING = 0.01  # the default of solve_kronecker_sum
NUM_TIMED_PRODUCTS = 20
GOAL_DISTANCE, GOAL_PRODUCTS, GOAL_REACHED = 1e-3, 1.3, 10.0
GOAL_TRAJECTORY = {1024: 30.0, 2816: 8.0}  # by the number of inputs

Result = dict[str, Any]
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Layer:
    """Eight models' weights of one layer, and their statistics."""

    weights: list[Tensor]  # (out, in), float64
    start: Tensor  # (out, in), float64
    inputs: list[Tensor]  # (in, in), float32
    outputs: list[Tensor]  # (out, out), float32


def make_layer(num_out: int, num_in: int, num_samples: int) -> Layer:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(num_out, num_in, generator=generator, dtype=torch.float64) * 0.03
    deltas = [
        torch.randn(num_out, num_in, generator=generator, dtype=torch.float64) * 0.002
        for _ in range(NUM_MODELS)
    ]
    start = base + 0.3 * torch.stack(deltas).sum(0)
    inputs = make_grams(generator, num_in, num_samples)
    # Gradients are small.
    outputs = [gram * 1e-6 for gram in make_grams(generator, num_out, num_samples)]
    return Layer([base + delta for delta in deltas], start, inputs, outputs)


def make_grams(generator: torch.Generator, d: int, num_samples: int) -> list[Tensor]:
    """Second moments of correlated samples of each model."""
    shared = torch.linalg.qr(torch.randn(d, d, generator=generator)).Q
    sizes = torch.arange(1, d + 1).float() ** -1
    grams = []
    for _ in range(NUM_MODELS):
        disturbed = shared + 0.3 * torch.randn(d, d, generator=generator) / d**0.5
        directions = torch.linalg.qr(disturbed).Q
        mean = 0.03 * torch.randn(d, generator=generator)
        samples = (torch.randn(num_samples, d, generator=generator) * sizes) @ directions.T + mean
        gram = samples.T @ samples / num_samples
        # Exactly symmetric, as stored triangles are: iterates feel the last digit of an entry.
        grams.append((gram + gram.T) / 2)
    return grams


def timed(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> tuple[float, T]:
    gc.collect()
    start = time.perf_counter()
    result = work(*args, **kwargs)
    return time.perf_counter() - start, result


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b).norm() / b.norm())


def run_scipy(
    multiply: Callable[[Tensor], Tensor], right: Tensor, start: Tensor, iterations: int
) -> tuple[float, dict[int, Tensor]]:
    """Seconds, and the iterates at multiples of ten, of scipy.sparse.linalg.cg in float32.

    Products are torch's, as ours are.
    """
    try:
        linalg = importlib.import_module("scipy.sparse.linalg")
    except ImportError:
        sys.exit("this benchmark compares with SciPy: pip install scipy")
    shape = start.shape

    def matvec(x: NDArray[np.float32]) -> NDArray[np.float32]:
        flat: NDArray[np.float32] = multiply(torch.from_numpy(x).view(shape)).flatten().numpy()
        return flat

    operator = linalg.LinearOperator(
        (start.numel(), start.numel()), matvec=matvec, dtype=np.float32
    )
    b, x0 = (t.float().flatten().numpy() for t in (right, start))
    iterates: dict[int, Tensor] = {}
    done = 0

    def keep(x: NDArray[np.float32]) -> None:
        nonlocal done
        done += 1
        if done in KEEP:
            iterates[done] = torch.from_numpy(x.copy()).view(shape)

    def solve() -> None:
        linalg.cg(operator, b, x0=x0, rtol=1e-30, atol=0.0, maxiter=iterations, callback=keep)

    seconds, _ = timed(solve)
    return seconds, iterates


def exact_iterates(matrix: Tensor, residual: Tensor) -> dict[int, Tensor]:
    """Conjugate gradients in exact arithmetic, or 500 digits, in the matrix's eigenbasis.

    On the whole weight even float64 with all residuals kept orthogonal will not do: every
    eigenvalue is there once for each output, and rounding brings in copies of the largest that
    are orthogonal to all residuals so far.
    """
    values, vectors = map(torch.from_numpy, np.linalg.eigh(matrix.numpy()))  # not our library's
    rotated = residual @ vectors
    g = rotated.norm(dim=0)
    iterates = {}
    with decimal.localcontext(decimal.Context(prec=500)):
        exactly = np.vectorize(lambda value: decimal.Decimal(float(value)), otypes=[object])
        diagonal, first = exactly(values.numpy()), exactly(g.numpy())
        x, r, p, rr = 0 * first, first, first, first @ first
        for done in range(1, ITERATIONS + 1):
            q = diagonal * p
            alpha = rr / (p @ q)
            x, r = x + alpha * p, r - alpha * q
            previous, rr = rr, r @ r
            p = r + rr / previous * p
            if done in KEEP:
                filtered = torch.from_numpy((x / first).astype(np.float64))
                iterates[done] = (rotated * filtered) @ vectors.T
        # Orthogonal still to the first residual: there were digits enough.
        assert abs(r @ first) < decimal.Decimal("1e-30") * (rr * (first @ first)).sqrt()
    return iterates


def compare_grams(layer: Layer, repeat: int, full: bool) -> Result:
    system = make_system(
        ((Gram(g.double()), w) for g, w in zip(layer.inputs, layer.weights, strict=True)),
        layer.start,
    )
    assert isinstance(system.operator, Gram)
    matrix = system.operator.matrix
    limits = Limits(ITERATIONS, keep=KEEP)

    runs, decompositions = [], []
    for _ in range(repeat):
        decomposing, basis = timed(decompose, matrix)
        following, solution = timed(follow_trajectory, system, basis, limits)
        runs.append(decomposing + following)
        decompositions.append(decomposing)

    single = torch.stack(layer.inputs).sum(0)
    pairs = zip(layer.weights, layer.inputs, strict=True)
    right = torch.stack([w.float() @ g for w, g in pairs]).sum(0)

    def multiply(x: Tensor) -> Tensor:
        return x @ single

    one_run, scipy_iterates = run_scipy(multiply, right, layer.start, ITERATIONS)
    ten_runs = one_run * sum(KEEP) / ITERATIONS
    if full:
        ten_runs = one_run
        for iterations in KEEP[:-1]:
            more, iterates = run_scipy(multiply, right, layer.start, iterations)
            ten_runs += more
            scipy_iterates[iterations] = iterates[iterations]

    exact = exact_iterates(matrix, system.residual)
    plain = conjugate_gradients(system, limits).kept
    values = torch.linalg.eigvalsh(matrix)
    rows = []
    for at in KEEP:
        ours_at, exact_at, plain_at = (
            layer.start + kept[at] for kept in (solution.kept, exact, plain)
        )
        rows.append(
            {
                "iteration": at,
                "ours_exact": distance(ours_at, exact_at),
                "ours_plain": distance(ours_at, plain_at),
                "scipy_exact": distance(scipy_iterates[at], exact_at),
                "scipy_plain": distance(scipy_iterates[at], plain_at),
                "plain_exact": distance(plain_at, exact_at),
                "moved": distance(layer.start, exact_at),
            }
        )
    return {
        "condition": float(values[-1] / values[0]),
        "num_null": basis.num_null,
        "ours_seconds": statistics.median(runs),
        "decompose_seconds": statistics.median(decompositions),
        "scipy_one_run_seconds": one_run,
        "scipy_ten_runs_seconds": ten_runs,
        "all_runs_made": full,
        "iterates": rows,
    }


def objective(layer: Layer, x: Tensor) -> float:
    """Of K-FAC, in float64."""
    total = 0.0
    for w, o, g in zip(layer.weights, layer.outputs, layer.inputs, strict=True):
        difference = x.double() - w
        total += 0.5 * float((difference * (o.double() @ difference @ g.double())).sum())
    return total


def float64_iterates(
    layer: Layer, terms: Sequence[Kronecker], iterations: int
) -> dict[int, Tensor]:
    """The same preconditioned conjugate gradients without anything in float32."""
    fine = [Kronecker(t.outputs.double(), t.inputs.double()) for t in terms]
    system = make_system(zip(fine, layer.weights, strict=True), layer.start)
    basis = decompose_kronecker(nearest_kronecker(terms))
    damped = basis.values + DAMPING * basis.values.mean()
    keep = [at for at in KEEP if at <= iterations]
    solution = conjugate_gradients(
        system,
        Limits(iterations, keep=keep),
        precondition=lambda r: basis.leave(basis.enter(r) / damped),
    )
    return solution.kept


def compare_kfac(layer: Layer, reference_iterations: int) -> Result:
    # As our K-FAC objective does, for SciPy as well: 2,000 samples leave wide factors singular.
    layer = replace(
        layer,
        inputs=[without_rounding(g, torch.float32) for g in layer.inputs],
        outputs=[without_rounding(o, torch.float32) for o in layer.outputs],
    )
    terms = [Kronecker(o, g) for o, g in zip(layer.outputs, layer.inputs, strict=True)]
    system = make_system(zip(terms, layer.weights, strict=True), layer.start)
    x = layer.start.float()

    def products() -> None:
        for _ in range(NUM_TIMED_PRODUCTS // 2):
            system.operator(x)

    products()  # once to warm up
    before, _ = timed(products)
    limits = Limits(ITERATIONS, keep=KEEP)
    ours, solution = timed(solve_kronecker_sum, system, limits, damping=DAMPING)
    after, _ = timed(products)
    products_seconds = (before + after) * ITERATIONS / NUM_TIMED_PRODUCTS

    pairs = zip(terms, layer.weights, strict=True)
    right = torch.stack([term(w.float()) for term, w in pairs]).sum(0)
    scipy_seconds, scipy_iterates = run_scipy(system.operator, right, layer.start, ITERATIONS)
    reached = objective(layer, scipy_iterates[ITERATIONS])
    enough = next(
        (at for at, value in enumerate(solution.trace.objectives) if value <= reached), None
    )
    reach_seconds = None
    if enough is not None:
        reach_seconds, short = timed(solve_kronecker_sum, system, Limits(enough), damping=DAMPING)
        assert objective(layer, layer.start + short.correction) <= reached * (1 + 1e-6)

    reference = float64_iterates(layer, terms, reference_iterations)
    start = objective(layer, layer.start)
    rows = []
    for at in KEEP:
        ours_at = layer.start + solution.kept[at]
        row = {
            "iteration": at,
            "moved": distance(ours_at, layer.start),
            "objective": objective(layer, ours_at) / start,
        }
        if at in reference:
            row["iterate"] = distance(ours_at, layer.start + reference[at])
            row["correction"] = distance(solution.kept[at], reference[at])
            row["reference_objective"] = objective(layer, layer.start + reference[at]) / start
        rows.append(row)
    return {
        "status": solution.status.name,
        "iterations": solution.iterations,
        "ours_seconds": ours,
        "products_seconds": products_seconds,
        "scipy_seconds": scipy_seconds,
        "scipy_objective": reached / start,
        "our_objective": objective(layer, layer.start + solution.correction) / start,
        "reported_objective": solution.objective / start,
        "iterations_to_reach_scipy": enough,
        "seconds_to_reach_scipy": reach_seconds,
        "reference_iterations": reference_iterations,
        "iterates": rows,
    }


def verdict(value: float, goal: float | None, at_least: bool) -> str:
    if goal is None:
        return "no goal at this size"
    met = value >= goal if at_least else value <= goal
    return f"goal {'at least' if at_least else 'at most'} {goal:g}: {'met' if met else 'NOT MET'}"


def print_grams(num_in: int, result: Result) -> None:
    how = "ten runs made" if result["all_runs_made"] else "one run made, counted 5.5 times"
    ratio = result["scipy_ten_runs_seconds"] / result["ours_seconds"]
    worst_exact = max(row["ours_exact"] for row in result["iterates"])
    worst_plain = max(row["ours_plain"] for row in result["iterates"])
    worst_of_plain = max(row["plain_exact"] for row in result["iterates"])
    print(
        f"Gram: condition {result['condition']:.1e}, {result['num_null']} eigenvalues only rounding"
    )
    print(
        f"  ours {result['ours_seconds']:.2f} s (of that decomposing "
        f"{result['decompose_seconds']:.2f} s), SciPy {result['scipy_ten_runs_seconds']:.2f} s "
        f"({how}, {result['scipy_one_run_seconds']:.2f} s for 100 iterations)"
    )
    goal = GOAL_TRAJECTORY.get(num_in)
    print(f"  SciPy/ours {ratio:.1f}  ({verdict(ratio, goal, at_least=True)})")
    print(
        f"  distance of iterates to  {'exact':^23}   {'plain float64':^23}   plain float64   start"
    )
    print(
        f"  {'iteration':>9} {'':14} {'ours':>11} {'SciPy':>11}   {'ours':>11} {'SciPy':>11}   "
        f"{'to exact':>13} {'to exact':>9}"
    )
    for row in result["iterates"]:
        print(
            f"  {row['iteration']:9} {'':14} {row['ours_exact']:11.1e} "
            f"{row['scipy_exact']:11.1e}   {row['ours_plain']:11.1e} {row['scipy_plain']:11.1e}   "
            f"{row['plain_exact']:13.1e} {row['moved']:9.1e}"
        )
    print(
        f"  ours at most {worst_exact:.1e} from exact  "
        f"({verdict(worst_exact, GOAL_DISTANCE, at_least=False)}); {worst_plain:.1e} from plain "
        f"float64, which is {worst_of_plain:.1e} from exact",
        flush=True,
    )


def print_kfac(result: Result, is_quick: bool) -> None:
    cost = result["ours_seconds"] / result["products_seconds"]
    print(f"K-FAC: {result['status']} after {result['iterations']} iterations")
    goal = None if is_quick else GOAL_PRODUCTS
    print(
        f"  ours {result['ours_seconds']:.1f} s for 100 iterations, 100 float32 products "
        f"{result['products_seconds']:.1f} s: ratio {cost:.2f}  "
        f"({verdict(cost, goal, at_least=False)})"
    )
    print(
        f"  objective relative to the start's: SciPy {result['scipy_objective']:.4e} after 100 "
        f"iterations in {result['scipy_seconds']:.1f} s, ours {result['our_objective']:.4e} after "
        f"{result['iterations']} (reported as {result['reported_objective']:.4e})"
    )
    if result["seconds_to_reach_scipy"] is None:
        print("  ours does not reach SciPy's objective: NOT MET")
    else:
        faster = result["scipy_seconds"] / result["seconds_to_reach_scipy"]
        goal = None if is_quick else GOAL_REACHED
        print(
            f"  ours reaches SciPy's after {result['iterations_to_reach_scipy']} iterations, in "
            f"{result['seconds_to_reach_scipy']:.2f} s: {faster:.1f} times faster  "
            f"({verdict(faster, goal, at_least=True)})"
        )
    num_references = result["reference_iterations"]
    print(
        f"  {'':9} {'moved from':>11} {'':>13}   against {num_references} iterations of the same "
        f"in float64\n  {'iteration':>9} {'the start':>11} {'objective':>13}   {'objective':>13} "
        f"{'iterate':>9} {'correction':>11}"
    )
    for row in result["iterates"]:
        print(f"  {row['iteration']:9} {row['moved']:11.1e} {row['objective']:13.6e}", end="")
        if "iterate" in row:
            print(
                f"   {row['reference_objective']:13.6e} {row['iterate']:9.1e} "
                f"{row['correction']:11.1e}",
                end="",
            )
        print()
    if min(row["objective"] for row in result["iterates"]) < 0:
        print("  an objective below zero: rounding of the statistics has taken over: NOT SOUND")
    sys.stdout.flush()


def main() -> None:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", nargs="+", metavar="OUTxIN", help=f"default: {LAYERS}")
    parser.add_argument("--quick", action="store_true", help="256 wide; under a minute")
    parser.add_argument("--full", action="store_true", help="make all ten runs of SciPy")
    parser.add_argument("--repeat", type=int, default=3, help="runs of our trajectory; the median")
    parser.add_argument(
        "--reference-iterations",
        type=int,
        help="of K-FAC in float64; default: 100, and 20 for layers wider than 1024",
    )
    parser.add_argument("--json", type=Path, help="write the numbers here, too")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    results: dict[str, dict[str, Result]] = {}
    for name in arguments.layers or (QUICK_LAYERS if arguments.quick else LAYERS):
        num_out, num_in = map(int, name.split("x"))
        num_samples = NUM_SAMPLES // 4 if arguments.quick else NUM_SAMPLES
        print(f"== {num_out} outputs, {num_in} inputs, {NUM_MODELS} models", flush=True)
        layer = make_layer(num_out, num_in, num_samples)
        grams = compare_grams(layer, arguments.repeat, arguments.full)
        print_grams(num_in, grams)
        is_wide = max(num_out, num_in) > (256 if arguments.quick else 1024)
        kfac = compare_kfac(layer, arguments.reference_iterations or (20 if is_wide else 100))
        print_kfac(kfac, arguments.quick)
        results[name] = {"gram": grams, "kfac": kfac}
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
