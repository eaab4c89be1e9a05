"""The commands as a user sees them: output, exit codes, errors."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from matsmerge.cli import consoles, merge_command
from matsmerge.version import __version__

State = dict[str, Tensor]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def models(make_state: Callable[..., State], save_model: Callable[..., Path]) -> list[Path]:
    return [save_model(f"m{i}", make_state(i)) for i in range(3)]


def test_help_and_version(mats: Run) -> None:
    assert mats()[0] == 0
    assert mats("--version")[1].strip() == __version__
    code, out, _ = mats("merge", "--help")
    assert code == 0
    assert all(option in out for option in ("--method", "--dry-run", "--resume", "--max-memory"))


def test_merge_without_a_file(mats: Run, models: list[Path], tmp_path: Path) -> None:
    base, a, b = models
    code, out, err = mats(
        "merge", "--method", "task_arithmetic", "--scale", 0.3, "--base", base,
        "--model", a, "--model", b, "--weight", 1, "--weight", 2, "--out", tmp_path / "out",
    )  # fmt: skip
    assert code == 0, err
    assert "2 models merged into" in out
    assert "merging" in err
    assert "error" not in err
    merged = load_file(tmp_path / "out" / "model.safetensors")
    x, y, z = (load_file(m / "model.safetensors")["layers.0.w"].double() for m in (base, a, b))
    torch.testing.assert_close(
        merged["layers.0.w"], (x + 0.3 * (y - x) + 0.6 * (z - x)).float(), rtol=2e-7, atol=1e-9
    )


def test_merge_from_a_file(mats: Run, models: list[Path], tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"base: {models[0]}\nmodels: [{models[1]}, {models[2]}]\n"
        "method: {name: ties, density: 0.5, scale: [0.2, 0.8]}\n"
    )
    code, out, err = mats("merge", recipe, "-o", tmp_path / "out", "--dtype", "bfloat16", "--quiet")
    assert (code, out, err) == (0, "", "")
    assert load_file(tmp_path / "out" / "model.safetensors")["embed.weight"].dtype == torch.bfloat16
    manifest = json.loads((tmp_path / "out" / "merge.json").read_text())
    assert manifest["recipe"]["method"] == {"name": "ties", "density": 0.5, "scale": [0.2, 0.8]}
    assert [i["name"] for i in manifest["inputs"]] == ["m1", "m2", "base"]
    found = manifest["parameters"]["layers.1.w"]
    assert len(found["measured"]["thresholds"]) == 2
    merged = load_file(tmp_path / "out" / "model.safetensors")["layers.1.w"]
    assert found["norm"] == pytest.approx(float(merged.double().norm()), rel=1e-2)
    assert manifest["parameters"]["position_ids"]["copied"]
    assert {rule["scale"] for rule in manifest["rules"]} == {0.2, 0.8}


def test_mergekit_file(mats: Run, models: list[Path], tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"merge_method: dare_ties\nbase_model: {models[0]}\nmodels:\n"
        f"  - model: {models[1]}\n    parameters: {{weight: 1.0, density: 0.5}}\n"
        "parameters: {int8_mask: true}\ndtype: float32\n"
    )
    code, _, err = mats("merge", recipe, "-o", tmp_path / "out")
    assert code == 0, err
    assert "note: int8_mask" in err


def test_json(mats: Run, models: list[Path], tmp_path: Path) -> None:
    arguments = ["merge", "--model", models[1], "--model", models[2], "--json"]
    code, out, err = mats(*arguments, "--dry-run")
    planned = json.loads(out)
    assert (code, err) == (0, "")
    assert planned["num_tensors"] == 7
    code, out, err = mats(*arguments, "-o", tmp_path / "out")
    assert (code, err) == (0, "")
    done = json.loads(out)
    assert done.pop("out") == str(tmp_path / "out")
    assert done == planned


def test_dry_run_writes_nothing(mats: Run, models: list[Path], tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    code, out, _ = mats(
        "merge", "--method", "ties", "--base", models[0], "--model", models[1], "--dry-run",
        "-o", tmp_path / "out",
    )  # fmt: skip
    assert code == 0
    for part in ("tensors", "to read", "to write", "peak memory, estimated", "disk free"):
        assert part in out
    assert sorted(tmp_path.rglob("*")) == before


def test_heads_and_notes(
    mats: Run, make_state: Callable[..., State], save_model: Callable[..., Path], tmp_path: Path
) -> None:
    for i, labels in ((1, 2), (2, 4)):
        save_model(f"m{i}", make_state(i) | {"classifier.weight": torch.ones(labels, 8)})
    arguments = ["merge", "--model", tmp_path / "m1", "--model", tmp_path / "m2"]
    code, _, err = mats(*arguments, "-o", tmp_path / "found")
    assert code == 0, err
    assert "note: kept apart as each model's own head" in err
    code, _, err = mats(*arguments, "-o", tmp_path / "named", "--heads", "classifier.*")
    assert (code, "note" in err) == (0, False)
    for out in ("found", "named"):
        assert sorted(p.name for p in (tmp_path / out / "heads").iterdir()) == [
            "m1.safetensors",
            "m2.safetensors",
        ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["merg"], "No such command 'merg'"),
        (["merge"], "no models"),
        (["merge", "--out"], "requires an argument"),
        (["merge", "--modle", "x"], "No such option"),
        (["merge", "--model", "M1"], "--out"),
        (["merge", "--model", "M1", "--model", "M1", "-o", "OUT"], "given twice"),
        (["merge", "--model", "M1", "--method", "tise", "-o", "OUT"], "did you mean 'ties'"),
        (["merge", "--model", "M1", "--scale", "2", "-o", "OUT"], "unknown parameter 'scale'"),
        (
            ["merge", "--model", "M1", "--weight", "1", "--weight", "2", "-o", "OUT"],
            "2 times --weight",
        ),
        (["merge", "--model", "M1", "--dtype", "int3", "-o", "OUT"], "dtype: input should be"),
        (["merge", "--model", "M1", "--device", "gpu", "-o", "OUT"], "device: "),
        (["merge", "--model", "M1", "--device", "cuda:99", "-o", "OUT"], "no 'cuda:99' on this"),
        (["merge", "--model", "M1", "--max-memory", "lots", "-o", "OUT"], "not a size"),
        (["merge", "--model", "M1", "--shard-size", "0", "-o", "OUT"], "'0' is not a size"),
        (["merge", "M1", "-o", "OUT"], "is a folder, not a recipe"),
        (["merge", "--model", "M1", "--max-memory", "1kB", "-o", "OUT"], "allow more"),
        (["merge", "--model", "M1", "--workers", "0", "-o", "OUT"], "--workers"),
        (["merge", "--model", "M1", "--heads", "nope", "-o", "OUT"], "matches no parameter"),
        (
            ["merge", "--model", "GONE", "--model", "ALSO", "-o", "OUT"],
            "GONE: no such.*\n.*ALSO: no such",
        ),
        (["merge", "r.yaml", "--model", "M1", "-o", "OUT"], "either the file or these options"),
        (["merge", "gone.yaml", "-o", "OUT"], "No such file"),
        (["inspect"], "Missing argument"),
        (["inspect", "GONE"], "no such file or folder"),
    ],
)
def test_user_errors_exit_with_1(
    mats: Run, models: list[Path], tmp_path: Path, arguments: list[str], message: str
) -> None:
    import re

    places = {"M1": str(models[1]), "OUT": str(tmp_path / "out")}
    code, _, err = mats(*(places.get(a, a) for a in arguments))
    assert code == 1, err
    assert re.search(message, err, re.DOTALL), err
    assert "error:" in err
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_bugs_exit_with_2(
    mats: Run, models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("our fault")

    monkeypatch.setattr(merge_command, "check_memory", broken)
    code, _, err = mats("merge", "--model", models[0], "-o", tmp_path / "out")
    assert code == 2
    assert "our fault" in err
    assert "bug in matsmerge" in err


def test_inspect_one(mats: Run, models: list[Path]) -> None:
    code, out, _ = mats("inspect", models[0])
    assert code == 0
    assert all(
        word in out for word in ("embedding", "matrix", "vector", "buffer", "float32", "total")
    )
    code, out, _ = mats("inspect", models[0], "--json")
    assert json.loads(out)["kinds"]["total"]["num_tensors"] == 7


def test_inspect_of_many_ties_is_short(mats: Run, tmp_path: Path) -> None:
    path = tmp_path / "tied.safetensors"
    save_file({"a": torch.ones(2)}, path, {f"b{i}": "a" for i in range(500)})
    code, out, _ = mats("inspect", path)
    assert code == 0
    assert "and 488 more that are tied" in out
    assert len(out.splitlines()) < 30


def test_not_more_errors_than_anybody_reads(capsys: pytest.CaptureFixture[str]) -> None:
    consoles.show_problems([f"problem {i}" for i in range(5000)])
    printed = capsys.readouterr().err
    assert len(printed.splitlines()) == 101
    assert "and 4900 more like these" in printed


def test_inspect_two(mats: Run, models: list[Path], save_model: Callable[..., Path]) -> None:
    code, out, _ = mats("inspect", models[0], models[1], "-q")
    assert code == 0
    assert "1 tensors equal, 6 changed" in out
    other = save_model("other", {"embed.weight": torch.ones(2, 2), "mine": torch.ones(1)})
    code, out, _ = mats("inspect", models[0], other, "--json")
    found = json.loads(out)
    assert found["only_second"] == ["mine"]
    assert found["other_shape"] == ["embed.weight"]


def test_schema(mats: Run) -> None:
    code, out, _ = mats("schema")
    assert code == 0
    jsonschema.Draft202012Validator.check_schema(json.loads(out))


def test_inputs_larger_than_the_memory_allowed(
    save_model: Callable[..., Path], tmp_path: Path
) -> None:
    """480 MB of inputs under a hard limit on private memory of 250 MB more than at the start."""
    for i in range(4):
        save_model(f"m{i}", {f"w{j}": torch.full((6_000_000,), float(i)) for j in range(5)})
    code = (
        "import resource, sys; from matsmerge.cli import main; import matsmerge.api;"
        "pages = int(open('/proc/self/statm').read().split()[5]);"
        "limit = pages * resource.getpagesize() + 250_000_000;"
        "resource.setrlimit(resource.RLIMIT_DATA, (limit, limit));"
        "sys.exit(main.run(sys.argv[1:]))"
    )
    models = [f"--model={tmp_path / f'm{i}'}" for i in range(1, 4)]
    result = subprocess.run(
        [sys.executable, "-c", code, "merge", "--method", "ties", "--base", tmp_path / "m0", *models,
         "-o", tmp_path / "out", "--max-memory", "150MB", "-q"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(merged["w3"], torch.full((6_000_000,), 2.0))


@pytest.mark.parametrize(
    "failure", [MemoryError(), RuntimeError("x: not enough memory: you tried to allocate 9 bytes")]
)
def test_want_of_memory_is_no_bug(
    mats: Run,
    models: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failure: Exception,
) -> None:
    def fail(*_: object) -> None:
        raise failure

    monkeypatch.setattr(merge_command, "check_memory", fail)
    code, _, err = mats("merge", "--model", models[0], "-o", tmp_path / "out")
    assert code == 1
    assert err.startswith("error: the machine, or a limit on this process, gave out")
    assert err.endswith("; continue with --resume\n")
