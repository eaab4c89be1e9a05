"""Files that never end, or are none: refused at once, whichever command they are given to."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., tuple[int, str, str]]

COMMANDS = {
    "merge": ["merge", "GIVEN", "--out", "OUT"],
    "tune": ["tune", "GIVEN", "--out", "OUT"],
    "collect": [
        "collect",
        "MODEL",
        "--task",
        "GIVEN",
        "--data",
        "GIVEN",
        "--out",
        "OUT.safetensors",
    ],
    "evaluate": ["evaluate", "MODEL", "--task", "GIVEN"],
    "experiment": ["experiment", "run", "GIVEN", "--out", "OUT"],
    "report": ["report", "GIVEN", "--out", "OUT.html"],
}
BOMB = "a0: &a0 [x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 11)
)


@pytest.fixture
def given(tmp_path: Path) -> dict[str, Path]:
    """Files by what is wrong with them."""
    paths = {
        kind: tmp_path / f"{kind}.yaml"
        for kind in ("zero", "pipe", "folder", "huge", "bomb", "date", "set", "bytes", "deep")
    }
    paths["zero"].symlink_to("/dev/zero")
    os.mkfifo(paths["pipe"])
    paths["folder"].mkdir()
    with paths["huge"].open("wb") as file:
        file.truncate(2**40)
    paths["bomb"].write_text(BOMB)
    paths["date"].write_text("models: 2020-99-99\nmethod: 2020-01-01\nrecipe: 2020-01-01\n")
    paths["set"].write_text("models: !!set {a, b}\nmethod: average\n")
    paths["bytes"].write_bytes(b"\xff\xfe\x00")
    paths["deep"].write_text("[" * 3000)
    return paths


@pytest.mark.parametrize("command", COMMANDS)
def test_given_files(command: str, mats: Run, given: dict[str, Path], tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for kind, path in given.items():
        places = {"GIVEN": path, "OUT": tmp_path / "out", "MODEL": model}
        places |= {f"OUT{end}": tmp_path / f"out{end}" for end in (".safetensors", ".html")}
        code, out, err = mats(*(places.get(part, part) for part in COMMANDS[command]))
        assert (code, out) == (1, ""), f"{kind}: {err}"
        assert "Traceback" not in err
        assert not (tmp_path / "out").exists()


def test_a_name_that_no_file_can_have(mats: Run, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"models: [{'x' * 5000}, b]\nmethod: average\n")
    code, _, err = mats("merge", recipe, "--out", tmp_path / "out")
    assert code == 1, err
