from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import matsmerge
from matsmerge import AlignmentError
from matsmerge.checkpoints.alignment import align
from matsmerge.checkpoints.source import open_checkpoint

State = dict[str, Tensor]
Make = Callable[..., State]


def test_all_differences_at_once(make_state: Make) -> None:
    a, b, c, base = (make_state(i) for i in (1, 2, 3, 0))
    del b["layers.0.b"]
    b["extra"] = torch.ones(1)
    c["layers.1.w"] = torch.ones(8, 9)
    c["layers.1.b"] = c["layers.1.b"].half()
    del base["embed.weight"]
    base["layers.0.w"] = base["layers.0.w"].T.reshape(4, 16)
    with pytest.raises(AlignmentError) as error:
        matsmerge.merge({"a": a, "b": b, "c": c}, base, "task_arithmetic")
    text = str(error.value)
    for part in (
        "b lacks 1 tensor that a has: layers.0.b",
        "b has 1 tensor that a lacks: extra",
        "c has 1 tensor of another shape than a: layers.1.w [8, 9] instead of [8, 8]",
        "c has 1 tensor of another dtype than a: layers.1.b float16 instead of float32",
        "base lacks 1 tensor that a has: embed.weight",
        "base has 1 tensor of another shape than a: layers.0.w [4, 16] instead of [8, 8]",
    ):
        assert part in text


def test_long_lists_are_counted(make_state: Make) -> None:
    a = make_state(1) | {f"x{i}": torch.ones(1) for i in range(20)}
    with pytest.raises(AlignmentError, match="lacks 20 tensors.*and 12 more"):
        matsmerge.merge([a, make_state(2)])


def test_dtypes_may_differ_when_the_output_has_one(make_state: Make) -> None:
    models = [make_state(1), make_state(2, torch.bfloat16)]
    with pytest.raises(AlignmentError, match="--dtype"):
        matsmerge.merge(models)
    merged = matsmerge.merge(models, dtype="float16")
    expected = (models[0]["layers.0.w"].double() + models[1]["layers.0.w"].double()) / 2
    assert torch.equal(merged["layers.0.w"], expected.half())
    models[1]["position_ids"] = models[1]["position_ids"].float()
    with pytest.raises(AlignmentError, match="position_ids float32 instead of int64"):
        matsmerge.merge(models, dtype="float16")


@pytest.mark.parametrize(
    ("first", "second", "widest"),
    [
        (torch.bfloat16, torch.float16, torch.float32),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float16, torch.float16, torch.float16),
    ],
)
def test_the_widest_dtype_holds_the_values_of_all_inputs(
    make_state: Make, first: torch.dtype, second: torch.dtype, widest: torch.dtype
) -> None:
    models = [make_state(1, first), make_state(2, second)]
    merged = matsmerge.merge(models, dtype="widest")["layers.0.w"]
    mean = (models[0]["layers.0.w"].double() + models[1]["layers.0.w"].double()) / 2
    assert torch.equal(merged, mean.to(widest))
    assert merged.dtype == widest


def test_integer_buffers_must_be_equal(make_state: Make) -> None:
    a, b = make_state(1), make_state(2)
    b["position_ids"] = b["position_ids"] + 1
    with pytest.raises(AlignmentError, match="int64 buffer 'position_ids' differs.*passthrough"):
        matsmerge.merge({"a": a, "b": b})
    take = {"match": "position_ids", "method": {"name": "passthrough", "model": "b"}}
    merged = matsmerge.merge({"a": a, "b": b}, overrides=[take])
    assert torch.equal(merged["position_ids"], b["position_ids"])


def with_head(state: State, num_labels: int) -> State:
    return state | {
        "classifier.weight": torch.randn(num_labels, 8),
        "classifier.bias": torch.randn(num_labels),
    }


def test_counters_of_batches_may_differ() -> None:
    """No two models that were trained further have the same."""
    states = []
    for number in (3, 5):
        state = torch.nn.BatchNorm1d(4).state_dict()
        state["num_batches_tracked"].fill_(number)
        state["running_mean"].fill_(number)
        states.append(state)
    with pytest.warns(UserWarning, match="how many batches each was trained on"):
        merged = matsmerge.merge(states, method="average")
    assert merged["num_batches_tracked"].item() == 3
    assert merged["running_mean"].tolist() == [4.0] * 4
    assert matsmerge.merge([states[0], dict(states[0])], method="average").notes == ()


def test_buffers_that_only_the_base_has_are_not_used(make_state: Make) -> None:
    models = [make_state(1), make_state(2)]
    for model in models:
        del model["position_ids"]
    with pytest.warns(UserWarning, match="not used: position_ids"):
        merged = matsmerge.merge(models, make_state(0), "task_arithmetic", scale=0.5)
    assert merged.keys() == models[0].keys()


def test_heads_by_pattern(make_state: Make, tmp_path: Path) -> None:
    a, b = with_head(make_state(1), 3), with_head(make_state(2), 3)
    out = matsmerge.merge({"a": a, "b": b}, heads="classifier.*", out=tmp_path / "out").folder
    assert "classifier.weight" not in open_checkpoint(out).specs
    for name, state in (("a", a), ("b", b)):
        head = open_checkpoint(out / "heads" / f"{name}.safetensors")
        assert set(head.specs) == {"classifier.weight", "classifier.bias"}
        assert torch.equal(head["classifier.weight"], state["classifier.weight"])
    with pytest.raises(AlignmentError, match="'clasifier.*' matches no parameter"):
        matsmerge.merge({"a": a, "b": b}, heads="clasifier.*")
    with pytest.raises(AlignmentError, match="no parameters are left"):
        matsmerge.merge({"a": a, "b": b}, heads="*")


@pytest.mark.parametrize("base_head", [None, 7])
def test_heads_found_by_themselves(make_state: Make, base_head: int | None) -> None:
    models = {
        "a": open_checkpoint(with_head(make_state(1), 2)),
        "b": open_checkpoint(with_head(make_state(2), 5)),
    }
    base = make_state(0) if base_head is None else with_head(make_state(0), base_head)
    alignment = align(models, open_checkpoint(base))
    assert [m.heads for m in alignment.models] == [("classifier.weight", "classifier.bias")] * 2
    assert "classifier.weight" not in alignment.names
    assert any("head" in note and "classifier.bias" in note for note in alignment.notes)


def test_a_head_the_base_lacks_is_found_even_when_sizes_agree(make_state: Make) -> None:
    models = [with_head(make_state(i), 2) for i in (1, 2)]
    with pytest.warns(UserWarning, match="head.*classifier.bias, classifier.weight"):
        merged = matsmerge.merge(models, make_state(0), "task_arithmetic")
    assert "classifier.weight" not in merged


@pytest.mark.parametrize(
    "change",
    [
        {"embed.weight": torch.ones(51, 8)},  # a longer vocabulary is not a head
        {"layers.1.w": torch.ones(9, 8)},  # nor is an inner layer
        {"classifier.weight": torch.ones(5, 9)},  # nor one with other inputs
        {"classifier.weight": torch.ones(5, 8), "pooler.weight": torch.ones(5, 8)},
    ],
)
def test_what_is_not_a_head_is_an_error(make_state: Make, change: State) -> None:
    a = make_state(1) | {"classifier.weight": torch.ones(2, 8), "pooler.weight": torch.ones(2, 8)}
    with pytest.raises(AlignmentError, match="of another shape|another vocabulary"):
        matsmerge.merge([a, a | make_state(2) | change])


def test_prefixes(make_state: Make) -> None:
    plain, prefixed = make_state(1), {f"bert.{n}": t for n, t in make_state(2).items()}
    expected = matsmerge.merge([make_state(1), make_state(2)])
    with pytest.warns(UserWarning, match="without the leading 'bert.'"):
        merged = matsmerge.merge([plain, prefixed])
    assert all(torch.equal(merged[n], t) for n, t in expected.items())
    with pytest.warns(UserWarning, match="'bert.' in front"):
        merged = matsmerge.merge([prefixed, plain])
    assert all(torch.equal(merged[f"bert.{n}"], t) for n, t in expected.items())
    models = {"m": open_checkpoint(prefixed)}
    notes = align(models, open_checkpoint(plain)).notes
    assert any("'bert.' in front" in note for note in notes)


def test_tied_in_one_file_and_left_out_of_another(make_state: Make) -> None:
    a, b = make_state(1), make_state(2)
    a["lm_head.weight"] = a["embed.weight"]
    merged = matsmerge.merge([a, b])
    assert merged["lm_head.weight"] is merged["embed.weight"]
    b["lm_head.weight"] = b["embed.weight"]
    assert matsmerge.merge([a, b])["lm_head.weight"].shape == (50, 8)


def test_tied_in_one_model_and_separate_in_another(make_state: Make) -> None:
    a, b = make_state(1), make_state(2)
    a["lm_head.weight"] = a["embed.weight"]
    b["lm_head.weight"] = 2 * b["embed.weight"]
    merged = matsmerge.merge([a, b])
    expected = (a["embed.weight"].double() + b["lm_head.weight"].double()) / 2
    assert torch.equal(merged["lm_head.weight"], expected.float())


def test_the_prefix_that_fits_most(make_state: Make) -> None:
    prefixed = {f"model.decoder.{n}": t for n, t in make_state(2).items()}
    prefixed["other.scalar"] = torch.ones(())
    plain = make_state(1)
    with pytest.warns(UserWarning, match="'model.decoder.' in front"):
        merged = matsmerge.merge([prefixed, plain], heads="other.*")
    assert merged.keys() == {f"model.decoder.{n}" for n in plain}


def test_a_tied_weight_can_be_a_head(make_state: Make, tmp_path: Path) -> None:
    models = {}
    for i in (1, 2):
        models[f"m{i}"] = make_state(i)
        models[f"m{i}"]["lm_head.weight"] = models[f"m{i}"]["embed.weight"]
    out = matsmerge.merge(models, heads="lm_head.*", out=tmp_path / "out").folder
    assert "embed.weight" in open_checkpoint(out).specs
    head = open_checkpoint(out / "heads" / "m1.safetensors")
    assert torch.equal(head["lm_head.weight"], models["m1"]["lm_head.weight"])


def test_notes_and_names_of_many_tensors_are_short() -> None:
    odd = {f"position_ids.{i}": torch.arange(2) for i in range(1000)}
    base = {"w": torch.ones(3), **odd}
    (note,) = align({"a": open_checkpoint({"w": torch.ones(3)})}, open_checkpoint(base)).notes
    assert note.endswith("and 992 more")
    long = {"x." * 50_000 + "w": torch.ones(3)}  # not split at each of its dots
    with pytest.raises(AlignmentError):
        align({"a": open_checkpoint({"w": torch.ones(3)}), "b": open_checkpoint(long)}, None)
