"""`mats report` on a suite, and on a merge of tiny models; everything it refuses."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import matsmerge.lab
from matsmerge.errors import DataError
from matsmerge.lab.experiments.suite_results import MethodRow, Scores, SuiteResults, VariantResults
from matsmerge.lab.reports import merge_subspaces
from matsmerge.statistics.statistics_file import save_statistics

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    folder = tmp_path / "suite"
    folder.mkdir()
    rows = [
        MethodRow(method=method, seed=0, test=Scores(tasks={"a": score}, errors={"a": 0.01}))
        for method, score in {"average": 0.6, "mats": 0.8, "individual": 0.9}.items()
    ]
    results = SuiteResults(
        name="small", title="A small suite", about="Two methods.", suite={}, seeds=[0],
        variants={"full": VariantResults(tasks=["a"], comparison=rows)},
    )  # fmt: skip
    (folder / "results.json").write_text(results.model_dump_json())
    return folder


def test_a_suite_as_page_markdown_and_picture(
    suite: Path, tmp_path: Path, mats: Run, browser: str
) -> None:
    out = {name: tmp_path / name for name in ("r.html", "r.md", "r.png")}
    code, text, error = mats(
        "report",
        suite,
        "--out",
        out["r.html"],
        "--markdown",
        out["r.md"],
        "--picture",
        out["r.png"],
    )
    assert code == 0, error
    assert text.count("written: ") == 3
    assert "A small suite" in out["r.html"].read_text()
    assert "| mats | **80.0 ± 1.0** |" in out["r.md"].read_text()
    assert out["r.png"].read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r.html", "r.md", "r.png", "suite"]


def test_nothing_is_overwritten_by_itself(suite: Path, tmp_path: Path, mats: Run) -> None:
    page = tmp_path / "report.html"
    page.write_text("mine")
    code, _, error = mats("report", suite, "--out", page)
    assert code == 1
    assert "exists already; replace it with --overwrite" in error
    assert page.read_text() == "mine"
    assert mats("report", suite, "--out", page, "--overwrite")[0] == 0
    assert "A small suite" in page.read_text()


def test_only_markdown(
    suite: Path, tmp_path: Path, mats: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert mats("report", suite, "--markdown", "card.md", "--quiet")[:2] == (0, "")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["card.md", "suite"]
    assert mats("report", suite)[0] == 0
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere: no such folder"),
        (["empty"], "empty: is no run: expected results.json"),
        (["broken"], "not the results of a suite"),
        (["evaluated"], "holds scores of `mats evaluate`"),
        (["suite", "--out", "page.txt"], "page.txt: the name of this file ends in .html"),
        (["suite", "--scores", "evaluated"], "a suite has its own scores"),
    ],
)
def test_refusals(
    suite: Path,
    tmp_path: Path,
    mats: Run,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "results.json").write_text('{"name": 3}')
    (tmp_path / "evaluated").mkdir()
    (tmp_path / "evaluated" / "results.json").write_text('{"scores": {}}')
    (tmp_path / "evaluated" / "results.md").write_text("")
    code, _, error = mats("report", *arguments)
    assert code == 1
    assert message in " ".join(error.split())
    assert not list(tmp_path.glob("*.html"))


def test_a_merge_with_its_subspaces(
    tmp_path: Path,
    mats: Run,
    save_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    layers = {name: nn.Linear(6, 4) for name in ("base", "first", "second")}
    paths = {name: save_model(name, layer.state_dict()) for name, layer in layers.items()}
    for name in ("first", "second"):
        statistics = matsmerge.collect(layers[name], [torch.randn(50, 6)], "gram")
        save_statistics(statistics, paths[name] / "statistics.safetensors")
    merged = tmp_path / "merged"
    code, _, error = mats(
        "merge", "--method", "mats", "--base", paths["base"], "--model", paths["first"],
        "--model", paths["second"], "--out", merged, "--quiet",
    )  # fmt: skip
    assert code == 0, error
    page = tmp_path / "report.html"
    assert mats("report", merged, "--out", page, "--quiet")[0] == 0
    text = page.read_text()
    assert "2 models merged by mats" in text
    assert "Overlap of subspaces" in text
    assert "first and second share most" in text
    monkeypatch.setattr(merge_subspaces, "_MAX_BYTES", 10)
    assert mats("report", merged, "--out", page, "--overwrite", "--quiet")[0] == 0
    assert "`mats report --subspaces` does it" in page.read_text()
    again = ("--subspaces", "--out", page, "--overwrite", "--quiet")
    assert mats("report", merged, *again)[0] == 0
    assert "Overlap of subspaces" in page.read_text()
    (paths["first"] / "statistics.safetensors").unlink()
    assert mats("report", merged, "--out", page, "--overwrite", "--quiet")[0] == 0
    assert "Overlap of subspaces" not in page.read_text()


def test_a_picture_of_a_merge_needs_scores(
    tmp_path: Path, mats: Run, save_model: Callable[..., Path]
) -> None:
    models = [save_model(name, {"w": torch.ones(2, 2)}) for name in ("a", "b")]
    merged = tmp_path / "merged"
    options = ["--method", "average", "--model", models[0], "--model", models[1], "--quiet"]
    assert mats("merge", *options, "--out", merged)[0] == 0
    code, _, error = mats("report", merged, "--picture", tmp_path / "p.svg")
    assert code == 1
    assert "give those of this merge with --scores" in " ".join(error.split())


def test_where_the_model_is(
    tmp_path: Path, mats: Run, save_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is called from where the page lies; of a page elsewhere, by its last name."""
    models = [save_model(name, {"w": torch.ones(2, 2)}) for name in ("a", "b")]
    matsmerge.merge(models, out=tmp_path / "runs" / "merged")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pages").mkdir()
    for page, place in (
        ("report.html", "runs/merged"),
        ("runs/merged/report.html", "."),
        ("pages/report.html", "merged"),
    ):
        assert mats("report", "runs/merged", "--out", page, "--quiet")[0] == 0
        text = (tmp_path / page).read_text()
        assert f"matsmerge.load(&quot;{place}&quot;)" in text
        assert str(tmp_path) not in text


def test_from_python(tmp_path: Path, save_model: Callable[..., Path]) -> None:
    models = [save_model(name, {"w": torch.ones(2, 2)}) for name in ("a", "b")]
    merged = matsmerge.merge(models, out=tmp_path / "merged").folder
    written = [tmp_path / "r.html", tmp_path / "r.md"]
    assert matsmerge.lab.report(merged, written[0], markdown=written[1]) == written
    assert "2 models merged by average" in written[0].read_text()
    with pytest.raises(DataError, match="say what to write"):
        matsmerge.lab.report(merged)
