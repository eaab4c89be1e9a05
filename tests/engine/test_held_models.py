"""Models for whose data the init, and not the model itself, says what is right (`from_init`)."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from prefix_families import Family, State, family, merge, plain_rows, tensors_of
from safetensors.torch import load_file
from torch import Tensor, nn

import matsmerge
from matsmerge.data.rows import read_data
from matsmerge.errors import RecipeError
from matsmerge.methods import Mats
from matsmerge.tasks.loaded_model import load_model
from matsmerge.tasks.task import encode_all

F64 = torch.float64
ANCHOR = 0.02


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return family("bert", tmp_path_factory.mktemp("bert"))


def test_covariances_of_held_models_say_where_the_init_stays() -> None:
    """X (G_0 + G_1) = A G_0 + W_1 G_1, A the init."""
    torch.manual_seed(0)
    base = nn.Linear(4, 3, bias=False).double()
    models = {name: nn.Linear(4, 3, bias=False).double() for name in ("poor", "good")}
    batches = [torch.randn(30, 4, dtype=F64) for _ in models]
    statistics = [
        matsmerge.collect(model, [batch], "gram")
        for model, batch in zip(models.values(), batches, strict=True)
    ]
    options: dict[str, Any] = {"solver": "closed_form", "init": "task_arithmetic", "scale": 0.4}
    found = matsmerge.merge(
        models, base, "mats", statistics=statistics, from_init=["poor"], **options
    )
    start = matsmerge.merge(models, base, "task_arithmetic", scale=0.4)["weight"].double()
    first, second = (batch.mT @ batch / len(batch) for batch in batches)
    right = start @ first + models["good"].weight.detach() @ second
    expected = torch.linalg.solve(first + second, right.mT).mT
    torch.testing.assert_close(found["weight"].double(), expected, rtol=1e-6, atol=1e-8)
    usual = matsmerge.merge(models, base, "mats", statistics=statistics, **options)
    assert not torch.allclose(usual["weight"].double(), expected, rtol=1e-2)


def received(path: Path, data: Path, state: State) -> dict[str, Tensor]:
    """What layers receive in a model with some other values, in plain passes."""
    loaded = load_model(path, need_targets=False)
    batches = [loaded.task.collate([e]) for e in encode_all(loaded.task, read_data(data))]
    student = copy.deepcopy(loaded.model)
    with torch.no_grad():
        for name, tensor in tensors_of(student):
            tensor.copy_(state[name])
    return plain_rows(student, batches, [*state])


def joined(state: State, weight: str) -> Tensor:
    bias = state[f"{weight.removesuffix('weight')}bias"]
    return torch.cat([state[weight].double(), bias.double()[:, None]], 1)


def test_layers_output_what_those_of_the_init_do(bert: Family) -> None:
    """For the first model's data z* and W are the init's, for the second's its own."""
    found = {
        name: tensor.double()
        for name, tensor in bert.merge(
            "featcal", init="average", otherwise="init", from_init=["m0"]
        ).items()
    }
    states = [
        {n: t.double() for n, t in load_file(path / "model.safetensors").items()}
        for path in bert.paths
    ]
    init = {name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]}
    teachers = [init, states[1]]
    pairs = list(zip(bert.paths, bert.data, teachers, strict=True))
    merged = [received(path, data, found) for path, data, _ in pairs]
    own = [received(path, data, teacher) for path, data, teacher in pairs]
    assert len(merged[0]) >= 12
    for weight in merged[0]:
        x, start = joined(found, weight), joined(init, weight)
        at = {"found": torch.zeros_like(x), "start": torch.zeros_like(x)}
        for teacher, of_merged, of_own in zip(teachers, merged, own, strict=True):
            ones = torch.ones(len(of_merged[weight]), 1, dtype=F64)
            z, z_own = (torch.cat([rows[weight], ones], 1) for rows in (of_merged, of_own))
            for name, value in (("found", x), ("start", start)):
                error = value @ z.mT - joined(teacher, weight) @ z_own.mT
                at[name] += error @ z / z.square().sum()
        at["found"] += ANCHOR * 2 / z.shape[1] * (x - start)
        assert float(at["found"].norm()) < 1e-5 * float(at["start"].norm()), weight


def test_if_all_models_are_held_the_init_is_what_it_is(bert: Family) -> None:
    expected = bert.merge("average", data=None)
    found = bert.merge("featcal", init="average", otherwise="init", from_init=["m0", "m1"])
    for name, value in expected.items():
        torch.testing.assert_close(found[name].double(), value.double(), rtol=1e-6, atol=1e-8)


def test_order_does_not_matter(bert: Family) -> None:
    options = {"init": "average", "from_init": ["m1"]}
    found = bert.merge("featcal", **options)
    turned = merge(bert.paths[::-1], method="featcal", data=bert.data[::-1], **options)
    for name, value in found.items():
        torch.testing.assert_close(turned[name], value, rtol=1e-9, atol=1e-11)


def test_heads_of_held_models_are_kept(bert: Family, tmp_path: Path) -> None:
    """What they answer is not asked for, so that nothing is matched to it."""
    bert.merge(
        "featcal", init="average", heads=["classifier.*"], match_heads=True, from_init=["m0"],
        out=tmp_path / "merged",
    )  # fmt: skip
    heads = [load_file(tmp_path / "merged" / "heads" / f"m{i}.safetensors") for i in range(2)]
    own = [load_file(path / "model.safetensors") for path in bert.paths]
    assert torch.equal(heads[0]["classifier.weight"], own[0]["classifier.weight"])
    assert not torch.equal(heads[1]["classifier.weight"], own[1]["classifier.weight"])
    written = json.loads((tmp_path / "merged" / "merge.json").read_text())
    assert [note for note in written["notes"] if note.startswith("m0: its head is kept")]


def test_names_that_no_model_has_are_refused(bert: Family) -> None:
    with pytest.raises(RecipeError, match="from_init: there is no model 'm2'; did you mean"):
        bert.merge("featcal", init="average", from_init=["m2"])


def test_names_may_be_given_as_on_the_command_line() -> None:
    assert Mats(from_init="m0, m1").held_models == {"m0", "m1"}
