"""`mats inspect --subspace` on tiny models: what is shown, JSON, figures, and every refusal."""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from tiny_models import bert_config, make_tokenizer, save, write_rows
from torch import Tensor
from transformers import BertForSequenceClassification, BertModel

from matsmerge.cli import display, main
from matsmerge.statistics.statistics_file import open_statistics

Run = Callable[..., tuple[int, str, str]]
WORDS = {"first": "abcdef", "second": "efghij", "third": "klmnop"}
NUM_MAPS = 2 * 6 + 1  # of each layer query, key, value, two outputs and the one between; the pooler
NUM_GRAMS = 2 * 4 + 1


@dataclass(frozen=True)
class Merge:
    """A folder of models, their statistics, and an average of the first two."""

    folder: Path

    @property
    def merged(self) -> Path:
        return self.folder / "merged"

    def model(self, name: str) -> Path:
        return self.folder / name

    def statistics(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def arguments(self, *names: str) -> list[str]:
        options: list[str] = []
        for name in names:
            options += ["--model", str(self.model(name))]
            options += ["--statistics", str(self.statistics(name))]
        return options

    def weights(self, name: str) -> dict[str, Tensor]:
        return load_file(self.folder / name / "model.safetensors")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Merge:
    folder = tmp_path_factory.mktemp("subspace")
    torch.manual_seed(0)
    base = BertModel(bert_config()).double()
    save(base, folder / "base", make_tokenizer())
    for i, (name, words) in enumerate(WORDS.items()):
        model = BertForSequenceClassification(bert_config(num_labels=2 + i)).double()
        model.bert.load_state_dict(base.state_dict())
        save(model, folder / name, make_tokenizer(), seed=i + 1)
        letters = [words[j % 6 : j % 6 + 1 + j % 3] for j in range(12)]
        rows = [{"text": " ".join(t), "label": j % 2} for j, t in enumerate(letters)]
        write_rows(folder / f"{name}.jsonl", rows)
        command = [
            "collect",
            folder / name,
            "--data",
            folder / f"{name}.jsonl",
            "--dtype",
            "float64",
        ]
        command += ["--statistics", "gram", "--out", folder / f"{name}.safetensors", "--quiet"]
        assert main.run([str(part) for part in command]) == 0
    made = Merge(folder)
    first, second = made.weights("first"), made.weights("second")
    made.merged.mkdir()
    shared = {n: (v + second[n]) / 2 for n, v in first.items() if not n.startswith("classifier")}
    save_file(shared, made.merged / "model.safetensors")
    return made


def write_manifest(folder: Path, made: Merge, *, base: bool, statistics: bool) -> Path:
    """The merged model elsewhere, with a `merge.json` beside it."""
    folder.mkdir()
    (folder / "model.safetensors").write_bytes((made.merged / "model.safetensors").read_bytes())
    entries = [
        {"model": str(made.model(name)), "name": f"the-{name}"}
        | ({"statistics": str(made.statistics(name))} if statistics else {})
        for name in ("first", "second")
    ]
    recipe = {"models": entries} | ({"base": str(made.model("base"))} if base else {})
    (folder / "merge.json").write_text(json.dumps({"format": 1, "recipe": recipe}))
    return folder


def run_json(mats: Run, *arguments: object) -> Any:
    code, out, err = mats("inspect", *arguments, "--subspace", "--json")
    assert code == 0, err
    assert err == ""
    return json.loads(out)


def test_what_is_shown(mats: Run, made: Merge) -> None:
    code, out, err = mats("inspect", made.merged, "--subspace", *made.arguments("first", "second"))
    assert code == 0, err
    assert "decomposing" in err
    tables = out.split("\n\n")
    assert "90% of the trace" in tables[0]
    rows = [line for line in tables[0].splitlines() if line.startswith("bert.")]
    assert len(rows) == NUM_GRAMS
    query = r"bert\.encoder\.layer\.0\.attention\.self\.query +3 +16( +\d+\.\d \(\d+\)){2}( +\d\.\d\d){2} *"
    assert re.fullmatch(query, rows[0])
    found = re.search(
        r"1 first +1\.00 +(\d\.\d\d) +\d\.\d\d *\n2 second +(\d\.\d\d) +1\.00", tables[1]
    )
    assert found
    assert found[1] == found[2]
    assert re.search(r"second( +\d\.\d{3}){2}( +\d+\.\d%){3}", tables[2])
    assert "in |W|" in tables[2]
    worst = [float(x) for x in re.findall(r"(\d+\.\d)%", tables[3])]
    assert worst == sorted(worst, reverse=True)
    assert len(worst) == 8
    assert "left out: 3 of embeddings" in tables[4]
    assert "left out: 1 not in the merged model" in tables[4]


def test_json_against_dense(mats: Run, made: Merge) -> None:
    base = ["--base", made.model("base")]
    found = run_json(mats, made.merged, *made.arguments("first", "second"), *base, "--rank", 3)
    assert [task["name"] for task in found["tasks"]] == ["first", "second"]
    assert found["tasks"][1]["statistics"] == str(made.statistics("second"))
    assert (found["rank"], found["relative_to"]) == (3, "base")
    assert sum(len(layer["weights"]) for layer in found["layers"]) == NUM_MAPS
    assert set(found["skipped"]) >= {"not in the merged model"}
    layer = next(layer for layer in found["layers"] if layer["name"].endswith("0.output.dense"))
    weight = "bert.encoder.layer.0.output.dense.weight"
    assert (layer["weights"], layer["dim"]) == ([weight], 32)
    bases = {}
    for name in ("first", "second"):
        gram = open_statistics(made.statistics(name)).gram("bert.encoder.layer.0.output.dense")
        values, vectors = torch.linalg.eigh(gram)
        spectrum = layer["spectra"][name]
        assert len(spectrum["eigenvalues"]) == 32
        assert spectrum["eigenvalues"][:5] == pytest.approx(values.flip(0)[:5].tolist())
        assert spectrum["trace"] == pytest.approx(float(gram.trace()))
        assert spectrum["rank"] == 3
        assert spectrum["share"] == pytest.approx(float(values[-3:].sum() / gram.trace()))
        bases[name] = vectors[:, -3:]
        own = made.weights(name)[weight]
        moved = made.weights("merged")[weight] - own
        size = (own - made.weights("base")[weight.removeprefix("bert.")]).norm()
        inside = moved @ bases[name] @ bases[name].T
        distance = layer["distances"][name][weight]
        assert distance["inside"] == pytest.approx(float(inside.norm() / size))
        assert distance["outside"] == pytest.approx(float((moved - inside).norm() / size))
        outputs = (moved @ gram * moved).sum() / (own @ gram * own).sum()
        assert distance["at_outputs"] == pytest.approx(float(outputs.sqrt()))
    expected = float((bases["first"].T @ bases["second"]).square().sum()) / 3
    assert layer["overlap"][0][1] == pytest.approx(expected)
    assert layer["overlap_at_random"][0][1] == pytest.approx(3 / 32)
    overlaps = [layer["overlap"][1][0] for layer in found["layers"]]
    assert found["overlap"][1][0] == pytest.approx(sum(overlaps) / NUM_GRAMS)


def test_statistics_alone(mats: Run, made: Merge) -> None:
    first, second, third = (made.statistics(name) for name in WORDS)
    code, out, err = mats("inspect", first, second, "--subspace", "--layers", "bert.pooler.*")
    assert code == 0, err
    assert out.count("bert.") == 1
    assert "first" in out
    assert "inside" not in out
    found = run_json(mats, first, second, "--statistics", third, "--energy", 0.5)
    assert [task["name"] for task in found["tasks"]] == list(WORDS)
    assert (found["energy"], found["relative_to"], found["distances"]) == (0.5, None, {})
    assert len(found["layers"]) == NUM_GRAMS + 1  # the head's inputs are looked at, too
    for layer in found["layers"]:
        assert layer["distances"] == {}
        for spectrum in layer["spectra"].values():
            assert spectrum["rank"] == spectrum["num_for_energy"]
            assert spectrum["share"] >= 0.5
    one = run_json(mats, first)
    assert one["overlap"] == [[pytest.approx(1)]]
    code, out, _ = mats("inspect", first, "--subspace", "-q")
    assert code == 0
    assert "mean over layers" not in out


def test_many_tasks(mats: Run, made: Merge, tmp_path: Path) -> None:
    files = []
    for i, name in enumerate(list(WORDS) * 2):
        files.append(tmp_path / f"t{i}.safetensors")
        files[-1].write_bytes(made.statistics(name).read_bytes())
    others = [part for file in files[1:] for part in ("--statistics", file)]
    picture = tmp_path / "figure.html"
    arguments = [files[0], *others, "--layers", "bert.pooler.*", "--rank", 2]
    code, out, err = mats("inspect", *arguments, "--subspace", "--figure", picture)
    assert code == 0, err
    spectra = run_json(mats, *arguments)["layers"][0]["spectra"]
    ranks = [spectra[f"t{i}"]["effective_rank"] for i in range(6)]
    assert f" {min(ranks):.1f} (2)  {max(ranks):.1f} (2) " in out
    assert re.search(r"lowest +highest +overlap", out)
    assert re.search(r"6 t5( +\d\.\d\d){7}", out)


def test_identical_statistics_overlap(mats: Run, made: Merge, tmp_path: Path) -> None:
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(made.statistics("first").read_bytes())
    found = run_json(mats, made.statistics("first"), copy)
    assert found["overlap"][0][1] == pytest.approx(1)


def test_what_a_merge_was_made_of_is_known(mats: Run, made: Merge, tmp_path: Path) -> None:
    noted = write_manifest(tmp_path / "a", made, base=True, statistics=True)
    found = run_json(mats, noted)
    assert [task["name"] for task in found["tasks"]] == ["the-first", "the-second"]
    assert found["relative_to"] == "base"
    given = ["--base", made.model("base"), *made.arguments("first", "second")]
    again = run_json(mats, made.merged, *given)
    assert again["overlap"] == found["overlap"]
    assert list(again["distances"].values()) == list(found["distances"].values())
    # Models that are given are not the recipe's, and neither is the base then.
    assert run_json(mats, noted, *made.arguments("first", "second"))["relative_to"] == "model"
    without = write_manifest(tmp_path / "b", made, base=False, statistics=False)
    code, _, err = mats("inspect", without, "--subspace")
    assert (code, err.count("no merge.json names its statistics")) == (1, 2)
    files = [made.statistics(name) for name in ("first", "second")]
    options = ["--statistics", files[0], "--statistics", files[1]]
    assert run_json(mats, without, *options)["relative_to"] == "model"


def test_statistics_beside_a_model(mats: Run, made: Merge, tmp_path: Path) -> None:
    for name in ("first", "second"):
        folder = tmp_path / name
        folder.mkdir()
        for file, source in (
            ("model.safetensors", made.model(name) / "model.safetensors"),
            ("statistics.safetensors", made.statistics(name)),
        ):
            (folder / file).write_bytes(source.read_bytes())
    # One is a folder, the other a file in one.
    models = ["--model", tmp_path / "first", "--model", tmp_path / "second" / "model.safetensors"]
    found = run_json(mats, made.merged, *models)
    expected = run_json(mats, made.merged, *made.arguments("first", "second"))
    assert list(found["distances"].values()) == list(expected["distances"].values())


def test_what_merging_writes(mats: Run, made: Merge, tmp_path: Path) -> None:
    options = ["--base", made.model("base"), *made.arguments("first", "second")]
    code, _, err = mats("merge", "--method", "regmean", *options, "--out", tmp_path / "m", "-q")
    assert code == 0, err
    found = run_json(mats, tmp_path / "m")
    assert [task["statistics"] for task in found["tasks"]] == [
        str(made.statistics(name)) for name in ("first", "second")
    ]
    average = run_json(mats, made.merged, *options)
    assert found["overlap"] == average["overlap"]
    for name in ("first", "second"):
        ours, theirs = found["distances"][name], average["distances"][name]
        assert ours["at_outputs"] < theirs["at_outputs"]
        assert ours["inside_share"] < theirs["inside_share"]


def test_a_picture(mats: Run, made: Merge, tmp_path: Path, browser: str) -> None:
    file = tmp_path / "figure.svg"
    arguments = ["inspect", made.merged, "--subspace", *made.arguments("first", "second")]
    code, out, err = mats(*arguments, "--figure", file)
    assert code == 0, err
    assert str(file) in out
    drawn = file.read_bytes()
    assert drawn.startswith(b"<svg")
    for title in ("Spectra", "Overlap of subspaces", "Inside and outside of the subspace"):
        assert f">{title}<".encode() in drawn
    assert mats(*arguments, "--figure", file, "--json")[0] == 0
    assert file.read_bytes() == drawn


def test_a_page_has_what_there_is(mats: Run, made: Merge, tmp_path: Path) -> None:
    first, second = made.statistics("first"), made.statistics("second")
    merge = [made.merged, *made.arguments("first", "second")]
    for arguments, num_figures in (([first], 1), ([first, second], 2), (merge, 3)):
        file = tmp_path / "figure.html"
        code, _, err = mats("inspect", *arguments, "--subspace", "--figure", file)
        assert code == 0, err
        assert file.read_text().count('<figure class="figure"') == num_figures


def test_a_figure_needs_plotly_and_a_picture_a_browser(
    mats: Run, made: Merge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = made.statistics("first")
    arguments = ["inspect", first, "--subspace", "--figure", tmp_path / "f.png"]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "kaleido", None)
        code, out, err = mats(*arguments)
        assert (code, out) == (1, "")
        assert "pip install 'matsmerge[lab]'" in " ".join(err.split())
    with monkeypatch.context() as patch:
        patch.setattr("choreographer.browsers.chromium.Chromium.find_browser", lambda **_: None)
        code, out, err = mats(*arguments)
        assert (code, out) == (1, "")
        assert "drawn by Chrome or Chromium, and none was found; install" in " ".join(err.split())
    with monkeypatch.context() as patch:
        for name in [n for n in sys.modules if n.startswith("matsmerge.lab.reports")]:
            patch.delitem(sys.modules, name)
        patch.setitem(sys.modules, "plotly.graph_objects", None)
        assert "needs plotly" in " ".join(mats(*arguments)[2].split())
        assert mats("inspect", first, "--subspace")[0] == 0


def test_a_screen_shows_colours(mats: Run, made: Merge, monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(force_terminal=True, color_system="truecolor", width=120)
    monkeypatch.setattr(display, "stdout", console)
    first, second = made.statistics("first"), made.statistics("second")
    with console.capture() as shown:
        assert mats("inspect", first, second, "--subspace", "-q")[0] == 0
    assert "48;2;253;231;37m 1.00 " in shown.get()  # the brightest of viridis


FIRST = ["--model", "FIRST", "--statistics", "FIRST.safetensors"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["MERGED"], "0 models and 0 files.*--model MODEL --statistics FILE.*merge.json names them"),
        (["MERGED", "--model", "FIRST"], "FIRST: no merge.json names its statistics.*--statistics"),
        (["MERGED", "--statistics", "FIRST.safetensors"], "0 models and 1 files of statistics"),
        (["MERGED", *FIRST, "--model", "SECOND"], "2 models and 1 files.*in the same order"),
        (["MERGED", "SECOND", *FIRST], "one merged model.*--model"),
        (["FIRST.safetensors", "--model", "FIRST"], "holds statistics.*mats inspect MERGED"),
        (["FIRST.safetensors", "FIRST"], "FIRST: no file of statistics"),
        (["MERGED", "--model", "GONE", "--model", "LOST", *FIRST * 2], "4 models and 2"),
        (["MERGED", "--model", "GONE", "--statistics", "FIRST.safetensors"], "GONE: no such file or folder"),
        (["MERGED", "--model", "FIRST", "--statistics", "GONE.safetensors"], "GONE.safetensors: no such file"),
        (["MERGED", "--model", "FIRST", "--statistics", "SECOND.safetensors"], "collected from another model.*--force"),
        (["MERGED", *FIRST, "--base", "GONE"], "GONE: no such file or folder"),
        (["MERGED", *FIRST, "--rank", "0"], "rank: expected at least 1 direction, found 0"),
        (["MERGED", *FIRST, "--energy", "1.5"], "energy: .*found 1.5"),
        (["MERGED", *FIRST, "--energy", "nan"], "energy: .*found nan"),
        (["MERGED", *FIRST, "--energy", "most"], "Invalid value for '--energy'"),
        (["MERGED", *FIRST, "--energy", "0.5", "--rank", "3"], "either --rank or --energy"),
        (["MERGED", *FIRST, "--layers", "bert.poler.*"], "'bert.poler.\\*' matches no linear map"),
        (["MERGED", *FIRST, "--layers", "classifier"], "no linear map to look at .*1 not in the merged"),
        (["MERGED", *FIRST, "--figure", "figure.jpg"], "figure.jpg: the name of this file ends in .html or .png or .svg"),
        (["FISHER.safetensors"], "holds no Gram matrix, only fisher; collect with --statistics gram"),
        (["DAMAGED", *FIRST], "merge.json: recipe.models.0: .*damaged or edited"),
    ],
)  # fmt: skip
def test_errors(mats: Run, made: Merge, tmp_path: Path, arguments: list[str], message: str) -> None:
    if "FISHER.safetensors" in arguments:
        command = ["collect", made.model("first"), "--data", made.folder / "first.jsonl"]
        command += ["--statistics", "fisher", "--out", tmp_path / "fisher.safetensors", "--quiet"]
        assert mats(*command)[0] == 0
    damaged = write_manifest(tmp_path / "damaged", made, base=False, statistics=False)
    (damaged / "merge.json").write_text('{"recipe": {"models": [3]}}')
    places = {
        "MERGED": made.merged,
        "DAMAGED": damaged,
        "FISHER.safetensors": tmp_path / "fisher.safetensors",
    }
    for name in ("first", "second"):
        places |= {name.upper(): made.model(name)}
        places |= {f"{name.upper()}.safetensors": made.statistics(name)}
    code, out, err = mats("inspect", *(places.get(a, a) for a in arguments), "--subspace")
    assert (code, out) == (1, ""), err
    shown = " ".join(err.split()).replace(str(made.model("first")), "FIRST")
    assert re.search(message, shown), err
    assert "decomposing" not in err


def test_what_is_gone_since_the_merge(mats: Run, made: Merge, tmp_path: Path) -> None:
    noted = write_manifest(tmp_path / "a", made, base=True, statistics=True)
    content = (noted / "merge.json").read_text()
    for place, option in (
        (made.model("first"), "--model"),
        (made.statistics("second"), "--statistics"),
        (made.model("base"), "--base"),
    ):
        changed = content.replace(json.dumps(str(place)), '"/nowhere"')
        (noted / "merge.json").write_text(changed)
        code, _, err = mats("inspect", noted, "--subspace")
        assert code == 1
        assert re.search(
            f"/nowhere: no such .*merge.json names it.*{option}", " ".join(err.split())
        )


def test_force(mats: Run, made: Merge) -> None:
    options = ["--model", made.model("first"), "--statistics", made.statistics("second")]
    found = run_json(mats, made.merged, *options, "--force")
    assert found["distances"]["first"]["inside"] > 0


def test_options_of_subspaces_alone(mats: Run, made: Merge) -> None:
    options = ["--model", "m", "--rank", 0, "--energy", 0, "--layers", "x", "--figure", "f.png"]
    code, _, err = mats("inspect", made.merged, *options, "--force")
    assert code == 1
    expected = "--model, --rank, --energy, --layers, --figure, --force: only with --subspace"
    assert expected in " ".join(err.split())
