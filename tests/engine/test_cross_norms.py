"""Norms merged along the merged model: scale and shift of each feature match every model's own."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from prefix_families import Family, State, family, merge, tensors_of
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

import matsmerge
from matsmerge.data.rows import read_data
from matsmerge.statistics.linear_maps import find_norm
from matsmerge.tasks.loaded_model import load_model
from matsmerge.tasks.task import encode_all

F64 = torch.float64
ANCHOR = 0.02


def normalise(module: nn.Module, x: Tensor) -> Tensor:
    """What a norm scales, written out."""
    if isinstance(module, nn.LayerNorm):
        x, eps = x - x.mean(-1, keepdim=True), module.eps
    else:
        eps = float(module.variance_epsilon)  # type: ignore[arg-type]
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def norm_rows(model: Any, batches: list[Any]) -> dict[str, Tensor]:
    """What every norm scales, of real rows, by the name of its weight."""
    rows: dict[str, list[Tensor]] = {}
    masks: list[Tensor] = []
    hooks = []
    for name, module in model.named_modules():
        if type(module).__name__.endswith("Norm"):

            def keep(module: nn.Module, args: Any, name: str = name) -> None:
                n = normalise(module, args[0].detach().double())
                real = [mask for mask in masks if mask.shape == n.shape[:-1]]
                own = n[real[0]] if real else n.flatten(0, -2)
                rows.setdefault(f"{name}.weight", []).append(own)

            hooks.append(module.register_forward_pre_hook(keep))
    with torch.no_grad():
        for batch in batches:
            masks[:] = batch.row_masks
            model(**batch.inputs)
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(own) for name, own in rows.items()}


def residuals(members: Family, found: State) -> dict[str, tuple[float, float]]:
    """By norm: the size of the objective's gradient, at what was found and at the average."""
    states: list[State] = []
    merged: list[dict[str, Tensor]] = []
    own: list[dict[str, Tensor]] = []
    for path, data in zip(members.paths, members.data, strict=True):
        loaded = load_model(path, need_targets=False)
        batches = [loaded.task.collate([e]) for e in encode_all(loaded.task, read_data(data))]
        states.append({n: t.detach().double() for n, t in tensors_of(loaded.model)})
        student = copy.deepcopy(loaded.model)
        with torch.no_grad():
            for name, tensor in tensors_of(student):
                stored = loaded.names.get(name, name)
                tensor.copy_(found.get(stored, tensor))
        merged.append(norm_rows(student, batches))
        own.append(norm_rows(loaded.model, batches))
        values = {n: t.detach().double() for n, t in tensors_of(student)}
    result = {}
    for weight in merged[0]:
        bias = f"{weight.removesuffix('weight')}bias"
        parts = [weight, bias] if bias in values else [weight]
        x = torch.stack([values[n] for n in parts], -1)  # (features, 1 or 2)
        start = torch.stack([torch.stack([s[n] for s in states]).mean(0) for n in parts], -1)
        at = {"found": torch.zeros_like(x), "start": torch.zeros_like(x)}
        mean_eigenvalue = 0.0
        for state, of_merged, of_own in zip(states, merged, own, strict=True):
            z, z_own = of_merged[weight][..., None], of_own[weight][..., None]
            if len(parts) == 2:  # a constant input for the shift
                z, z_own = (torch.cat([r, torch.ones_like(r)], -1) for r in (z, z_own))
            target = (torch.stack([state[n] for n in parts], -1) * z_own).sum(-1)
            scale = float(len(z) / z.square().sum())  # all models count the same
            mean_eigenvalue += 1 / x.numel()
            for name, value in (("found", x), ("start", start)):
                error = (value * z).sum(-1) - target
                at[name] += scale * (error[..., None] * z).mean(0)
        at["found"] += ANCHOR * mean_eigenvalue * (x - start)
        result[weight] = float(at["found"].norm()), float(at["start"].norm())
    return result


@pytest.mark.parametrize(
    ("name", "num_norms"),
    [("bert", 5), ("llama", 5), pytest.param("t5", 12, marks=pytest.mark.long)],
)
def test_each_norm_outputs_what_the_models_output(
    name: str, num_norms: int, tmp_path: Path
) -> None:
    members = family(name, tmp_path)
    found = residuals(members, members.merge("featcal", init="average", norms=True))
    assert len(found) == num_norms
    for weight, (at_found, at_start) in found.items():
        assert at_found < 1e-6 * at_start, weight


def test_norms_beside_kfac(tmp_path: Path) -> None:
    """The same, with a solver that iterates; features count alike."""
    members = family("bert", tmp_path)
    found = members.merge("mats_cross", init="average", norms=True, iterations=60)
    for weight, (at_found, at_start) in residuals(members, found).items():
        assert at_found < 1e-4 * at_start, weight


def test_one_model_stays_what_it_is(tmp_path: Path) -> None:
    members = family("llama", tmp_path)
    expected = matsmerge.open_checkpoint(members.paths[0])
    found = members.merge("featcal", init="average", norms=True)
    assert not torch.allclose(found["model.norm.weight"], expected["model.norm.weight"])
    alone = merge(
        members.paths[:1], method="featcal", init="average", norms=True, data=members.data[:1]
    )
    for name in expected.specs:
        assert torch.allclose(alone[name], expected[name], rtol=1e-9, atol=1e-9), name


@pytest.mark.parametrize(
    ("module", "is_scale"),
    [
        (nn.LayerNorm(6), True),
        (nn.LayerNorm(6, bias=False), True),
        (LlamaRMSNorm(6), True),
        (T5LayerNorm(6), True),
        (nn.RMSNorm(6), True),
        (GemmaRMSNorm(6), False),  # scales by one more than its weight
        (nn.LayerNorm((2, 6)), False),
        (nn.LayerNorm(6, elementwise_affine=False), False),
        (nn.GroupNorm(2, 6), False),
        (nn.BatchNorm1d(6), False),
        (nn.Linear(6, 6), False),
    ],
)
def test_which_modules_are_norms(module: nn.Module, is_scale: bool) -> None:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    m = find_norm("norm", module.double())
    assert (m is not None) == is_scale
    if m is not None:
        x = torch.randn(5, 6, dtype=F64)
        bias = getattr(module, "bias", None)
        expected = m.weight * m.unscaled(x) + (0 if bias is None else bias)
        torch.testing.assert_close(module(x), expected)


def test_norms_need_outputs_to_match(tmp_path: Path) -> None:
    members = family("bert", tmp_path, torch.float32, num_layers=1)
    with pytest.raises(matsmerge.RecipeError, match="norms: are merged where outputs are matched"):
        members.merge("regmean++", norms=True)
