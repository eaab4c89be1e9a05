"""Second moments kept as sketches, from rows to files, against those kept in full."""

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from damaged_json import edit_metadata, put
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sketched_models import RANK, Batch, collect, loss, make_batches, make_model
from test_resuming import interrupted
from torch import Tensor, nn

import matsmerge
from matsmerge.checkpoints.safetensors_header import read_header
from matsmerge.linalg.nystrom import directions
from matsmerge.linalg.truncated import truncate
from matsmerge.statistics.collection import Collection
from matsmerge.statistics.collection_options import make_collection_options
from matsmerge.statistics.compression import finish
from matsmerge.statistics.kinds.sketch_sum import SketchSum
from matsmerge.statistics.statistics import HELD_OUT, Origin, Sketching, Statistics, in_memory
from matsmerge.statistics.statistics_file import save_statistics
from matsmerge.statistics.statistics_sum import add_up, combine_statistics


@pytest.fixture
def model() -> nn.Module:
    return make_model()


@pytest.fixture
def batches() -> list[Batch]:
    return make_batches()


def sketch_of(total: SketchSum) -> Tensor:
    return total.sums()[0][0]


# sums


def test_sums_are_of_the_moment_its_diagonal_and_its_mean() -> None:
    rows = torch.randn(30, 50, dtype=torch.float64)
    ones = torch.cat([rows, rows.new_ones(30, 1)], 1)
    few, many = torch.arange(0, 30, 2), torch.arange(2, 29)
    for keeps_mean, keep, padding in product((False, True), (few, many), (7.0, torch.nan)):
        z = ones if keeps_mean else rows
        padded = torch.full_like(rows, padding).index_copy(0, keep, rows[keep])
        total = SketchSum(50, RANK, torch.float64, keeps_mean=keeps_mean)
        total.add(padded, keep)
        g = z[keep].mT @ z[keep]
        omega = directions(len(g), RANK).double()
        torch.testing.assert_close(sketch_of(total)[:, :-1], g @ omega)
        torch.testing.assert_close(sketch_of(total)[:, -1], g.diagonal())
        assert total.num_rows == len(keep)
        means = [values for values, form in total.sums() if form == "full"]
        assert len(means) == keeps_mean
        for mean in means:
            torch.testing.assert_close(mean, rows[keep].sum(0))


def test_the_sketch_of_a_sum_is_the_sum_of_sketches_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randint(-99, 99, (n, 50), generator=generator).double() for n in (7, 40, 1)]
    sums = []
    for rows in (*parts, torch.cat(parts)):
        total = SketchSum(50, RANK, torch.float64, keeps_mean=True)
        total.add(rows)
        sums.append(sketch_of(total))
    # Whole numbers and signs: no product or sum is rounded, in whatever order it is made.
    assert torch.equal(sums[0] + sums[1] + sums[2], sums[3])
    rows = torch.cat([torch.cat(parts), torch.ones(48, 1)], 1)
    assert torch.equal((rows.mT @ rows) @ directions(51, RANK).double(), sums[3][:, :-1])
    # And of any rows, a batch at a time.
    rows, others = torch.randn(2, 33, 50, generator=generator, dtype=torch.float64)
    one, other, both = (SketchSum(50, RANK, torch.float64, keeps_mean=False) for _ in range(3))
    for total, some in ((one, rows), (other, others), (both, rows), (both, others)):
        total.add(some)
    assert torch.equal(sketch_of(one) + sketch_of(other), sketch_of(both))


# collecting


def test_what_is_kept_of_a_rank(model: nn.Module, batches: list[Batch]) -> None:
    full, kept = collect(model, batches, "full"), collect(model, batches)
    forms = {name.removeprefix("main/"): form for name, form in kept.header.forms.items()}
    assert {n: f for n, f in forms.items() if n.split("/")[0] != "mean"} == {
        "inputs/tokens": "diagonal", "inputs/first": "sketch", "inputs/conv": "symmetric",
        "inputs/narrow": "sketch", "inputs/head": "symmetric", "outputs/tokens": "sketch",
        "outputs/first": "sketch", "outputs/second": "sketch", "outputs/conv": "symmetric",
        "outputs/narrow": "symmetric", "outputs/head": "symmetric",
    }  # fmt: skip
    assert kept.arrays.specs["main/inputs/first"].shape == (41, RANK + 1)  # of a bias as well
    assert kept.arrays.specs["main/inputs/narrow"].shape == (64, RANK + 1)
    for module, bias in (("first", False), ("first", True), ("second", False), ("narrow", False)):
        _is_near(kept.truncated_gram(module, bias=bias), full.gram(module, bias=bias))
        dense = kept.gram(module, bias=bias)
        assert dense.shape == full.gram(module, bias=bias).shape
    for module in ("tokens", "first", "second"):
        _is_near(kept.truncated_output_factor(module), full.output_factor(module))
    for module in ("conv", "head"):
        assert kept.truncated_gram(module) is kept.truncated_output_factor(module) is None
        assert torch.equal(kept.gram(module), full.gram(module))
    torch.testing.assert_close(kept.stored("mean/first"), full.stored("mean/first"))
    with pytest.raises(matsmerge.StatisticsError, match="mean input of 'narrow' was not kept"):
        kept.truncated_gram("narrow", bias=True)


def _is_near(kept: Any, full: Tensor) -> None:
    """As near as any of this rank, with the trace kept; nearly so of a constant left out."""
    best = truncate(full, RANK)
    assert kept.rank == RANK
    assert kept.trace == pytest.approx(float(full.trace()), rel=1e-10)
    error, least = (float((one.dense() - full).norm()) for one in (kept, best))
    assert error < 1.1 * least + 1e-9 * float(full.norm())


LOW = 4  # of which sketches are summed up, and not whole moments


def test_what_is_kept_of_a_low_rank(model: nn.Module, batches: list[Batch]) -> None:
    full, kept = collect(model, batches, "full"), collect(model, batches, LOW)
    assert kept.header.sketching == Sketching(rank=LOW)
    assert kept.arrays.specs["main/inputs/first"].shape == (41, LOW + 1)
    for module, bias in (("first", False), ("first", True), ("narrow", False)):
        exact = full.gram(module, bias=bias)
        diagonal = kept.stored(f"inputs/{module}")[: len(exact), -1]
        torch.testing.assert_close(diagonal, exact.diagonal())
        ours, best = kept.truncated_gram(module, bias=bias), truncate(exact, LOW)
        assert ours is not None
        assert (ours.dense() - exact).norm() < 2 * (best.dense() - exact).norm()


def test_the_widest_layer_whose_whole_moment_is_summed_up(
    model: nn.Module, batches: list[Batch]
) -> None:
    """Its directions are exact, also with the constant that makes it wider."""
    full, kept = collect(model, batches, "full"), collect(model, batches, 5)  # 40 inputs, 8 times 5
    best = truncate(full.gram("first", bias=True), 5)
    torch.testing.assert_close(kept.gram("first", bias=True), best.dense())


def test_sums_are_wide_until_they_are_finished(model: nn.Module, batches: list[Batch]) -> None:
    """A sum over processes is of G Ω and exact; only then directions are chosen."""
    parts = [_unfinished(model, some) for some in (batches[:2], batches[2:], batches)]
    assert parts[0].header.forms["main/inputs/narrow"] == "wide"
    assert parts[0].header.sketching is None
    added, whole = add_up(parts[:2]), parts[2]
    gram = collect(model, batches, "full").gram("narrow")
    expected = gram @ directions(64, 2 * LOW).double()
    for one in (added, whole):
        torch.testing.assert_close(one.stored("inputs/narrow")[:, :-1], expected)
    ours, theirs = (finish(one).gram("first", bias=True) for one in (added, whole))
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(theirs, collect(model, batches, LOW).gram("first", bias=True))


def _unfinished(
    model: nn.Module, batches: Sequence[Any], rank: int = LOW, statistics: str = "kfac"
) -> Statistics:
    options = make_collection_options(statistics=statistics, rank=rank)
    own = Collection(model, options, loss if statistics == "kfac" else None)
    origin = Origin(name="x", fingerprint="")
    with own.running():
        for batch in batches:
            own.add(batch)
        return own.statistics(origin, (origin,))


def test_full_is_as_it_was(model: nn.Module, batches: list[Batch], tmp_path: Path) -> None:
    """Nothing in the header or the arrays says that there are sketches."""
    out = tmp_path / "s.safetensors"
    collect(model, batches, "full", out=out)
    with safe_open(out, "pt") as opened:
        assert not any("rank" in text or "sketch" in text for text in opened.metadata().values())
    assert {str(v.dtype) for v in load_file(out).values()} == {"torch.float32"}
    # Where no layer is wide enough for the default rank, that is the same.
    narrow = nn.Linear(20, 3)
    ours = matsmerge.collect(narrow, [torch.ones(4, 20)])
    assert ours.header.sketching is None
    assert ours.header.forms["main/inputs/"] == "symmetric"


@pytest.mark.parametrize(
    ("rank", "kinds", "message"),
    [
        (64, "kfac", "at least 131 inputs or outputs, and the widest that is collected has 64"),
        (4, "fisher", "is of gram and kfac, and fisher has none"),
        (0, "gram", "rank: expected a number of at least 1, full or auto, found 0"),
        ("lots", "gram", "expected a number of at least 1, full or auto, found 'lots'"),
        (True, "gram", "found True"),
    ],
)
def test_wrong_ranks(
    model: nn.Module, batches: list[Batch], rank: Any, kinds: str, message: str
) -> None:
    def never(*_: Any) -> Tensor:
        raise AssertionError("it ran")

    with pytest.raises(matsmerge.RecipeError, match=message):
        matsmerge.collect(model, batches, kinds, loss=never, rank=rank)


def test_overflow_is_named(model: nn.Module, batches: list[Batch]) -> None:
    with torch.no_grad():
        model.tokens.weight[3] = torch.inf  # type: ignore[union-attr, operator]
    with pytest.raises(matsmerge.NonFiniteError, match="'main/inputs/first' holds NaN or Inf"):
        collect(model, batches, statistics="gram")


# files, interruptions, sums


def test_interruptions_and_held_out_sets(
    model: nn.Module, batches: list[Batch], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"held_out": 0.3, "dtype": "float64"}
    whole = tmp_path / "whole.safetensors"
    statistics = collect(model, batches, out=whole, **options)
    assert statistics.truncated_gram("first", HELD_OUT, bias=True) is not None
    out = tmp_path / "s.safetensors"
    for at in (2, 4):
        with pytest.raises(KeyboardInterrupt):
            collect(model, interrupted(batches, at), out=out, resume=True, **options)
    collect(model, batches, out=out, resume=True, **options)
    assert out.read_bytes() == whole.read_bytes()
    read = matsmerge.open_statistics(out)
    assert read.header == statistics.header
    assert torch.equal(read.gram("first"), statistics.gram("first"))


def test_a_partial_file_of_another_shape(
    model: nn.Module, batches: list[Batch], tmp_path: Path
) -> None:
    out = tmp_path / "s.safetensors"
    with pytest.raises(KeyboardInterrupt):
        collect(model, interrupted(batches, 2), LOW, out=out)
    partial = tmp_path / ".s.safetensors.partial"
    with safe_open(partial, "pt") as opened:
        metadata = opened.metadata()
    arrays = load_file(partial)
    arrays["main/gram/sketch/first"] = arrays["main/gram/sketch/first"][:, 1:].contiguous()
    save_file(arrays, partial, metadata)
    with pytest.raises(matsmerge.StatisticsError, match="'first': expected arrays .*sketch"):
        collect(model, batches, LOW, out=out, resume=True)


@pytest.mark.parametrize("dtype", ["auto", "float32", "float64"])
def test_dtypes_of_files(
    model: nn.Module, batches: list[Batch], tmp_path: Path, dtype: str
) -> None:
    out = tmp_path / "s.safetensors"
    kept = collect(model, batches, out=out, dtype=dtype)
    specs = read_header(out).specs
    names = {"auto": ("int8", "float32")}.get(dtype, (dtype, dtype))
    for name, form in kept.header.forms.items():
        assert str(specs[name].dtype) == f"torch.{names[form != 'sketch']}"
    rounding = {"auto": 2.0**-8, "float32": 2.0**-23, "float64": 1e-14}[dtype]
    read = matsmerge.open_statistics(out)
    for bias in (False, True):
        ours, theirs = kept.gram("first", bias=bias), read.gram("first", bias=bias)
        assert float((ours - theirs).norm()) < 2 * rounding * float(ours.norm())
        assert float(torch.linalg.eigvalsh(theirs)[0]) > -1e-12 * float(theirs.norm())


@pytest.mark.parametrize("dtype", ["auto", "float64"])
def test_files_add_up(model: nn.Module, batches: list[Batch], tmp_path: Path, dtype: str) -> None:
    """The leading directions of the sum of what was kept, each by its rows, and the trace."""
    whole = collect(model, batches, LOW)
    parts = []
    for i, some in enumerate((batches[:2], batches[2:])):
        out = tmp_path / f"{i}.safetensors"
        collect(model, some, LOW, out=out, dtype=dtype)
        parts.append(matsmerge.open_statistics(out))
    added = combine_statistics(parts)
    assert added.header.sketching == whole.header.sketching
    assert added.header.sets == whole.header.sets
    relative = 1e-9 if dtype == "float64" else 0.02
    for key in ("inputs/first", "inputs/narrow", "outputs/first"):
        stored = [part.stored(key).double() for part in parts]
        total = sum(
            (
                w * kept[:, :-1] @ kept[:, :-1].mT
                for w, kept in zip((1 / 3, 2 / 3), stored, strict=True)
            ),
            torch.zeros(()),
        )
        best = truncate(total, LOW)
        b = added.stored(key)[:, :-1]
        expected = (best.vectors * best.values) @ best.vectors.mT
        torch.testing.assert_close(b @ b.mT, expected, rtol=0, atol=1e-9 * float(expected.norm()))
        ours, expected = (s.stored(key)[:, -1] for s in (added, whole))
        torch.testing.assert_close(ours, expected, rtol=relative, atol=0)


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("rank", [LOW, RANK])
def test_a_process_without_batches(
    model: nn.Module, batches: list[Batch], rank: int, is_first: bool
) -> None:
    parts = [_unfinished(model, some, rank) for some in (batches, [])]
    whole = finish(parts[0])
    added = finish(add_up(parts[::-1] if is_first else parts))
    assert added.header.sketching == whole.header.sketching == Sketching(rank=rank)
    torch.testing.assert_close(added.gram("first"), whole.gram("first"))


class Branches(nn.Module):
    """Two layers, one of them with a bias, that receive the same tensor or a copy of it."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(40, 8, bias=False)
        self.biased = nn.Linear(40, 8)
        self.is_copied = False

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.plain(x) + self.biased(x.clone() if self.is_copied else x)
        return found


def test_parts_in_which_other_maps_share_an_input() -> None:
    """The mean is kept where one of those that share has a bias."""
    torch.manual_seed(0)
    model = Branches().double()
    # Of few directions, so that a rank has all of them.
    batches = [torch.randn(10, 3).double() @ torch.randn(3, 40).double() + 1 for _ in range(2)]
    parts, sums = [], []
    for model.is_copied, some in ((False, batches[:1]), (True, batches[1:])):
        parts.append(matsmerge.collect(model, some, "gram", rank=RANK))
        sums.append(_unfinished(model, some, LOW, "gram"))
    for found in (parts, sums):
        assert [len(part.stored("inputs/plain")) for part in found] == [41, 40]
    whole = matsmerge.collect(model, batches, "gram")
    for order in (1, -1):
        added, wide = combine_statistics(parts[::order]), add_up(sums[::order])
        assert not added.has("mean/plain")
        for module, bias in (("plain", False), ("biased", False), ("biased", True)):
            ours, expected = (s.gram(module, bias=bias) for s in (added, whole))
            torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)
        y = whole.gram("plain") @ directions(40, 2 * LOW).double()
        torch.testing.assert_close(wide.stored("inputs/plain")[:, :-1], y)


def test_what_cannot_be_added(model: nn.Module, batches: list[Batch]) -> None:
    ours, full = collect(model, batches), collect(model, batches, "full")
    other = collect(model, batches, rank=4)
    ranks = "sketches of rank 14 and sketches of rank 4, .* compress"
    for theirs, message in (
        (other, ranks),
        (full, "rank 14 and second moments in full"),
    ):
        with pytest.raises(matsmerge.StatisticsError, match=message) as caught:
            combine_statistics([ours, theirs], force=True)
        assert len(caught.value.problems) == 1


KEY = "matsmerge_statistics"


@pytest.mark.parametrize(
    "change",
    [
        lambda header: put(header, "sketching", None),
        lambda header: put(header, "sketching.rank", RANK + 1),
        lambda header: put(header, "sketching.rank", 0),
        lambda header: put(header, "forms.main/inputs/first", "wide"),
        lambda header: put(header, "forms.main/mean/first", "sketch"),
        lambda header: put(header, "forms.main/inputs/first", "diagonal"),
    ],
)
def test_damaged_headers(
    model: nn.Module, batches: list[Batch], tmp_path: Path, change: Callable[[Any], Any]
) -> None:
    out = tmp_path / "s.safetensors"
    collect(model, batches, out=out)
    edit_metadata(out, KEY, change)
    with pytest.raises(matsmerge.StatisticsError, match=r"has not the form|damaged header"):
        matsmerge.open_statistics(out)


def test_damaged_numbers(model: nn.Module, batches: list[Batch], tmp_path: Path) -> None:
    out = tmp_path / "s.safetensors"
    statistics = collect(model, batches)
    arrays = {name: statistics.arrays[name].clone() for name in statistics.arrays.specs}
    arrays["main/inputs/first"][2, 3] = torch.nan
    save_statistics(in_memory(statistics.header, arrays), out)
    with pytest.raises(matsmerge.StatisticsError, match="'main/inputs/first' holds NaN or Inf"):
        matsmerge.open_statistics(out).truncated_gram("first")
