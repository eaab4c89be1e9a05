"""A suite from beginning to end: what is done, what is not done again, what survives."""

import errno
import json
import multiprocessing
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from forked_commands import ForkedCommand
from tiny_suite import METHODS, make_base, make_data, tiny_suite
from transformers import AutoTokenizer, BertForSequenceClassification

from matsmerge.checkpoints.public_names import without_paths
from matsmerge.errors import DataError, OutputError, ResourceError
from matsmerge.files.journal_file import JournalFile
from matsmerge.files.whole_outputs import held
from matsmerge.lab.evaluation.results import INDIVIDUAL
from matsmerge.lab.experiments.steps import TUNED, Merge, continued
from matsmerge.lab.experiments.store import Store
from matsmerge.lab.experiments.suite_plan import SuitePlan
from matsmerge.lab.experiments.suite_results import BASE, JOINT, read_results
from matsmerge.lab.experiments.suite_run import resume_suite, run_suite
from matsmerge.lab.experiments.suite_setup import local
from matsmerge.lab.reports.report_files import Outputs, write_report
from matsmerge.lab.tuning.trials import JOURNAL
from matsmerge.progress import Progress
from matsmerge.recipes.recipe_file import read_recipe
from matsmerge.tasks.splits import read_split


class Heard(Progress):
    """What a run said."""

    def __init__(self) -> None:
        self.counts: tuple[int, int] = (0, 0)
        self.done: list[str] = []
        self.notes: list[str] = []

    def stage(self, title: str, total: int | None = None, unit: str = "", done: int = 0) -> None:
        assert title == unit == "steps"
        self.counts = (total or 0, done)

    def note(self, text: str) -> None:
        if text.startswith("note: "):
            self.notes.append(text)
        elif text.endswith(" s"):
            self.done.append(text.rpartition(": ")[0])


STUDIES = {
    "heat_map": {
        "inits": ["average", "task_arithmetic"],
        "objectives": {"average": "identity", "RegMean": "gram", "blocks": "block_fisher"},
        "iterations": [2],
    },
    "fisher": {"methods": ["diagonal_fisher"], "splits": ["train", "statistics"]},
    "curves": {"curves": {"Gram": "mats"}, "iterations": [0, 2, 5]},
    "costs": {"repeats": 2},
    "subspaces": {},
    "landscape": {
        "layer": "bert.encoder.layer.1.output.dense.weight",
        "tasks": ["has_a", "early"],
        "size": 3,
        "num_examples": 4,
    },
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("where-nobody-looks")
    make_base(folder / "base")
    make_data(folder / "data")
    return folder


def test_what_is_published_has_no_local_paths(place: Path, ran: Path, tmp_path: Path) -> None:
    page, markdown = tmp_path / "page.html", tmp_path / "page.md"
    write_report(ran, Outputs(page=page, markdown=markdown))
    for path in (ran / "results.json", page, markdown):
        assert place.name not in path.read_text()


@pytest.fixture(scope="module")
def ran(place: Path) -> Path:
    """A run of everything there is."""
    variant = tiny_suite().variants["full"].model_dump(exclude_unset=True) | {"joint": {}}
    methods = METHODS | {"diagonal_fisher": {"method": "diagonal_fisher"}}
    suite = tiny_suite(variants={"full": variant}, methods=methods, studies=STUDIES, seeds=[0, 1])
    narrow = suite.model_dump(mode="json", exclude_unset=True)
    for study in narrow["studies"].values():
        study["seeds"] = [0]
    suite = tiny_suite(**{k: v for k, v in narrow.items() if k != "name"})
    run_suite(suite, place / "ran", base=place / "base", data=place / "data", num_workers=1)
    return place / "ran"


def test_every_study_has_results(ran: Path) -> None:
    results = read_results(ran)
    assert results.missing == []
    assert results.replaced == [
        "base model: base", "data of has_a: has_a.jsonl", "data of early: early.jsonl"
    ]  # fmt: skip
    found = results.variants["full"]
    rows = {(row.method, row.seed) for row in found.comparison}
    names = [INDIVIDUAL, BASE, JOINT, *METHODS, "diagonal_fisher"]
    assert rows == {(name, seed) for name in names for seed in (0, 1)}
    cells = {(c.init, c.objective) for c in found.heat_map}
    # No statistics are collected for exact blocks of the Fisher information.
    assert cells == {(i, o) for i in ("average", "task_arithmetic") for o in ("average", "RegMean")}
    assert len(found.fisher) == 4
    (curve,) = found.curves
    assert [p.iterations for p in curve.points] == [0, 2, 5]
    assert curve.points[0].residual == curve.points[0].objective == 1.0
    assert curve.points[2].objective < curve.points[1].objective < 1.0
    costs = {cost.method: cost for cost in found.costs}
    assert len(costs["mats"].seconds) == 2
    assert costs["mats"].operations is not None
    assert costs["mats"].statistics_seconds is not None
    assert costs["average"].statistics_seconds is None
    assert costs[JOINT].operations is not None
    assert found.landscape is not None
    assert len(found.landscape.losses["has_a"]) == len(found.landscape.ys) == 3
    assert found.subspaces is not None
    assert found.subspaces["overlap"][0][0] == pytest.approx(1.0)


def test_the_init_of_a_cell_is_the_tuned_one_and_the_average_has_one_solution(ran: Path) -> None:
    found = read_results(ran).variants["full"]
    by_name = {row.method: row for row in found.comparison if row.seed == 0}
    for cell in found.heat_map:
        assert cell.of_init == by_name[cell.init].test.mean
        if cell.objective == "average":
            assert cell.score == by_name["average"].test.mean


def test_recipes_of_results_can_be_merged_again(ran: Path) -> None:
    (folder,) = (ran / "steps").glob("merge-full-0-mats-*")
    recipe, _ = read_recipe(folder / "recipe.yaml")
    (row,) = (
        r
        for r in read_results(ran).variants["full"].comparison
        if (r.method, r.seed) == ("mats", 0)
    )
    steps = f"{ran.absolute()}/"
    written = (folder / "recipe.yaml").read_text().replace(steps, "")
    assert row.recipe == without_paths(yaml.safe_load(written))
    assert row.recipe
    assert all((ran / model["model"]).is_dir() for model in row.recipe["models"])
    assert str(ran) not in str(row.recipe)
    assert row.merge is not None
    assert row.num_tried == 2
    assert recipe.method.parameters["iterations"] == row.chosen["iterations"]


def test_results_say_where_they_come_from(ran: Path) -> None:
    results = read_results(ran)
    assert {"python", "torch", "transformers", "matsmerge"} <= set(results.versions)
    assert results.seeds == [0, 1]
    assert results.machine["cores"] >= 1
    assert results.suite["methods"]["average"] == {"method": "average"}
    assert all(step.seconds >= 0 for step in results.steps)


@pytest.mark.parametrize(
    "kind", ["train-full-0-early", "collect-full-0-early", "merge-full-0-mats", "costs-full-0"]
)
def test_a_step_that_was_complete_but_not_recorded_is_done_again(
    place: Path, ran: Path, kind: str
) -> None:
    """Killed between the end of the work and its record."""
    before = read_results(ran)
    (done,) = (p for p in (ran / "steps").iterdir() if p.name.rpartition("-")[0] == kind)
    partial = done.with_name(f".{done.name}.partial")
    done.rename(partial)
    (partial / "step.json").unlink()
    (partial / "merged").mkdir(exist_ok=True)
    heard = Heard()
    results = resume_suite(ran, num_workers=1, progress=heard)
    assert len(heard.done) == 1
    assert results.missing == []
    assert results.variants["full"].comparison == before.variants["full"].comparison
    assert place


def test_methods_that_need_data_get_the_tasks_own(place: Path, ran: Path) -> None:
    """The split and the examples that statistics are from; what was trained is not trained again."""
    folder = Path(shutil.copytree(ran, place / "along"))
    variants = read_results(ran).suite["variants"]
    suite = tiny_suite(
        variants=variants, methods={"mats_cross": {"method": "mats_cross"}}, seeds=[0]
    )
    heard = Heard()
    results = run_suite(
        suite, folder, base=place / "base", data=place / "data", num_workers=1, progress=heard
    )
    assert heard.done == ["merge full 0 mats_cross"]
    row = next(r for r in results.variants["full"].comparison if r.method == "mats_cross")
    assert row.test is not None
    (recipe,) = (folder / "steps").glob("merge-full-0-mats_cross-*/recipe.yaml")
    models = yaml.safe_load(recipe.read_text())["models"]
    assert [m["data"]["split"] for m in models] == ["statistics", "statistics"]
    assert [m["data"]["num_examples"] for m in models] == [8, 8]


def test_a_method_can_be_chosen_without_labels(place: Path, ran: Path) -> None:
    folder = Path(shutil.copytree(ran, place / "unlabelled"))
    variants = read_results(ran).suite["variants"]
    search = {"scale": [0.1, 0.5]}
    method = {"method": "task_arithmetic", "search": search, "unlabelled": True}
    suite = tiny_suite(variants=variants, methods={"without": method}, seeds=[0])
    heard = Heard()
    results = run_suite(
        suite, folder, base=place / "base", data=place / "data", num_workers=1, progress=heard
    )
    row = next(r for r in results.variants["full"].comparison if r.method == "without")
    assert row.validation is None  # a distance is no score
    assert "merge full 0 without" in heard.done
    (report,) = (folder / "steps").glob("merge-full-0-without-*/tuning.json")
    content = json.loads(report.read_text())
    assert set(content["metrics"].values()) == {"divergence"}
    scores = [trial["score"] for trial in content["trials"]]
    assert len(scores) == 2
    assert content["best"]["score"] == min(scores)


def test_an_ensemble_answers_each_task_with_its_head(place: Path, ran: Path) -> None:
    """The mean of probabilities, once more by transformers alone, one example at a time."""
    folder = Path(shutil.copytree(ran, place / "ensemble"))
    variants = read_results(ran).suite["variants"]
    methods = {"average": {"method": "average"}}
    suite = tiny_suite(variants=variants, methods=methods, seeds=[0], ensemble=True)
    results = run_suite(suite, folder, base=place / "base", data=place / "data", num_workers=1)
    row = next(r for r in results.variants["full"].comparison if r.method == "ensemble")
    steps = {task: next((folder / "steps").glob(f"train-full-0-{task}-*")) for task in suite.tasks}
    for task, step in steps.items():
        models = [
            BertForSequenceClassification.from_pretrained(s / "model") for s in steps.values()
        ]
        head = BertForSequenceClassification.from_pretrained(step / "model").classifier
        tokenizer = AutoTokenizer.from_pretrained(step / "model")
        file = suite.tasks[task].model_copy(
            update={"name": task, "data": str(place / "data" / f"{task}.jsonl")}
        )
        data = read_split(file, "test")
        right = ""
        for one in data.rows:
            shown = tokenizer(one["text"], return_tensors="pt")
            total = torch.zeros(2)
            for model in models:
                model.classifier = head
                total += model.eval()(**shown).logits[0].softmax(0).detach()
            right += str(int(["no", "yes"][int(total.argmax())] == one["label"]))
        assert row.test.right[task] == right
        assert row.test.tasks[task] == pytest.approx(right.count("1") / len(data))


@pytest.mark.long
def test_processes_give_what_one_process_gives(place: Path, ran: Path) -> None:
    suite = tiny_suite(methods={"average": METHODS["average"]})
    out = place / "processes"
    seen: list[int] = []

    def look(_: object) -> None:
        if (out / "results.json").exists():
            seen.append(len(read_results(out).steps))

    base, data = place / "base", place / "data"
    results = run_suite(suite, out, base=base, data=data, num_workers=2, progress=look)
    assert seen == sorted(seen)
    assert {1, 2, len(results.steps)} <= set(seen)  # as they come
    rows = {r.method: r for r in results.variants["full"].comparison}
    for row in read_results(ran).variants["full"].comparison:
        if row.seed == 0 and row.method in rows:
            assert rows[row.method].test == row.test


def test_only_what_changed_is_done(place: Path, ran: Path) -> None:
    ran = Path(shutil.copytree(ran, place / "changed"))
    before = read_results(ran)
    heard = Heard()
    results = resume_suite(ran, num_workers=1, progress=heard)
    assert heard.done == []
    assert results.variants == before.variants
    # One file is damaged, and one method searches further.
    (model,) = (ran / "steps").glob("merge-full-1-average-*/model/model.safetensors")
    model.write_bytes(model.read_bytes()[:-4] + b"\0\0\0\1")
    content = before.suite
    content["methods"]["task_arithmetic"]["search"] = {"scale": [0.3, 0.5]}
    content["studies"] = {}
    heard = Heard()
    suite = tiny_suite(**{k: v for k, v in content.items() if k != "name"})
    again = run_suite(
        suite, ran, base=place / "base", data=place / "data", num_workers=1, progress=heard
    )
    assert sorted(heard.done) == [
        "merge full 0 task_arithmetic",
        "merge full 1 average",
        "merge full 1 task_arithmetic",
    ]
    assert len(heard.notes) == 1
    assert "merge full 1 average" in heard.notes[0]
    for old, new in zip(
        before.variants["full"].comparison, again.variants["full"].comparison, strict=True
    ):
        if old.method != "task_arithmetic":
            assert old == new


def test_a_killed_run_is_continued(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed without warning in the middle, workers and all."""
    context = multiprocessing.get_context("fork")  # of ours, which has everything imported
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: context)
    out = place / "killed"
    methods = {"average": METHODS["average"]}
    suite = place / "killed.yaml"
    content = tiny_suite(methods=methods).model_dump(mode="json", exclude_unset=True)
    suite.write_text(yaml.safe_dump(content))
    places = ("--base", place / "base", "--data", place / "data", "--workers", "2")

    def wait_at_merges() -> None:  # so that it is never done before it is killed
        Merge.run = lambda *_: time.sleep(600)  # type: ignore[assignment,method-assign]

    command = ForkedCommand(["experiment", "run", suite, "--out", out, *places], wait_at_merges)
    steps = out / "steps"
    while not list(steps.glob("train-*")) and command.poll() is None:
        time.sleep(0.01)
    command.send_signal(signal.SIGKILL)
    assert command.wait().returncode == -signal.SIGKILL
    done = {path.name for path in steps.glob("*") if not path.name.startswith(".")}
    assert done
    out = out.rename(place / "killed and moved")
    steps = out / "steps"
    heard = Heard()
    results = resume_suite(out, num_workers=1, progress=heard)
    assert results.missing == []
    assert heard.counts[1] >= 1
    assert done <= {path.name for path in steps.iterdir()}
    assert not list(steps.glob(".*"))


def test_a_search_that_was_interrupted_elsewhere_is_begun_anew(place: Path) -> None:
    suite = tiny_suite(methods={"average": METHODS["average"]})
    base, data = place / "base", place / "data"
    out = place / "elsewhere"
    store = Store(out / "steps")
    for step in SuitePlan(suite, local(base, data, suite.tasks)).steps:
        if step.kind == "merge":
            begun = store.partial(step) / f".{TUNED}.partial" / "output"
            begun.mkdir(parents=True)
            JournalFile.begin(begun / JOURNAL, {"identity": "another"})
    assert run_suite(suite, out, base=base, data=data, num_workers=1).missing == []


def test_what_cannot_be_written_is_not_begun_anew() -> None:
    """A full disk must not cost what was there before."""
    tried: list[dict[str, bool]] = []

    def work(**how: bool) -> None:
        tried.append(how)
        raise OutputError("no space left")

    with pytest.raises(OutputError, match="no space left"):
        continued(work)
    assert tried == [{"resume": True}]


def test_what_fails_is_named_and_the_rest_is_kept(place: Path) -> None:
    suite = tiny_suite(
        methods={"broken": {"method": {"name": "mats", "objective": "block_fisher"}}}
    )
    out = place / "failing"
    with pytest.raises(Exception, match="merge full 0 broken"):
        run_suite(suite, out, base=place / "base", data=place / "data", num_workers=1)
    results = read_results(out)
    assert "merge full 0 broken" in results.missing
    assert [row.method for row in results.variants["full"].comparison] == [INDIVIDUAL]


def test_a_full_disk_is_said_and_loses_nothing(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    suite = tiny_suite(methods={"average": METHODS["average"]})
    local: dict[str, Any] = {"base": place / "base", "data": place / "data"}
    monkeypatch.setattr(Merge, "run", full)
    with pytest.raises(ResourceError, match="No space left.*the same command continues"):
        run_suite(suite, tmp_path / "run", **local, num_workers=1)
    monkeypatch.undo()
    heard = Heard()
    assert run_suite(suite, tmp_path / "run", **local, num_workers=1, progress=heard).missing == []
    assert all(name.startswith("merge") for name in heard.done)


def test_results_that_were_cut_off(ran: Path, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text((ran / "results.json").read_text()[:3000])
    with pytest.raises(DataError, match="not the results of a suite, or damaged"):
        read_results(tmp_path)


def test_bad_places(place: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        run_suite(tiny_suite(), tmp_path / "run", base=tmp_path / "x", data=tmp_path / "y")
    assert len(caught.value.problems) == 2
    assert not (tmp_path / "run").exists()
    with pytest.raises(DataError, match="no run of a suite"):
        resume_suite(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis").write_text("")
    for out, problem in (("mine", "something else"), ("mine/thesis", "is a file")):
        with pytest.raises(OutputError, match=problem):
            run_suite(tiny_suite(), tmp_path / out, base=place / "base", data=place / "data")
    (tmp_path / "busy").mkdir()
    with held(tmp_path / "busy", "run"), pytest.raises(OutputError, match="another run"):
        run_suite(tiny_suite(), tmp_path / "busy", base=place / "base", data=place / "data")


def test_without_the_hub_all_that_is_missing_is_named(tmp_path: Path) -> None:
    content = tiny_suite().model_dump(mode="json", exclude_unset=True)
    content["tasks"]["has_a"]["data"] = "nobody/letters:all"
    suite = tiny_suite(tasks=content["tasks"])
    with pytest.raises(DataError) as caught:
        run_suite(suite, tmp_path / "run")
    text = str(caught.value)
    assert "nowhere/base (base model)" in text
    assert "nobody/letters (data of has_a)" in text
    assert "text-small" in text
    assert "paper-t0-8" not in text
    assert not (tmp_path / "run").exists()
