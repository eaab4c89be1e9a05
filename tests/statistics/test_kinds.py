"""A statistic is one class and one line in the table: everything else works by itself."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from dense_statistics import conv_rows, module_rows, per_example_gradients
from statistics_cases import Case, make_case
from test_resuming import interrupted
from torch import Tensor, nn

import matsmerge
from matsmerge.statistics.collection_options import make_collection_options
from matsmerge.statistics.kinds import KINDS, arrays_of, includes, kinds_by_name
from matsmerge.statistics.kinds.statistic import (
    Arrays,
    GradientStatistic,
    InputStatistic,
)
from matsmerge.statistics.kinds.tensor_sum import TensorStatistic, TensorSum
from matsmerge.statistics.linear_maps import LinearMap
from matsmerge.statistics.parameters import Owned
from matsmerge.statistics.statistics import Statistics
from matsmerge.statistics.statistics_sum import combine_statistics


class AbsoluteSum(TensorSum):
    def add(self, rows: Tensor, keep: Tensor | None = None) -> None:
        rows = (rows if keep is None else rows[keep]).to(self.total.dtype)
        self.total = self.total.to(rows.device) + rows.abs().sum(-2)
        self.num_rows += rows.shape[-2]


class MeanAbsoluteInput(TensorStatistic[LinearMap], InputStatistic):
    """Mean over rows of |z|."""

    name = "mean_absolute"
    arrays: ClassVar[Arrays] = {"absolute": ("full",)}
    is_per_row = True
    sum_type = AbsoluteSum

    def shape(self, target: LinearMap) -> tuple[int, ...]:
        groups = (target.num_groups,) if target.num_groups > 1 else ()
        return (*groups, target.num_inputs)

    def refuses(self, target: LinearMap) -> str | None:
        return "its inputs are indices" if target.layout == "embedding" else None


class AbsoluteGradientSum(TensorSum):
    def add(self, rows: Tensor, keep: Tensor | None = None) -> None:
        assert keep is None
        self.total = self.total.to(rows.device)
        self.total += rows.abs().sum(0).view_as(self.total)


class MeanAbsoluteGradient(TensorStatistic[Owned], GradientStatistic):
    """Mean over examples of |g|."""

    name = "absolute_gradient"
    arrays: ClassVar[Arrays] = {"absolute_gradient": ("full",)}
    sum_type = AbsoluteGradientSum

    def shape(self, target: Owned) -> tuple[int, ...]:
        return tuple(target.parameter.shape)


NEW = ("mean_absolute", "absolute_gradient")


@pytest.fixture(params=["gpt2", "depthwise"])
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Case:
    for kind in (MeanAbsoluteInput(), MeanAbsoluteGradient()):
        monkeypatch.setitem(KINDS, kind.name, kind)
    return make_case(request.param)


def collect(case: Case, batches: Any, statistics: Any = NEW, **options: Any) -> Statistics:
    return matsmerge.collect(case.model, batches, statistics, loss=case.predict, **options)


def test_new_kinds_are_what_they_say(case: Case) -> None:
    statistics = collect(case, case.batches(3))
    assert statistics.kinds == NEW
    for m in statistics.header.maps:
        if m.inputs is not None:
            module = case.model.get_submodule(m.module)
            if isinstance(module, nn.Conv2d):
                rows, _ = conv_rows(module, case.runs())
                rows = rows if module.groups > 1 else rows[:, 0]
            else:
                rows, _ = module_rows(case.model, m.module, case.runs())
            found = statistics.array(f"absolute/{m.inputs}")
            torch.testing.assert_close(found, rows.abs().mean(0))
    without = statistics.header.without["mean_absolute"]
    has_indices = any(isinstance(module, nn.Embedding) for module in case.model.modules())
    assert ("its inputs are indices" in without.values()) == has_indices
    assert not set(without) & set(statistics.parameters("mean_absolute"))
    gradients = per_example_gradients(case.model, case.runs())
    for name in statistics.parameters("absolute_gradient"):
        expected = torch.stack([g[name].abs() for g in gradients]).mean(0)
        torch.testing.assert_close(statistics.array(f"absolute_gradient/{name}"), expected)
    with pytest.raises(matsmerge.StatisticsError, match="no Gram matrix"):
        statistics.gram(statistics.header.maps[0].module)


def test_new_kinds_go_with_the_others_into_files_and_sums(case: Case, tmp_path: Path) -> None:
    kinds = ("gram", *NEW)
    options: dict[str, Any] = {"held_out": 0.3, "dtype": "float64", "statistics": kinds}
    batches = case.batches(2)
    out = tmp_path / "s.safetensors"
    whole = collect(case, batches, out=tmp_path / "whole.safetensors", **options)
    with pytest.raises(KeyboardInterrupt):
        collect(case, interrupted(batches, 2), out=out, **options)
    collect(case, batches, out=out, resume=True, **options)
    assert out.read_bytes() == (tmp_path / "whole.safetensors").read_bytes()
    read = matsmerge.open_statistics(out)
    assert read.header == whole.header
    assert all(torch.equal(read.arrays[key], whole.arrays[key]) for key in whole.arrays.specs)
    halves = [collect(case, half, kinds) for half in (batches[:2], batches[2:])]
    added, expected = combine_statistics(halves, force=True), collect(case, batches, kinds)
    for key in expected.arrays.specs:
        torch.testing.assert_close(added.arrays[key], expected.arrays[key])


def test_arrays_have_one_kind() -> None:
    class Other(MeanAbsoluteInput):
        arrays: ClassVar[Arrays] = {"mean": ("full",)}

    with pytest.raises(AssertionError, match="have an array named mean"):
        kinds_by_name(*KINDS.values(), Other())


def test_a_sum_that_counts_no_rows_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Uncounted(AbsoluteSum):
        def add(self, rows: Tensor, keep: Tensor | None = None) -> None:
            super().add(rows, keep)
            self.num_rows = 0

    class Other(MeanAbsoluteInput):
        sum_type = Uncounted

    monkeypatch.setitem(KINDS, Other.name, Other())
    with pytest.raises(AssertionError, match="Uncounted.add does not count num_rows"):
        matsmerge.collect(nn.Linear(4, 3), [torch.ones(2, 4)], Other.name)


def test_kfac_includes_gram() -> None:
    assert includes(["kfac"], "gram")
    assert not includes(["gram"], "kfac")
    assert arrays_of(["kfac"]) == {"inputs", "mean", "outputs"}
    assert arrays_of(["fisher", "block_fisher"]) == {"fisher", "block_fisher"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"statistics": "kfacc"}, "'kfacc' is not a kind of statistic; did you mean 'kfac'"),
        ({"statistics": "gram,x"}, "there is gram, kfac, fisher, block_fisher"),
        ({"statistics": ()}, "at least 1"),
        ({"held_out": 2}, "held_out: input should be less than 1, found 2"),
        ({"seeds": 1}, "did you mean 'seed'"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(matsmerge.RecipeError, match=message):
        make_collection_options(**options)
