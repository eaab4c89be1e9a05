"""Statistics block by block, against those with all of the model in memory."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from prefix_families import pictures
from safetensors.torch import save_file
from tiny_models import (
    bert_config,
    gpt2_config,
    gpt_oss_config,
    llama_config,
    make_tokenizer,
    mixtral_config,
    save,
    t5_config,
    vit_config,
    write_rows,
)
from torch import nn
from transformers import (
    AlbertConfig,
    AlbertForSequenceClassification,
    BertForSequenceClassification,
    BertModel,
    GPT2LMHeadModel,
    GptOssForCausalLM,
    LlamaForCausalLM,
    MixtralForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    SwinConfig,
    SwinForImageClassification,
    T5ForConditionalGeneration,
    ViTForImageClassification,
)

from matsmerge.checkpoints.checkpoint import Checkpoint
from matsmerge.data.rows import read_data
from matsmerge.errors import DataError, OutputError, RecipeError, ResourceError
from matsmerge.models.streamed_model import EMPTY, StreamedModel
from matsmerge.statistics.collection_options import make_collection_options
from matsmerge.statistics.collection_run import Output
from matsmerge.statistics.prepared_blocks import PreparedBlocks, prepare_blocks, prepare_within
from matsmerge.statistics.prepared_collection import (
    ExampleChoice,
    PreparedCollection,
    prepare_collection,
)
from matsmerge.statistics.statistics import Statistics
from matsmerge.tasks.loaded_model import load_model
from matsmerge.tasks.task_file import TaskFile

TEXTS = ["a b c", "d", "e f g h", "b a", "c c d a e", "p o n m"]
EVERYTHING = "gram,kfac,fisher,block_fisher"


@dataclass(frozen=True)
class Kind:
    make: Callable[[], Any]
    rows: list[dict[str, Any]]
    precision: float = 1e-9  # some models compute parts in float32, whatever their dtype
    task: str | None = None


KINDS = {
    "bert": Kind(
        lambda: BertForSequenceClassification(bert_config(num_labels=3)),
        [{"text": t} for t in TEXTS],
    ),
    "llama": Kind(
        lambda: LlamaForCausalLM(llama_config()), [{"text": f"{t} a"} for t in TEXTS], 1e-5
    ),
    "mixtral": Kind(
        lambda: MixtralForCausalLM(mixtral_config()), [{"text": f"{t} a"} for t in TEXTS], 1e-5
    ),
    "gpt_oss": Kind(
        lambda: GptOssForCausalLM(gpt_oss_config()), [{"text": f"{t} a"} for t in TEXTS], 1e-5
    ),
    "gpt2": Kind(lambda: GPT2LMHeadModel(gpt2_config()), [{"text": f"{t} a"} for t in TEXTS]),
    "t5": Kind(
        lambda: T5ForConditionalGeneration(t5_config()),
        [{"input": t, "target": t[:3]} for t in TEXTS],
        1e-5,
    ),
    "choices": Kind(
        lambda: T5ForConditionalGeneration(t5_config()),
        [{"input": t, "choices": ["a b", "c", "d"][: 2 + len(t) % 2]} for t in TEXTS],
        1e-5,
        "multiple_choice",
    ),
    "vit": Kind(lambda: ViTForImageClassification(vit_config(num_labels=3)), pictures(0)),
    "resnet": Kind(
        lambda: ResNetForImageClassification(
            ResNetConfig(
                embedding_size=8,
                hidden_sizes=[8, 16],
                depths=[1, 2],
                layer_type="basic",
                num_labels=3,
            )
        ),
        pictures(0, 32),
    ),
    "swin": Kind(  # with a linear map between blocks
        lambda: SwinForImageClassification(
            SwinConfig(
                image_size=16,
                patch_size=2,
                embed_dim=8,
                depths=[2, 1],
                num_heads=[2, 2],
                window_size=4,
                num_labels=3,
            )
        ),
        pictures(0, 16),
    ),
}


@dataclass(frozen=True)
class Case:
    """A model in a folder, its data, and what to collect."""

    kind: Kind
    folder: Path
    options: dict[str, Any]

    def prepared(self, batch_size: int = 2, **loading: Any) -> PreparedCollection:
        options = make_collection_options(**self.options)
        file = TaskFile(task=self.kind.task, head=loading.pop("head", None))
        loaded = load_model(
            self.folder / "model", file, need_targets=options.wants_targets, **loading
        )
        data = read_data(self.folder / "data.jsonl")
        return prepare_collection(loaded, data, options, ExampleChoice(batch_size=batch_size))

    def blocks(self, batch_size: int = 2, **loading: Any) -> PreparedBlocks:
        return prepare_blocks(self.prepared(batch_size, device_map=EMPTY, **loading))


def case(
    name: str,
    folder: Path,
    statistics: str,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> Case:
    kind = KINDS[name]
    torch.manual_seed(0)
    model = kind.make().to(dtype)
    generator = torch.Generator().manual_seed(0)
    for buffer in model.buffers():
        if buffer.is_floating_point() and buffer.ndim:
            buffer += torch.rand(buffer.shape, generator=generator)
    is_text = "image" not in kind.rows[0]
    save(model, folder / "model", make_tokenizer() if is_text else None)
    write_rows(folder / "data.jsonl", kind.rows)
    return Case(kind, folder, {"statistics": statistics, "fisher": "true"} | options)


def assert_same(found: Statistics, expected: Statistics, precision: float = 1e-9) -> None:
    assert found.header == expected.header
    assert found.arrays.specs == expected.arrays.specs
    sizes = {name: float(expected.arrays[name].norm()) for name in expected.arrays.specs}
    for name, size in sizes.items():
        # Some gradients are zero but for rounding, such as those of the biases of keys.
        most = max(n for other, n in sizes.items() if other.split("/")[:2] == name.split("/")[:2])
        error = float((found.arrays[name] - expected.arrays[name]).norm())
        assert error <= precision * size + precision**1.5 * most, name


@pytest.mark.parametrize(
    ("name", "statistics"),
    [
        *((name, EVERYTHING) for name in KINDS),
        *(
            pytest.param(name, alone, marks=[] if name in ("bert", "t5") else [pytest.mark.long])
            for alone in ("gram", "kfac")
            for name in KINDS
        ),
    ],
)
def test_blocks_give_what_the_whole_model_gives(name: str, statistics: str, tmp_path: Path) -> None:
    one = case(name, tmp_path, statistics, held_out=0.3)
    assert_same(one.blocks().run(), one.prepared().run(), one.kind.precision)


def test_a_t5_in_bfloat16(tmp_path: Path) -> None:
    """Gradients that nearly cancel are rounded otherwise, but no more than in the whole model."""
    one = case("t5", tmp_path, "kfac", dtype=torch.bfloat16, fisher="empirical")
    blocks, whole = one.blocks(), one.prepared()
    assert {p.dtype for p in whole.loaded.model.parameters()} == {torch.bfloat16}
    exact = one.prepared(dtype="float32").run().arrays
    found, expected = blocks.run(), whole.run()
    assert found.header == expected.header

    def error(arrays: Checkpoint) -> float:
        pairs = [(arrays[name], exact[name]) for name in exact.specs]
        return sum(float((ours - e).norm() / e.norm()) for ours, e in pairs) / len(pairs)

    assert error(found.arrays) < 1.5 * error(expected.arrays) < 0.2


def test_answers_of_the_data(tmp_path: Path) -> None:
    one = case("llama", tmp_path, EVERYTHING, fisher="empirical", reduction="mean")
    assert_same(one.blocks().run(), one.prepared().run(), one.kind.precision)


@pytest.mark.parametrize("name", ["bert", "gpt2", "swin", "t5"])
def test_sketches(name: str, tmp_path: Path) -> None:
    """Also where the part that comes first has none."""
    one = case(name, tmp_path, "kfac", rank=2, held_out=0.3)
    found = one.blocks().run()
    assert found.header.sketching is not None
    assert_same(found, one.prepared().run(), one.kind.precision)


def test_answers_are_marked(tmp_path: Path) -> None:
    one = case("bert", tmp_path, "kfac", fisher="empirical", held_out=0.3)
    write_rows(tmp_path / "data.jsonl", [{"text": t, "label": len(t) % 3} for t in TEXTS])
    found = one.blocks().run()
    assert {of: s.marks and s.marks.num for of, s in found.header.sets.items()} == {
        of: s.num_examples for of, s in found.header.sets.items()
    }
    assert_same(found, one.prepared().run())


def test_several_answers_of_an_example(tmp_path: Path) -> None:
    one = case("gpt2", tmp_path, EVERYTHING, num_samples=3)
    assert_same(one.blocks().run(), one.prepared().run(), one.kind.precision)


@pytest.mark.parametrize("statistics", ["gram", EVERYTHING])
def test_some_parameters(statistics: str, tmp_path: Path) -> None:
    one = case("bert", tmp_path, statistics, parameters=("*.layer.0.*", "classifier.*"))
    assert_same(one.blocks().run(), one.prepared().run())


def test_batches_of_one_example(tmp_path: Path) -> None:
    one = case("bert", tmp_path, EVERYTHING)
    assert_same(one.blocks(batch_size=1).run(), one.prepared(batch_size=1).run())


def test_a_head_of_its_own(tmp_path: Path) -> None:
    one = case("bert", tmp_path, "kfac")
    torch.manual_seed(1)
    save(BertModel(bert_config()).double(), tmp_path / "model", make_tokenizer())
    head = tmp_path / "head.safetensors"
    save_file({"weight": torch.randn(3, 16).double(), "bias": torch.randn(3).double()}, head)
    assert_same(one.blocks(head=str(head)).run(), one.prepared(head=str(head)).run())


@pytest.mark.parametrize("statistics", ["gram", "kfac"])
def test_one_block_is_in_memory_and_loaded_as_often_as_said(
    statistics: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = case("llama", tmp_path, statistics).blocks()
    present: set[str] = set()
    num_loads: dict[str, int] = {}
    load, release = StreamedModel.load, StreamedModel.release

    def note_load(self: StreamedModel, names: Collection[str]) -> None:
        present.update(names)
        assert len({name.split(".")[2] for name in present if ".layers." in name}) <= 1
        for name in names:
            num_loads[name] = num_loads.get(name, 0) + 1
        load(self, names)

    def note_release(self: StreamedModel, names: Collection[str]) -> None:
        present.difference_update(names)
        release(self, names)

    monkeypatch.setattr(StreamedModel, "load", note_load)
    monkeypatch.setattr(StreamedModel, "release", note_release)
    blocks.run()
    assert not present
    of_blocks = {num for name, num in num_loads.items() if ".layers." in name}
    assert of_blocks == {blocks.needs.num_passes} == {1 if statistics == "gram" else 2}
    # Nobody needs the output of the last layer where there is no loss.
    assert ("lm_head.weight" in num_loads) == (statistics == "kfac")
    storage = blocks.cut.streamed.parameters["lm_head.weight"].untyped_storage()
    assert storage.nbytes() == 8


@pytest.mark.parametrize("statistics", ["gram", EVERYTHING])
def test_what_does_not_fit_is_kept_in_files(statistics: str, tmp_path: Path) -> None:
    one = case("t5", tmp_path, statistics)
    blocks = one.blocks()
    tight = replace(blocks, max_bytes=blocks.needs.by_blocks)
    assert tight.needs.disk(tight.max_bytes) == tight.needs.held + tight.needs.statistics > 0
    assert_same(tight.run(), one.prepared().run(), one.kind.precision)


def test_limits_of_memory(tmp_path: Path) -> None:
    one = case("llama", tmp_path, "kfac")
    needs = one.blocks().needs
    assert 0 < needs.by_blocks < needs.whole
    assert prepare_within(one.prepared(device_map=EMPTY), needs.whole) is None
    within = prepare_within(one.prepared(device_map=EMPTY), needs.whole - 1)
    assert within is not None
    assert within.max_bytes == needs.whole - 1
    with pytest.raises(ResourceError, match="block by block at least .* --max-memory allows"):
        prepare_within(one.prepared(device_map=EMPTY), needs.by_blocks - 1)


def test_full_disks_are_seen_before_work_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = case("llama", tmp_path, "kfac")
    needs = one.blocks().needs
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10}))
    with pytest.raises(OutputError, match="not enough disk space"):
        prepare_within(one.prepared(device_map=EMPTY), needs.by_blocks)
    with pytest.raises(OutputError, match="not enough disk space"):
        one.blocks().run(Output(tmp_path / "out.safetensors"))


def test_a_model_that_cannot_be_cut(tmp_path: Path) -> None:
    config = AlbertConfig(
        vocab_size=24, embedding_size=8, hidden_size=16, num_hidden_layers=2,
        num_attention_heads=2, intermediate_size=32, max_position_embeddings=32, num_labels=3,
    )  # fmt: skip
    one = case("bert", tmp_path, "gram")
    model = AlbertForSequenceClassification(config).double()
    save(model, tmp_path / "model", make_tokenizer())
    with pytest.raises(DataError, match="cannot be run block by block .* allow more memory"):
        one.blocks()
    prepared = one.prepared(device_map=EMPTY)
    assert prepare_within(prepared, 10**9) is None  # all of it may fit
    with pytest.raises(DataError, match="cannot be run block by block"):
        prepare_within(one.prepared(device_map=EMPTY), 100)


def test_weights_that_blocks_share(tmp_path: Path) -> None:
    """Their inputs are known block by block, and their gradients are not."""
    one = case("bert", tmp_path, "kfac")
    blocks = one.blocks()
    layers = blocks.cut.streamed.model.get_submodule("bert.encoder.layer")
    assert isinstance(layers, nn.ModuleList)
    for parameter in layers[1].parameters():
        assert parameter.untyped_storage().nbytes() == 8
    streamed = blocks.cut.streamed
    name = "bert.encoder.layer.0.output.dense.weight"
    streamed.owners[name].append("bert.encoder.layer.1.output.dense")
    cut = replace(blocks.cut)
    assert name in cut.resident
    fisher = Case(one.kind, one.folder, one.options | {"statistics": "fisher"})
    prepared = replace(blocks.prepared, collection=fisher.prepared().collection)
    with pytest.raises(RecipeError, match="used in several parts of the model"):
        replace(blocks, cut=cut, prepared=prepared).run()


def test_interrupted_runs_leave_nothing(tmp_path: Path) -> None:
    one = case("llama", tmp_path, "kfac")
    out = tmp_path / "out" / "statistics.safetensors"
    out.parent.mkdir()

    def stop(update: Any) -> None:
        if update.done and update.done > 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        one.blocks().run(Output(out), stop)
    assert not [*out.parent.iterdir()]
    found = one.blocks().run(Output(out, resume=True))
    assert [*out.parent.iterdir()] == [out]
    assert_same(found, one.prepared().run(), one.kind.precision)
    again = one.blocks().run(Output(out, resume=True))  # is left as it is
    assert again.header == found.header
    assert one.prepared().run(Output(out, resume=True)).header == found.header


def test_what_was_begun_otherwise_is_not_continued(tmp_path: Path) -> None:
    one = case("llama", tmp_path, "gram")
    out = tmp_path / "statistics.safetensors"
    (tmp_path / ".statistics.safetensors.partial").touch()
    with pytest.raises(OutputError, match="begun with all of the model in memory"):
        one.blocks().run(Output(out, resume=True))
