"""Merging block after block on what the merged blocks before make of the data (RegMean++)."""

import copy
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from prefix_families import (
    KINDS,
    TEXTS,
    Family,
    State,
    family,
    merge,
    plain_grams,
    tensors_of,
)
from tiny_models import (
    bert_config,
    llama_config,
    make_tokenizer,
    save,
    write_rows,
)
from torch import Tensor
from transformers import (
    BertForSequenceClassification,
    BertModel,
    LlamaForCausalLM,
)
from transformers.models.bert.modeling_bert import BertLayer

import matsmerge
from matsmerge.data.rows import read_data
from matsmerge.engine.local_executor import LocalExecutor
from matsmerge.engine.merge_run import RunOptions, merge_to_folder
from matsmerge.engine.prepared_merge import prepare_merge
from matsmerge.files.whole_outputs import staging_path
from matsmerge.progress import BYTES, Progress
from matsmerge.recipes.recipe import make_recipe
from matsmerge.tasks.loaded_model import load_model
from matsmerge.tasks.task import encode_all

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return family("bert", tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def merged(bert: Family) -> State:
    return bert.merge()


# --- RegMean++ as it is written down, with plain forward passes of whole models ---


def plain_regmean_plus_plus(members: Family, heads: str = "") -> State:
    """The merged parameters, by their names in the module."""
    loaded = [load_model(path, need_targets=False) for path in members.paths]
    states = [{n: t.detach().clone() for n, t in tensors_of(one.model)} for one in loaded]
    examples = [
        encode_all(one.task, read_data(path))
        for one, path in zip(loaded, members.data, strict=True)
    ]
    merged = {n: (states[0][n] + states[1][n]) / 2 for n in states[0]}
    # Embeddings that are the output layer as well are needed before all else: by their own inputs.
    tied = [
        n for n in merged if not n.startswith(tuple(b for s in members.kind.sections for b in s))
    ]
    for beginnings in [None, *members.kind.sections]:
        own = (
            list(merged) if beginnings is None else [n for n in merged if n.startswith(beginnings)]
        )
        grams: list[dict[str, Tensor]] = []
        for one, state, shown in zip(loaded, states, examples, strict=True):
            hybrid = copy.deepcopy(one.model)
            values = merged | {n: state[n] for n in state if fnmatchcase(n, heads) or n in own}
            with torch.no_grad():
                for n, t in tensors_of(hybrid):
                    t.copy_(values[n])
            batches = [one.task.collate([example]) for example in shown]
            grams.append(plain_grams(hybrid, batches, tied if beginnings is None else own))
        for name in grams[0]:
            if not fnmatchcase(name, heads):
                merged[name] = regmean([s[name] for s in states], [g[name] for g in grams])
    return merged


def regmean(
    weights: Sequence[Tensor], grams: Sequence[Tensor], off_diagonal: float = 0.9
) -> Tensor:
    """(sum W G) (sum G)^-1; the average where there is no data."""
    w = torch.stack([weight.flatten(1) for weight in weights])  # (models, out, in)
    g = torch.stack(list(grams))  # (models, in, in)
    g = off_diagonal * g + (1 - off_diagonal) * torch.diag_embed(g.diagonal(dim1=1, dim2=2))
    a, b, start = g.sum(0), (w @ g).sum(0), w.mean(0)
    inverse: Tensor = torch.linalg.pinv(a, rtol=1e-10, hermitian=True)
    return (start + (b - start @ a) @ inverse).view_as(weights[0])


def assert_equals_plain(found: State, expected: State, members: Family, but: str = "") -> None:
    loaded = load_model(members.paths[0])
    stored = {n: s for n, s in loaded.names.items() if not fnmatchcase(n, but)}
    stored |= {n: n for n, _ in loaded.model.named_buffers() if n in found and "running" in n}
    assert {s for s in found if found[s].is_floating_point()} == set(stored.values()) | (
        {"lm_head.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"}
        & set(found)
    )
    for name, own in stored.items():
        torch.testing.assert_close(found[own].double(), expected[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "name", ["t5", "llama", "vit", pytest.param("resnet", marks=pytest.mark.long)]
)
def test_it_is_regmean_plus_plus(name: str, tmp_path: Path) -> None:
    members = family(name, tmp_path)
    assert_equals_plain(members.merge(), plain_regmean_plus_plus(members), members)


def test_it_is_regmean_plus_plus_of_an_encoder(bert: Family, merged: State) -> None:
    assert_equals_plain(merged, plain_regmean_plus_plus(bert), bert)


def test_what_is_kept_for_each_task_is_its_own_on_the_way(tmp_path: Path) -> None:
    """Norms that are not merged: every task's data goes through its own."""
    members = family("bert", tmp_path, num_layers=1)
    heads = "bert.embeddings.LayerNorm.*"
    expected = plain_regmean_plus_plus(members, heads)
    assert_equals_plain(members.merge(heads=heads), expected, members, but=heads)


def test_merged_inputs_matter(bert: Family, merged: State) -> None:
    own = bert.merge("regmean", statistics=own_statistics(bert), data=None)
    for layer in ("layer.0.attention.self.query", "layer.1.output.dense"):
        name = f"bert.encoder.{layer}.weight"
        # The embeddings differ between these models, so even the first inputs do.
        assert float((own[name] - merged[name]).norm()) > 1e-3 * float(own[name].norm())


def own_statistics(members: Family, kinds: str = "gram") -> list[Path]:
    """What `mats collect` would write."""
    found = []
    for i, path in enumerate(members.paths):
        loaded = load_model(path)
        rows = [row | {"label": n % 3} for n, row in enumerate(members.kind.rows[i])]
        data = write_rows(members.folder / f"labelled{i}.jsonl", rows)
        batches = [loaded.task.collate([e]) for e in encode_all(loaded.task, data)]
        found.append(members.folder / f"statistics{i}.safetensors")
        matsmerge.collect(
            loaded.model, batches, kinds, loss=loaded.task.predict, checkpoint=path,
            out=found[-1], overwrite=True, dtype="float64",
        )  # fmt: skip
    return found


def test_one_block_on_equal_embeddings_is_regmean(tmp_path: Path) -> None:
    members = family("bert", tmp_path, num_layers=1)
    one, other = (BertForSequenceClassification.from_pretrained(path) for path in members.paths)
    other.bert.embeddings.load_state_dict(one.bert.embeddings.state_dict())
    other.save_pretrained(members.paths[1])
    along = members.merge()
    own = members.merge("regmean", statistics=own_statistics(members), data=None)
    in_block = [n for n in own if ".layer.0." in n]
    assert len(in_block) == 16
    for name in in_block:
        torch.testing.assert_close(along[name], own[name], rtol=1e-6, atol=1e-9)
    pooler = "bert.pooler.dense.weight"
    assert float((along[pooler] - own[pooler]).norm()) > 1e-3 * float(own[pooler].norm())


def test_one_model_and_equal_models_stay_what_they_are(bert: Family, tmp_path: Path) -> None:
    expected = dict(load_model(bert.paths[0]).model.state_dict())
    twin = shutil.copytree(bert.paths[0], tmp_path / "twin")
    for paths in ([bert.paths[0]], [bert.paths[0], twin]):
        found = merge(paths, method="regmean++", data=bert.data[: len(paths)])
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            torch.testing.assert_close(found[name], values, rtol=1e-9, atol=1e-12)


def test_order_and_batches_do_not_matter(bert: Family, merged: State) -> None:
    data = [{"path": path, "batch_size": 1} for path in bert.data]
    other = merge(bert.paths[::-1], method="regmean++", data=data[::-1])
    for name, values in merged.items():
        torch.testing.assert_close(other[name], values, rtol=1e-8, atol=1e-11)


def test_blocks_run_as_often_in_deep_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block as often as any other, however many there are: no forward pass per layer."""
    counts: Counter[int] = Counter()
    forward = BertLayer.forward

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        counts[self.attention.self.layer_idx] += 1
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(BertLayer, "forward", counted)
    found: list[int] = []
    for num_layers in (1, 3):
        members = family("bert", tmp_path / str(num_layers), torch.float32, num_layers)
        counts.clear()
        members.merge(data=[{"path": path, "batch_size": 2} for path in members.data])
        assert len(counts) == num_layers
        found += counts.values()
    assert len(set(found)) == 1


@dataclass(frozen=True)
class Small:
    """A family with one block, a base and statistics of their own."""

    members: Family
    base: Path
    statistics: list[Path]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    folder = tmp_path_factory.mktemp("small")
    members = family("bert", folder, torch.float32, num_layers=1)
    torch.manual_seed(0)
    base = save(KINDS["bert"].make(1), folder / "base", seed=9)
    return Small(members, base, own_statistics(members, "kfac,fisher"))


STAGES = [{"objective": "gram"}, {"objective": "kfac"}]
COMBINATIONS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("mats", {"scale": 0.5, "iterations": 5}, ["gram"]),
    ("mats", {"init": "ties", "density": 0.5}, ["gram"]),
    ("regmean++", {"bias": True, "embeddings": True}, ["gram"]),
    ("mats_kfac", {"init": "average"}, ["kfac"]),
    ("mats", {"init": "average", "objective": "kfac", "solver": "closed_form"}, ["kfac"]),
    ("mats", {"stages": STAGES}, ["gram", "kfac"]),
    ("mats_kfac", {"init": "regmean++"}, ["gram", "kfac"]),
    ("regmean++", {"overrides": [{"match": "*LayerNorm*", "method": "diagonal_fisher"}]}, ["gram"]),
]


@pytest.mark.parametrize(("method", "options", "objectives"), COMBINATIONS)
def test_every_init_objective_and_solver(
    method: str, options: dict[str, Any], objectives: list[str], small: Small, tmp_path: Path
) -> None:
    needs_own = "kfac" in objectives or "overrides" in options
    out = tmp_path / "out"
    small.members.merge(
        method, base=small.base, inputs="merged", out=out,
        statistics=small.statistics if needs_own else None, **options,
    )  # fmt: skip
    parameters = json.loads((out / "merge.json").read_text())["parameters"]
    solved = {name: p["solved"] for name, p in parameters.items() if "solved" in p}
    layers = [name for name in solved if "LayerNorm" not in name and "embed" not in name]
    assert len(layers) == 8
    for name in layers:
        assert [one["objective"] for one in solved[name]] == objectives
        nothing = (
            1e-5 * solved[name][0]["objective_of_start"]
        )  # what few rows leave, but for rounding
        starts = [(one["objective_of_start"], one["objective_value"]) for one in solved[name]]
        assert all(value < start or start < nothing for start, value in starts)
    assert ("bert.embeddings.word_embeddings.weight" in solved) == ("embeddings" in options)
    assert ("bert.embeddings.LayerNorm.weight" in solved) == ("overrides" in options)


def test_kfac_has_input_factors_of_the_prefix(small: Small) -> None:
    """Its solution solves the system of the models' own output factors and the prefix's inputs."""
    weight = "bert.encoder.layer.0.output.dense.weight"
    options = {"objective": "kfac", "solver": "closed_form", "init": "average"}
    found = small.members.merge(
        "mats", inputs="merged", targets="weights", statistics=small.statistics, **options
    )
    states = [dict(load_model(path).model.named_parameters()) for path in small.members.paths]
    start = ((states[0][weight] + states[1][weight]) / 2).detach().double()

    def residual(*, own_embeddings: bool) -> float:
        of_found, of_start = torch.zeros_like(start), torch.zeros_like(start)
        for i, path in enumerate(small.members.paths):
            loaded = load_model(path, dtype="float64", need_targets=False)
            with torch.no_grad():
                for n, p in loaded.model.named_parameters():
                    if n.startswith("bert.embeddings.") and not own_embeddings:
                        p.copy_((states[0][n].double() + states[1][n].double()) / 2)
            shown = encode_all(loaded.task, read_data(small.members.data[i]))
            batches = [loaded.task.collate([example]) for example in shown]
            g = plain_grams(loaded.model, batches, [weight])[weight]
            own = matsmerge.open_statistics(small.statistics[i])
            o = own.output_factor(weight.removesuffix(".weight")).double()
            w = states[i][weight].detach().double()
            of_found += o @ (found[weight].double() - w) @ g
            of_start += o @ (start - w) @ g
        return float(of_found.norm() / of_start.norm())

    assert residual(own_embeddings=False) < 1e-3
    assert residual(own_embeddings=True) > 1e-2


def test_stopping_by_held_out_data(small: Small, tmp_path: Path) -> None:
    out = tmp_path / "out"
    data = [{"path": path, "held_out": 0.4} for path in small.members.data]
    small.members.merge(
        "mats", base=small.base, inputs="merged", stop="held_out", data=data, out=out
    )
    manifest = json.loads((out / "merge.json").read_text())
    for parameter in manifest["parameters"].values():
        for one in parameter.get("solved", ()):
            values = one["held_out_values"]
            assert min(values) == values[one["iterations"]]


def test_heads_of_other_sizes_and_data_without_labels(tmp_path: Path) -> None:
    """An encoder, two fine-tuned models with heads of different sizes, no labels in the data."""
    torch.manual_seed(0)
    save(BertModel(bert_config()), tmp_path / "base")
    paths, data = {}, {}
    for i, num_labels in enumerate((2, 5)):
        model = BertForSequenceClassification.from_pretrained(
            tmp_path / "base", num_labels=num_labels
        )
        paths[f"m{i}"] = save(model, tmp_path / f"m{i}", make_tokenizer(), seed=i)
        write_rows(tmp_path / f"d{i}.jsonl", [{"sentence": t} for t in TEXTS[i]])
        data[f"m{i}"] = {"path": tmp_path / f"d{i}.jsonl", "columns": {"text": "sentence"}}
    found = merge(paths, tmp_path / "base", "regmean++", data=data)
    assert not any(name.startswith("classifier") for name in found)
    # The same as with heads of equal size, which do not matter.
    for i in range(2):
        other = BertForSequenceClassification.from_pretrained(tmp_path / f"m{i}").bert
        model = BertForSequenceClassification(bert_config(num_labels=3))
        model.bert.load_state_dict(other.state_dict())
        model.save_pretrained(tmp_path / f"m{i}")
    for name, values in merge(paths, method="regmean++", data=data, heads="classifier.*").items():
        torch.testing.assert_close(found[name], values)


def test_stored_dtypes_may_differ(bert: Family, merged: State, tmp_path: Path) -> None:
    model = BertForSequenceClassification.from_pretrained(bert.paths[1]).float()
    model.save_pretrained(tmp_path / "single")
    make_tokenizer().save_pretrained(tmp_path / "single")
    mixed = merge(
        [bert.paths[0], tmp_path / "single"], method="regmean++", data=bert.data, dtype="float32"
    )
    for name, values in merged.items():
        torch.testing.assert_close(mixed[name].to(values.dtype), values, rtol=1e-3, atol=1e-4)


# --- the command line, recipes and what can be wrong ---


def test_a_recipe_says_it_all(mats: Run, bert: Family, tmp_path: Path) -> None:
    (tmp_path / "task.yaml").write_text(f"data: {bert.data[1]}\ncolumns: {{text: text}}\n")
    recipe = {
        "models": [
            {"model": str(bert.paths[0]), "data": {"path": str(bert.data[0]), "num_examples": 4}},
            {"model": str(bert.paths[1]), "data": str(tmp_path / "task.yaml")},
        ],
        "method": "regmean++",
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    out = tmp_path / "out"
    code, _, err = mats("merge", tmp_path / "recipe.yaml", "--out", out)
    assert code == 0, err
    assert "merged block after block: bert.encoder.layer (2 blocks)" in err
    manifest = json.loads((out / "merge.json").read_text())
    described = [one for one in manifest["inputs"] if "data" in one]
    assert [(one["name"], one["data"], one["num_examples"]) for one in described] == [
        ("m0", "d0.jsonl", 4), ("m1", "d1.jsonl", 5),
    ]  # fmt: skip
    assert manifest["recipe"]["models"][0]["data"]["num_examples"] == 4
    assert BertForSequenceClassification.from_pretrained(out).num_labels == 3


def test_options_and_python_give_the_same(
    mats: Run, bert: Family, merged: State, tmp_path: Path
) -> None:
    """Forked workers and many shards on one side, threads and memory on the other."""
    arguments = [a for path in bert.paths for a in ("--model", path)]
    arguments += [a for path in bert.data for a in ("--data", path)]
    code, printed, err = mats(
        "merge", "--method", "regmean", "--inputs", "merged", "--targets", "weights", *arguments, "--shard-size", "9kB",
        "--out", tmp_path / "out", "--json",
    )  # fmt: skip
    assert code == 0, err
    assert len(json.loads(printed)["output_files"]) > 3
    written = matsmerge.open_checkpoint(tmp_path / "out")
    assert set(written.specs) == set(merged)
    for name in written.specs:
        assert torch.equal(written[name], merged[name]), name


def recipe_of(members: Family, **changes: Any) -> dict[str, Any]:
    models = [
        {"model": str(path), "data": str(data)}
        for path, data in zip(members.paths, members.data, strict=True)
    ]
    return {"models": models, "method": "regmean++", **changes}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": None}, "inputs: merged runs the models on their data.*model m1 has none; give it"),
        ({"data": {"path": "x", "num_exmples": 3}}, "unknown key 'num_exmples'; did you mean 'num_ex"),
        ({"data": {"path": "x", "batch_size": 0}}, "batch_size: .*greater than or equal to 1"),
        ({"data": {"path": "x", "task": "classification"}}, "there is no task 'classification'"),
        ({"data": {"path": "none.jsonl"}}, "none.jsonl: no such file"),
        ({"data": {"path": "{}/d1.jsonl", "columns": {"text": "txt"}}}, "no column 'txt'"),
        ({"data": {"path": "{}/d1.jsonl", "task": "seq2seq"}}, "cannot do seq2seq"),
        ({"data": {"path": "{}/d1.jsonl", "held_out": 0.2}}, "held_out is for solvers with stop"),
        ({"data": {"path": "{}/empty.yaml"}}, "empty: names no data"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_data(
    change: dict[str, Any], message: str, bert: Family, mats: Run, tmp_path: Path
) -> None:
    (bert.folder / "empty.yaml").write_text("task: sequence_classification\n")
    recipe = recipe_of(bert)
    recipe["models"][1] |= change
    text = json.dumps(recipe).replace("{}/", f"{bert.folder}/")
    (tmp_path / "recipe.yaml").write_text(text)
    code, _, err = mats("merge", tmp_path / "recipe.yaml", "--out", tmp_path / "out")
    assert code == 1
    assert re.search(message, err.replace("\n", " ")), err
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "regmean"}, "the model m0 has data, which only methods with inputs: merged use"),
        ({"method": {"name": "mats", "init": "average", "inputs": "merged"}, "trajectory": [5]},
         "trajectory: with inputs: merged each number of iterations is a merge of its own"),
        ({"overrides": [{"match": "*pooler*", "method": "regmean"}]},
         "inputs: merged must be said for all parameters"),
        ({"method": {"name": "mats", "init": "average", "inputs": "merged", "stop": "held_out"}},
         "m0: stop: held_out needs a share of its data"),
        ({"method": {"name": "mats", "init": "average", "inputs": "merged", "objective": "fisher"}},
         "inputs: merged is about the Gram matrices of gram and kfac"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_recipes(change: dict[str, Any], message: str, bert: Family) -> None:
    with pytest.raises(matsmerge.RecipeError, match=message):
        make_recipe(recipe_of(bert, **change))


def test_kfac_needs_statistics_of_all_models_or_of_none(small: Small) -> None:
    method = {"name": "mats", "init": "average", "objective": "kfac", "inputs": "merged"}
    recipe = recipe_of(small.members, method=method)
    recipe["models"][0]["statistics"] = str(small.statistics[0])
    with pytest.raises(matsmerge.StatisticsError, match=r"m1: the method needs statistics \(kfac"):
        prepare_merge(make_recipe(recipe))


def test_models_without_a_folder_cannot_be_run(bert: Family) -> None:
    states = [load_model(path).model.state_dict() for path in bert.paths]
    with pytest.raises(matsmerge.DataError, match="must be a folder with config.json"):
        merge(states, method="regmean++", data=bert.data)
    with pytest.raises(matsmerge.RecipeError, match="1 data for 2 models"):
        merge(bert.paths, method="regmean++", data=bert.data[:1])
    with pytest.raises(matsmerge.RecipeError, match="data: there is no model 'x'"):
        merge(bert.paths, method="regmean++", data={"x": bert.data[0]})


def test_weights_tied_in_one_model_alone_are_refused(tmp_path: Path) -> None:
    tied = LlamaForCausalLM(llama_config(tie_word_embeddings=True))
    save(tied, tmp_path / "m0", make_tokenizer())
    (tmp_path / "m0" / "model.safetensors").unlink()
    torch.save(tied.state_dict(), tmp_path / "m0" / "pytorch_model.bin")  # under both names
    save(LlamaForCausalLM(llama_config()), tmp_path / "m1", make_tokenizer())
    for i in range(2):
        write_rows(tmp_path / f"d{i}.jsonl", KINDS["llama"].rows[i])
    with pytest.raises(matsmerge.DataError, match="are one tensor, but two in other models"):
        Family(KINDS["llama"], tmp_path).merge()


class Noted(Progress):
    """Notes what a merge says of how far it is."""

    def __init__(self) -> None:
        self.announced: dict[str, int] = {}
        self.done = 0

    def stage(self, title: str, total: int | None = None, unit: str = BYTES, done: int = 0) -> None:
        assert total is not None
        assert unit == BYTES
        self.announced[title] = total
        self.done = done

    def advance(self, amount: int, _: str | None = None) -> None:
        assert amount >= 0
        self.done += amount


class Stopping(LocalExecutor):
    """Lets the user stop it before it maps for the fourth time, in the second block."""

    num_maps = 0

    def map(self, function: Any, jobs: Any) -> Any:
        self.num_maps += 1
        if self.num_maps == 4:
            raise KeyboardInterrupt
        return super().map(function, jobs)


def test_an_interrupted_merge_goes_on_or_begins_anew(
    bert: Family, merged: State, tmp_path: Path
) -> None:
    prepared = prepare_merge(make_recipe(recipe_of(bert)))
    # One block's output for each token, with padding.
    num_tokens = sum(len(texts) * max(2 + len(t.split()) for t in texts) for texts in TEXTS)
    assert prepared.prefix is not None
    assert prepared.prefix.num_held_bytes == num_tokens * 16 * 8
    target = tmp_path / "out"
    for resume in (True, False):
        with pytest.raises(KeyboardInterrupt):
            merge_to_folder(prepared, target, RunOptions(Stopping(), overwrite=True))
        assert staging_path(target).exists()
        # The same preparation serves again, from the beginning.
        progress = Noted()
        merge_to_folder(
            prepared, target, RunOptions(progress=progress, resume=resume, overwrite=not resume)
        )
        assert progress.announced["merging block after block"] == progress.done
        written = matsmerge.open_checkpoint(target)
        for name in written.specs:
            assert torch.equal(written[name], merged[name]), name
        shutil.rmtree(target)
