"""What goes with a model's weights, and what does not."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

import matsmerge
from matsmerge.checkpoints.companions import companion_files
from matsmerge.errors import CheckpointError

State = dict[str, Tensor]


def names(folder: Path) -> set[str]:
    return {path.name for path in companion_files(folder)}


def test_records_of_what_was_done_stay(tmp_path: Path) -> None:
    kept = {"config.json", "tokenizer.json", "vocab.txt", "chat_template.jinja", "spiece.model"}
    others = {
        "step.json",
        "merge.json",
        "training.json",
        "tuning.json",
        "results.json",
        "eval_results.json",
        "trainer_state.json",
        "model.safetensors.index.json",
        "requirements.txt",
        "README.md",
    }
    for name in kept | others:
        (tmp_path / name).write_text("{}")
    assert names(tmp_path) == kept


def test_code_only_where_the_configuration_refers_to_it(tmp_path: Path) -> None:
    for name in ("setup.py", "modeling_x.py", "layers.py", "tokenizing.py", "elsewhere.py"):
        (tmp_path / name).write_text("")
    (tmp_path / "modeling_x.py").write_text("import torch\nfrom .layers import (\n    A,\n)\n")
    (tmp_path / "layers.py").write_text("from .modeling_x import B\nfrom .gone import C\n")
    (tmp_path / "config.json").write_text("{}")
    assert names(tmp_path) == {"config.json"}
    auto_map = {"AutoModel": "modeling_x.XModel", "AutoConfig": "owner/name--elsewhere.XConfig"}
    (tmp_path / "config.json").write_text(json.dumps({"auto_map": auto_map}))
    assert names(tmp_path) == {"config.json", "modeling_x.py", "layers.py"}
    tokenizer = {"auto_map": {"AutoTokenizer": ["tokenizing.X", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    assert names(tmp_path) >= {"tokenizing.py", "tokenizer_config.json", "layers.py"}


@pytest.mark.parametrize(
    "auto_map", [3, [], {"AutoModel": 3}, {"AutoModel": "../../x.Y"}, {"a": ""}]
)
def test_odd_references(tmp_path: Path, auto_map: object) -> None:
    (tmp_path / "x.py").write_text("")
    (tmp_path / "config.json").write_text(json.dumps({"auto_map": auto_map}))
    assert names(tmp_path) == {"config.json"}


def test_a_merge_says_that_it_carries_code(
    make_state: Callable[..., State], save_model: Callable[..., Path], tmp_path: Path
) -> None:
    config = json.dumps({"auto_map": {"AutoModel": "modeling_x.XModel"}})
    base = save_model("base", make_state(0), config__json=config, modeling_x__py="1")
    (base / "step.json").write_text("{}")
    models = [save_model(f"m{i}", make_state(i)) for i in (1, 2)]
    with pytest.warns(UserWarning, match=r"code of base .*modeling_x.py; .*trust_remote_code"):
        out = matsmerge.merge(models, base, "task_arithmetic", out=tmp_path / "out").folder
    assert (out / "modeling_x.py").read_text() == "1"
    assert not (out / "step.json").exists()
    assert "trust_remote_code" in (out / "README.md").read_text()
    assert "modeling_x.py" in json.loads((out / "merge.json").read_text())["notes"][0]


@pytest.mark.parametrize("name", ["config.json", "vocab.txt", "modeling.py"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match=f"{name}: not a regular file"):
        companion_files(tmp_path)
