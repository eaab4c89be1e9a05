"""A collection that was saved, interrupted or killed ends in the bytes of one that was not."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from damaged_json import MISSING, edit_metadata, put
from forked_commands import run_mats
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from statistics_cases import Case, make_case
from tiny_models import bert_config, make_tokenizer, save, write_rows
from torch import Tensor, nn
from transformers import BertForSequenceClassification

import matsmerge
from matsmerge.files import whole_outputs
from matsmerge.statistics import partial_file
from matsmerge.statistics.partial_file import partial_path

EVERYTHING = "gram,kfac,fisher,block_fisher"
ALWAYS, NEVER = -1.0, float("inf")


def gather(case: Case, batches: Any, out: Path, dtype: str = "float32", **options: Any) -> bytes:
    """The bytes of the file."""
    given: dict[str, Any] = {"statistics": EVERYTHING, "loss": case.predict} | options
    matsmerge.collect(case.model, batches, out=out, dtype=dtype, **given)
    return out.read_bytes()


def interrupted(batches: list[Any], after: int) -> Iterator[Any]:
    for i, batch in enumerate(batches):
        if i == after:
            os.kill(os.getpid(), signal.SIGINT)
        yield batch


KINDS = ("bert", "t5", "gpt2", "ia3", "resnet", "gpt-oss")


@pytest.fixture(params=KINDS)
def case(request: pytest.FixtureRequest) -> Case:
    return make_case(request.param)


@pytest.mark.parametrize(
    ("case", "precision"),
    [
        ("bert", torch.float32),
        *((name, torch.float64) for name in KINDS),
        *(
            pytest.param(name, torch.float32, marks=pytest.mark.long)
            for name in KINDS
            if name != "bert"
        ),
    ],
    indirect=["case"],
)
def test_saving_and_interrupting_change_nothing(
    case: Case, precision: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case.model.to(precision)
    # Lengths differ from batch to batch, so that rows are gathered over several.
    batches = [_cast(batch, precision) for batch in case.batches(2) + case.batches(1)]
    options: dict[str, Any] = {"held_out": 0.3, "dtype": "float64"}
    monkeypatch.setattr(partial_file, "_SECONDS_BETWEEN", NEVER)
    expected = gather(case, batches, tmp_path / "whole.safetensors", **options)
    for seconds in (NEVER, ALWAYS):
        monkeypatch.setattr(partial_file, "_SECONDS_BETWEEN", seconds)
        out = tmp_path / f"{seconds}.safetensors"
        for after in (0, 2, 3):
            with pytest.raises(KeyboardInterrupt):
                gather(case, interrupted(batches, after), out, **options, resume=True)
        assert gather(case, batches, out, **options, resume=True) == expected
        assert not partial_path(out).exists()


def _cast(batch: Any, dtype: torch.dtype) -> Any:
    return {
        k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in batch.items()
    }


class Moody(nn.Module):
    """Its examples influence each other only where some are padded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, input_values: Tensor, attention_mask: Tensor) -> Tensor:
        x = input_values * attention_mask[..., None]
        if not bool(attention_mask.all()):
            x = x + x.mean(0)
        mean: Tensor = (self.second(self.first(x).tanh()) * attention_mask[..., None]).mean(1)
        return mean


def test_what_was_learnt_of_the_model_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether examples are run alone is decided by the first batch that is padded alike."""
    torch.manual_seed(0)
    model = Moody()
    batches = []
    for padded in (False, True, False, True, False):
        batch = {
            "input_values": torch.randn(3, 4, 6), "attention_mask": torch.ones(3, 4).long()
        }  # fmt: skip
        if padded:
            batch["attention_mask"][0, 2:] = 0
        batches.append(batch)

    def loss(model: nn.Module, batch: Any) -> Any:
        return model(**batch), torch.zeros(len(batch["input_values"]), dtype=torch.long)

    def run(out: Path, given: Any, **options: Any) -> bytes:
        with pytest.warns(UserWarning, match="one at a time"):
            matsmerge.collect(model, given, EVERYTHING, loss=loss, out=out, **options)
        return out.read_bytes()

    expected = run(tmp_path / "whole.safetensors", batches)
    out = tmp_path / "s.safetensors"
    with pytest.raises(KeyboardInterrupt):
        run(out, interrupted(batches, 3))
    assert run(out, batches, resume=True) == expected


def die_after(num_syncs: int) -> Callable[[], None]:
    """Has this process killed when it has written so many files to the disk."""

    def prepare() -> None:
        sync, left = whole_outputs.sync, [num_syncs]

        def count(path: Path) -> None:
            sync(path)
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        partial_file._SECONDS_BETWEEN = ALWAYS
        whole_outputs.sync = count

    return prepare


def test_a_killed_collection_ends_in_the_same_bytes(tmp_path: Path) -> None:
    """Killed three times: with a file half saved, just saved, and again."""
    torch.manual_seed(0)
    model = BertForSequenceClassification(bert_config(num_labels=2))
    folder = save(model, tmp_path / "model", make_tokenizer())
    rows = [{"text": " ".join("abcdef"[: 1 + i % 6]), "label": i % 2} for i in range(23)]
    write_rows(tmp_path / "data.jsonl", rows)

    def collect(out: str, *more: str, prepare: Callable[[], None] = lambda: None) -> int:
        options = ("--statistics", EVERYTHING, "--batch-size", "3", "--held-out", "0.3")
        given = ("collect", folder, "--data", tmp_path / "data.jsonl", *options)
        return run_mats(*given, "--out", tmp_path / out, *more, prepare=prepare).returncode

    assert collect("whole.safetensors") == 0
    for num_syncs in (2, 3, 4):
        code = collect("killed.safetensors", "--resume", prepare=die_after(num_syncs))
        assert code == -signal.SIGKILL
    assert collect("killed.safetensors", "--resume") == 0
    whole, killed = ((tmp_path / f"{n}.safetensors").read_bytes() for n in ("whole", "killed"))
    assert whole == killed
    # Killed when the file was there, and the partial one still: it is tidied up, and no more.
    (tmp_path / ".killed.safetensors.partial").write_bytes(b"")
    assert collect("killed.safetensors", "--resume") == 0
    assert (tmp_path / "killed.safetensors").read_bytes() == whole
    assert collect("killed.safetensors", "--resume", "--seed", "1") == 1
    assert sorted(p.name for p in tmp_path.glob(".*")) == []


def test_batches_are_not_taken_for_finished(tmp_path: Path) -> None:
    """Nobody knows whether batches given from Python are those that a file was made from."""
    out, model = tmp_path / "s.safetensors", nn.Linear(3, 2)
    matsmerge.collect(model, [torch.ones(4, 3)], out=out)
    with pytest.raises(matsmerge.OutputError, match="exists already; replace it"):
        matsmerge.collect(model, [torch.zeros(4, 3)], out=out, resume=True)
    found = matsmerge.collect(model, [torch.zeros(4, 3)], out=out, resume=True, overwrite=True)
    assert float(found.gram("").sum()) == 0


def test_interrupting_while_saving_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(path: Path) -> None:
        assert path.exists()
        raise KeyboardInterrupt

    monkeypatch.setattr("matsmerge.files.whole_outputs.sync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        matsmerge.collect(nn.Linear(3, 2), [torch.ones(4, 3)], out=tmp_path / "s.safetensors")
    assert list(tmp_path.iterdir()) == []


# Partial files that are damaged

KEY = "matsmerge_interrupted_collection_2"
STATE = "state.sets.main"
WRONG: list[tuple[str, object]] = [
    ("", 5),
    ("", None),
    ("identity", MISSING),
    ("identity", 5),
    ("state", []),
    ("state.num_batches", "1"),
    ("state.num_batches", -1),
    ("state.num_batches", float("nan")),
    ("state.num_batches", 10**300),
    ("state.num_batches", True),
    ("state.num_batches", 3),
    ("state.sets", {}),
    ("state.sets", {"other": {}}),
    (f"{STATE}.num_examples", -2),
    (f"{STATE}.num_examples", 3),
    (f"{STATE}.num_examples", 2.0),
    (f"{STATE}.num_examples", None),
    (f"{STATE}.sums", {"nothing": {"": 2}}),
    (f"{STATE}.sums.gram", {"": "x"}),
    (f"{STATE}.sums.gram", {"nowhere": 2}),
    (f"{STATE}.sums.kfac", {"nowhere": 2}),
    (f"{STATE}.sums.kfac", 5),
    (f"{STATE}.sums.fisher", {"nowhere": 0}),
    (f"{STATE}.sums.block_fisher", {"weight": 0}),
    ("state.leaders", {"nowhere": "nowhere"}),
    ("state.leaders", [1]),
    ("state.lessons", [{}]),
    ("state.lessons", "x"),
    ("state.lessons.0.batch", 0),
    ("state.lessons.0.is_padded", [True]),
    ("state.lessons.0.is_one_by_one", "no"),
    ("state.notes", [5]),
    ("surprise", 1),
]


def linear_loss(model: nn.Module, x: Tensor) -> Any:
    return model(x), torch.zeros(len(x), dtype=torch.long)


@pytest.fixture
def linear(tmp_path: Path) -> dict[str, Any]:
    """What to collect, and of what there is a partial file."""
    torch.manual_seed(0)
    batches = [torch.randn(2, 3) for _ in range(2)]
    given: dict[str, Any] = {
        "model": nn.Linear(3, 2),
        "statistics": EVERYTHING,
        "loss": linear_loss,
        "out": tmp_path / "s.safetensors",
    }
    with pytest.raises(KeyboardInterrupt):
        matsmerge.collect(batches=interrupted(batches, 0), **given)
    return given | {"batches": batches, "resume": True}


@pytest.mark.parametrize(("where", "wrong"), WRONG)
def test_wrong_values_in_a_partial_file(linear: dict[str, Any], where: str, wrong: object) -> None:
    edit_metadata(partial_path(linear["out"]), KEY, lambda content: put(content, where, wrong))
    with pytest.raises(matsmerge.MatsError, match=r"s\.safetensors\.partial: .*--overwrite"):
        matsmerge.collect(**linear)
    assert not linear["out"].exists()
    matsmerge.collect(**linear | {"resume": False, "overwrite": True})


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "9" * 6000, "NaN"])
def test_a_partial_file_that_is_not_json(linear: dict[str, Any], text: str) -> None:
    path = partial_path(linear["out"])
    save_file(load_file(path), path, metadata={KEY: text})
    with pytest.raises(matsmerge.StatisticsError, match="not valid JSON|a valid|--overwrite"):
        matsmerge.collect(**linear)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("main/gram/upper/", torch.ones(5)),
        ("main/gram/upper/", torch.full((6,), float("nan"))),
        ("main/gram/first/", torch.ones(4)),
        ("main/gram/rows/", torch.ones(9, 3)),
        ("main/gram/rows/", torch.ones(())),
        ("main/kfac/upper/", torch.ones(3).double()),
        ("main/fisher/sum/weight", torch.ones(3, 2)),
        ("main/block_fisher/upper/bias", torch.ones(2, 3)),
        ("main/gram/surprise/", torch.ones(3)),
    ],
)
def test_wrong_arrays_in_a_partial_file(linear: dict[str, Any], name: str, values: Tensor) -> None:
    path = partial_path(linear["out"])
    with safe_open(path, "pt") as opened:
        metadata = opened.metadata()
    save_file(load_file(path) | {name: values}, path, metadata=metadata)
    with pytest.raises(matsmerge.StatisticsError, match=r"\.partial: cannot be continued"):
        matsmerge.collect(**linear)


@pytest.mark.parametrize("num_bytes", [0, 5, 200, -1])
def test_a_partial_file_that_was_cut(linear: dict[str, Any], num_bytes: int) -> None:
    path = partial_path(linear["out"])
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(matsmerge.StatisticsError, match="truncated.*--overwrite"):
        matsmerge.collect(**linear)


def test_arrays_of_other_names_are_not_taken_for_parts(linear: dict[str, Any]) -> None:
    path = partial_path(linear["out"])
    with safe_open(path, "pt") as opened:
        metadata = opened.metadata()
    arrays = load_file(path)
    arrays["main/kfac/upper"] = arrays.pop("main/kfac/upper/")
    save_file(arrays, path, metadata=metadata)
    with pytest.raises(matsmerge.StatisticsError, match=r"\.partial: cannot be continued"):
        matsmerge.collect(**linear)
