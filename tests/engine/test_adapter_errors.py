"""Adapters that cannot be merged as asked for: what is said, and of which file."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig
from peft_models import MODELS, adapt, load, make_base, reconfigure, tensors
from safetensors.torch import save_file
from tiny_models import llama_config, save

import matsmerge
from matsmerge import AlignmentError, CheckpointError, MatsError, RecipeError

LORA = LoraConfig(target_modules=["q_proj", "up_proj"], r=2)
IA3 = IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
Copy = Callable[..., Path]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base("llama", tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def wider(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base with layers of the same names and other shapes."""
    config = llama_config(head_dim=16)
    config.hidden_size, config.intermediate_size = 32, 48
    make, _ = MODELS["llama"]
    return save(make(config), tmp_path_factory.mktemp("wider"))


@pytest.fixture(scope="module")
def made(base: Path, wider: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One adapter of each kind."""
    folder = tmp_path_factory.mktemp("adapters")
    dora = LoraConfig(target_modules=["q_proj"], r=2, use_dora=True)
    return {
        "lora": adapt(base, LORA, folder / "lora"),
        "dora": adapt(base, dora, folder / "dora"),
        "ia3": adapt(base, IA3, folder / "ia3"),
        "wide-lora": adapt(wider, LORA, folder / "wide-lora"),
        "wide-ia3": adapt(wider, IA3, folder / "wide-ia3"),
    }


@pytest.fixture
def copy(made: dict[str, Path], tmp_path: Path) -> Copy:
    """A copy of one of the adapters, with changes of its configuration."""

    def copied(kind: str, name: str = "copy", **changes: Any) -> Path:
        shutil.copytree(made[kind], tmp_path / name)
        return reconfigure(tmp_path / name, **changes)

    return copied


# --- Which base ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lora", "ia3"])
def test_bases_of_different_names(kind: str, made: dict[str, Path], copy: Copy) -> None:
    other = copy(kind, base_model_name_or_path="owner/other")
    with pytest.raises(RecipeError, match="the adapters are of different bases") as caught:
        matsmerge.merge([made[kind], other])
    assert f"{other}: its base is owner/other" in caught.value.problems
    assert any(
        problem.startswith(f"{made[kind]}: its base is") for problem in caught.value.problems
    )


@pytest.mark.parametrize("options", [{}, {"align": "knots"}, {"output": "dense"}], ids=str)
def test_loras_on_bases_of_different_shapes(
    options: Any, base: Path, made: dict[str, Path], copy: Copy
) -> None:
    """All of them say that they are of this base."""
    other = copy("wide-lora", base_model_name_or_path=str(base))
    with pytest.raises(MatsError, match=r"'model.layers.0.\S+q_proj.*\[16, 16\]") as caught:
        matsmerge.merge([made["lora"], other], None, "ties", **options)
    assert str(other) in str(caught.value)


@pytest.mark.parametrize("is_first", [False, True])
def test_ia3_on_bases_of_different_shapes(
    is_first: bool, base: Path, made: dict[str, Path], copy: Copy
) -> None:
    other = copy("wide-ia3", base_model_name_or_path=str(base))
    models = [other, made["ia3"]] if is_first else [made["ia3"], other]
    with pytest.raises(MatsError, match=r"ia3_l.*shape|shape.*ia3_l|\[16, 1\]") as caught:
        matsmerge.merge(models)
    assert str(other) in str(caught.value)


def test_ia3_vectors_that_scale_something_else(base: Path, tmp_path: Path) -> None:
    """The outputs of a layer in one adapter, the inputs in another; both are as long."""
    models = []
    for i, feedforward in enumerate(([], ["o_proj"])):
        config = IA3Config(target_modules=["o_proj"], feedforward_modules=feedforward)
        models.append(adapt(base, config, tmp_path / f"ia3-{i}"))
    with pytest.raises(MatsError, match="o_proj") as caught:
        matsmerge.merge(models)
    assert str(models[1]) in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("lora", {}),
        ("lora", {"align": "knots"}),
        ("lora", {"output": "dense"}),
        ("ia3", {}),
        ("ia3", {"output": "dense"}),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:on the base")
def test_a_base_that_does_not_fit(
    kind: str, options: Any, base: Path, made: dict[str, Path]
) -> None:
    """A base that is given is looked at, needed or not."""
    adapter = made[f"wide-{kind}"]
    with pytest.raises(CheckpointError, match=f"{adapter}: does not fit {base}: 'model.layers"):
        matsmerge.merge([adapter], base, "ties", **options)


@pytest.mark.filterwarnings("ignore:on the base")
def test_a_base_without_the_layers(made: dict[str, Path], tmp_path: Path) -> None:
    gpt2 = make_base("gpt2", tmp_path / "gpt2")
    with pytest.raises(CheckpointError) as caught:
        matsmerge.merge([made["lora"]], gpt2)
    first, *_ = caught.value.problems
    assert first.startswith(f"{made['lora']}: changes 'model.layers.0.")
    assert f"which {gpt2} does not have; was it made for another base?" in first


def test_no_base_at_all(copy: Copy) -> None:
    adapter = copy("lora", base_model_name_or_path=None)
    path = adapter / "adapter_config.json"
    with pytest.raises(CheckpointError, match=f"{path}: does not name its base"):
        matsmerge.merge([adapter])


def test_a_base_that_is_not_there(copy: Copy) -> None:
    adapter = copy("lora", base_model_name_or_path="no-such-folder")
    path = adapter / "adapter_config.json"
    with pytest.raises(CheckpointError, match=f"{path}: its base: no-such-folder: no such file"):
        matsmerge.merge([adapter])


def test_a_base_that_is_an_adapter(made: dict[str, Path], copy: Copy) -> None:
    with pytest.raises(CheckpointError, match=f"{made['ia3']}: is an adapter; the base must be"):
        matsmerge.merge([made["lora"]], made["ia3"])
    stacked = copy("lora", base_model_name_or_path=str(made["ia3"]))
    with pytest.raises(CheckpointError) as caught:
        matsmerge.merge([stacked])
    assert str(stacked) in str(caught.value)


@pytest.mark.parametrize("is_saved", [False, True], ids=["lora", "modules_to_save"])
def test_tied_weights_that_come_apart(is_saved: bool, tmp_path: Path) -> None:
    """An adapter changes the embedding only; a full model's output layer would change with it."""
    base = make_base("gpt2", tmp_path / "base")
    config = LoraConfig(
        target_modules=["c_attn"] if is_saved else ["wte"],
        modules_to_save=["wte"] if is_saved else None,
        fan_in_fan_out=is_saved,
        r=2,
    )
    adapter = adapt(base, config, tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=r"'transformer.wte.weight'.*tied weights") as caught:
        matsmerge.merge([adapter], output="dense")
    assert str(adapter) in str(caught.value)


# --- Damaged adapters ----------------------------------------------------------------------------


def test_all_damaged_adapters_at_once(copy: Copy, tmp_path: Path) -> None:
    unknown = copy("lora", "unknown", peft_type="LOHA")
    broken = copy("lora", "broken")
    (broken / "adapter_config.json").write_text('{"peft_type": "LORA", ')
    lacking = copy("ia3", "lacking")
    (lacking / "adapter_config.json").unlink()
    ranks = copy("lora", "ranks", r=5)
    half = copy("lora", "half")
    state = tensors(half)
    state.pop("base_model.model.model.layers.0.mlp.up_proj.lora_B.weight")
    save_file(state, half / "adapter_model.safetensors")
    pissa = copy("lora", "pissa", init_lora_weights="pissa")
    with pytest.raises(CheckpointError) as caught:
        matsmerge.merge([unknown, broken, lacking, ranks, half, pissa])
    for folder, problem in (
        (unknown, "adapter_config.json: is an adapter of type LOHA; expected LORA or IA3"),
        (broken, "adapter_config.json: not valid JSON"),
        (lacking, ": holds an adapter's tensors and no adapter_config.json"),
        (ranks, "has factors [2, 16] and [32, 2]; adapter_config.json says rank 5"),
        (half, "'model.layers.0.mlp.up_proj' has A; expected lora_A and lora_B"),
        (pissa, "init_lora_weights is 'pissa', which changes the base"),
    ):
        assert any(str(folder) in p and problem in p for p in caught.value.problems), folder


def test_vectors_of_different_dtypes(made: dict[str, Path], copy: Copy) -> None:
    """As of full models, that is said and not decided by their order."""
    half = copy("ia3")
    state = {name: value.bfloat16() for name, value in tensors(half).items()}
    save_file(state, half / "adapter_model.safetensors")
    for models in ([made["ia3"], half], [half, made["ia3"]]):
        with pytest.raises(AlignmentError, match="of another dtype"):
            matsmerge.merge(models)
    merged = matsmerge.merge([made["ia3"], half], dtype="float32")
    assert {value.dtype for value in merged.values()} == {torch.float32}


# --- What cannot be asked for --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("models", "options", "message"),
    [
        (["lora", "ia3"], {"output": "adapter"}, "output: adapter needs adapters of one kind"),
        (["lora", "full"], {"output": "adapter"}, "output: adapter needs adapters of one kind"),
        (["full"], {"output": "adapter"}, "output: adapter needs adapters of one kind"),
        (["full"], {"rank": 2}, "rank: is for LoRA adapters"),
        (["full"], {"align": "knots"}, "align: is for LoRA adapters"),
        (["lora", "full"], {"rank": 2}, "rank: is for LoRA adapters"),
        (["ia3"], {"rank": 2}, "rank: is for LoRA adapters"),
        (["lora"], {"rank": 2, "output": "dense"}, "rank is that of a LoRA to write"),
        (["lora"], {"rank": 0}, "rank"),
        (["lora"], {"rank": 17}, "rank: 17 is larger than every layer.*choose at most 16"),
        (["lora"], {"rank": 17, "align": "knots"}, "rank: 17 is larger than every layer"),
        (["dora"], {"align": "knots"}, "DoRA is not a change of low rank.*leave out align"),
        (["dora"], {"rank": "concatenate"}, "DoRA is not a change of low rank.*as rank"),
        (["dora"], {"output": "adapter"}, "say how much of it to keep with rank"),
        (["lora", "wide-lora"], {"method": "slerp", "align": "knots"}, "not for slerp; leave it"),
        (["lora"], {"method": "ties", "rank": "concatenate"}, "not for ties; choose a number"),
        (["lora"], {"method": "actmat", "align": "knots"}, "align: knots is for methods that"),
        (["lora"], {"method": "tsv_m", "align": "knots"}, "leave it out, or choose core_space"),
        (
            ["lora"],
            {"method": "ace", "align": "core_space"},
            "core_space is for methods of changes",
        ),
        (["lora"], {"method": "svc", "align": "core_space"}, "not for svc; leave it out"),
        (["ia3"], {"method": "svc"}, "about the singular values of matrices, and \\(IA\\)\\^3"),
        (["ia3"], {"method": "actmat"}, "about the inputs of linear layers, and \\(IA\\)\\^3"),
        (["ia3"], {"method": "regmean"}, "about the inputs of linear layers, and \\(IA\\)\\^3"),
    ],
)
def test_recipes_that_make_no_sense(
    models: list[str],
    options: dict[str, Any],
    message: str,
    base: Path,
    made: dict[str, Path],
    copy: Copy,
    tmp_path: Path,
) -> None:
    sources: dict[str, Any] = {}
    for name in models:
        if name == "full":
            sources[name] = load(base).state_dict()
        elif name == "wide-lora":  # a second one of the same base
            sources[name] = copy("lora")
        else:
            sources[name] = made[name]
    with pytest.raises(RecipeError, match=message):
        matsmerge.merge(sources, base, out=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
