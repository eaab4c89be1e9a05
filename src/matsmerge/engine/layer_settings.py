"""What a configuration says about layers, brought in line with a stack of them."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from matsmerge.errors import RecipeError

# What transformers calls the number of layers; of encoders and decoders, of each.
_NUMBERS = {
    "decoder": ("num_decoder_layers", "decoder_layers"),
    "encoder": ("encoder_layers", "num_layers", "num_hidden_layers"),
    "": ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "depth"),
}
_PER_LAYER = re.compile(r"layer|block|multipliers|heads")
# Lists of the numbers of some layers.
_INDICES = ("mlp_only_layers", "moe_layers", "cross_attention_layers", "attn_layer_indices")


def restack(
    config: Mapping[str, Any],
    prefix: str,
    num_layers: int,
    sources: Sequence[tuple[Mapping[str, Any], int]],
    changes: dict[str, Any],
) -> None:
    """Add to `changes` what a stack changes in the configuration of a model with `num_layers`.

    `prefix` begins the names of the layers; `sources` are, for each layer of the result, the
    configuration of the model it is from and its number there.
    """
    place, key = _find_number(config, prefix, num_layers)
    own = config[place] if place else config
    found: dict[str, Any] = {key: len(sources)}
    for name, value in own.items():
        if not isinstance(value, list):
            continue
        lists = [(c.get(place, {}) if place else c).get(name, value) for c, _ in sources]
        numbers = [number for _, number in sources]
        if name in _INDICES:
            found[name] = [
                k for k, (of, j) in enumerate(zip(lists, numbers, strict=True)) if j in of
            ]
        elif len(value) == num_layers and _PER_LAYER.search(name):
            found[name] = [
                of[j] if j < len(of) else value[min(j, len(value) - 1)]
                for of, j in zip(lists, numbers, strict=True)
            ]
    if place:
        changes.setdefault(place, {}).update(found)
    else:
        changes.update(found)


def _find_number(config: Mapping[str, Any], prefix: str, num_layers: int) -> tuple[str, str]:
    """Which part of a configuration says how many layers there are, and by which key."""
    parts = [name for name, value in config.items() if isinstance(value, dict)]
    kind = next((kind for kind in ("vision", "visual", "audio") if kind in prefix), "")
    if kind:
        order = [p for p in parts if p.startswith(kind[:3])]
    else:
        order = ["", *(p for p in parts if p.startswith(("text", "llm", "language")))]
    side = next((side for side in ("decoder", "encoder") if side in prefix and not kind), "")
    keys = dict.fromkeys((*_NUMBERS[side], *_NUMBERS[""]))
    for place in order:
        for key in keys:
            if (config[place] if place else config).get(key) == num_layers:
                return place, key
    raise RecipeError(
        f"stack: config.json does not say by any of {', '.join(keys)} that there are {num_layers} "
        f"layers ({prefix}), so the number of layers of the result cannot be written"
    )
