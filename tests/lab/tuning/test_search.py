"""`mats tune`: what is chosen is what scores best, and test data stays unseen."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tiny_models import bert_config, make_tokenizer, save, write_rows
from transformers import BertForSequenceClassification

import matsmerge.lab
from matsmerge.errors import RecipeError
from matsmerge.files.journal_file import JournalFile, read_journal_lines
from matsmerge.lab.tuning import trial_score
from matsmerge.lab.tuning.search_space import Range, SearchSpace, parse_values
from matsmerge.lab.tuning.trials import Trial, trial_table

Run = Callable[..., tuple[int, str, str]]

WORDS = "abcdefgh"


def rows(seed: int, num: int = 60) -> list[dict[str, Any]]:
    g = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, len(WORDS), (num, 4), generator=g)
    return [
        {"text": " ".join(WORDS[int(w)] for w in words), "label": int(words.sum()) % 3}
        for words in drawn
    ]


@pytest.fixture
def setting(tmp_path: Path, mats: Run) -> Path:
    """Two fine-tuned models, their base, statistics and task files."""
    base = BertForSequenceClassification(bert_config(num_labels=3))
    save(base, tmp_path / "base", make_tokenizer())
    for i, name in enumerate(("one", "two")):
        model = BertForSequenceClassification.from_pretrained(tmp_path / "base")
        save(model, tmp_path / name, make_tokenizer(), seed=i + 1)
        write_rows(tmp_path / f"{name}.jsonl", rows(i))
        (tmp_path / f"{name}.yaml").write_text(
            f"data: {name}.jsonl\nsplits: {{train: 20, validation: 25, test: 15}}\n"
        )
        code, _, error = mats(
            "collect",
            tmp_path / name,
            "--task",
            tmp_path / f"{name}.yaml",
            "--split",
            "train",
            "-q",
        )
        assert code == 0, error
    return tmp_path


def recipe(folder: Path, method: Any, **more: Any) -> Path:
    path = folder / "recipe.yaml"
    content = {
        "models": [str(folder / n) for n in ("one", "two")],
        "base": str(folder / "base"),
        "method": method,
        "heads": "classifier.*",
        **more,
    }
    path.write_text(yaml.safe_dump(content))
    return path


def tasks(folder: Path) -> list[Any]:
    return ["--task", folder / "one.yaml", "--task", folder / "two.yaml"]


def evaluated(mats: Run, model: Path, folder: Path, split: str = "validation") -> dict[str, float]:
    code, out, error = mats("evaluate", model, *tasks(folder), "--split", split, "--json")
    assert code == 0, error
    (scores,) = json.loads(out)["scores"].values()
    return {task: found["accuracy"]["value"] for task, found in scores.items()}


def test_the_best_of_a_grid(setting: Path, mats: Run) -> None:
    path = recipe(setting, "task_arithmetic")
    code, out, error = mats(
        "tune", path, *tasks(setting), "--search", "scale=0:1:0.25", "--out", setting / "tuned",
        "--json",
    )  # fmt: skip
    assert code == 0, error
    result = json.loads(out)
    assert result["num_trials"] == 5
    trials = json.loads((setting / "tuned" / "tuning.json").read_text())["trials"]
    by_hand = {}
    for scale in (0, 0.25, 0.5, 0.75, 1):
        merged = setting / f"scale{scale}"
        code, _, error = mats(
            "merge", recipe(setting, {"name": "task_arithmetic", "scale": scale}), "--out", merged,
            "-q",
        )  # fmt: skip
        assert code == 0, error
        found = evaluated(mats, merged, setting)
        by_hand[scale] = sum(found.values()) / 2
    for trial in trials:
        assert trial["score"] == pytest.approx(by_hand[trial["choice"]["scale"]], abs=1e-12)
    assert result["score"] == pytest.approx(max(by_hand.values()), abs=1e-12)
    # Evaluating what was chosen gives the score that was printed.
    assert evaluated(mats, setting / "tuned" / "model", setting) == result["scores"]
    chosen = yaml.safe_load((setting / "tuned" / "recipe.yaml").read_text())
    assert chosen["method"] == {"name": "task_arithmetic", **result["choice"]}


def test_iterations_come_from_one_run(
    setting: Path, mats: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matsmerge.lab.tuning import search as tuning

    merges = []

    def counted(*arguments: Any, **more: Any) -> Any:
        merges.append(arguments)
        return merge_to_folder(*arguments, **more)

    from matsmerge.engine.merge_run import merge_to_folder

    monkeypatch.setattr(tuning, "merge_to_folder", counted)
    path = recipe(setting, {"name": "mats", "init": "average"})
    code, out, error = mats(
        "tune", path, *tasks(setting), "--search", "iterations=2,4,8", "--out", setting / "tuned",
        "--json",
    )  # fmt: skip
    assert code == 0, error
    assert len(merges) == 1  # all iterations at once; the model is the one that was scored
    result = json.loads(out)
    assert result["num_trials"] == 3
    assert evaluated(mats, setting / "tuned" / "model", setting) == pytest.approx(result["scores"])


def test_weights_stages_and_methods(setting: Path, mats: Run) -> None:
    stage = {"objective": "gram", "solver": {"name": "cg", "iterations": 3}}
    content = {
        "recipe": yaml.safe_load(recipe(setting, "average").read_text()),
        "tasks": ["one.yaml"],
        "search": {
            "weight.two": [0.5, 1.0],
            "method": ["average", {"name": "mats", "init": "average", "stages": [stage]}],
        },
    }
    (setting / "tune.yaml").write_text(yaml.safe_dump(content))
    code, out, error = mats("tune", setting / "tune.yaml", "--out", setting / "tuned", "--json")
    assert code == 0, error
    assert json.loads(out)["num_trials"] == 4


def test_importance_of_a_model(setting: Path, mats: Run) -> None:
    path = recipe(setting, {"name": "mats", "init": "average"})
    search = ["--search", "importance.two=0,2", "--out", setting / "tuned"]
    code, _, error = mats("tune", path, *tasks(setting), *search, "-q")
    assert code == 0, error
    trials = json.loads((setting / "tuned" / "tuning.json").read_text())["trials"]
    assert [trial["choice"] for trial in trials] == [{"importance.two": 0}, {"importance.two": 2}]
    chosen = yaml.safe_load((setting / "tuned" / "recipe.yaml").read_text())
    assert "importance" in chosen["models"][1]


def test_an_interrupted_search_goes_on(setting: Path, mats: Run) -> None:
    path = recipe(setting, "task_arithmetic")
    arguments = ["tune", path, *tasks(setting), "--out", setting / "tuned", "--search"]
    assert mats(*arguments, "scale=0:1:0.5", "-q")[0] == 0
    finished = json.loads((setting / "tuned" / "tuning.json").read_text())
    # What a run that died after its first trial leaves behind.
    partial = setting / ".tuned.partial" / "output"
    partial.parent.mkdir()
    (setting / "tuned").rename(partial)
    lines, _ = read_journal_lines(partial / "trials.jsonl")
    journal = JournalFile.begin(partial / "trials.jsonl", lines[0])
    journal.note({**lines[1], "scores": {"one": 0.123, "two": 0.123}})
    with (partial / "trials.jsonl").open("a") as file:
        file.write('{"torn')
    code, _, error = mats(*arguments, "scale=0:1:0.5", "-q")
    assert code == 1
    assert "--resume" in error
    assert mats(*arguments, "scale=0:1:0.5", "-q", "--resume")[0] == 0
    found = json.loads((setting / "tuned" / "tuning.json").read_text())
    assert found["trials"][0]["score"] == pytest.approx(0.123)  # not tried again
    assert found["trials"][1:] == finished["trials"][1:]
    code, _, error = mats(*arguments, "scale=0:1:0.5", "-q")
    assert code == 1
    assert "exists already" in error


def test_another_search_is_not_continued(setting: Path, mats: Run) -> None:
    path = recipe(setting, "task_arithmetic")
    arguments = ["tune", path, *tasks(setting), "--out", setting / "tuned", "-q", "--search"]
    assert mats(*arguments, "scale=0,1")[0] == 0
    (setting / ".tuned.partial").mkdir()
    (setting / "tuned").rename(setting / ".tuned.partial" / "output")
    code, _, error = mats(*arguments, "scale=0,0.5", "--resume")
    assert code == 1
    assert "the interrupted search had another recipe" in " ".join(error.split())


def test_optuna_tries_numbers_of_its_own(setting: Path, mats: Run) -> None:
    pytest.importorskip("optuna")
    path = recipe(setting, "task_arithmetic")
    results = []
    for out in ("a", "b"):
        code, printed, error = mats(
            "tune", path, *tasks(setting), "--search", "scale=0:1", "--strategy", "optuna",
            "--trials", 4, "--seed", 3, "--out", setting / out, "--json",
        )  # fmt: skip
        assert code == 0, error
        results.append({k: v for k, v in json.loads(printed).items() if k != "out"})
    assert results[0] == results[1]
    assert results[0]["num_trials"] == 4
    assert 0 <= results[0]["choice"]["scale"] <= 1


def test_what_is_refused(setting: Path, mats: Run) -> None:
    arithmetic = recipe(setting, "task_arithmetic")
    out = setting / "tuned"
    for arguments, message in (
        (["--search", "scale=0,1", "--split", "test"], "never looks at the test split"),
        (["--search", "sclae=0,1"], "did you mean 'scale'?"),
        (["--search", "scale=0:1"], "a grid needs values to try"),
        (["--search", "scale"], "expected KEY=VALUES"),
        (["--search", "scale=1:0:1"], "is not low:high:step"),
        (["--search", "iterations=10,20"], "has no iterations"),
        (["--search", "weight.three=1,2"], "there is no model 'three'"),
        (
            ["--search", "scale=0,1", "--strategy", "random"],
            "strategy: input should be 'grid' or 'optuna', found 'random'",
        ),
        (["--search", "scale=0,1", "--split", "dev"], "has no split 'dev'"),
    ):
        code, _, error = mats("tune", arithmetic, *tasks(setting), *arguments, "--out", out)
        assert code == 1
        assert message in " ".join(error.split())
        assert not out.exists()
    code, _, error = mats("tune", arithmetic, "--search", "scale=0,1", "--out", out)
    assert code == 1
    assert "at least one task" in error


def test_statistics_and_validation_do_not_overlap(setting: Path, mats: Run) -> None:
    for name in ("one", "two"):
        code, _, error = mats(
            "collect", setting / name, "--task", setting / f"{name}.yaml", "--split", "validation",
            "--overwrite", "-q",
        )  # fmt: skip
        assert code == 0, error
    path = recipe(setting, {"name": "mats", "init": "average"})
    arguments = ["tune", path, *tasks(setting), "--search", "iterations=1,2", "-q"]
    code, _, error = mats(*arguments, "--out", setting / "tuned")
    assert code == 1
    assert "or allow it with --allow-overlap" in " ".join(error.split())
    assert mats(*arguments, "--out", setting / "tuned", "--allow-overlap")[0] == 0


@pytest.mark.parametrize(
    "chosen", [[], ["--num-examples", 30], ["--num-examples", 30, "--shuffle"]]
)
def test_statistics_of_the_whole_file_overlap_with_a_split_of_it(
    setting: Path, mats: Run, chosen: list[Any]
) -> None:
    collected = ["collect", setting / "one", "--data", setting / "one.jsonl", *chosen]
    assert mats(*collected, "--overwrite", "-q")[0] == 0
    path = recipe(setting, {"name": "mats", "init": "average"})
    arguments = ["tune", path, *tasks(setting), "--search", "iterations=1,2", "-q"]
    code, _, error = mats(*arguments, "--out", setting / "tuned")
    assert code == 1
    found = " ".join(error.split())
    assert "collected from one.jsonl, without a split, and 'one' is tuned on 'validation'" in found
    assert "two" not in found
    assert mats(*arguments, "--out", setting / "tuned", "--allow-overlap")[0] == 0


def test_data_of_a_recipe_is_not_what_a_split_is_cut_from(setting: Path, mats: Run) -> None:
    of_two = {"path": str(setting / "two.yaml"), "split": "train"}
    names = {"one": str(setting / "one.jsonl"), "two": of_two}
    models = [{"model": str(setting / name), "data": data} for name, data in names.items()]
    path = recipe(setting, "featcal", models=models)
    arguments = ["tune", path, *tasks(setting), "--search", "anchor=0.01,0.1", "-q"]
    code, _, error = mats(*arguments, "--out", setting / "tuned")
    assert code == 1
    found = " ".join(error.split())
    assert "one: its data is all of" in found
    assert "of which 'validation' is a part that 'one' is tuned on" in found
    assert "two:" not in found
    assert mats(*arguments, "--out", setting / "tuned", "--allow-overlap")[0] == 0


def test_overrides_and_stages_stop_where_they_were_scored(setting: Path, mats: Run) -> None:
    stage = {"objective": "gram", "solver": {"name": "cg", "iterations": 3}}
    method = {"name": "mats", "init": "average", "stages": [stage]}
    override = {"match": "*layer.0*", "method": {"name": "mats", "init": "average"}}
    path = recipe(setting, method, overrides=[override])
    code, out, error = mats(
        "tune", path, *tasks(setting), "--search", "iterations=1,4", "--out", setting / "tuned",
        "--json",
    )  # fmt: skip
    assert code == 0, error
    result = json.loads(out)
    assert evaluated(mats, setting / "tuned" / "model", setting) == result["scores"]
    # The recipe that is written gives the same model.
    merged = setting / "again"
    code, _, error = mats("merge", setting / "tuned" / "recipe.yaml", "--out", merged, "-q")
    assert code == 0, error
    assert evaluated(mats, merged, setting) == result["scores"]


def test_merges_that_fail_do_not_end_the_search(setting: Path, mats: Run) -> None:
    path = recipe(setting, "task_arithmetic")
    code, out, error = mats(
        "tune", path, *tasks(setting), "--search", "scale=0.1,1e39,0.5", "--out",
        setting / "tuned", "--json",
    )  # fmt: skip
    assert code == 0, error
    trials = json.loads((setting / "tuned" / "tuning.json").read_text())["trials"]
    assert [("failure" in t) for t in trials] == [False, True, False]
    assert trials[1]["score"] is None
    assert json.loads(out)["choice"]["scale"] in (0.1, 0.5)


def test_tuning_by_loss(setting: Path, mats: Run) -> None:
    for name in ("one", "two"):
        with (setting / f"{name}.yaml").open("a") as file:
            file.write("metrics: [loss]\n")
    path = recipe(setting, "task_arithmetic")
    arguments = ["tune", path, *tasks(setting), "--search", "scale=0,0.5,1"]
    code, out, error = mats(*arguments, "--out", setting / "tuned", "--json")
    assert code == 0, error
    trials = json.loads((setting / "tuned" / "tuning.json").read_text())["trials"]
    assert json.loads(out)["score"] == min(trial["score"] for trial in trials) > 0
    (setting / "one.yaml").write_text((setting / "one.yaml").read_text().replace("loss", "f1"))
    code, _, error = mats(*arguments, "--out", setting / "mixed")
    assert code == 1
    assert "have no mean to tune by" in error


def test_what_appeared_meanwhile_is_not_deleted(
    setting: Path, mats: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matsmerge.lab.tuning import search as tuning

    plain = tuning._Search.write

    def late(*arguments: Any) -> None:
        plain(*arguments)
        (setting / "tuned").mkdir()
        (setting / "tuned" / "precious").touch()

    monkeypatch.setattr(tuning._Search, "write", late)
    path = recipe(setting, "task_arithmetic")
    code, _, error = mats(
        "tune", path, *tasks(setting), "--search", "scale=0,1", "--out", setting / "tuned", "-q"
    )
    assert code == 1
    assert "exists and holds no search of ours" in " ".join(error.split())
    assert (setting / "tuned" / "precious").exists()


def test_values() -> None:
    assert parse_values("x", "0:1:0.25") == [0, 0.25, 0.5, 0.75, 1]
    assert parse_values("x", "10:100:60") == [10, 70]
    assert parse_values("x", "1e-3,-2") == [0.001, -2]
    for text in ("1,", "0:inf:1", "0:nan:1", "[1", "1:2:3:4"):
        with pytest.raises(RecipeError, match="search: x"):
            parse_values("x", text)
    assert parse_values("x", "10:30:10") == [10, 20, 30]
    assert parse_values("x", "0:1") == Range(0, 1)
    assert parse_values("x", "a,0.5,3") == ["a", 0.5, 3]
    assert parse_values("x", "0:0.3:0.1") == [0, 0.1, 0.2, 0.3]
    space = SearchSpace({}, {"a": [1, 2], "b": ["x"], "iterations": [1, 2]})
    assert list(space.grid()) == [{"a": 1, "b": "x"}, {"a": 2, "b": "x"}]
    assert space.iterations == [1, 2]


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("method.scale", "options of the method have no prefix: scale"),
        ("init.scale", "the recipe's method names no init; say which one it is"),
    ],
)
def test_places_that_a_recipe_does_not_have(key: str, message: str) -> None:
    recipe = {"models": ["a"], "base": "b", "method": "task_arithmetic"}
    with pytest.raises(RecipeError, match=message):
        SearchSpace(recipe, {key: [0.5]}).fill({key: 0.5})


def test_intermediate_task_merging(setting: Path, mats: Run) -> None:
    """Two models, one of which has the task that counts: the paper's way, and in closed form."""
    code, _, error = mats(
        "collect", setting / "one", setting / "two", "--task", setting / "one.yaml", "--split",
        "train", "--statistics", "kfac", "--overwrite", "-q",
    )  # fmt: skip
    assert code == 0, error
    closed = {"name": "mats", "objective": "kfac", "solver": "closed_form"}
    for method, search in (("mats", "iterations=1,3"), (closed, "weight.two=0.1,0.5,1")):
        out = setting / f"target-{search.partition('=')[0]}"
        path = recipe(setting, method)
        code, printed, error = mats(
            "tune", path, "--task", setting / "one.yaml", "--search", search, "--out", out, "--json"
        )
        assert code == 0, error
        result = json.loads(printed)
        assert list(result["scores"]) == ["one"]
        code, printed, error = mats(
            "evaluate", out / "model", "--task", setting / "one.yaml", "--split", "validation",
            "--json",
        )  # fmt: skip
        assert code == 0, error
        (scores,) = json.loads(printed)["scores"].values()
        assert scores["one"]["accuracy"]["value"] == pytest.approx(result["score"])


def test_trials_of_a_killed_search_do_not_stay(
    setting: Path, mats: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill right after a trial was noted leaves its merge, which nobody would look at again."""
    arguments = [
        "tune", recipe(setting, "task_arithmetic"), *tasks(setting), "--search", "scale=0.2,0.4",
        "--out", setting / "tuned",
    ]  # fmt: skip
    score, calls = trial_score.Scorer.score, []

    def interrupted(self: Any, folder: Path) -> Any:
        calls.append(folder)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return score(self, folder)

    with monkeypatch.context() as patch:
        patch.setattr(trial_score.Scorer, "score", interrupted)
        assert mats(*arguments)[0] == 130
    for name in ("merge-0", ".merge-0.partial"):
        left = setting / ".tuned.partial" / "output" / name
        left.mkdir()
        (left / "merge.json").write_text("{}")
    code, _, error = mats(*arguments, "--resume")
    assert code == 0, error
    assert {path.name for path in (setting / "tuned").iterdir()} == {
        "merge.json", "model", "recipe.yaml", "trials.jsonl", "tuning.json",
    }  # fmt: skip


def test_values_at_the_edge_of_what_was_tried() -> None:
    values: dict[str, Any] = {
        "scale": [0.1, 0.2, 0.3],
        "iterations": [10, 20],
        "method": ["ties", "average"],
    }
    space = SearchSpace({}, {**values, "density": [0.5], "rank": Range(0, 1)})
    chosen = {"scale": 0.2, "iterations": 20, "method": "ties", "density": 0.5, "rank": 0.3}
    assert space.remarks(chosen) == [
        "iterations: the best value, 20, lies at the edge of what was tried; a larger one may be "
        "better still"
    ]
    (remark,) = space.remarks({**chosen, "scale": 0.1, "iterations": 15})
    assert remark.startswith("scale: the best value, 0.1,")
    assert "a smaller one" in remark
    assert space.remarks(chosen, [chosen, {**chosen, "iterations": 10}]) == []
    assert len(space.remarks(chosen, [chosen, {**chosen, "scale": 0.1}])) == 1


def test_from_python_with_a_recipe_and_a_search(setting: Path) -> None:
    path = recipe(setting, "task_arithmetic")
    files = [setting / f"{name}.yaml" for name in ("one", "two")]
    found = matsmerge.lab.tune(path, files, setting / "a", search={"scale": "0.2,0.4"})
    assert len(found.trials) == 2
    assert repr(found).startswith("<Tuned {'scale': 0.")
    assert "Tuned" in found._repr_html_()
    assert len(found.remarks) == 1
    with pytest.raises(RecipeError, match="leave out search="):
        matsmerge.lab.tune(SearchSpace({}, {}), files, setting / "b", search={"scale": "0,1"})


def test_trials_as_a_table() -> None:
    """Rows are as long as the head, also of a merge that failed."""
    tried = [
        Trial(choice={"scale": 0.5}, scores={"one": 0.5, "two": 0.7}, errors={"one": 0.03, "two": 0.04}),
        Trial(choice={"scale": 9}, failure="not finite"),
    ]  # fmt: skip
    heads, (first, second) = trial_table(tried)
    assert heads == ["tried", "one", "two", "mean"]
    assert first == ["scale=0.5", 0.5, 0.7, pytest.approx(0.6)]
    assert second[0] == "scale=9"
    assert all(map(math.isnan, second[1:]))
    assert len(second) == len(heads)
    assert tried[0].error == pytest.approx(0.025)
    assert tried[1].error == 0
