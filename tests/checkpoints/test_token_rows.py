"""Embeddings in another order, against the same made at once in float64."""

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from matsmerge.checkpoints import token_rows
from matsmerge.checkpoints.checkpoint import Buffer, Checkpoint, TensorSpec
from matsmerge.checkpoints.fused_experts import SeparatedExperts, separate_experts
from matsmerge.checkpoints.in_memory import InMemoryCheckpoint
from matsmerge.checkpoints.token_rows import TokenRows, num_embedded, resized
from matsmerge.errors import AlignmentError

EMBED, HEAD, BIAS = "model.embed_tokens.weight", "lm_head.weight", "lm_head.bias"
SIZES = {"a": 6, "b": 8, "base": 5}


def make_state(model: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(SIZES[model])
    size = SIZES[model]
    shapes = {EMBED: (size, 3), HEAD: (size, 3), BIAS: (size,), "final_logits_bias": (1, size)}
    shapes |= {"layers.0.weight": (3, size), "embed_positions.weight": (size, 3)}
    return {n: torch.randn(s, generator=generator).to(dtype) for n, s in shapes.items()}


def view(rows: TokenRows, states: dict[str, dict[str, Tensor]]) -> dict[str, Checkpoint]:
    everyone: dict[str, Checkpoint] = {
        name: InMemoryCheckpoint(name, state) for name, state in states.items()
    }
    tables = {n: {**{t: t for t in c.specs}, **c.aliases} for n, c in everyone.items()}
    return rows.view(everyone, tables)


def dense(rows: TokenRows, states: dict[str, dict[str, Tensor]], model: str, name: str) -> Tensor:
    """Row by row, as the definition says."""
    tables = {m: states[m][name].double().view(SIZES[m], -1) for m in rows.names}
    made = []
    for row in range(rows.num_rows):
        own = int(rows.own[rows.names.index(model), row])
        places = {m: int(rows.given[i, row]) for i, m in enumerate(rows.names)}
        given = [tables[m][at] for m, at in places.items() if at >= 0]
        zero = torch.zeros_like(tables[model][0])
        lacked = torch.stack(given).mean(0) if given else zero
        made.append(tables[model][own] if own >= 0 else lacked)
    used = torch.stack([r for r, pad in zip(made, rows.is_padding, strict=True) if not pad])
    made = [used.mean(0) if pad else r for r, pad in zip(made, rows.is_padding, strict=True)]
    return torch.stack(made).flatten()


@st.composite
def any_rows(draw: st.DrawFn) -> TokenRows:
    names = tuple(SIZES)
    num = draw(st.integers(1, 12))
    some = [[draw(st.integers(-1, SIZES[n] - 1)) for _ in range(num)] for n in names * 2]
    padding = [draw(st.booleans()) for _ in range(num - 1)]
    is_padding = torch.tensor([False, *padding])
    own, given_rows = torch.tensor(some[:3]), torch.tensor(some[3:])
    own[:, is_padding] = given_rows[:, is_padding] = -1
    return TokenRows(names, tuple(SIZES.values()), own, given_rows, is_padding)


@pytest.mark.parametrize("block", [4, 1 << 20])
@settings(max_examples=20)
@given(rows=any_rows(), data=st.data())
def test_any_stretch_of_any_table(block: int, rows: TokenRows, data: st.DataObject) -> None:
    states = {model: make_state(model) for model in SIZES}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_rows, "_BLOCK_ELEMENTS", block)
        for model, checkpoint in view(rows, states).items():
            for name in (EMBED, HEAD, BIAS, "final_logits_bias"):
                expected = dense(rows, states, model, name)
                num = checkpoint.specs[name].num_elements
                assert num == len(expected)
                start = data.draw(st.integers(0, num - 1))
                stop = data.draw(st.integers(start, num))
                found = checkpoint.read(name, start, stop).double()
                torch.testing.assert_close(found, expected[start:stop], rtol=1e-6, atol=1e-6)
                checkpoint.prefetch(name, start, stop)


def union_rows() -> TokenRows:
    """The base has 5 tokens, a one more, b three more of which a has the first."""
    own = torch.tensor([[*range(6), -1, -1], [*range(8)], [*range(5), -1, -1, -1]])
    given_rows = own.clone()
    given_rows[:2, :5] = -1
    padding = torch.zeros(8, dtype=torch.bool)
    return TokenRows(("a", "b", "base"), (6, 8, 5), own, given_rows, padding)


def test_what_has_no_rows_for_tokens_is_as_it_was() -> None:
    states = {model: make_state(model) for model in SIZES}
    for model, checkpoint in view(union_rows(), states).items():
        for name in ("layers.0.weight", "embed_positions.weight"):
            assert torch.equal(checkpoint[name], states[model][name])
        assert checkpoint.specs["final_logits_bias"].shape == (1, 8)
        assert checkpoint.origin.label == model
        copy = pickle.loads(pickle.dumps(checkpoint))
        assert torch.equal(copy[EMBED], checkpoint[EMBED])


def test_means_have_more_digits_than_stored_and_single_rows_are_exact() -> None:
    states = {model: make_state(model, torch.bfloat16) for model in SIZES}
    views = view(union_rows(), states)
    # Token 5 is a's and b's, and the base sees their mean.
    assert views["base"].read_dtype(EMBED) == torch.float32
    assert views["a"].read_dtype(EMBED) == torch.bfloat16
    buffer = Buffer(3, torch.float32)
    views["base"].read_into(buffer, EMBED, 15)
    mean = (states["a"][EMBED][5].float() + states["b"][EMBED][5].float()) / 2
    assert torch.equal(buffer.tensor, mean)
    assert torch.equal(views["a"][EMBED][6:], states["b"][EMBED][6:])


def test_rows_given_by_a_model_of_more_digits_keep_them() -> None:
    kinds = {"a": torch.bfloat16, "b": torch.float32, "base": torch.bfloat16}
    states = {model: make_state(model, dtype) for model, dtype in kinds.items()}
    seen = view(union_rows(), states)["a"]
    assert seen.specs[EMBED].dtype == torch.bfloat16
    buffer = Buffer(3, seen.read_dtype(EMBED))
    seen.read_into(buffer, EMBED, 18)
    assert torch.equal(buffer.tensor, states["b"][EMBED][6])


def test_a_tensor_that_the_giver_lacks_is_refused() -> None:
    states = {model: make_state(model) for model in SIZES}
    del states["b"][HEAD]
    with pytest.raises(AlignmentError, match="lacks rows of 'lm_head.weight' that b should give"):
        view(union_rows(), states)


def test_a_tie_that_others_do_not_have_is_refused() -> None:
    states = {model: make_state(model) for model in SIZES}
    states["a"][HEAD] = states["a"][EMBED]
    with pytest.raises(AlignmentError, match="a: '.*' is tied to another tensor"):
        view(union_rows(), states)
    for state in states.values():
        state[HEAD] = state[EMBED]
    assert view(union_rows(), states)["a"].aliases == {HEAD: EMBED}


def test_fused_experts_stay_fused() -> None:
    fused = {"l.experts.gate_up_proj": torch.randn(2, 8, 3), "l.experts.down_proj": torch.randn(2, 3, 4)}  # fmt: skip
    states = {model: make_state(model) | fused for model in SIZES}
    everyone = {
        name: separate_experts(InMemoryCheckpoint(name, state)) for name, state in states.items()
    }
    tables = {name: {t: t for t in one.specs} for name, one in everyone.items()}
    found = union_rows().view(everyone, tables)["a"]
    assert isinstance(found, SeparatedExperts)
    assert found.specs[EMBED].shape == (8, 3)
    assert torch.equal(found["l.experts.1.down_proj.weight"], fused["l.experts.down_proj"][1])


def test_what_is_by_token() -> None:
    states = {model: make_state(model) for model in SIZES}
    assert num_embedded(InMemoryCheckpoint("a", states["a"])) == 6
    assert num_embedded(InMemoryCheckpoint("", {"layers.0.weight": torch.zeros(3, 3)})) is None
    assert resized("lm_head.dense.weight", TensorSpec(torch.float32, (3, 3)), 6, 8) is None
    assert resized("lm_head.weight", TensorSpec(torch.float32, (6, 3)), 6, 8) == (8, 3)
    same = torch.arange(5).expand(2, 5)
    nothing = torch.zeros(5, dtype=torch.bool)
    assert TokenRows(("a", "b"), (5, 5), same, same, nothing).changes_nothing
    assert not TokenRows(("a", "b"), (5, 6), same, same, nothing).changes_nothing
