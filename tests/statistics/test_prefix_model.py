"""Gram matrices along a merged prefix, against plain forward passes of hybrid models."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
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
    AlbertConfig,
    AlbertForSequenceClassification,
    BertForSequenceClassification,
    LlamaForCausalLM,
    SwinConfig,
    SwinForImageClassification,
    T5ForConditionalGeneration,
    ViTForImageClassification,
)

import matsmerge
from matsmerge.data.rows import Data
from matsmerge.statistics.collection_options import make_collection_options
from matsmerge.statistics.joined_statistics import put_together, with_own
from matsmerge.statistics.prefix_model import PrefixModel
from matsmerge.statistics.prepared_collection import ExampleChoice, prepare_collection
from matsmerge.statistics.statistics import HELD_OUT, MAIN, Map, Origin, Statistics, in_memory
from matsmerge.statistics.task_data import TaskData
from matsmerge.tasks.batch import Batch
from matsmerge.tasks.loaded_model import LoadedModel, load_model
from matsmerge.tasks.task import Encoded, Task
from matsmerge.tasks.task_file import TaskFile

SENTENCES = ["a b c", "d", "e f g h", "b a", "c c d a e", "p o n m"]
GRAM = make_collection_options(statistics="gram")


@dataclass(frozen=True)
class Kind:
    """An architecture, rows of data for it, and what each of its sections begins with."""

    make: Callable[[], Any]
    rows: list[dict[str, Any]]
    sections: list[tuple[str, ...]]  # beginnings of parameter names
    decoder: tuple[str, ...] = ()  # modules whose input is the decoder's, where there is one
    task: str | None = None


def pictures(size: int) -> list[dict[str, Any]]:
    g = torch.Generator().manual_seed(0)
    return [
        {"image": torch.randint(0, 256, (size, size, 3), generator=g).tolist()} for _ in range(5)
    ]


T5_ROWS = [{"input": t, "target": t[:3]} for t in SENTENCES]
KINDS = {
    "bert": Kind(
        lambda: BertForSequenceClassification(bert_config(num_labels=3)),
        [{"text": t} for t in SENTENCES],
        [("bert.embeddings.",), ("bert.encoder.layer.0.",), ("bert.encoder.layer.1.",),
         ("bert.pooler.", "classifier.")],
    ),
    "t5": Kind(
        lambda: T5ForConditionalGeneration(t5_config()),
        T5_ROWS,
        # The embeddings, which are the output layer as well, come first.
        [("shared.",), ("encoder.block.0.",), ("encoder.block.1.",), ("encoder.final",),
         ("decoder.block.0.",), ("decoder.block.1.",), ("decoder.final",)],
        ("decoder.", "lm_head"),
    ),
    "choices": Kind(
        lambda: T5ForConditionalGeneration(t5_config()),
        [{"input": t, "choices": ["a b", "c", "d e f"][: 2 + i % 2]} for i, t in enumerate(SENTENCES)],
        [("shared.",), ("encoder.block.0.",), ("encoder.block.1.",), ("encoder.final",),
         ("decoder.block.0.",), ("decoder.block.1.",), ("decoder.final",)],
        ("decoder.", "lm_head"),
        "multiple_choice",
    ),
    "llama": Kind(
        lambda: LlamaForCausalLM(llama_config()),
        [{"text": f"{t} a"} for t in SENTENCES],
        [("model.embed",), ("model.layers.0.",), ("model.layers.1.",), ("model.norm.", "lm_head.")],
    ),
    "vit": Kind(
        lambda: ViTForImageClassification(vit_config(num_labels=3)),
        pictures(8),
        [("vit.embeddings.",), ("vit.layers.0.",), ("vit.layers.1.",),
         ("vit.layernorm.", "classifier.")],
    ),
    "swin": Kind(
        lambda: SwinForImageClassification(
            SwinConfig(
                image_size=16, patch_size=2, embed_dim=8, depths=[2, 1], num_heads=[2, 2],
                window_size=4, num_labels=3,
            )
        ),
        pictures(16),
        [("swin.embeddings.",), ("swin.encoder.layers.0.blocks.0.",),
         ("swin.encoder.layers.0.blocks.1.",), ("swin.encoder.layers.0.downsample.",),
         ("swin.encoder.layers.1.blocks.0.",), ("swin.layernorm.", "classifier.")],
    ),
}  # fmt: skip


def load(kind: Kind, folder: Path, seed: int = 0, **choice: Any) -> tuple[LoadedModel, TaskData]:
    """A model in double precision with random values, and its data in batches with padding."""
    torch.manual_seed(0)
    is_text = "image" not in kind.rows[0]
    model = kind.make().double()
    save(model, folder / str(seed), make_tokenizer() if is_text else None, seed)
    data = write_rows(folder / "data.jsonl", kind.rows)
    loaded = load_model(folder / str(seed), TaskFile(task=kind.task), need_targets=False)
    return loaded, task_data(loaded, data, **choice)


def task_data(loaded: LoadedModel, data: Data, held_out: float = 0.0, **choice: Any) -> TaskData:
    options = make_collection_options(statistics="gram", held_out=held_out)
    prepared = prepare_collection(
        loaded, data, options, ExampleChoice(**{"batch_size": 4} | choice)
    )
    return TaskData(loaded.task, prepared.batches, prepared.model, prepared.data)


def examples_of(data: TaskData) -> list[Any]:
    return [example for _, batch in data.batches for example in batch]


def dense_grams(
    model: Any, data: TaskData, kind: Kind, modules: list[str]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Second moments and means of real input rows, from plain passes of one example each."""
    rows: dict[str, list[Tensor]] = {name: [] for name in modules}
    for example in examples_of(data):
        batch = data.task.collate([example])
        real = batch.inputs.get("attention_mask")
        real_decoder = batch.inputs.get("decoder_attention_mask")

        def keep(module: nn.Module, args: Any, name: str, real: Any, real_decoder: Any) -> None:
            x = args[0].detach()
            if isinstance(module, nn.Conv2d):
                patches = nn.functional.unfold(x, module.kernel_size, stride=module.stride)
                rows[name].append(patches[0].T)
                return
            own = name.startswith(kind.decoder) and not name.endswith(
                ("EncDecAttention.k", "EncDecAttention.v")
            )
            mask = real_decoder if kind.decoder and own else real
            x = x.reshape(-1, x.shape[-1])
            if mask is not None and len(x) == mask.numel():
                x = x[mask.flatten().bool()]
            rows[name].append(x)

        handles = [
            model.get_submodule(name).register_forward_pre_hook(
                lambda m, a, name=name, r=real, d=real_decoder: keep(m, a, name, r, d)
            )
            for name in modules
        ]
        with torch.no_grad():
            model(**batch.inputs)
        for handle in handles:
            handle.remove()
    joined = {name: torch.cat(own) for name, own in rows.items()}
    return {name: (z.T @ z / len(z), z.mean(0)) for name, z in joined.items()}


def put_all(model: Any, state: dict[str, Tensor], beginnings: tuple[str, ...]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith(beginnings):
                parameter.copy_(state[name])


def linear_modules(model: Any, tensors: list[str]) -> list[str]:
    weights = {id(p) for n, p in model.named_parameters() if n in tensors}
    linear = (nn.Linear, nn.Conv2d)
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, linear) and id(module.weight) in weights
    ]


def is_linear(m: Map) -> bool:
    return m.layout != "embedding"


@pytest.mark.parametrize("name", KINDS)
def test_every_section_sees_the_merged_prefix(name: str, tmp_path: Path) -> None:
    """Merged weights before a section, the task's own in it, whatever after it."""
    kind = KINDS[name]
    own, data = load(kind, tmp_path, 1)
    merged = load(kind, tmp_path, 2)[0].model.state_dict()
    others = load(kind, tmp_path, 3)[0].model  # what is put over must not be seen
    state = copy.deepcopy(own.model.state_dict())
    names = {n: n for n, _ in own.model.named_parameters()}
    running = PrefixModel(others, data.first(3))
    sections = running.outline.sections
    assert len(sections) == len(kind.sections)
    seen: list[str] = []
    for section, beginnings in zip(sections, kind.sections, strict=True):
        learnt = [n for n in section.tensors if n in names]
        assert learnt == [n for n in names if n.startswith(beginnings)]
        hybrid = copy.deepcopy(own.model)
        if section.is_whole:
            running.put(names, lambda n: state[n])
        else:
            put_all(hybrid, merged, tuple(b for before in kind.sections for b in before))
            put_all(hybrid, state, beginnings)
            running.put(learnt, lambda n: state[n])
        found = running.collect(section, data, names, GRAM)
        modules = [m.module for m in found.header.maps if is_linear(m)]
        assert modules == linear_modules(hybrid, learnt)
        for module, (gram, mean) in dense_grams(hybrid, data, kind, modules).items():
            torch.testing.assert_close(found.gram(module), gram, rtol=1e-8, atol=1e-10)
            if hybrid.get_submodule(module).bias is not None:
                stored = found.stored(f"mean/{found.map_of(module).inputs}")
                torch.testing.assert_close(stored, mean, rtol=1e-8, atol=1e-10)
        seen += modules
        running.put(learnt, lambda n: merged[n])
        if section.block is not None:
            running.advance(section, data)
    assert len(seen) > 6


@pytest.mark.parametrize("name", ["bert", "choices"])
def test_with_one_model_it_is_what_collect_gives(name: str, tmp_path: Path) -> None:
    """Nothing merged, all sections put together: the same header and the same numbers."""
    kind = KINDS[name]
    loaded, data = load(kind, tmp_path, held_out=0.3)
    options = make_collection_options(statistics="gram", held_out=0.3)
    running = PrefixModel(loaded.model, data.first(3))
    parts = []
    for section in running.outline.sections:
        parts.append(running.collect(section, data, loaded.names, options))
        if section.block is not None:
            running.advance(section, data)
    rows = write_rows(tmp_path / "data.jsonl", kind.rows)
    prepared = prepare_collection(loaded, rows, options, ExampleChoice(batch_size=4))
    with prepared.collection.running():
        for to, batch in prepared.batches:
            prepared.collection.add(loaded.task.collate(batch), to)
        whole = prepared.collection.statistics(prepared.model, (prepared.data,))
    found = put_together(parts)
    assert described(found) == described(whole)
    for of in (MAIN, HELD_OUT):
        assert found.header.sets[of].num_examples == whole.header.sets[of].num_examples > 0
        for m in whole.header.maps:
            for bias in {False, whole.has(f"mean/{m.inputs}")}:
                expected = whole.gram(m.module, of, bias=bias)
                got = found.gram(m.module, of, bias=bias)
                torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-10)


def described(statistics: Statistics) -> dict[str, Any]:
    """A header, but for who shares an input with another section and the order."""
    header = statistics.header.model_dump(exclude={"maps", "sets", "forms"})
    maps = {m.module: m.model_dump(exclude={"inputs"}) for m in statistics.header.maps}
    return {**header, "maps": maps}


def test_rehearsing_says_what_there_will_be(tmp_path: Path) -> None:
    loaded, data = load(KINDS["t5"], tmp_path)
    running = PrefixModel(loaded.model, data.first(3))
    rehearsed = running.rehearse(data.first(2), loaded.names, GRAM)
    for section, expected in zip(running.outline.sections, rehearsed, strict=True):
        found = running.collect(section, data, loaded.names, GRAM)
        assert found.header.maps == expected.header.maps
        assert found.arrays.specs == expected.arrays.specs
        if section.block is not None:
            running.advance(section, data)
    # Two stacks, of which the last block's output is held for each batch.
    hidden = 0
    for _, batch in data.collated():
        hidden += batch.inputs["input_ids"].numel() + batch.inputs["decoder_input_ids"].numel()
    assert data.num_held_bytes >= hidden * 16 * 8
    data.begin()
    assert data.num_held_bytes == 0


def test_the_output_factors_are_the_models_own(tmp_path: Path) -> None:
    loaded, data = load(KINDS["bert"], tmp_path)
    rows = [{"text": t, "label": i % 3} for i, t in enumerate(SENTENCES)]
    again = load_model(tmp_path / "0")
    own_data = write_rows(tmp_path / "own.jsonl", rows)
    kfac = prepare_collection(
        again,
        own_data,
        make_collection_options(statistics="kfac,fisher"),
        ExampleChoice(batch_size=4),
    )
    with kfac.collection.running():
        for to, batch in kfac.batches:
            kfac.collection.add(again.task.collate(batch), to)
        own = kfac.collection.statistics(kfac.model, (kfac.data,))
    running = PrefixModel(loaded.model, data.first(3))
    section = running.outline.sections[1]
    changed = {n: n.replace("bert.", "") for n in loaded.names}
    running.put(["bert.embeddings.LayerNorm.weight"], lambda _: torch.full((16,), 2.0))
    inputs = running.collect(section, data, changed, GRAM)
    # The same layers under other names of modules, and others that these have not.
    renamed = [
        m.model_copy(
            update={
                "weight": m.weight.replace("bert.", ""),
                "module": f"x.{m.module}",
                "inputs": None,
            }
        )
        for m in own.header.maps
    ]
    arrays = {name.replace("outputs/", "outputs/x."): own.arrays[name] for name in own.arrays.specs}
    forms = {n.replace("outputs/", "outputs/x."): form for n, form in own.header.forms.items()}
    header = own.header.model_copy(update={"maps": tuple(renamed), "forms": forms})
    joined = with_own(inputs, in_memory(header, arrays))
    assert [m.module for m in joined.header.maps] == [m.module for m in inputs.header.maps]
    for m in joined.header.maps:
        assert m.outputs
        torch.testing.assert_close(joined.gram(m.module), inputs.gram(m.module))
        assert not torch.allclose(joined.gram(m.module), own.gram(m.module))
        torch.testing.assert_close(joined.output_factor(m.module), own.output_factor(m.module))
    name = "classifier.bias"
    torch.testing.assert_close(joined.fisher(name), own.fisher(name))


class Plain(Task[Encoded]):
    """A task whose examples are numbered vectors."""

    kind = "plain"
    required = ()
    files = ()

    def __init__(self) -> None:
        pass

    def encode(self, row: Any, number: int) -> Encoded:
        return Encoded(number, 1)

    def collate(self, examples: Sequence[Encoded]) -> Batch:
        g = torch.Generator().manual_seed(0)
        x = torch.randn(20, 3, 4, generator=g, dtype=torch.float64)
        numbers = [example.number for example in examples]
        return Batch({"x": x[numbers]}, numbers)


def plain_data(num_examples: int = 7, batch_size: int = 3) -> TaskData:
    examples = [Encoded(n, 1) for n in range(num_examples)]
    batches = [(MAIN, examples[i : i + batch_size]) for i in range(0, num_examples, batch_size)]
    origin = Origin(name="plain", fingerprint="")
    return TaskData(Plain(), batches, origin, origin)


class InPlace(nn.Module):
    """A block that changes its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return x.add_(self.linear(x) + sum(others))


class Stack(nn.Module):
    """Blocks one after the other; with `skip`, the last also sees what the first gave."""

    def __init__(self, skip: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(InPlace() for _ in range(3))
        self.skip = skip

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        a = self.layers[0](x)
        kept = [a.clone()] if self.skip else []
        last: Tensor = self.layers[2](self.layers[1](a), *kept)
        return last


def test_blocks_may_work_in_place() -> None:
    torch.manual_seed(0)
    model, data = Stack().double(), plain_data()
    running = PrefixModel(model, data.first(3))
    names = {n: n for n, _ in model.named_parameters()}
    running.rehearse(data.first(3), names, GRAM)
    for section in running.outline.sections:
        once = running.collect(section, data, names, GRAM)
        again = running.collect(section, data, names, GRAM)
        [m] = once.header.maps
        assert torch.equal(once.gram(m.module), again.gram(m.module))
        x = torch.cat([batch.inputs["x"] for _, batch in data.collated()])
        rows: list[Tensor] = []
        handle = model.get_submodule(m.module).register_forward_pre_hook(
            lambda _, args, rows=rows: rows.append(args[0].detach().clone().flatten(0, 1))
        )
        model(x.clone())
        handle.remove()
        torch.testing.assert_close(once.gram(m.module), rows[0].T @ rows[0] / len(rows[0]))
        if section.block is not None:
            running.advance(section, data)


def test_blocks_that_look_further_back_are_refused() -> None:
    model, data = Stack(skip=True).double(), plain_data()
    running = PrefixModel(model, data.first(3))
    names = {n: n for n, _ in model.named_parameters()}
    with pytest.raises(matsmerge.DataError, match=r"'layers\.2' cannot be run on the output"):
        running.rehearse(data.first(3), names, GRAM)


def test_layers_that_share_their_weights_are_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    config = AlbertConfig(**sizes, embedding_size=8, num_hidden_layers=3, vocab_size=24)
    kind = Kind(lambda: AlbertForSequenceClassification(config), KINDS["bert"].rows, [])
    loaded, data = load(kind, tmp_path)
    with pytest.raises(matsmerge.DataError, match="no layers that run once"):
        PrefixModel(loaded.model, data.first(3))


def test_data_of_another_kind_is_refused(tmp_path: Path) -> None:
    loaded, _ = load(KINDS["vit"], tmp_path)
    with pytest.raises(matsmerge.DataError, match="plain: cannot be shown to a ViTFor"):
        PrefixModel(loaded.model, plain_data().first(3))


def test_the_model_is_left_without_hooks(tmp_path: Path) -> None:
    loaded, data = load(KINDS["bert"], tmp_path)
    running = PrefixModel(loaded.model, data.first(3))
    running.rehearse(data.first(3), loaded.names, GRAM)
    for module in loaded.model.modules():
        assert "forward" not in vars(module)
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
