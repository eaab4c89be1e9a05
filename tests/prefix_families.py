"""Small models of several architectures with data of their own, to be merged along their blocks."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tiny_models import (
    bert_config,
    llama_config,
    make_tokenizer,
    save,
    t5_config,
    vit_config,
    write_rows,
)
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    T5ForConditionalGeneration,
    ViTForImageClassification,
)

import matsmerge

State = dict[str, Tensor]

TEXTS = (["a b c", "d", "e f g h", "b a", "c c d a e"], ["p o n m", "i j", "k l m a b", "a", "n n"])


@dataclass(frozen=True)
class Kind:
    """An architecture, each task's rows, and what the parameters of each section begin with."""

    make: Callable[[int], Any]  # of so many layers, where that is needed
    rows: Sequence[list[dict[str, Any]]]
    sections: list[tuple[str, ...]]


def pictures(seed: int, size: int = 8) -> list[dict[str, Any]]:
    g = torch.Generator().manual_seed(seed)
    shape = (size, size, 3)
    return [{"image": torch.randint(0, 256, shape, generator=g).tolist()} for _ in range(5)]


KINDS = {
    "bert": Kind(
        lambda num_layers: BertForSequenceClassification(
            BertConfig.from_dict(
                bert_config(num_labels=3).to_dict() | {"num_hidden_layers": num_layers}
            )
        ),
        [[{"text": t} for t in texts] for texts in TEXTS],
        [("bert.embeddings.",), ("bert.encoder.layer.0.",), ("bert.encoder.layer.1.",),
         ("bert.pooler.", "classifier.")],
    ),
    "t5": Kind(
        lambda _: T5ForConditionalGeneration(t5_config()),
        [[{"input": t, "target": t[:3]} for t in texts] for texts in TEXTS],
        [("encoder.block.0.",), ("encoder.block.1.",), ("encoder.final",), ("decoder.block.0.",),
         ("decoder.block.1.",), ("decoder.final",)],
    ),
    "llama": Kind(
        lambda _: LlamaForCausalLM(llama_config()),
        [[{"text": f"{t} a"} for t in texts] for texts in TEXTS],
        [("model.embed",), ("model.layers.0.",), ("model.layers.1.",), ("model.norm.", "lm_head.")],
    ),
    "vit": Kind(
        lambda _: ViTForImageClassification(vit_config(num_labels=3)),
        [pictures(0), pictures(1)],
        [("vit.embeddings.",), ("vit.layers.0.",), ("vit.layers.1.",),
         ("vit.layernorm.", "classifier.")],
    ),
    # With batch norms: running means go where the parameters go.
    "resnet": Kind(
        lambda _: ResNetForImageClassification(
            ResNetConfig(
                embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic",
                num_labels=3,
            )
        ),
        [pictures(0, 16), pictures(1, 16)],
        [("resnet.embedder.",), ("resnet.encoder.stages.0.",), ("resnet.encoder.stages.1.",),
         ("classifier.",)],
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """Two models in folders, and the data of each."""

    kind: Kind
    folder: Path

    @property
    def paths(self) -> list[Path]:
        return [self.folder / "m0", self.folder / "m1"]

    @property
    def data(self) -> list[Path]:
        return [self.folder / "d0.jsonl", self.folder / "d1.jsonl"]

    def merge(self, method: str = "regmean++", **options: Any) -> State:
        """In memory, without what it has to say."""
        given: dict[str, Any] = {"data": self.data} | options
        found: State = merge(self.paths, method=method, **given)
        return found


def merge(*args: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return matsmerge.merge(*args, **options)


def family(
    name: str, folder: Path, dtype: torch.dtype = torch.float64, num_layers: int = 2
) -> Family:
    """Models that differ in all their values."""
    kind = KINDS[name]
    for i in range(2):
        torch.manual_seed(0)
        model = kind.make(num_layers).to(dtype)
        g = torch.Generator().manual_seed(i)
        for name_of_buffer, buffer in model.named_buffers():
            if "running" in name_of_buffer:
                buffer += torch.rand(buffer.shape, generator=g)
        is_text = "image" not in kind.rows[i][0]
        save(model, folder / f"m{i}", make_tokenizer() if is_text else None, seed=i)
        write_rows(folder / f"d{i}.jsonl", kind.rows[i])
    return Family(kind, folder)


def tensors_of(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters, and buffers such as running means."""
    buffers = [(n, b) for n, b in model.named_buffers() if b.is_floating_point()]
    return [*model.named_parameters(), *buffers]


def plain_grams(model: Any, batches: Sequence[Any], tensors: Sequence[str]) -> dict[str, Tensor]:
    """Second moments of the real input rows of linear layers, by weight."""
    rows = plain_rows(model, batches, tensors)
    return {name: r.mT @ r / len(r) for name, r in rows.items()}


def plain_rows(model: Any, batches: Sequence[Any], tensors: Sequence[str]) -> dict[str, Tensor]:
    """The real input rows of linear layers and convolutions, by weight."""
    weights = {id(p): n for n, p in model.named_parameters() if n in tensors}
    modules = [
        (module, weights[id(module.weight)])
        for module in model.modules()
        if isinstance(module, (nn.Linear, nn.Conv2d)) and id(module.weight) in weights
    ]
    rows: dict[str, list[Tensor]] = {name: [] for _, name in modules}
    for batch in batches:
        handles = []
        for module, name in modules:

            def keep(module: nn.Module, args: Any, name: str = name, batch: Any = batch) -> None:
                x = args[0].detach()
                if isinstance(module, nn.Conv2d):
                    size, padding = module.kernel_size, module.padding
                    assert not isinstance(padding, str)
                    patches = nn.functional.unfold(x, size, 1, padding, module.stride)
                    rows[name].append(patches[0].T)
                    return
                for mask in batch.row_masks:
                    if x.shape[:-1] == mask.shape:
                        x = x[mask]
                rows[name].append(x.reshape(-1, x.shape[-1]))

            handles.append(module.register_forward_pre_hook(keep))
        with torch.no_grad():
            model(**batch.inputs)
        for handle in handles:
            handle.remove()
    return {name: torch.cat(own).double() for name, own in rows.items() if own}
