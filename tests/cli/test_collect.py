"""`mats collect` for every kind of task, and what it says when something is wrong."""

import getpass
import json
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from safetensors.torch import save_file
from tiny_models import (
    bert_config,
    clip_config,
    llama_config,
    make_tokenizer,
    save,
    t5_config,
    vit_config,
    write_rows,
)
from transformers import (
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    CLIPModel,
    LlamaForCausalLM,
    T5ForConditionalGeneration,
    ViTForImageClassification,
)

from matsmerge.cli.collect_command import LoadingOptions
from matsmerge.data.rows import read_data
from matsmerge.statistics.statistics_file import open_statistics
from matsmerge.tasks.kinds import TASKS
from matsmerge.tasks.loaded_model import load_model
from matsmerge.tasks.task import encode_all
from matsmerge.tasks.task_file import TaskFile

Run = Callable[..., tuple[int, str, str]]
Rows = list[dict[str, Any]]

SENTENCES = ["a b c", "d", "e f g h", "b a", "c c d a e"]


def classification(folder: Path) -> tuple[Path, Rows, list[str]]:
    model = BertForSequenceClassification(bert_config(num_labels=3)).double()
    rows = [{"text": t, "text_pair": "a d", "label": i % 3} for i, t in enumerate(SENTENCES)]
    return save(model, folder / "model", make_tokenizer()), rows, []


def words(folder: Path) -> tuple[Path, Rows, list[str]]:
    model = BertForTokenClassification(bert_config(num_labels=3)).double()
    rows = [
        {"tokens": t.split(), "labels": [i % 3 for i in range(len(t.split()))]} for t in SENTENCES
    ]
    return save(model, folder / "model", make_tokenizer()), rows, []


def seq2seq(folder: Path) -> tuple[Path, Rows, list[str]]:
    model = T5ForConditionalGeneration(t5_config()).double()
    rows = [{"input": t, "target": t[::-1]} for t in SENTENCES]
    return save(model, folder / "model", make_tokenizer()), rows, []


def language(folder: Path) -> tuple[Path, Rows, list[str]]:
    model = LlamaForCausalLM(llama_config()).double()
    rows = [{"question": t, "answer": "a b"} for t in SENTENCES]
    options = ["--columns", "input=question,target=answer"]
    return save(model, folder / "model", make_tokenizer()), rows, options


def conversations(folder: Path) -> tuple[Path, Rows, list[str]]:
    model = LlamaForCausalLM(llama_config()).double()
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role[0] + ' ' + m.content + ' </s> ' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'a ' }}{% endif %}"
    )
    rows = [
        {"messages": [{"role": "user", "content": t}, {"role": "assistant", "content": t[::-1]}]}
        for t in SENTENCES
    ]
    return save(model, folder / "model", tokenizer), rows, []


def choices(folder: Path) -> tuple[Path, Rows, list[str]]:
    model = T5ForConditionalGeneration(t5_config()).double()
    rows = [
        {"input": t, "choices": ["a b", "c", "d e f"][: 2 + i % 2], "label": i % 2}
        for i, t in enumerate(SENTENCES)
    ]
    return save(model, folder / "model", make_tokenizer()), rows, ["--task", "multiple_choice"]


def pictures(num: int) -> Rows:
    g = torch.Generator().manual_seed(0)
    return [
        {"image": torch.randint(0, 256, (8, 8, 3), generator=g).tolist(), "label": i % 3}
        for i in range(num)
    ]


def images(folder: Path) -> tuple[Path, Rows, list[str]]:
    model = ViTForImageClassification(vit_config(num_labels=3)).double()
    return save(model, folder / "model"), pictures(5), []


def clip_with_head(folder: Path) -> tuple[Path, Rows, list[str]]:
    model = CLIPModel(clip_config()).double()
    dim = model.config.projection_dim
    weight = torch.randn(3, dim, dtype=torch.float64)
    save_file({"weight": weight}, folder / "head.safetensors")
    return save(model, folder / "model"), pictures(5), ["--head", str(folder / "head.safetensors")]


def encoder_with_head(folder: Path) -> tuple[Path, Rows, list[str]]:
    head = {
        "classifier.weight": torch.randn(4, 16, dtype=torch.float64),
        "classifier.bias": torch.randn(4, dtype=torch.float64),
    }
    save_file(head, folder / "head.safetensors")
    rows = [{"text": t, "label": i % 4} for i, t in enumerate(SENTENCES)]
    path = save(BertModel(bert_config()).double(), folder / "model", make_tokenizer())
    options = ["--head", str(folder / "head.safetensors"), "--task", "sequence_classification"]
    return path, rows, options


def adapter(config: Any, folder: Path) -> tuple[Path, Rows, list[str]]:
    base = save(T5ForConditionalGeneration(t5_config()).double(), folder / "base", make_tokenizer())
    torch.manual_seed(1)
    model = get_peft_model(T5ForConditionalGeneration.from_pretrained(base), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn(parameter.shape))
    model.save_pretrained(folder / "adapter")
    rows = [{"input": t, "target": t[::-1]} for t in SENTENCES]
    return folder / "adapter", rows, []


def ia3(folder: Path) -> tuple[Path, Rows, list[str]]:
    config = IA3Config(
        task_type="SEQ_2_SEQ_LM", target_modules=["k", "v", "wo"], feedforward_modules=["wo"]
    )
    return adapter(config, folder)


def lora(folder: Path) -> tuple[Path, Rows, list[str]]:
    return adapter(LoraConfig(task_type="SEQ_2_SEQ_LM", target_modules=["q", "v"], r=2), folder)


@pytest.mark.parametrize(
    "make",
    [classification, words, seq2seq, language, conversations, choices, images, clip_with_head,
     encoder_with_head, ia3, lora],
)  # fmt: skip
def test_every_kind_of_task(
    make: Callable[[Path], tuple[Path, Rows, list[str]]], mats: Run, tmp_path: Path
) -> None:
    folder, rows, options = make(tmp_path)
    write_rows(tmp_path / "data.jsonl", rows)
    out = tmp_path / "s.safetensors"
    code, printed, err = mats(
        "collect", folder, "--data", tmp_path / "data.jsonl", "--statistics", "gram,fisher",
        "--batch-size", 3, "--out", out, *options, "--dtype", "float64", "--json",
    )  # fmt: skip
    assert code == 0, err
    assert json.loads(printed)["sets"] == {"main": len(rows)}
    statistics = open_statistics(out)
    expected = dense_fisher(folder, tmp_path / "data.jsonl", options)
    assert set(statistics.parameters("fisher")) <= set(expected)
    for name, values in expected.items():
        if name in statistics.header.without["fisher"]:
            assert not values.any(), name
        else:
            error = (statistics.fisher(name) - values).norm()
            assert float(error) <= 1e-6 * float(values.norm()) + 1e-20, name
    assert mats("inspect", out, folder)[0] == 0
    assert str(tmp_path) not in out.read_bytes().decode(errors="ignore")


def dense_fisher(folder: Path, data: Path, options: list[str]) -> dict[str, torch.Tensor]:
    """One example at a time, by plain backward passes."""
    given = dict(zip(options[::2], options[1::2], strict=True))
    loaded = load_model(folder, TaskFile(task=given.get("--task")), head=given.get("--head"))
    columns = {"input": "question", "target": "answer"} if "--columns" in given else {}
    examples = encode_all(loaded.task, read_data(data), columns)
    own = {
        n: p for n, p in loaded.model.named_parameters() if n in loaded.names and p.requires_grad
    }
    total = {loaded.names[n]: torch.zeros_like(p) for n, p in own.items()}
    for example in examples:
        loaded.model.zero_grad()
        loaded.task.predict(loaded.model, loaded.task.collate([example])).losses().sum().backward()
        for name, parameter in own.items():
            if parameter.grad is not None:
                total[loaded.names[name]] += parameter.grad**2 / len(examples)
    return total


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    folder, rows, _ = classification(tmp_path)
    write_rows(tmp_path / "data.jsonl", rows)
    return folder


def test_help_names_every_kind_of_task() -> None:
    described = LoadingOptions.model_fields["task"].description
    assert described is not None
    assert set(TASKS) <= set(re.findall(r"\w+", described))


def test_what_is_shown(mats: Run, bert: Path, tmp_path: Path) -> None:
    data, out = tmp_path / "data.jsonl", tmp_path / "s.safetensors"
    code, printed, err = mats("collect", bert, "--data", data, "--out", out, "--num-examples", 4)
    assert code == 0, err
    assert "4 examples of data.jsonl in" in printed
    assert "not the weight of a linear map" in printed
    assert "collecting" in err
    code, printed, _ = mats("inspect", out)
    assert code == 0
    assert all(part in printed for part in ("eff. rank", "condition", "attention.self.query"))
    code, printed, _ = mats("inspect", out, "--json")
    assert json.loads(printed)["header"]["sets"]["main"]["num_examples"] == 4
    assert mats("collect", bert, "--data", data, "--out", out)[0] == 1
    code, printed, err = mats("collect", bert, "--data", data, "--out", out, "--overwrite", "-q")
    assert (code, printed, err) == (0, "", "")


def test_shards_are_combined(mats: Run, bert: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (tmp_path / "data.jsonl").read_text().splitlines()]
    parts = []
    for i, some in enumerate((rows[:2], rows[2:])):
        write_rows(tmp_path / f"{i}.jsonl", some)
        parts.append(tmp_path / f"{i}.safetensors")
        assert (
            mats("collect", bert, "--data", tmp_path / f"{i}.jsonl", "--out", parts[-1], "-q")[0]
            == 0
        )
    code, printed, err = mats("stats", "combine", *parts, "--out", tmp_path / "all.safetensors")
    assert code == 0, err
    assert "2 + 3 = 5 examples" in printed
    whole = tmp_path / "whole.safetensors"
    assert mats("collect", bert, "--data", tmp_path / "data.jsonl", "--out", whole, "-q")[0] == 0
    a, b = open_statistics(tmp_path / "all.safetensors"), open_statistics(whole)
    torch.testing.assert_close(a.gram("classifier"), b.gram("classifier"))


def test_a_task_file_says_it_all(mats: Run, bert: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "d.jsonl", [{"s": "a b", "gold": "yes"}, {"s": "c", "gold": "no"}])
    (tmp_path / "task.yaml").write_text(
        "task: sequence_classification\ndata: d.jsonl\ncolumns: {text: s, label: gold}\n"
        "labels: ['no', 'yes', maybe]\n"
    )
    out = tmp_path / "s.safetensors"
    code, _, err = mats("collect", bert, "--task", tmp_path / "task.yaml", "--out", out, "-q")
    assert code == 0, err
    assert open_statistics(out).header.num_examples == 2


def test_no_path_is_published(mats: Run, bert: Path, tmp_path: Path) -> None:
    """A file of statistics is for others: it has names, and not where things lie."""
    rows = [{"text": t, "label": i % 2} for i, t in enumerate(SENTENCES)]
    write_rows(tmp_path / "data.jsonl", rows)
    (tmp_path / "task.yaml").write_text(
        "task: sequence_classification\ndata: data.jsonl\nsplits: {train: 0.5, test: 0.5}\n"
    )
    out = tmp_path / "s.safetensors"
    code, _, err = mats(
        "collect", bert, "--task", tmp_path / "task.yaml", "--split", "train", "--out", out
    )
    assert code == 0, err
    assert open_statistics(out).header.data[0].name == "data.jsonl (train)"
    assert open_statistics(out).header.model.name == bert.name
    content = out.read_bytes()
    assert str(tmp_path).encode() not in content
    # Names of users and machines may be short enough to turn up among the numbers.
    header = content[8 : 8 + int.from_bytes(content[:8], "little")].decode()
    for hidden in (getpass.getuser() + "@", socket.gethostname()):
        assert not re.search(rf"\b{re.escape(hidden)}", header)
    assert "data.jsonl (train)" in mats("inspect", out)[1]


def test_a_sorted_file_is_noticed(mats: Run, bert: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "d.jsonl", [{"text": "a b", "label": i // 5} for i in range(10)])
    arguments = ["collect", bert, "--data", tmp_path / "d.jsonl", "--num-examples", 5]
    code, _, err = mats(*arguments, "--out", tmp_path / "s.safetensors")
    assert code == 0
    assert "--shuffle" in err
    code, _, err = mats(*arguments, "--out", tmp_path / "t.safetensors", "--shuffle")
    assert "--shuffle" not in err


def test_the_same_data_is_not_added_twice(mats: Run, bert: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.safetensors"
    assert mats("collect", bert, "--data", tmp_path / "data.jsonl", "--out", out, "-q")[0] == 0
    code, _, err = mats("stats", "combine", out, out, "--out", tmp_path / "b.safetensors")
    assert code == 1
    assert "same data" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--data FILE"),
        (["--data", "{}/none.jsonl"], "no such file"),
        (["--data", "{}/empty.jsonl"], "empty"),
        (["--data", "{}/data.jsonl", "--columns", "text=txt"], "no column 'txt'.*--columns text=text"),
        (["--data", "{}/wrong.jsonl", "--statistics", "fisher"], "row 2: label 7 is out of range"),
        (["--data", "{}/data.jsonl", "--statistics", "gramm"], "'gramm' is not a kind"),
        (["--data", "{}/data.jsonl", "--task", "classification"], "--task 'classification'"),
        (["--data", "{}/data.jsonl", "--task", "seq2seq"], "seq2seq"),
        (["--data", "{}/data.jsonl", "--device", "cuda"], "device 'cuda': the model cannot be put there"),
        (["--data", "{}/data.jsonl", "--held-out", "1.5"], "held_out"),
        (["--data", "{}/data.jsonl", "--held-out", "0.01"], "both sets need at least one"),
        (["--data", "{}/data.jsonl", "--fisher", "exact"], "fisher: input should be 'empirical' or 'true'"),
    ],
)  # fmt: skip
def test_errors(mats: Run, bert: Path, tmp_path: Path, options: list[str], message: str) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    write_rows(tmp_path / "wrong.jsonl", [{"text": "a", "label": 0}, {"text": "b", "label": 7}])
    out = tmp_path / "s.safetensors"
    code, _, err = mats("collect", bert, "--out", out, *(o.format(tmp_path) for o in options))
    assert code == 1, err
    assert re.search(message, err.replace("\n", " ")), err
    assert not list(tmp_path.glob("*s.safetensors*"))


def test_what_is_wrong_with_any_model_is_said_first(mats: Run, bert: Path, tmp_path: Path) -> None:
    wrong = [{"text": "a", "label": 0}, {"text": "b", "label": 7}], [{"sentence": "a", "label": 0}]
    data = [tmp_path / name for name in ("data.jsonl", "label.jsonl", "column.jsonl")]
    outs = [tmp_path / f"{path.stem}.safetensors" for path in data]
    for path, rows in zip(data[1:], wrong, strict=True):
        write_rows(path, rows)
    options = [
        o for pair in zip(data, outs, strict=True) for o in ("--data", pair[0], "--out", pair[1])
    ]
    code, _, err = mats("collect", *[bert] * 3, *options, "--statistics", "fisher", "-q")
    assert code == 1
    assert "label 7 is out of range" in " ".join(err.split())
    assert "no column 'text'" in " ".join(err.split())
    assert not any(out.exists() for out in outs)
    data[1].write_text("")
    outs[0].write_text("something of somebody's")
    options[8:] = ["--data", tmp_path / "none.jsonl", "--out", outs[2]]
    options += ["--data", data[0], "--out", tmp_path / "other.safetensors"]
    code, _, err = mats("collect", *[bert] * 4, *options, "--statistics", "fisher", "-q")
    assert code == 1
    for message in ("exists already", "label.jsonl", "none.jsonl"):
        assert message in " ".join(err.split())
