"""Advice on tiny models: what is found, what is proposed, and that it can be done."""

import copy
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from advised_models import Family, make_family, write_texts
from peft import IA3Config, LoraConfig
from peft_models import adapt, make_base
from solved_models import make_nets, make_statistics
from torch import Tensor

import matsmerge
from matsmerge import Advice, AlignmentError, Finding, RecipeError
from matsmerge.errors import DataError, MatsError, StatisticsError
from matsmerge.progress import Update

State = dict[str, Tensor]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(tmp_path_factory.mktemp("family"), poor=[2], fresh=True)


def make_states(num: int = 2, spread: float = 0.01) -> list[State]:
    """A base, and models that moved a little."""
    g = torch.Generator().manual_seed(0)
    base = {n: torch.randn(8, 8, generator=g) for n in ("layer.0.w", "layer.1.w")}
    return [
        base,
        *(
            {n: t + spread * torch.randn(8, 8, generator=g) for n, t in base.items()}
            for _ in range(num)
        ),
    ]


def found(advice: Advice, subject: str) -> list[Finding]:
    return [one for one in advice.findings if one.subject == subject]


def levels(findings: Iterable[Finding]) -> set[str]:
    return {one.level for one in findings}


def test_without_anything_but_weights(family: Family) -> None:
    advice = matsmerge.advise(family.models[:2], family.base)
    assert advice.recipe.method.name == "actmat"
    assert advice.recipe.heads == ["classifier.*", "bert.pooler.*"]
    assert levels(found(advice, "heads")) == {"note", "warning"}  # other sizes; from scratch
    assert "bert.pooler.dense was learnt from scratch" in advice.warnings[0]
    assert levels(found(advice, "tokenizers")) == {"good"}
    assert levels(found(advice, "norms")) == {"good"}
    assert [layer.name for layer in advice.layers] == [
        "outside of layers", "bert.encoder.layer.0", "bert.encoder.layer.1",
    ]  # fmt: skip
    # Heads do not count: without the pooler models moved by 2 %.
    assert [own.change for own in advice.models.values()] == pytest.approx([0.02] * 2, rel=0.5)
    assert "with 1 warning" in advice.summary
    assert advice.recipe_text.startswith(f"base: {family.base}\nmodels:\n")


def test_a_pooler_that_moved_as_others_did_is_merged(tmp_path: Path) -> None:
    family = make_family(tmp_path, num=2)
    advice = matsmerge.advise(family.models, family.base)
    assert advice.recipe.heads == ["classifier.*"]
    assert not advice.warnings


def test_data_shows_poor_models(family: Family, tmp_path: Path) -> None:
    advice = matsmerge.advise(family.models, family.base, data=family.data, num_examples=30)
    assert advice.recipe.method.name == "mats_cross"
    assert advice.recipe.method.written == {
        "name": "mats_cross", "from_init": ["m2"], "otherwise": "init",
        "init": {"name": "task_arithmetic", "scale": 0.3},
    }  # fmt: skip
    assert [entry.weight for entry in advice.recipe.models] == [1, 1, 0.3]
    (poor,) = found(advice, "answers")
    assert (poor.level, poor.models) == ("warning", ("m2",))
    own = advice.models["m2"].answers
    assert own is not None
    assert own.num_examples == 30
    # What is advised can be done, from the recipe and from its parts.
    file = tmp_path / "recipe.yaml"
    file.write_text(advice.recipe_text)
    planned = matsmerge.plan(file)
    assert planned.recipe == advice.recipe
    again = matsmerge.plan(family.models, family.base, **advice.arguments)
    assert again.recipe.method == advice.recipe.method
    assert again.recipe.models == advice.recipe.models


def test_half_of_the_models_are_poor(family: Family) -> None:
    pair = family.models[1:]
    advice = matsmerge.advise(pair, family.base, data=family.data[1:])
    assert advice.recipe.method.written == {"name": "task_arithmetic", "scale": 0.5}
    assert [entry.weight for entry in advice.recipe.models] == [1, 0.3]
    assert all(entry.data is None for entry in advice.recipe.models)
    with pytest.warns(UserWarning, match="names were read"):
        merged = matsmerge.merge(pair, family.base, **advice.arguments)
    assert merged.report["rules"][0]["scale"] == 0.5


def test_data_of_some_models_is_looked_at_all_the_same(family: Family) -> None:
    advice = matsmerge.advise(family.models, family.base, data={"m0": family.data[0]})
    assert advice.recipe.method.name == "actmat"
    assert [own.answers is not None for own in advice.models.values()] == [True, False, False]
    assert levels(found(advice, "answers")) == {"good"}


def test_statistics() -> None:
    base, models = make_nets()
    advice = matsmerge.advise(models, base, statistics=make_statistics())
    assert advice.recipe.method.name == "mats_kfac"
    assert all(own.fisher is not None for own in advice.models.values())
    assert levels(found(advice, "confidence")) == {"good"}
    with pytest.warns(UserWarning, match="merged by average"):
        merged = matsmerge.merge(models, base, **advice.arguments)
    assert merged.layers
    names = ["model_0", "model_1"]
    some = matsmerge.advise(
        models, base, statistics=dict(zip(names, make_statistics()[:2], strict=True))
    )
    assert some.recipe.method.name == "actmat"
    assert "no statistics of model_2" in found(some, "statistics")[0].text


def test_statistics_beside_models(family: Family, tmp_path: Path) -> None:
    pair = [Path(shutil.copytree(m, tmp_path / m.name)) for m in family.models[:2]]
    for model, data in zip(pair, family.data, strict=False):
        collect(model, data)
    advice = matsmerge.advise(pair, family.base)
    assert advice.recipe.method.name == "mats_kfac"
    assert advice.recipe.models[0].statistics == str(pair[0] / "statistics.safetensors")
    shutil.copy(pair[0] / "statistics.safetensors", pair[1])
    advice = matsmerge.advise(pair, family.base)
    assert advice.recipe.method.name == "actmat"
    assert "beside m1 are not used" in found(advice, "statistics")[0].text
    with pytest.raises(StatisticsError, match="collected from another model") as raised:
        matsmerge.advise(pair, family.base, statistics=[pair[0] / "statistics.safetensors"] * 2)
    assert "--force" not in str(raised.value)  # which advice has not


def collect(model: Path, data: Path) -> None:
    from matsmerge.cli import main

    arguments = [str(model), "--data", str(data), "--statistics", "kfac", "--fisher", "true", "-q"]
    assert main.run(["collect", *arguments]) == 0


def test_a_method_that_is_refused_is_said_with_the_reason(family: Family, tmp_path: Path) -> None:
    pair = [Path(shutil.copytree(m, tmp_path / m.name)) for m in family.models[:2]]
    collect(pair[0], family.data[0])  # for one model alone, which mats_cross then wants of all
    advice = matsmerge.advise(pair, family.base, data=family.data[:2])
    assert advice.recipe.method.name == "actmat"
    (refused,) = found(advice, "method")
    assert "mats_cross would be better" in refused.text
    assert "needs statistics" in refused.text


def test_models_of_different_norms() -> None:
    base, *models = make_states(3)
    models[2] = {n: base[n] + 100 * (t - base[n]) for n, t in models[2].items()}
    advice = matsmerge.advise(models, base)
    assert advice.recipe.method.name == "wudi"
    assert levels(found(advice, "norms")) == {"warning"}
    assert found(advice, "norms")[0].models == ("model_2",)
    assert [own.weight for own in advice.models.values()] == [1, 1, 0.05]
    assert advice.arguments["weights"] == [1, 1, 0.05]


def test_copies_the_base_and_other_models() -> None:
    base, *models = make_states(2)
    copies = matsmerge.advise([*models, copy.deepcopy(models[0])], base)
    assert "nearly the same model" in copies.warnings[0]
    unchanged = matsmerge.advise([models[0], copy.deepcopy(base)], base)
    assert "is the base itself" in unchanged.warnings[0]
    stranger = {n: torch.randn(8, 8) * 3 for n in base}
    strange = matsmerge.advise([models[0], stranger], base)
    assert "hardly resembles the base" in strange.warnings[0]
    assert "do not all fit this base" in strange.summary


def test_json_has_no_infinity() -> None:
    base, *models = make_states(2)
    for state in (base, *models):
        state["layer.2.w"] = torch.zeros(8, 8) if state is base else torch.ones(8, 8)
    content = matsmerge.advise(models, base).as_dict()
    assert content["layers"][-1]["changes"] == [None, None]
    json.dumps(content, allow_nan=False)


def test_order_does_not_matter() -> None:
    base, *models = make_states(3)
    one, other = (
        matsmerge.advise(dict(named), base)
        for named in (zip("abc", models, strict=True), list(zip("abc", models, strict=True))[::-1])
    )
    for name in "abc":
        assert one.models[name].norm == pytest.approx(other.models[name].norm, rel=1e-12)
    assert one.recipe.method == other.recipe.method


def test_adapters(tmp_path: Path) -> None:
    base = make_base("bert", tmp_path / "base")
    lora = LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS")
    models = [adapt(base, lora, tmp_path / f"lora{i}", i) for i in (1, 2)]
    advice = matsmerge.advise(models)
    assert advice.recipe.base is None
    assert "LORA" in found(advice, "adapters")[0].text
    assert matsmerge.plan(advice.recipe).recipe.method.name == "actmat"
    ia3 = IA3Config(target_modules=["key", "value"], feedforward_modules=[], task_type="SEQ_CLS")
    models = [adapt(base, ia3, tmp_path / f"ia3-{i}", i) for i in (1, 2)]
    advice = matsmerge.advise(models)
    assert "vectors are merged" in found(advice, "adapters")[0].text
    assert advice.recipe.method.name == "task_arithmetic"


def test_language_models_that_hardly_moved(tmp_path: Path) -> None:
    base = make_base("llama", tmp_path / "base")
    models = []
    for i, share in enumerate((1e-3, 2e-3)):
        folder = Path(shutil.copytree(base, tmp_path / f"m{i}"))
        move(folder / "model.safetensors", share, i)
        models.append(folder)
    advice = matsmerge.advise(models, base)
    assert advice.recipe.method.name == "task_arithmetic"
    assert not advice.recipe.heads
    (tmp_path / "base" / "config.json").unlink()  # nothing says that it is one
    assert matsmerge.advise(models, base).recipe.method.name == "actmat"


def move(file: Path, share: float, seed: int) -> None:
    from safetensors.torch import load_file, save_file

    g = torch.Generator().manual_seed(seed)
    state = {
        n: t + share * t.abs().mean() * torch.randn(t.shape, generator=g)
        for n, t in load_file(file).items()
    }
    save_file(state, file, {"format": "pt"})


def test_tokenizers_that_differ(family: Family, tmp_path: Path) -> None:
    pair = [Path(shutil.copytree(m, tmp_path / m.name)) for m in family.models[:2]]
    file = pair[1] / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(content))
    with pytest.raises(AlignmentError, match="different ids"):
        matsmerge.advise(pair, family.base)
    advice = matsmerge.advise(pair, family.base, ignore_tokenizers=True)
    assert levels(found(advice, "tokenizers")) == {"warning"}
    assert advice.recipe.ignore_tokenizers
    assert advice.arguments["ignore_tokenizers"]


def test_progress_is_told(family: Family) -> None:
    told: list[Update] = []
    matsmerge.advise(family.models[:2], family.base, data=family.data[:2], progress=told.append)
    stages = {update.title: update for update in told}
    assert {"running models", "reading weights"} <= stages.keys()
    assert all(
        u.done == u.total for t, u in stages.items() if t in ("running models", "reading weights")
    )


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"models": [0]}, RecipeError, "at least two models"),
        ({"base": None}, RecipeError, "fine-tuned from with --base"),
        ({"num_examples": 0}, RecipeError, "num_examples"),
        ({"data": [0]}, RecipeError, "1 data for 2 models"),
        ({"data": ["nothing.jsonl", 1]}, DataError, "nothing.jsonl"),
        ({"statistics": ["nothing.safetensors", "no"]}, StatisticsError, "no such file"),
    ],
)
def test_what_is_wrong_is_said_first(
    family: Family, change: dict[str, Any], error: type[MatsError], message: str
) -> None:
    def given(values: Any, of: list[Path]) -> Any:
        return values and [of[v] if isinstance(v, int) else v for v in values]

    told: list[Update] = []
    with pytest.raises(error, match=message):
        matsmerge.advise(
            given(change.get("models", [0, 1]), family.models),
            change.get("base", family.base),
            data=given(change.get("data"), family.data),
            statistics=change.get("statistics"),
            num_examples=change.get("num_examples", 300),
            progress=told.append,
        )
    assert not told


def test_data_that_does_not_fit_is_said_of_all_models(family: Family, tmp_path: Path) -> None:
    wrong = []
    for i in range(2):
        wrong.append(write_texts(tmp_path / f"wrong{i}.jsonl"))
        wrong[i].write_text(wrong[i].read_text().replace('"text"', '"words"'))
    with pytest.raises(DataError) as raised:
        matsmerge.advise(family.models[:2], family.base, data=wrong)
    assert all(any(f"wrong{i}" in p for p in raised.value.problems) for i in range(2))
    base, *models = make_states()
    with pytest.raises(DataError, match="must be a model's folder"):
        matsmerge.advise(models, base, data=family.data[:2])
