"""Tiny models with tokenizers, in folders; nothing is downloaded."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BartConfig,
    BertConfig,
    CLIPConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedTokenizerFast,
    T5Config,
    ViTConfig,
)

from matsmerge.data.rows import Data, read_data

WORDS = ["<pad>", "<unk>", "<s>", "</s>", *"abcdefghijklmnop"]
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def bert_config(**options: Any) -> Any:
    return BertConfig(**SIZES, vocab_size=24, max_position_embeddings=32, **options)


def llama_config(**options: Any) -> Any:
    settings = {"vocab_size": 24, "num_key_value_heads": 2, "bos_token_id": 2, "eos_token_id": 3}
    return LlamaConfig(**SIZES | settings | options)


EXPERTS = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}


def mixtral_config(**options: Any) -> Any:
    return MixtralConfig(**SIZES, vocab_size=24, **EXPERTS | options)


def gpt_oss_config(**options: Any) -> Any:
    return GptOssConfig(**SIZES, vocab_size=24, head_dim=8, **EXPERTS | options)


def gpt2_config(**options: Any) -> Any:
    ids = {"bos_token_id": 2, "eos_token_id": 3}
    return GPT2Config(
        n_embd=16, n_layer=2, n_head=2, vocab_size=24, n_positions=32, **ids | options
    )


def t5_config(**options: Any) -> Any:
    ids = {"pad_token_id": 0, "eos_token_id": 3, "decoder_start_token_id": 0}
    return T5Config(
        d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, vocab_size=24, **ids | options
    )


def bart_config(**options: Any) -> Any:
    sizes = {f"{part}_{what}": 2 for part in ("encoder", "decoder") for what in ("layers",)}
    sizes |= {f"{part}_attention_heads": 2 for part in ("encoder", "decoder")}
    sizes |= {f"{part}_ffn_dim": 32 for part in ("encoder", "decoder")}
    ids = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 3}
    return BartConfig(
        d_model=16, vocab_size=24, max_position_embeddings=12, **sizes, **ids | options
    )


def vit_config(**options: Any) -> Any:
    return ViTConfig(**SIZES, image_size=8, patch_size=4, **options)


def clip_config(**options: Any) -> Any:
    text = SIZES | {"vocab_size": 24, "bos_token_id": 2, "eos_token_id": 3}
    vision = SIZES | {"image_size": 8, "patch_size": 4}
    return CLIPConfig(text_config=text, vision_config=vision, **{"projection_dim": 8} | options)


def make_tokenizer(
    words: Sequence[str] = WORDS, begin: bool = True, end: bool = True, **options: Any
) -> Any:
    """A token per word; `w+x` is two. Begins with <s> and ends with </s>, unless told."""
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.CharDelimiterSplit("+")]
    )
    first, last = ["<s>"] * begin, ["</s>"] * end
    tokenizer.post_processor = processors.TemplateProcessing(
        single=" ".join([*first, "$A", *last]),
        pair=" ".join([*first, "$A", *last, "$B:1", *(f"{word}:1" for word in last)]),
        special_tokens=[("<s>", 2), ("</s>", 3)],
    )
    names = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "<pad>"} | options
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def save(model: Any, folder: Path, tokenizer: Any = None, seed: int = 0) -> Path:
    """Save a model, all its values moved at random, with a tokenizer beside it."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    model.eval().save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> Data:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_data(path)
