"""LoRAs in the space they share, against singular value decompositions of their dense changes."""

import json
import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from matsmerge.adapters.adapter import Adapter
from matsmerge.adapters.adapter_folder import read_adapter
from matsmerge.adapters.joint_space import CoreSpace, JointCheckpoint, JointSpace
from matsmerge.adapters.lora import rank_of
from matsmerge.checkpoints.filled_checkpoint import FilledCheckpoint
from matsmerge.checkpoints.source import open_checkpoint
from matsmerge.errors import AlignmentError

F64 = torch.float64
# (out, in) of a linear layer, (out, in, height, width) of a convolution, as PEFT factors them.
SHAPES = {"lin": (9, 7), "narrow": (4, 12), "conv": (6, 3, 2, 2), "embed": (8, 20)}


def save_lora(
    folder: Path, ranks: Mapping[str, int], seed: int, alpha: float = 3.0, **shapes: Any
) -> Adapter:
    """A LoRA with random values for some of the modules."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for module, r in ranks.items():
        out, *inputs = (SHAPES | shapes)[module]
        a = torch.randn(r, *inputs, generator=generator)
        b = torch.randn(out, r, *(1 for _ in inputs[1:]), generator=generator)
        for part, values in (("A", a), ("B", b)):
            name = f"lora_embedding_{part}" if module == "embed" else f"lora_{part}.weight"
            state[f"base_model.model.{module}.{name}"] = values
    folder.mkdir()
    save_file(state, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": alpha,
        "rank_pattern": dict(ranks),
        "use_rslora": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    adapter = read_adapter(open_checkpoint(folder))
    assert adapter is not None
    return adapter


def change(adapter: Adapter, module: str) -> Tensor:
    """s B A, from the file's tensors."""
    stem = f"base_model.model.{module}.lora_"
    parts = ["embedding_A", "embedding_B"] if module == "embed" else ["A.weight", "B.weight"]
    a, b = (adapter.checkpoint[stem + part].double().flatten(1) for part in parts)
    scaling: float = adapter.config.content["lora_alpha"] / math.sqrt(len(a))
    return scaling * (b @ a)


@pytest.fixture
def adapters(tmp_path: Path) -> list[Adapter]:
    return [
        save_lora(tmp_path / "one", {"lin": 2, "narrow": 3, "conv": 1, "embed": 2}, 1),
        save_lora(tmp_path / "two", {"lin": 3, "narrow": 3, "conv": 2}, 2, alpha=0.7),
        save_lora(tmp_path / "three", {"narrow": 1, "embed": 3}, 3, alpha=5.0),
    ]


def test_coordinates_in_left_singular_vectors(adapters: list[Adapter]) -> None:
    space = JointSpace(adapters)
    assert set(space.modules) == set(SHAPES)
    for module, shape in SHAPES.items():
        having = [a for a in adapters if module in a.modules]
        num = min(sum(rank_of(a.config, module) for a in having), shape[0])
        num_inputs = torch.Size(shape[1:]).numel()
        assert space.num_outputs(module) == num
        assert space.spec(module).shape == (num, num_inputs)
        assert space.layer(module, 2, torch.float32).is_embedding == (module == "embed")
        u, s, vh = torch.linalg.svd(torch.cat([change(a, module) for a in having], 1))
        basis = space.basis(module)
        signs = (basis * u[:, :num]).sum(0).sign()
        torch.testing.assert_close(basis * signs, u[:, :num])
        expected = iter(((s[:num, None] * vh[:num]) * signs[:, None]).split(num_inputs, 1))
        for i, adapter in enumerate(adapters):
            found = space.coordinates(module, i)
            if module not in adapter.modules:
                assert found is None
                assert space.factors(module)[i] is None
                continue
            assert found is not None
            torch.testing.assert_close(found, next(expected))
            torch.testing.assert_close(basis @ found, change(adapter, module))
            factors = space.factors(module)[i]
            assert factors is not None
            torch.testing.assert_close(factors[0] @ factors[1], change(adapter, module))


def test_an_adapter_that_is_there_twice(tmp_path: Path) -> None:
    """Where changes depend on each other, what is left of the space has no coordinates."""
    pair = [save_lora(tmp_path / name, {"lin": 2}, 1) for name in ("one", "two")]
    space = JointSpace(pair)
    basis = space.basis("lin")
    torch.testing.assert_close(basis.mT @ basis, torch.eye(4, dtype=F64))
    for i in range(2):
        found = space.coordinates("lin", i)
        assert found is not None
        torch.testing.assert_close(found[2:], torch.zeros(2, 7, dtype=F64))
        torch.testing.assert_close(basis @ found, change(pair[i], "lin"))


def test_coordinates_in_the_core_space(adapters: list[Adapter]) -> None:
    """Against singular vectors of the factors side by side; nothing of a change is lost."""
    space = CoreSpace(adapters)
    for module, shape in SHAPES.items():
        factors = [f for f in space.factors(module) if f is not None]
        num_ranks, num_inputs = sum(len(a) for _, a in factors), torch.Size(shape[1:]).numel()
        size = min(num_ranks, shape[0]), min(num_ranks, num_inputs)
        assert space.spec(module).shape == size
        u = torch.linalg.svd(torch.cat([b for b, _ in factors], 1)).U[:, : size[0]]
        v = torch.linalg.svd(torch.cat([a for _, a in factors])).Vh[: size[1]]
        basis = space.basis(module)
        inputs = space.on_inputs(module, torch.eye(size[1], dtype=F64))
        torch.testing.assert_close(basis * (basis * u).sum(0).sign(), u)
        torch.testing.assert_close(inputs * (inputs * v).sum(1, keepdim=True).sign(), v)
        for i, adapter in enumerate(adapters):
            found = space.coordinates(module, i)
            if module not in adapter.modules:
                assert found is None
                continue
            assert found is not None
            exact = change(adapter, module)
            assert found.shape == size
            torch.testing.assert_close(found, basis.mT @ exact @ inputs.mT)
            torch.testing.assert_close(basis @ space.on_inputs(module, found), exact)


def test_checkpoints_of_coordinates(adapters: list[Adapter]) -> None:
    """They read as any other; where a LoRA leaves a module alone they are zero."""
    space = JointSpace(adapters)
    others = FilledCheckpoint("", {"lin.bias": space.spec("lin")}, {}, 0.5)
    models = [JointCheckpoint(space, i, others) for i in range(3)]
    assert {*models[0].specs} == {*(f"{m}.weight" for m in SHAPES), "lin.bias"}
    assert models[1].origin is adapters[1].checkpoint
    assert torch.equal(models[2]["lin.weight"], torch.zeros(5, 7, dtype=F64))
    assert torch.equal(models[2]["lin.bias"], torch.full((5, 7), 0.5, dtype=F64))

    @given(st.data())
    def check(data: st.DataObject) -> None:
        number = data.draw(st.integers(0, 1))
        module = data.draw(st.sampled_from(["lin", "narrow", "conv"]))
        whole = space.coordinates(module, number)
        assert whole is not None
        start = data.draw(st.integers(0, whole.numel() - 1))
        stop = data.draw(st.integers(start + 1, whole.numel()))
        found = models[number].read(f"{module}.weight", start, stop)
        assert torch.equal(found, whole.flatten()[start:stop])

    check()


@pytest.mark.parametrize("kind", [JointSpace, CoreSpace])
def test_copies_in_other_processes(kind: type[JointSpace], adapters: list[Adapter]) -> None:
    space = kind(adapters)
    expected = space.basis("lin")
    copied = pickle.loads(pickle.dumps(space))
    assert torch.equal(copied.basis("lin"), expected)
    assert torch.equal(copied.basis("conv"), space.basis("conv"))


def test_layers_of_different_shapes(tmp_path: Path) -> None:
    first = save_lora(tmp_path / "one", {"lin": 2, "narrow": 2}, 1)
    second = save_lora(tmp_path / "two", {"lin": 2, "narrow": 2}, 2, lin=(9, 8), narrow=(5, 12))
    with pytest.raises(AlignmentError) as caught:
        JointSpace([first, second])
    lin, narrow = caught.value.problems
    assert f"{tmp_path / 'two'}: 'lin' is of the shape [9, 8], {tmp_path / 'one'} has [9, 7]" in lin
    assert "'narrow' is of the shape [5, 12]" in narrow
