"""Merging layer after layer so that each outputs what every model's own does (cross moments).

A layer's inputs depend on the layers before it alone, so those of the finished model are what it
was merged on: plain forward passes of whole models show whether it solves its system.
"""

import copy
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft_models import adapt, fold, load, make_base
from prefix_families import KINDS, Family, State, family, merge, plain_rows, tensors_of
from tiny_models import make_tokenizer, write_rows
from torch import Tensor

import matsmerge
from matsmerge.data.rows import read_data
from matsmerge.errors import RecipeError
from matsmerge.linalg.calibration import calibrate
from matsmerge.tasks.loaded_model import load_model
from matsmerge.tasks.task import encode_all

F64 = torch.float64
ANCHOR = 0.02


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return family("bert", tmp_path_factory.mktemp("bert"))


class Rows:
    """What layers receive in the merged model, and in each model of its own; plain passes."""

    def __init__(self, members: Family, found: State) -> None:
        self.merged: list[dict[str, Tensor]] = []
        self.own: list[dict[str, Tensor]] = []
        self.states: list[State] = []
        for path, data in zip(members.paths, members.data, strict=True):
            loaded = load_model(path, need_targets=False)
            batches = [loaded.task.collate([e]) for e in encode_all(loaded.task, read_data(data))]
            self.states.append({n: t.detach().double() for n, t in tensors_of(loaded.model)})
            # Modules may call parameters something else than checkpoints do.
            self.found = {
                n: found.get(loaded.names.get(n, n), own) for n, own in self.states[-1].items()
            }
            student = copy.deepcopy(loaded.model)
            with torch.no_grad():
                for name, tensor in tensors_of(student):
                    tensor.copy_(self.found[name])
            self.own.append(plain_rows(loaded.model, batches, [*self.found]))
            self.merged.append(plain_rows(student, batches, [*self.found]))


def with_one(rows: Tensor) -> Tensor:
    return torch.cat([rows, rows.new_ones(len(rows), 1)], 1)


def joined(state: State, weight: str) -> Tensor:
    """A weight as a matrix, with its bias as the last column where it has one."""
    matrix = state[weight].double().flatten(1)
    bias = state.get(f"{weight.removesuffix('weight')}bias")
    return matrix if bias is None else torch.cat([matrix, bias.double()[:, None]], 1)


def gradients(
    rows: Rows, metrics: Sequence[dict[str, Tensor]] | None = None
) -> Iterator[tuple[str, float, float]]:
    """Sizes of the gradient of each layer's objective: at what was found, and at the average."""
    average = {n: torch.stack([s[n] for s in rows.states]).mean(0) for n in rows.states[0]}
    for weight in rows.merged[0]:
        x, start = joined(rows.found, weight), joined(average, weight)
        at = {"found": torch.zeros_like(x), "start": torch.zeros_like(x)}
        mean_eigenvalue = 0.0
        for m, state in enumerate(rows.states):
            w = joined(state, weight)
            z, own = rows.merged[m][weight], rows.own[m][weight]
            if w.shape[1] > z.shape[1]:
                z, own = with_one(z), with_one(own)
            metric = torch.eye(len(w), dtype=F64) if metrics is None else metrics[m][weight]
            gram = z.mT @ z / len(z)
            scale = 1 / float(gram.trace() * (metric.trace() if metrics is not None else 1))
            for name, value in (("found", x), ("start", start)):
                at[name] += scale * metric @ ((value @ z.mT - w @ own.mT) @ z) / len(z)
            mean_eigenvalue += scale * float(gram.trace() * metric.trace()) / w.numel()
        at["found"] += ANCHOR * mean_eigenvalue * (x - start)
        yield weight, float(at["found"].norm()), float(at["start"].norm())


@pytest.mark.parametrize("name", ["bert", "llama", "vit", "resnet"])
def test_each_layer_outputs_what_the_models_output(name: str, tmp_path: Path) -> None:
    members = family(name, tmp_path)
    found = members.merge("featcal", init="average")
    checked = 0
    for weight, at_found, at_start in gradients(Rows(members, found)):
        assert at_found < 1e-5 * at_start, weight
        checked += 1
    assert checked >= 8


def test_layers_that_share_an_input_may_be_merged_in_other_ways(bert: Family) -> None:
    """Queries are taken from one model; what is merged after them is merged on what they give."""
    kept = {"match": "*.query.*", "method": {"name": "passthrough", "model": "m0"}}
    found = bert.merge("featcal", init="average", overrides=[kept])
    checked = 0
    for weight, at_found, at_start in gradients(Rows(bert, found)):
        if "query" not in weight:
            assert at_found < 1e-5 * at_start, weight
            checked += 1
    assert checked == 12


def test_decoders_see_the_merged_encoder(tmp_path: Path) -> None:
    """But for the embeddings, which are the output layer too and needed before all else."""
    members = family("t5", tmp_path)
    found = members.merge("featcal", init="average")
    for weight, at_found, at_start in gradients(Rows(members, found)):
        if "shared" not in weight and "lm_head" not in weight:
            assert at_found < 1e-5 * at_start, weight


@pytest.fixture(scope="module")
def own_statistics(bert: Family) -> list[Any]:
    """K-FAC factors of each model, by the true Fisher: of data without labels."""
    statistics = []
    for path, data in zip(bert.paths, bert.data, strict=True):
        loaded = load_model(path, need_targets=False)
        batches = [loaded.task.collate([e]) for e in encode_all(loaded.task, read_data(data))]
        statistics.append(
            matsmerge.collect(
                loaded.model, batches, "kfac", loss=loaded.task.predict, fisher="true"
            )
        )
    return statistics


def test_outputs_count_as_they_matter_to_each_model(
    bert: Family, own_statistics: list[Any]
) -> None:
    found = bert.merge("mats_cross", init="average", statistics=own_statistics, iterations=200)
    metrics = []
    for own in own_statistics:
        factors = {}
        for m in own.header.maps:
            if m.outputs:
                o = own.output_factor(m.module).double()
                factors[m.weight] = o + 3 * o.diagonal().mean() * torch.eye(len(o), dtype=F64)
        metrics.append(factors)
    for weight, at_found, at_start in gradients(Rows(bert, found), metrics):
        assert at_found < 1e-4 * at_start, weight


@pytest.mark.parametrize("method", ["featcal", "mats_cross"])
def test_one_model_and_equal_models_stay_what_they_are(
    method: str, bert: Family, own_statistics: list[Any], tmp_path: Path
) -> None:
    expected = matsmerge.open_checkpoint(bert.paths[0])
    copies = [shutil.copytree(bert.paths[0], tmp_path / str(i)) for i in range(3)]
    for num in (1, 3):
        given: dict[str, Any] = {"data": [bert.data[0]] * num}
        if method == "mats_cross":  # with all its defaults; it starts from the average
            given["statistics"] = [own_statistics[0]] * num
        else:
            given["init"] = "average"
        found = merge(copies[:num], method=method, **given)
        for name in expected.specs:
            assert torch.allclose(found[name], expected[name], rtol=1e-9, atol=1e-9), name


def test_the_order_of_models_and_the_size_of_batches_do_not_matter(bert: Family) -> None:
    found = bert.merge("featcal", init="average")
    turned = merge(
        bert.paths[::-1],
        method="featcal",
        init="average",
        data=[{"path": path, "batch_size": 2} for path in bert.data[::-1]],
    )
    for name in found:
        assert torch.allclose(found[name], turned[name], rtol=1e-4, atol=1e-5), name


def test_it_is_better_than_what_each_models_weights_make_of_the_inputs(bert: Family) -> None:
    """At what the issue is: outputs of the merged layers, beside those of the models' own."""

    def errors(found: State) -> list[float]:
        rows = Rows(bert, found)
        last = "bert.pooler.dense.weight"
        return [
            float(
                (merged[last] @ joined(rows.found, last)[:, :-1].mT)
                .sub(own[last] @ joined(state, last)[:, :-1].mT)
                .norm()
            )
            for merged, own, state in zip(rows.merged, rows.own, rows.states, strict=True)
        ]

    crossed = errors(bert.merge("featcal", init="average"))
    plain = errors(bert.merge("featcal", init="average", targets="weights"))
    assert sum(crossed) < 0.5 * sum(plain)


def test_targets_must_be_the_same_everywhere(bert: Family) -> None:
    other = [{"match": "*pooler*", "method": "regmean++"}]
    with pytest.raises(RecipeError, match="targets: must be the same of all methods"):
        bert.merge("featcal", init="average", overrides=other)


def test_statistics_are_collected_where_there_are_none(
    bert: Family, own_statistics: list[Any]
) -> None:
    """By the true Fisher, from data that has no labels."""
    given = bert.merge("mats_cross", init="average", statistics=own_statistics)
    found = bert.merge("mats_cross", init="average")
    for name in given:
        # They were in a file meanwhile, in float32.
        assert float((found[name] - given[name]).norm()) < 1e-3 * float(given[name].norm()), name
    notes = getattr(found, "notes", ())
    assert any("collected from the data beforehand: kfac (true Fisher)" in note for note in notes)


def test_other_methods_get_statistics_that_were_collected(bert: Family) -> None:
    norms = [{"match": "*LayerNorm*", "method": "diagonal_fisher"}]
    found = bert.merge("featcal", init="average", overrides=norms)
    states = [matsmerge.open_checkpoint(path) for path in bert.paths]
    name = "bert.encoder.layer.0.output.LayerNorm.weight"
    average = torch.stack([state[name] for state in states]).mean(0)
    assert not torch.allclose(found[name], average, rtol=1e-3)
    low, high = torch.stack([s[name] for s in states]).aminmax(dim=0)
    assert bool(((found[name] >= low - 1e-9) & (found[name] <= high + 1e-9)).all())


@pytest.mark.parametrize("init", ["localize_and_stitch", "svc"])
def test_strong_inits(init: str, bert: Family, own_statistics: list[Any], tmp_path: Path) -> None:
    """Without iterations layers keep what the init makes of them."""
    base = shutil.copytree(bert.paths[0], tmp_path / "base")
    expected = merge(bert.paths, base=base, method=init)
    given: dict[str, Any] = {"base": base, "init": init, "otherwise": "init"}
    found = bert.merge("mats_cross", statistics=own_statistics, iterations=0, **given)
    for name in expected:
        assert torch.allclose(found[name], expected[name], rtol=1e-9, atol=1e-9), name


def test_singular_values_are_calibrated_on_the_way(bert: Family, tmp_path: Path) -> None:
    """Layers that receive no merged layer's outputs show what is done to each."""
    base = shutil.copytree(bert.paths[0], tmp_path / "base")
    given: dict[str, Any] = {"base": base, "init": "average"}
    plain = bert.merge("featcal", **given)
    found = bert.merge("svc", base=base, init={"name": "featcal", "init": "average"}, least=0.4)
    start, *states = (matsmerge.open_checkpoint(path) for path in (base, *bert.paths))
    name = "bert.encoder.layer.0.attention.self.query.weight"
    changes = [state[name].double() - start[name].double() for state in states]
    change = plain[name].double() - start[name].double()
    expected = change + calibrate(change, changes, 0.4)
    assert not torch.allclose(expected, change, rtol=1e-2)
    assert torch.allclose(found[name].double() - start[name].double(), expected, atol=1e-9)
    norm = "bert.encoder.layer.1.output.LayerNorm.weight"
    assert torch.equal(found[norm], plain[norm])


def test_loras_are_merged_as_the_models_they_make(tmp_path: Path) -> None:
    base = make_base("llama", tmp_path / "base")
    make_tokenizer().save_pretrained(base)
    config = LoraConfig(target_modules=["q_proj", "down_proj"], r=2, task_type="CAUSAL_LM")
    adapters, full, data = [], [], []
    for i, rows in enumerate(KINDS["llama"].rows):
        adapters.append(adapt(base, config, tmp_path / f"lora{i}", seed=i))
        model = load(base)
        model.load_state_dict(fold(base, adapters[-1]))
        model.save_pretrained(tmp_path / f"full{i}")
        make_tokenizer().save_pretrained(tmp_path / f"full{i}")
        full.append(tmp_path / f"full{i}")
        data.append(tmp_path / f"d{i}.jsonl")
        write_rows(data[-1], rows)
    found = merge(adapters, method="featcal", init="average", data=data, output="dense")
    expected = merge(full, method="featcal", init="average", data=data)
    for name in expected:
        assert torch.allclose(found[name], expected[name], rtol=1e-3, atol=1e-4), name
