"""What must not matter does not; what is interrupted goes on; what is wrong is said."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import disk_offload
from statistics_cases import Case, make_case
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import matsmerge
from matsmerge.statistics.partial_file import partial_path
from matsmerge.statistics.statistics import HELD_OUT, MAIN, Statistics
from matsmerge.statistics.statistics_file import open_statistics, save_statistics
from matsmerge.statistics.statistics_sum import combine_statistics

EVERYTHING = "gram,kfac,fisher,block_fisher"


def gather(
    case: Case, batches: list[Any] | None = None, size: int = 3, **options: Any
) -> Statistics:
    given: dict[str, Any] = {"statistics": EVERYTHING, "loss": case.predict} | options
    return matsmerge.collect(case.model, batches or case.batches(size), **given)


def assert_equal(a: Statistics, b: Statistics, tolerance: float = 1e-10) -> None:
    """Same header and same numbers; per-example gradients in any order."""
    assert a.header == b.header
    for full_key in a.header.forms:
        of, _, key = full_key.partition("/")
        x, y = a.array(key, of), b.array(key, of)
        assert float((x - y).norm()) <= tolerance * float(x.norm()) + 1e-18, key


@pytest.fixture(params=["bert", "t5", "gpt2", "ia3"])
def case(request: pytest.FixtureRequest) -> Case:
    return make_case(request.param)


def test_batch_size_and_padding_change_nothing(case: Case) -> None:
    expected = gather(case, size=1)
    assert_equal(gather(case, size=7), expected)
    assert_equal(gather(case, case.batches(3, padding=4)), expected)
    assert_equal(gather(case, case.batches(2)[::-1]), expected)


def test_shards_combine_to_one_pass(case: Case, tmp_path: Path) -> None:
    batches = case.batches(2)
    parts = []
    for i, shard in enumerate((batches[:1], batches[1:3], batches[3:])):
        save_statistics(gather(case, shard), tmp_path / f"{i}.safetensors", "float64")
        parts.append(open_statistics(tmp_path / f"{i}.safetensors"))
    assert_equal(combine_statistics(parts), gather(case))


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    case = make_case("bert")
    collected = gather(case, out=tmp_path / "s.safetensors", dtype="float64", held_out=0.34)
    read = open_statistics(tmp_path / "s.safetensors")
    assert_equal(collected, read, 0.0)
    assert sum(s.num_examples for s in read.header.sets.values()) == 7
    assert (tmp_path / "s.safetensors").stat().st_mode & 0o044 == 0o044
    for dtype, tolerance in (("float32", 1e-6), ("bfloat16", 1e-2)):
        save_statistics(collected, tmp_path / "t.safetensors", dtype)
        assert_equal(collected, open_statistics(tmp_path / "t.safetensors"), tolerance)


def test_symmetric_arrays_are_stored_once(tmp_path: Path) -> None:
    case = make_case("bert")
    gather(case, statistics="gram", out=tmp_path / "s.safetensors")
    specs = open_statistics(tmp_path / "s.safetensors").arrays.specs
    grams = [name for name in specs if "inputs/bert.encoder.layer.0" in name]
    assert len(grams) == 4  # query, key and value share theirs
    assert specs["main/inputs/bert.encoder.layer.0.attention.self.query"].shape == (16 * 17 // 2,)


def test_cross_attention_shares_the_encoder_output() -> None:
    header = gather(make_case("t5"), statistics="gram").header
    leaders = {
        m.inputs for m in header.maps if "EncDecAttention" in m.module and m.module[-1] in "kv"
    }
    assert len(leaders) == 1
    gated = [
        m.inputs for m in header.maps if "decoder.block.0.layer.2.DenseReluDense.wi" in m.module
    ]
    assert len(gated) == 2
    assert len(set(gated)) == 1


def test_held_out_is_a_second_set() -> None:
    case = make_case("bert")
    batches = case.batches(1)
    both = gather(case, batches, held_out=0.5)
    assert {name: s.num_examples for name, s in both.header.sets.items()} == {MAIN: 4, HELD_OUT: 3}
    alone = gather(case, batches[1::2])
    for key in ("inputs/bert.pooler.dense", "fisher/classifier.weight", "outputs/classifier"):
        torch.testing.assert_close(both.array(key, HELD_OUT), alone.array(key))


def test_bias_joins_as_a_constant_input() -> None:
    case = make_case("bert")
    statistics = gather(case, statistics="gram")
    joined = statistics.gram("classifier", bias=True)
    assert joined.shape == (17, 17)
    assert joined[-1, -1] == 1
    torch.testing.assert_close(joined[:-1, :-1], statistics.gram("classifier"))
    without = gather(case, statistics="gram", bias=False)
    assert "classifier.bias" in without.header.without["gram"]
    with pytest.raises(matsmerge.StatisticsError, match="--no-bias"):
        without.gram("classifier", bias=True)


def test_patterns_choose_parameters() -> None:
    case = make_case("bert")
    statistics = gather(case, parameters=["classifier.*"])
    assert statistics.parameters("fisher") == ["classifier.weight", "classifier.bias"]
    assert [m.module for m in statistics.header.maps] == ["classifier"]
    with pytest.raises(matsmerge.RecipeError, match="'clasifier.weight' matches no.*classifier"):
        gather(case, parameters=["clasifier.weight"])


def test_the_model_is_left_as_it_was() -> None:
    case = make_case("bert")
    case.model.train()
    case.model.get_parameter("classifier.bias").requires_grad_(False)
    before = {n: p.clone() for n, p in case.model.named_parameters()}
    statistics = gather(case)
    assert "classifier.bias" not in statistics.parameters("fisher")
    assert all(m.training for m in case.model.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in case.model.modules())
    for name, parameter in case.model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None
        assert parameter.requires_grad == (name != "classifier.bias")


def test_16_bit_models_are_summed_in_32_bits() -> None:
    model = nn.Linear(4, 2).bfloat16()
    x = torch.ones(40_000, 4, dtype=torch.bfloat16)
    gram = matsmerge.collect(model, x.split(100)).gram("")
    assert torch.equal(gram.float(), torch.ones(4, 4))
    # Summed in 16 bits it would have stuck at 256.
    assert float(torch.ones(1, dtype=torch.bfloat16) * 256 + 1) == 256


class SometimesShared(nn.Module):
    """Two maps that share their input only in some passes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Any:
        return self.a(x) + self.b(x if float(x.sum()) > 0 else 2 * x)


def test_maps_that_cease_to_share_get_sums_of_their_own() -> None:
    torch.manual_seed(0)
    positive, negative = torch.rand(4, 3), -torch.rand(4, 3)
    statistics = matsmerge.collect(SometimesShared(), [positive, negative, positive])
    assert {m.inputs for m in statistics.header.maps} == {"a", "b"}
    rows = torch.cat([positive, negative, positive])
    other = torch.cat([positive, 2 * negative, positive])
    torch.testing.assert_close(statistics.gram("a"), rows.T @ rows / 12, check_dtype=False)
    torch.testing.assert_close(statistics.gram("b"), other.T @ other / 12, check_dtype=False)


def test_models_larger_than_memory(tmp_path: Path) -> None:
    """Weights on disk, each brought in when its module runs; ties are then broken in memory."""
    for name, statistics in (("bert", EVERYTHING), ("gpt2", EVERYTHING), ("t5", "kfac")):
        case, offloaded = make_case(name), make_case(name)
        expected = gather(case, statistics=statistics)
        disk_offload(offloaded.model, tmp_path / name, torch.device("cpu"))
        found = gather(offloaded, statistics=statistics, checkpoint=case.model)
        for key in expected.header.forms:
            array = key.removeprefix(f"{MAIN}/")
            torch.testing.assert_close(found.array(array), expected.array(array))
    with pytest.raises(matsmerge.RecipeError, match="kept on disk or in memory"):
        gather(offloaded, statistics="fisher", checkpoint=case.model)


class Router(nn.Module):
    """An expert that may get no rows at all."""

    def __init__(self) -> None:
        super().__init__()
        self.expert = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x[x[:, 0] > 0] += self.expert(x[x[:, 0] > 0])
        return x


def test_no_rows_are_no_statistics() -> None:
    statistics = matsmerge.collect(Router(), [-torch.rand(3, 3), -torch.rand(3, 3)])
    assert statistics.header.maps == ()
    assert "expert.weight" in statistics.header.without["gram"]


# The Fisher information


def test_true_fisher_sums_over_classes() -> None:
    case = make_case("bert")
    found = gather(case, fisher="true", num_samples=2)
    expected = torch.zeros_like(case.model.get_parameter("classifier.weight"))
    for example in case.examples:
        log_p = case.predict(case.model, case.collate([example], 0)).logits.log_softmax(1)[0]
        for i in range(3):
            (gradient,) = torch.autograd.grad(
                log_p[i], case.model.get_parameter("classifier.weight"), retain_graph=True
            )
            expected += log_p[i].exp().detach() * gradient**2 / len(case.examples)
    torch.testing.assert_close(found.fisher("classifier.weight"), expected)
    assert_equal(gather(case, size=1, fisher="true", num_samples=2), found)


def test_drawn_answers_do_not_depend_on_the_batch() -> None:
    from matsmerge.tasks.batch import Batch

    case = make_case("gpt2")

    def shown(size: int) -> list[Batch]:
        return [
            Batch(b, range(i * size, i * size + len(b["input_ids"])), None, [b["attention_mask"]])
            for i, b in enumerate(case.batches(size))
        ]

    options: dict[str, Any] = {
        "fisher": "true",
        "num_samples": 3,
        "loss": lambda model, batch: case.predict(model, dict(batch.inputs)),
    }
    first = gather(case, shown(3), **options)
    assert_equal(gather(case, shown(7), **options), first)
    other = gather(case, shown(3), **options, seed=1)
    name = "transformer.wte.weight"
    assert not torch.allclose(other.fisher(name), first.fisher(name))


def test_kfac_is_the_fisher_where_it_is_exact() -> None:
    """One row per example, and the same input in all of them: z zᵀ and o oᵀ are independent."""
    torch.manual_seed(0)
    model = nn.Linear(3, 4).double()
    x = torch.randn(3, dtype=torch.float64).expand(5, 3)
    statistics = matsmerge.collect(
        model,
        [x],
        "kfac",
        loss=lambda m, batch: (m(batch), torch.zeros(len(batch), dtype=torch.long)),
        fisher="true",
        num_samples=3,
    )
    weight = model.weight
    dense = torch.zeros(12, 12, dtype=torch.float64)
    log_p = model(x[0]).log_softmax(0)
    for i in range(4):
        (g,) = torch.autograd.grad(log_p[i], weight, retain_graph=True)
        dense += log_p[i].exp().detach() * torch.outer(g.flatten(), g.flatten())
    factors = torch.kron(statistics.output_factor(""), statistics.gram(""))
    torch.testing.assert_close(factors, dense)


def test_a_vocabulary_has_no_output_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("matsmerge.statistics.kinds.kronecker_factors._MAX_OUTPUTS", 30)
    found = gather(make_case("llama"), statistics="kfac")
    assert "outputs" in found.header.without["kfac"]["lm_head.weight"]
    assert found.gram("lm_head").shape == (16, 16)
    assert "model.layers.0.mlp.down_proj.weight" in found.parameters("kfac")


def test_the_mean_over_tokens_scales_each_example() -> None:
    case = make_case("llama")
    summed, averaged = (
        gather(case, case.batches(1)[:1], statistics="fisher", reduction=reduction)
        for reduction in ("sum", "mean")
    )
    num_tokens = len(case.examples[0]["ids"]) - 2
    name = "model.norm.weight"
    torch.testing.assert_close(summed.fisher(name), averaged.fisher(name) * num_tokens**2)


# Interruptions


def interrupted(batches: list[Any], after: int) -> Iterator[Any]:
    for i, batch in enumerate(batches):
        if i == after:
            os.kill(os.getpid(), signal.SIGINT)
        yield batch


@pytest.mark.parametrize("after", [0, 2])
def test_an_interrupted_collection_goes_on(case: Case, tmp_path: Path, after: int) -> None:
    out, batches = tmp_path / "s.safetensors", case.batches(2)
    whole = gather(case, batches)
    options: dict[str, Any] = {
        "statistics": EVERYTHING, "loss": case.predict, "out": out, "dtype": "float64"
    }  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        matsmerge.collect(case.model, interrupted(batches, after), **options)
    assert not out.exists()
    assert partial_path(out).exists()
    with pytest.raises(matsmerge.OutputError, match="--resume"):
        matsmerge.collect(case.model, batches, **options)
    with pytest.raises(matsmerge.OutputError, match="other options"):
        matsmerge.collect(case.model, batches, **options | {"seed": 1}, resume=True)
    assert_equal(matsmerge.collect(case.model, batches, **options, resume=True), whole)
    assert_equal(open_statistics(out), whole)
    assert not partial_path(out).exists()
    with pytest.raises(matsmerge.OutputError, match="--overwrite"):
        matsmerge.collect(case.model, batches, **options)


def test_a_killed_collection_goes_on_from_the_last_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("matsmerge.statistics.partial_file._SECONDS_BETWEEN", 0.0)
    case, out = make_case("bert"), tmp_path / "s.safetensors"

    def dying() -> Iterator[Any]:
        yield from case.batches(2)[:3]
        raise SystemExit  # nothing is saved on the way out

    with pytest.raises(SystemExit):
        gather(case, dying(), out=out)  # type: ignore[arg-type]
    assert partial_path(out).exists()
    assert_equal(gather(case, case.batches(2), out=out, resume=True), gather(case))


def test_other_batches_are_not_taken_for_the_same(tmp_path: Path) -> None:
    case, out = make_case("bert"), tmp_path / "s.safetensors"
    with pytest.raises(KeyboardInterrupt):
        gather(case, interrupted(case.batches(2), 1), out=out)  # type: ignore[arg-type]
    with pytest.raises(matsmerge.OutputError, match="4 examples of 2 batches, which now have 6"):
        gather(case, case.batches(3), out=out, resume=True)


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, out = make_case("bert"), tmp_path / "s.safetensors"
    from matsmerge.files import whole_outputs

    def full(path: Path) -> None:
        if "partial" not in path.name:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(whole_outputs, "sync", full)
    with pytest.raises(matsmerge.OutputError, match="the disk is full"):
        gather(case, out=out)
    assert [p.name for p in tmp_path.iterdir()] == [partial_path(out).name]
    monkeypatch.undo()
    assert_equal(gather(case, out=out, resume=True), gather(case))

    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10}))
    with pytest.raises(matsmerge.OutputError, match="not enough disk space"):
        gather(case, out=tmp_path / "t.safetensors")


def test_a_disk_that_fills_up_while_saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was saved before is kept, and goes on; nothing else is left."""
    from matsmerge.files import whole_outputs

    monkeypatch.setattr("matsmerge.statistics.partial_file._SECONDS_BETWEEN", -1.0)
    case, out = make_case("bert"), tmp_path / "s.safetensors"
    left = 0

    def full(path: Path) -> None:
        nonlocal left
        left -= path.suffix == ".tmp"
        if left < 0:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(whole_outputs, "sync", full)
    with pytest.raises(matsmerge.OutputError, match="the disk is full.*make room.*--resume"):
        gather(case, case.batches(2), out=out)
    assert list(tmp_path.iterdir()) == []
    left = 2
    with pytest.raises(matsmerge.OutputError, match="kept before is still there.*--resume"):
        gather(case, case.batches(2), out=out, resume=True)
    assert list(tmp_path.iterdir()) == [partial_path(out)]
    left = 100
    assert_equal(gather(case, case.batches(2), out=out, resume=True), gather(case))
    assert list(tmp_path.iterdir()) == [out]


# What is wrong


def linear_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


@pytest.mark.parametrize(
    ("statistics", "loss", "batch", "error", "message"),
    [
        ("grams", None, torch.ones(2, 3), matsmerge.RecipeError, "'grams' is not a kind of.*did you mean 'gram'"),
        ("fisher", None, torch.ones(2, 3), matsmerge.RecipeError, "fisher: needs a loss"),
        ("gram", None, [], matsmerge.DataError, "holds no tensors"),
        ("gram", None, torch.ones(0, 3), matsmerge.DataError, "batch is empty"),
        ("fisher", lambda m, b: m(b).sum(), torch.ones(2, 3), matsmerge.DataError, r"expected the loss of each example.*\[2\]"),
        ("fisher", lambda m, b: (m(b), torch.tensor([0, 0])[:1]), torch.ones(2, 3), matsmerge.DataError, r"targets \[1\] for a batch of 2"),
        ("fisher", lambda m, b: m(b).sum(1) / 0, torch.ones(2, 3), matsmerge.NonFiniteError, "example 0: its loss is"),
        ("fisher", lambda m, b: (m(b[0]), b[1]), (torch.ones(2, 3), torch.tensor([0, 7])), matsmerge.DataError, "example 1: target 7 is out of range, the model has 4"),
    ],
)  # fmt: skip
def test_errors(statistics: str, loss: Any, batch: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        matsmerge.collect(nn.Linear(3, 4), [batch], statistics, loss=loss)


def test_errors_of_batches() -> None:
    with pytest.raises(matsmerge.DataError, match="no data"):
        matsmerge.collect(nn.Linear(3, 4), [])
    case = make_case("bert")
    batch = case.batches(3)[0]
    batch["attention_mask"][1] = 0
    with pytest.raises(matsmerge.DataError, match="example 1: all of it is masked"):
        gather(case, [batch])
    seq2seq = make_case("t5")
    batch = seq2seq.batches(3)[0]
    for key in ("input_ids", "attention_mask"):
        batch[key] = batch[key][:, : batch["targets"].shape[1]]
    with pytest.raises(matsmerge.DataError, match="pad one of them by one more column"):
        gather(seq2seq, [batch], statistics="gram")
    with pytest.raises(matsmerge.DataError, match="let the loss function return a tuple"):
        gather(case, loss=case.loss, fisher="true")
    with pytest.raises(matsmerge.RecipeError, match="no parameter of the model requires"):
        matsmerge.collect(nn.Linear(2, 2).requires_grad_(False), [torch.ones(1, 2)])
