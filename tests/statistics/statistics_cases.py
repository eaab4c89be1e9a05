"""Tiny real architectures with examples of different lengths, for tests of statistics."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from peft import IA3Config, LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from matsmerge.tasks.prediction import IGNORED, Prediction

SMALL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
NUM_EXAMPLES = 7

Example = dict[str, Tensor]
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A model in float64, examples, and how they are put together and scored."""

    model: nn.Module
    examples: Sequence[Example]
    collate: Callable[[Sequence[Example], int], Batch]  # examples, columns of extra padding
    predict: Callable[[nn.Module, Batch], Prediction]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.predict(model, batch).losses()

    def batches(self, size: int, padding: int = 0) -> list[Batch]:
        starts = range(0, len(self.examples), size)
        return [self.collate(self.examples[i : i + size], padding) for i in starts]

    def runs(self) -> list[Callable[[], Tensor]]:
        """Each example's loss, alone and without padding."""

        def run(example: Example) -> Callable[[], Tensor]:
            return lambda: self.loss(self.model, self.collate([example], 0)).sum()

        return [run(example) for example in self.examples]


def _tokens(seed: int, length: int, num: int = 40) -> Tensor:
    return torch.randint(2, num, (length,), generator=torch.Generator().manual_seed(seed))


def _pad(rows: Sequence[Tensor], padding: int, value: int) -> Tensor:
    length = max(map(len, rows)) + padding
    return torch.stack([F.pad(row, (0, length - len(row)), value=value) for row in rows])


def _text_batch(examples: Sequence[Example], padding: int) -> Batch:
    ids = [e["ids"] for e in examples]
    batch = {
        "input_ids": _pad(ids, padding, 0),
        "attention_mask": _pad([torch.ones_like(i) for i in ids], padding, 0),
    }
    if "label" in examples[0]:
        batch["label"] = torch.stack([e["label"] for e in examples])
    return batch


def _classes(model: nn.Module, batch: Batch) -> Prediction:
    inputs = {k: v for k, v in batch.items() if k != "label"}
    return Prediction(model(**inputs).logits, batch["label"])


def _text_examples(with_label: bool) -> list[Example]:
    examples = []
    for i in range(NUM_EXAMPLES):
        example = {"ids": _tokens(i, 5 + i % 4)}  # longer than any target
        if with_label:
            example["label"] = torch.tensor(i % 3)
        examples.append(example)
    return examples


def bert() -> Case:
    config = BertConfig(**SMALL, vocab_size=40, num_labels=3)
    return Case(BertForSequenceClassification(config), _text_examples(True), _text_batch, _classes)


def _next_tokens(model: nn.Module, batch: Batch) -> Prediction:
    logits = model(**batch).logits
    targets = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)
    targets[:, :2] = IGNORED  # a prompt
    return Prediction(logits[:, :-1], targets[:, 1:])


def llama() -> Case:
    config = LlamaConfig(**SMALL, num_key_value_heads=1, vocab_size=40)
    return Case(LlamaForCausalLM(config), _text_examples(False), _text_batch, _next_tokens)


def mixtral() -> Case:
    config = MixtralConfig(
        **SMALL, num_key_value_heads=1, vocab_size=40, num_local_experts=5, num_experts_per_tok=2
    )
    return Case(MixtralForCausalLM(config), _text_examples(False), _text_batch, _next_tokens)


def qwen2_moe() -> Case:
    """An expert that all tokens share beside the others, a layer without, as wide as inside."""
    config = Qwen2MoeConfig(
        **SMALL, num_key_value_heads=1, vocab_size=40, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16, shared_expert_intermediate_size=12, mlp_only_layers=[0],
    )  # fmt: skip
    return Case(Qwen2MoeForCausalLM(config), _text_examples(False), _text_batch, _next_tokens)


def gpt_oss() -> Case:
    """Experts with transposed weights and biases, one of which no token is routed to."""
    config = GptOssConfig(
        **SMALL, num_key_value_heads=1, head_dim=8, vocab_size=40, num_local_experts=4,
        num_experts_per_tok=2,
    )  # fmt: skip
    model = GptOssForCausalLM(config)
    with torch.no_grad():
        model.model.layers[1].mlp.router.bias[2] = -1000
    return Case(model, _text_examples(False), _text_batch, _next_tokens)


def gpt2() -> Case:
    """Tied input and output embeddings, transposed weights, positions shared by all examples."""
    config = GPT2Config(
        n_embd=16, n_layer=2, n_head=2, vocab_size=40, n_positions=16,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return Case(GPT2LMHeadModel(config), _text_examples(False), _text_batch, _next_tokens)


def _seq2seq_batch(examples: Sequence[Example], padding: int) -> Batch:
    batch = _text_batch(examples, padding)
    targets = [e["target"] for e in examples]
    labels = _pad(targets, padding, IGNORED)
    decoder = F.pad(labels.masked_fill(labels == IGNORED, 0), (1, 0))[:, :-1]
    mask = _pad([torch.ones_like(t) for t in targets], padding, 0)
    return batch | {
        "decoder_input_ids": decoder,
        "decoder_attention_mask": mask,
        "targets": labels,
    }


def _seq2seq(model: nn.Module, batch: Batch) -> Prediction:
    inputs = {k: v for k, v in batch.items() if k != "targets"}
    return Prediction(model(**inputs).logits, batch["targets"])


def _t5() -> Any:
    config = T5Config(
        d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, vocab_size=40,
        relative_attention_num_buckets=8, relative_attention_max_distance=6,
        feed_forward_proj="gated-gelu", decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def _seq2seq_examples() -> list[Example]:
    return [
        example | {"target": _tokens(100 + i, 2 + i % 3)}
        for i, example in enumerate(_text_examples(False))
    ]


def t5() -> Case:
    """Relative position biases, cross-attention, norms of its own, tied embeddings."""
    return Case(_t5(), _seq2seq_examples(), _seq2seq_batch, _seq2seq)


def switch() -> Case:
    """Experts that are modules of their own, in the encoder and the decoder."""
    config = SwitchTransformersConfig(
        d_model=16, d_kv=8, d_ff=24, num_layers=1, num_decoder_layers=1, num_heads=2,
        vocab_size=40, num_experts=3, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1,
        relative_attention_num_buckets=8, relative_attention_max_distance=6,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = SwitchTransformersForConditionalGeneration(config)
    for module in model.modules():
        if "router" in type(module).__name__.lower():
            module.dtype = torch.float64  # not float32, whatever the model's is
    return Case(model, _seq2seq_examples(), _seq2seq_batch, _seq2seq)


def _image_batch(examples: Sequence[Example], padding: int) -> Batch:
    return {
        "pixel_values": torch.stack([e["image"] for e in examples]),
        "label": torch.stack([e["label"] for e in examples]),
    }


def _images(size: int = 8) -> list[Example]:
    g = torch.Generator().manual_seed(0)
    return [
        {
            "image": torch.randn(3, size, size, generator=g, dtype=torch.float64),
            "label": torch.tensor(i % 3),
        }
        for i in range(NUM_EXAMPLES)
    ]


def vit() -> Case:
    config = ViTConfig(**SMALL, image_size=8, patch_size=4, num_labels=3)
    return Case(ViTForImageClassification(config), _images(), _image_batch, _classes)


class Output(NamedTuple):
    logits: Tensor


class _WithHead(nn.Module):
    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(8, 3, bias=False)

    def forward(self, pixel_values: Tensor) -> Any:
        embeds = self.encoder(pixel_values).image_embeds
        logits = self.head(embeds / embeds.norm(dim=-1, keepdim=True))
        return Output(logits)


def clip_vision() -> Case:
    config = CLIPVisionConfig(**SMALL, image_size=8, patch_size=4, projection_dim=8)
    model = _WithHead(CLIPVisionModelWithProjection(config))
    return Case(model, _images(), _image_batch, _classes)


def resnet() -> Case:
    """Convolutions with strides and padding, batch norms, rectifiers that work in place."""
    config = ResNetConfig(
        embedding_size=4, hidden_sizes=[6, 8], depths=[1, 1], layer_type="basic", num_labels=3
    )
    return Case(ResNetForImageClassification(config), _images(16), _image_batch, _classes)


class _Depthwise(nn.Module):
    """Groups, dilation, padding by reflection, a layer used twice, and one never used."""

    def __init__(self) -> None:
        super().__init__()
        self.grouped = nn.Conv2d(3, 6, 3, groups=3, padding=1, padding_mode="reflect")
        self.depthwise = nn.Conv2d(6, 6, 3, groups=6, stride=2, padding=1)
        self.dilated = nn.Conv2d(6, 4, 2, dilation=2, padding="same", bias=False)
        self.scale = nn.Parameter(torch.ones(4, 1, 1))
        self.twice = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, pixel_values: Tensor) -> Any:
        x = torch.relu_(self.depthwise(torch.tanh(self.grouped(pixel_values))))
        x = (self.dilated(x) * self.scale).mean((2, 3))
        x = self.twice(torch.tanh(self.twice(x)))
        return Output(self.head(torch.relu_(x)))


def depthwise() -> Case:
    return Case(_Depthwise(), _images(), _image_batch, _classes)


def ia3() -> Case:
    config = IA3Config(target_modules=["k", "v", "wo"], feedforward_modules=["wo"])
    model = get_peft_model(_t5(), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "ia3_" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape))
    return Case(model, _seq2seq_examples(), _seq2seq_batch, _seq2seq)


def lora() -> Case:
    model = get_peft_model(llama().model, LoraConfig(target_modules=["q_proj", "v_proj"], r=2))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape))
    return Case(model, _text_examples(False), _text_batch, _next_tokens)


CASES: dict[str, Callable[[], Case]] = {
    "bert": bert,
    "t5": t5,
    "llama": llama,
    "gpt2": gpt2,
    "switch": switch,
    "vit": vit,
    "clip-vision": clip_vision,
    "resnet": resnet,
    "depthwise": depthwise,
    "ia3": ia3,
    "lora": lora,
}


# Their experts are fused, and the modules that their statistics are named by are there for a while.
EXPERTS: dict[str, Callable[[], Case]] = {
    "mixtral": mixtral,
    "qwen2-moe": qwen2_moe,
    "gpt-oss": gpt_oss,
}


def make_case(name: str) -> Case:
    """A case in float64, with weights large enough for every part to matter."""
    torch.manual_seed(0)
    case = (CASES | EXPERTS)[name]()
    with torch.no_grad():
        for p in case.model.parameters():
            p.add_(0.1 * torch.randn(p.shape))
    case.model.double().eval()
    return case
