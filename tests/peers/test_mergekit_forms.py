"""Forms of mergekit's YAML that people write: our results and mergekit's, on the same files."""

from pathlib import Path

import pytest
import torch
from mergekit_process import IS_THERE, WHY_NOT, merge_by_mergekit
from safetensors.torch import load_file
from tiny_models import llama_config, make_tokenizer, save
from transformers import LlamaForCausalLM

from matsmerge.cli import main
from matsmerge.methods import METHODS

pytestmark = pytest.mark.skipif(not IS_THERE, reason=WHY_NOT)

RECIPES = {
    "stack": "{merge_method: passthrough, slices: [{sources: [{model: A, layer_range: [0, 2]}]}, "
    "{sources: [{model: B, layer_range: [1, 4]}]}, {sources: [{model: B, layer_range: [1, 3]}]}]}",
    "stack-scaled": "{merge_method: passthrough, slices: [{sources: [{model: A, layer_range: [1, 3], "
    "parameters: {scale: [{filter: o_proj, value: 0}, {filter: down_proj, value: [0.5, 2]}, {value: 1}]}}]}, "
    "{sources: [{model: B, layer_range: [2, 4]}], parameters: {scale: 0.5}}]}",
    # Ends with a second model that counts nothing, so that its rows were looked at, as large ones had.
    "stack-linear": "{merge_method: linear, parameters: {weight: 1.0}, slices: [{sources: [{model: A, layer_range: [0, 1]}, "
    "{model: B, layer_range: [0, 1], parameters: {weight: 0}}]}, {sources: [{model: B, layer_range: [0, 3]}]}, "
    "{sources: [{model: A, layer_range: [3, 4]}, {model: B, layer_range: [3, 4], parameters: {weight: 0}}]}]}",
    "layers-added": "{merge_method: passthrough, slices: [{sources: [{model: A, layer_range: [0, 3]}]}, {sources: [{layer_range: "
    "[2, 3], model: A, parameters: {scale: [{filter: o_proj, value: 0.0}, {filter: down_proj, value: 0.0}, {value: 1.0}]}}]}, "
    "{sources: [{model: A, layer_range: [3, 4]}]}]}",
    "taken-away": "{merge_method: task_arithmetic, base_model: BASE, parameters: {normalize: 0.0, int8_mask: 1.0}, slices: [{sources: "
    "[{layer_range: [0, 4], model: BASE}, {layer_range: [0, 4], model: A, parameters: {weight: 1.0}}, {layer_range: [0, 4], "
    "model: B, parameters: {weight: -0.5}}]}]}",
    "one-condition": "{merge_method: ties, base_model: BASE, slices: [{sources: [{layer_range: [0, 4], model: A, parameters: {density: "
    "0.8, weight: {value: 0.5}}}, {layer_range: [0, 4], model: B, parameters: {density: 0.2, weight: {filter: mlp, value: 0.5}}}, "
    "{layer_range: [0, 4], model: BASE}]}], parameters: {weight: 0, normalize: 1, lambda: 0.5}}",
    "slices-slerp": "{merge_method: slerp, base_model: A, slices: [{sources: [{model: A, layer_range: [0, 2]}, "
    "{model: B, layer_range: [1, 3]}]}, {sources: [{model: B, layer_range: [2, 4]}, {model: A, layer_range: [2, 4]}], "
    "parameters: {t: 0.8}}], parameters: {t: [{filter: self_attn, value: [0, 0.5, 1]}, {filter: mlp, value: [1, 0]}, {value: 0.3}]}}",
    "slices-task-arithmetic": "{merge_method: task_arithmetic, base_model: BASE, slices: [{sources: ["
    "{model: A, layer_range: [0, 2], parameters: {weight: [0.2, 0.8]}}, {model: BASE, layer_range: [0, 2]}, "
    "{model: B, layer_range: [0, 2], parameters: {weight: 0.5}}]}, {sources: [{model: BASE, layer_range: [2, 4]}, "
    "{model: C, layer_range: [2, 4], parameters: {weight: [{filter: mlp, value: [1, 0.5]}, {value: 0.4}]}}]}], "
    "parameters: {lambda: 0.9}}",
    "slices-other-base": "{merge_method: ties, base_model: BASE, slices: [{sources: [{model: A, layer_range: [0, 3]}, "
    "{model: B, layer_range: [0, 3]}, {model: BASE, layer_range: [0, 3]}]}, {base_model: C, sources: [{model: A, "
    "layer_range: [3, 4]}, {model: C, layer_range: [3, 4]}]}], parameters: {weight: 0.6, density: 0.5, int8_mask: true}}",
    "slices-model-stock": "{merge_method: model_stock, base_model: A, slices: [{sources: [{model: A, layer_range: "
    "[0, 4]}, {model: B, layer_range: [0, 4]}, {model: C, layer_range: [0, 4]}]}]}",
    "filter-wise": "{merge_method: model_stock, base_model: BASE, models: [{model: A}, {model: B}, {model: C}], "
    "parameters: {filter_wise: true}}",
    "base-listed": "{merge_method: ties, base_model: BASE, models: [{model: BASE, parameters: {weight: 0.2}}, "
    "{model: A, parameters: {weight: 0.2}}, {model: B, parameters: {weight: 0.3}}], parameters: {density: 0.3}, "
    "chat_template: auto}",
    "base-counted": "{merge_method: linear, base_model: BASE, models: [{model: A}, {model: B}], parameters: {weight: 0.5}}",
    "adapter": "{merge_method: linear, models: [{model: A+LORA, parameters: {weight: 0.5}}, {model: B, parameters: {weight: 0.5}}]}",
    "adapter-on-the-base": "{merge_method: task_arithmetic, base_model: A+LORA, models: [{model: B, parameters: {weight: 0.5}}]}",
    "adapter-on-the-base-alone": "{merge_method: task_arithmetic, base_model: A+LORA, parameters: {normalize: false}, slices: [{sources: "
    "[{layer_range: [0, 4], model: A+LORA, parameters: {weight: 1.0}}]}]}",
    "base-alone-in-a-slice": "{merge_method: ties, base_model: A, parameters: {weight: 0.5, density: 0.5}, slices: [{sources: [{model: A, layer_range: "
    "[0, 2]}, {model: B, layer_range: [0, 2]}, {model: C, layer_range: [0, 2]}]}, {sources: [{model: A, layer_range: [2, 4]}]}]}",
    "module": "{merge_method: linear, modules: {default: {models: [{model: A}, {model: B}], parameters: {weight: 1}}}}",
    "filters": "{merge_method: linear, models: [{model: A, parameters: {weight: [{filter: self_attn, value: 0.2}, "
    "{filter: mlp, value: [0.1, 0.9]}, {filter: nowhere, value: 7}, {value: 0.3}]}}, {model: B, parameters: {weight: 0.25}}], "
    "parameters: {density: 3}}",
    "nuslerp": "{merge_method: nuslerp, models: [{model: A, parameters: {weight: [0.1, 0.3, 0.1]}}, {model: B, "
    "parameters: {weight: [0.9, 0.7, 0.9]}}]}",
    "nuslerp-base": "{merge_method: nuslerp, base_model: BASE, models: [{model: A, parameters: {weight: 0.1}}, "
    "{model: B, parameters: {weight: 0.9}}]}",
    "karcher": "{merge_method: karcher, base_model: BASE, models: [{model: A}, {model: B}], parameters: {tol: 1e-10, max_iter: 200}}",
    "breadcrumbs": "{merge_method: breadcrumbs, base_model: BASE, models: [{model: A, parameters: {weight: 0.6, "
    "density: 0.9, gamma: 0.01}}, {model: C, parameters: {weight: 0.4, density: 0.8, gamma: 0.02}}]}",
    "sce": "{merge_method: sce, base_model: BASE, models: [{model: A}, {model: B}, {model: C}], parameters: {select_topk: 0.5}}",
    "weight-at-every-level": "{merge_method: linear, slices: [{sources: [{model: A, layer_range: [0, 2], parameters: {weight: 0.7}}, "
    "{model: B, layer_range: [0, 2]}], parameters: {weight: 0.2}}, {sources: [{model: A, layer_range: [2, 4]}, {model: C, layer_range: "
    "[2, 4], parameters: {weight: [{filter: mlp, value: 0}, {value: 2}]}}]}], parameters: {weight: 0.4, normalize: true}}",
    "gradients-in-filters": "{merge_method: task_arithmetic, base_model: BASE, models: [{model: A, parameters: {weight: [{filter: v_proj, "
    "value: [0.1, 0.9, 0.2]}, {filter: o_proj, value: [1, 0]}, {filter: lm_head, value: 0.1}, {filter: model.norm, value: 0.9}, "
    "{value: [0.5, 0.25]}]}}, {model: B, parameters: {weight: [0, 0, 1, 1]}}], parameters: {normalize: false, lambda: [1, 0.5]}}",
    "merge-keys": "{merge_method: ties, x: &w {weight: 0.5, density: 0.5}, base_model: BASE, models: [{model: A, parameters: *w}, "
    "{model: B, parameters: {<<: *w, weight: 0.25}}]}",
    "references": "{merge_method: task_arithmetic, base_model: {model: {path: BASE}}, models: [{model: {model: {path: A}}, "
    "parameters: {weight: 1}}, {model: {model: {path: B}}, parameters: {weight: 5.0e-1}}]}",
    "ties-adapter-on-the-base": "{merge_method: ties, base_model: A+LORA, models: [{model: B, parameters: {weight: 1, density: 0.5}}, "
    "{model: C, parameters: {weight: 1, density: 0.5}}]}",
    "dare-all-kept": "{merge_method: dare_ties, base_model: BASE, models: [{model: A, parameters: {density: 1.0, weight: [0, 0.3, 1]}}, "
    "{model: B, parameters: {density: 1, weight: 0.5}}], parameters: {int8_mask: yes, rescale: off, normalize: no, lambda: 1.1}}",
    "della-all-kept": "{merge_method: della_linear, base_model: BASE, models: [{model: A, parameters: {density: 1.0, weight: 0.5}}, {model: B, "
    "parameters: {density: 1.0, weight: 0.4}}], parameters: {epsilon: 0.0, lambda: 1.05, normalize: true}}",
    "breadcrumbs-ties": "{merge_method: breadcrumbs_ties, base_model: BASE, models: [{model: A, parameters: {weight: 0.3, density: 0.9, gamma: "
    "0.03}}, {model: B, parameters: {weight: 0.7}}], parameters: {density: 0.8, gamma: 0.01, lambda: 0.9}}",
    "multislerp": "{merge_method: multislerp, base_model: BASE, models: [{model: A, parameters: {weight: 0.3}}, {model: B, parameters: "
    "{weight: 0.7}}, {model: C, parameters: {weight: 0.1}}], parameters: {normalize_weights: true, eps: 1e-8}}",
    "ramplus": "{merge_method: ramplus_tl, base_model: BASE, models: [{model: A}, {model: B}, {model: C}], "
    "parameters: {epsilon: 1e-5, r: 0.1, alpha: 0.2}}",
    "weights-of-zero": "{merge_method: della_linear, base_model: BASE, models: [{model: A, parameters: {weight: [{filter: mlp, value: 0.5}, "
    "{value: 0}]}}, {model: B, parameters: {weight: [0, 0.5]}}], parameters: {normalize: true, density: 1}}",
    "arcee-fusion": "{merge_method: arcee_fusion, base_model: A, models: [{model: A}, {model: B}]}",
    "nearswap": "{merge_method: nearswap, base_model: A, models: [{model: A}, {model: B}], parameters: {t: 0.01}}",
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from peft import LoraConfig, get_peft_model

    folder: Path = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    base = LlamaForCausalLM(llama_config(num_hidden_layers=4))
    for seed, name in enumerate(("BASE", "A", "B", "C")):
        model = LlamaForCausalLM(base.config)
        model.load_state_dict(base.state_dict())
        save(model, folder / name, make_tokenizer(), seed=seed)
    adapted = get_peft_model(
        LlamaForCausalLM.from_pretrained(folder / "A"),
        LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False),
    )
    adapted.save_pretrained(folder / "LORA")
    return folder


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("name", RECIPES)
def test_agrees(name: str, models: Path, tmp_path: Path) -> None:
    text = RECIPES[name]
    for model in ("BASE", "LORA", "A", "B", "C"):
        for before, after in ((": ", ","), (": ", "}"), ("+", ","), ("+", "}"), (": ", "+")):
            text = text.replace(f"{before}{model}{after}", f"{before}{models / model}{after}")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text[:-1] + ", dtype: float32, name: mine}")
    kind = text.split()[1].rstrip(",")
    if kind not in {*METHODS, "linear"}:
        pytest.skip(f"there is no {kind} here")
    ours_out, theirs_out = tmp_path / "ours", tmp_path / "theirs"
    assert main.run(["mergekit", str(recipe), str(ours_out), "--quiet"]) == 0
    merge_by_mergekit(recipe, theirs_out)
    ours, theirs = (
        {k: v for p in out.glob("*.safetensors") for k, v in load_file(p).items()}
        for out in (ours_out, theirs_out)
    )
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        a, b = ours[key].double(), value.double()
        assert (a - b).abs().max() <= 3e-6 * b.abs().max(), key
    LlamaForCausalLM.from_pretrained(ours_out)
