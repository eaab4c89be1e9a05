"""`mats experiment` and `mats demo` on the command line."""

import re
import sys
from collections.abc import Callable
from html import unescape
from pathlib import Path

import pytest
import yaml
from tiny_suite import METHODS, make_base, make_data, tiny_suite

import matsmerge
from matsmerge.lab.experiments.suite_results import read_results

Mats = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experiment")
    make_base(folder / "base")
    make_data(folder / "data")
    content = tiny_suite(seeds=[0, 1]).model_dump(mode="json", exclude_unset=True)
    del content["methods"]["mats"]
    content["studies"] = {"costs": {"seeds": [1]}}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(content))
    return folder


def run(mats: Mats, place: Path, out: Path, *options: str) -> tuple[int, str, str]:
    local = ("--base", place / "base", "--data", place / "data", "--workers", 1)
    return mats("experiment", "run", place / "tiny.yaml", "--out", out, *local, *options)


def test_run_load_and_compare(
    mats: Mats, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = run(mats, place, tmp_path / "a", "--seeds", "0")
    assert code == 0
    assert "task_arithmetic" in out
    assert str(tmp_path / "a" / "report.html") in out.replace("\n", "")
    page = (tmp_path / "a" / "report.html").read_text()
    assert page.startswith("<!doctype html>")
    (call,) = re.findall(r"^model = (matsmerge\.load\(.*?\))", unescape(page), re.MULTILINE)
    with monkeypatch.context() as there:
        there.chdir(tmp_path / "a")
        assert eval(call, {"matsmerge": matsmerge}).tokenizer is not None
    results = read_results(tmp_path / "a")
    assert results.seeds == [0]
    assert results.variants["full"].costs == []  # a study of the other seed
    code, _, err = mats("experiment", "resume", tmp_path / "a", "--workers", 1, "--watch")
    assert code == 0
    assert "steps were done before" in err
    assert "watch it at http://127.0.0.1:" in err
    content = yaml.safe_load((tmp_path / "a" / "suite.yaml").read_text())
    content["methods"] = {"average": METHODS["average"]}
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(content))
    local = ("--base", place / "base", "--data", place / "data", "--workers", 1, "--quiet")
    code, out, _ = mats("experiment", "run", tmp_path / "other.yaml", "-o", tmp_path / "b", *local)
    assert (code, out) == (0, "")
    code, out, _ = mats("experiment", "compare", tmp_path / "a", tmp_path / "b")
    assert code == 0
    lines = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert "(+0.0)" in lines["average"]
    assert lines["task_arithmetic"].rstrip().endswith("-")


def test_list_names_all_suites_and_what_they_need(mats: Mats) -> None:
    code, out, _ = mats("experiment", "list")
    assert code == 0
    for name, needs in (("text-small", "packages"), ("paper-t0-8", "hub")):
        (line,) = (line for line in out.splitlines() if line.startswith(name))
        assert needs in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "text-smal"), "did you mean 'text-small'"),
        (("run", "text-small", "--seeds", "one"), "expected numbers"),
        (("run", "text-small", "--variants", "ful"), "did you mean 'full'"),
        (("resume", "nowhere"), "no run of a suite"),
        (("run", "text-small", "--seeds", "0,0"), "different numbers"),
        (("compare", "nowhere"), "two runs or more"),
        (("compare", "nowhere", "neither"), "no such file"),
        (("run", "paper-t0-8"), "google/t5-large-lm-adapt (base model)"),
    ],
)
def test_bad_input(
    mats: Mats, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = mats("experiment", *arguments)
    assert code == 1
    assert message in err.replace("\n", " ")
    assert list(tmp_path.iterdir()) == []


def test_what_lacks_is_said_before_the_first_step(
    mats: Mats, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    code, out, err = mats("demo", "--out", tmp_path / "demo")
    assert (code, out) == (1, "")
    assert "this needs accelerate" in err
    assert "pip install 'matsmerge[hf]'" in " ".join(err.split())
    assert not (tmp_path / "demo").exists()
