"""What commands end with: what was made and where, how good it is, and which command is next."""

from collections.abc import Callable
from pathlib import Path

import pytest
from documented_models import make_documented_models

from matsmerge.cli.commands import COMMANDS

Run = Callable[..., tuple[int, str, str]]

TASKS = ["--task", "sst2.yaml", "--task", "trec.yaml"]
MODELS = ["tuned/sst2", "tuned/trec", "--base", "base"]
MERGEKIT = "merge_method: linear\nmodels: [{model: tuned/sst2, parameters: {weight: 1}}]\n"
# In this order; with words that the verdict has.
GIVEN: list[tuple[list[str], str]] = [
    (["init", *MODELS, "--method", "task_arithmetic", "--heads", "classifier.*"], "recipe.yaml"),
    (["train", "base", "--task", "sst2.yaml", "--max-steps", "2", "--out", "new"], "how good it is"),
    (["collect", "tuned/sst2", *TASKS[:2], "--split", "train", "--statistics", "gram"], "20 examples of"),
    (["stats", "combine", "tuned/sst2/statistics.safetensors", "--out", "all.safetensors"], "= 20 examples"),
    (["stats", "compress", "all.safetensors", "--rank", "2", "--out", "small.safetensors"], "of rank 2"),
    (["inspect", "all.safetensors"], "examples: "),
    (["inspect", "all.safetensors", "tuned/sst2"], "they belong together"),
    (["advise", *MODELS], "fit together"),
    (["merge", "recipe.yaml", "--dry-run"], "to write"),
    (["merge", "recipe.yaml", "--out", "merged"], "2 models merged into merged"),
    (["mergekit", "mergekit.yml", "as-mergekit"], "1 model merged into as-mergekit"),
    (["inspect", "merged"], "fingerprint"),
    (["inspect", "all.safetensors", "--subspace"], "effective rank"),
    (["inspect", "merged", "--subspace", "--statistics", "all.safetensors", "--model", "tuned/sst2", "--base", "base"], "merged weights from"),
    (["inspect", "base", "base"], "they are the same model"),
    (["inspect", "tuned/sst2", "merged"], "a typical tensor that changed differs by"),
    (["evaluate", "merged", *TASKS, "--out", "scores"], "on average; --individual TASK=MODEL says"),
    (["evaluate", "merged", "tuned/sst2", *TASKS[:2]], "best on average: "),
    (["evaluate", "merged", *TASKS[:2], "--individual", "sst2=tuned/sst2"], "of what a model of its own"),
    (["tune", "recipe.yaml", *TASKS, "--search", "scale=0,1", "--out", "best"], "on validation data; "),
    (["export", "merged", "--task", "sst2", "--out", "exported"], "is in exported"),
    (["extract-lora", "as-mergekit", "--base", "tuned/trec", "--rank", "2", "--out", "lora/new"], "the merged change"),
    (["cost", "recipe.yaml"], "of what training on all tasks does"),
    (["report", "merged", "--scores", "scores", "--out", "report.html"], "report.html"),
    (["experiment", "list"], "text-small"),
]  # fmt: skip
# Print JSON for programs; need the hub; are one of the suites.
OTHERS = {"schema", "push", "demo"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    make_documented_models(made)
    (made / "mergekit.yml").write_text(MERGEKIT)
    return made


def test_all_commands_are_here() -> None:
    assert {given[0] for given, _ in GIVEN} | OTHERS == COMMANDS.keys()


@pytest.mark.filterwarnings("ignore:'pin_memory' argument")  # of machines without a GPU
def test_last_lines(folder: Path, mats: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for given, verdict in GIVEN:
        code, printed, error = mats(*given)
        assert code == 0, (given, error)
        assert verdict in printed, (given, printed)
        last = printed.splitlines()[-1]
        assert last.startswith("next: "), (given, printed)
        if "--out" in given:
            assert given[-1] in printed, (given, printed)
