"""The paper's suites: what they say fits together, and each runs on stand-ins from end to end."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from paper_stand_ins import NUM_CLASSES, ROWS, make_bert, make_clip, make_t5, write_data
from tiny_models import write_rows

import matsmerge
from matsmerge.lab.evaluation.results import ENSEMBLE, INDIVIDUAL
from matsmerge.lab.experiments.step import Places, Step, with_needs
from matsmerge.lab.experiments.store import Store
from matsmerge.lab.experiments.suite import FOLDER, Suite, make_suite, read_suite
from matsmerge.lab.experiments.suite_parts import MethodOfSuite
from matsmerge.lab.experiments.suite_plan import SuitePlan
from matsmerge.lab.experiments.suite_results import BASE, JOINT, VariantResults
from matsmerge.lab.experiments.suite_setup import Local, Setup, local
from matsmerge.lab.training.training_options import TrainingOptions
from matsmerge.lab.tuning.search_space import SearchSpace, parse_values
from matsmerge.methods.mats import Mats
from matsmerge.methods.task_arithmetic import TaskArithmetic
from matsmerge.statistics.collection_options import make_collection_options
from matsmerge.tasks.kinds import TASKS
from matsmerge.tasks.splits import read_split
from matsmerge.tasks.task_file import TaskFile

SUITES = {path.stem: read_suite(path) for path in sorted(FOLDER.glob("paper-*.yaml"))}
TASKS_OF_SUITES = [(suite, task) for suite in SUITES for task in SUITES[suite].tasks]
PAPER = yaml.safe_load(
    (Path(matsmerge.__file__).parent / "lab" / "reports" / "paper_numbers.yaml").read_text()
)
NUM_LABELS = {"Cars": 196, "DTD": 47, "EuroSAT": 10, "GTSRB": 43, "RESISC45": 45, "SUN397": 397}


def test_all_of_the_papers_settings_are_there() -> None:
    assert set(SUITES) == {"paper-t0-8", "paper-ties-7", "paper-vision-8", "paper-intermediate"}
    columns = [column for suite in SUITES.values() for column in suite.paper.values()]
    assert sorted(columns) == sorted(PAPER)


@pytest.mark.parametrize("name", SUITES)
def test_names_are_those_of_the_papers_numbers(name: str) -> None:
    suite = SUITES[name]
    for variant, column in suite.paper.items():
        numbers = PAPER[column]
        assert numbers.get("tasks", list(suite.tasks)) == list(suite.tasks)
        rows = set(numbers.get("mean", {}))
        if "donors" in numbers:
            study = suite.studies.intermediate
            assert study is not None
            assert list(numbers["donors"]) == study.donors
            rows = set(numbers["donors"]["MNLI"]) - {"sequential"}
        ours = {m for m, of in suite.methods.items() if variant in (of.variants or [variant])}
        assert rows - ours <= {INDIVIDUAL, JOINT, ENSEMBLE}
        for method in numbers.get("fisher", {}):
            assert suite.studies.fisher is not None
            assert method in suite.studies.fisher.methods


@pytest.mark.parametrize("name", SUITES)
def test_training_is_as_in_the_paper(name: str) -> None:
    for variant in SUITES[name].variants.values():
        options = TrainingOptions.model_validate(variant.training)
        TrainingOptions.model_validate({**variant.training, **(variant.joint or {})})
        make_collection_options(statistics=variant.statistics)
        batch = options.batch_size * options.accumulate
        found = (options.learning_rate, batch, options.max_steps, options.eval_every)
        if name == "paper-vision-8":
            assert found == (1e-5, 128, 2000, 100)
        else:
            assert found == (5e-3 if options.adapter == "ia3" else 1e-4, 1024, 5000, 100)
        assert options.patience == 5
        assert variant.num_examples == 1000
        assert variant.split == "validation"


@pytest.mark.parametrize("name", SUITES)
def test_searches_are_of_parameters_that_methods_have(name: str) -> None:
    suite = SUITES[name]
    models = [{"name": task, "model": task} for task in suite.tasks]
    for method in suite.methods.values():
        recipe = {"base": "base", "models": models, "method": method.method}
        space = SearchSpace(recipe, {k: parse_values(k, v) for k, v in method.search.items()})
        space.check()


@pytest.mark.parametrize("name", SUITES)
def test_systems_of_the_paper_start_from_the_tuned_task_arithmetic(name: str) -> None:
    """Whose scale is not searched once more."""
    found = set()
    for method, of in SUITES[name].methods.items():
        parsed = of.parsed()
        if parsed.iterates and method != "mats_kfac":  # which is ours
            assert of.starts_from == "task_arithmetic", method
            assert set(of.search) == {"iterations"}
            found.add(method)
    assert "mats" in found
    curves = SUITES[name].studies.curves
    for curve in curves.curves.values() if curves else ():
        parsed = MethodOfSuite(method=curve).parsed()
        assert isinstance(parsed, Mats)
        assert parsed.start == TaskArithmetic(scale=0.3)


@pytest.mark.parametrize(("name", "task_name"), TASKS_OF_SUITES)
def test_tasks_name_columns_that_the_hub_has(name: str, task_name: str, tmp_path: Path) -> None:
    task = SUITES[name].tasks[task_name]
    source = str(task.data)
    assert re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", source)
    assert task.splits is not None
    assert set(task.splits) == {"train", "validation", "test"}
    columns = [*ROWS[source](0), *task.fields]
    wordings = task.wordings
    if wordings is not None:
        assert wordings.problems(source, columns) == []
        assert isinstance(task.template, list)
        assert len(task.template) >= 3
    if task.task == "image_classification":
        assert task.labels is not None
        assert len(task.labels) == len(set(task.labels)) == NUM_LABELS.get(task_name, 10)
        assert all("{label}" in text for text in task.template or ())
    write_rows(tmp_path / "rows.jsonl", [ROWS[source](n) for n in range(8)])
    local_task = task.model_copy(update={"data": str(tmp_path / "rows.jsonl"), "splits": None})
    data = read_split(local_task)
    kind = TASKS[str(task.task)]
    for own in (*task.columns, *([kind.targets] if kind.targets else [])):
        assert task.columns.get(own, own) in data.columns
    _check_answers(local_task)


def _check_answers(task: TaskFile) -> None:
    """The answer is one of the choices, whatever it is called."""
    rows = read_split(task).rows
    if task.task != "multiple_choice":
        return
    wordings = task.wordings
    assert wordings is not None
    found = set()
    for number, row in enumerate(rows):
        filled = wordings.fill(row, number, "input")
        choices = filled.get("choices") or row[task.columns.get("choices", "choices")]
        label = row[task.columns.get("label", "label")]
        assert 0 <= label < len(choices)
        assert all(isinstance(choice, str) for choice in choices)
        found.add(label)
    assert found == set(range(min(len(rows), len(choices))))


# From end to end.


def shrunk(name: str, tasks: Sequence[str], methods: Sequence[str] = ()) -> Suite:
    """The suite with the same parts, each as small as can be."""
    content = SUITES[name].model_dump(mode="json", exclude_unset=True)
    content["tasks"] = {task: content["tasks"][task] for task in tasks}
    content["methods"] = {
        m: method for m, method in content["methods"].items() if not methods or m in methods
    }
    short = {"batch_size": 2, "accumulate": 1, "max_steps": 1, "eval_every": 1, "bf16": False}
    for variant in content["variants"].values():
        variant["training"] |= short
        variant["num_examples"] = 2
        if "joint" in variant:
            variant["joint"] = {}
    for method in content["methods"].values():
        for other in set(SUITES[name].tasks) - set(tasks):
            method.get("search", {}).pop(f"weight.{other}", None)
        for key, values in method.get("search", {}).items():
            tried = parse_values(key, values)
            assert isinstance(tried, list)
            method["search"][key] = [1, 2] if key == "iterations" else tried[-1:]
    for task in content["tasks"].values():
        if task["task"] == "image_classification":
            task["labels"] = task["labels"][:NUM_CLASSES]
        if "generate" in task:
            task["generate"] = 2
    studies = content.get("studies", {})
    if "RTE" not in tasks:
        studies.pop("intermediate", None)
    for study, key, value in (
        ("heat_map", "inits", ["task_arithmetic"]),
        ("heat_map", "iterations", [1]),
        ("fisher", "splits", ["validation"]),
        ("fisher", "variants", ["ia3"]),
        ("curves", "iterations", [0, 2]),
        ("curves", "variants", ["ia3"]),
        ("costs", "repeats", 1),
        ("costs", "variants", ["full"]),
        ("intermediate", "donors", [task for task in tasks if task != "RTE"]),
    ):
        if study in studies:
            studies[study][key] = value
    return make_suite(name, content)


@dataclass(frozen=True)
class Run:
    """A suite on stand-ins, whose steps are done one after the other in this process."""

    suite: Suite
    here: Local
    store: Store

    @classmethod
    def at(cls, folder: Path, suite: Suite, make_base: Callable[[Path], Path]) -> "Run":
        here = local(make_base(folder / "base"), write_data(suite, folder / "data"), suite.tasks)
        (folder / "steps").mkdir()
        return cls(suite, here, Store(folder / "steps"))

    def do(self, steps: Iterable[Step[Any]]) -> None:
        for step in with_needs(steps):
            out = self.store.partial(step)
            out.mkdir()
            places = Places({need.key: self.store.output(need) for need in step.needs})
            self.store.put(step, step.run(places, out), 0.1)

    def all(self) -> dict[str, VariantResults]:
        plan = SuitePlan(self.suite, self.here)
        self.do(plan.steps)
        return plan.results(self.store)


@pytest.mark.parametrize(
    ("name", "make_base", "tasks"),
    [
        ("paper-t0-8", make_t5, ["CosmosQA", "SocialIQA", "PAWS", "QuAIL", "WikiQA", "QuaRTz"]),
        ("paper-ties-7", make_t5, ["Winogrande", "StoryCloze"]),
        ("paper-intermediate", make_bert, ["QNLI", "QQP"]),
    ],
)
def test_every_task_is_trained_collected_and_scored(
    name: str, make_base: Callable[[Path], Path], tasks: list[str], tmp_path: Path
) -> None:
    suite = shrunk(name, tasks)
    run = Run.at(tmp_path, suite, make_base)
    setup = Setup(suite, "full", 0, run.here)
    run.do([*map(setup.statistics, suite.tasks), setup.individual()])
    record = run.store.load(setup.individual())
    assert record is not None
    scores = record.found.test.tasks
    assert all(0 <= scores[task] <= 1 for task in suite.tasks)


def check_comparison(suite: Suite, results: dict[str, VariantResults]) -> None:
    for variant, found in results.items():
        own = [m for m, of in suite.methods.items() if variant in (of.variants or [variant])]
        joint = [JOINT] if suite.variants[variant].joint is not None else []
        ensemble = [ENSEMBLE] if suite.ensemble else []
        rows = [row.method for row in found.comparison]
        assert set(rows) == {INDIVIDUAL, *own, BASE, *joint, *ensemble}
        assert len(rows) == len(set(rows))
        for row in found.comparison:
            assert set(row.test.tasks) == set(suite.tasks)
            assert all(0 <= score <= 1 for score in row.test.tasks.values())


@pytest.mark.long
def test_t0_8_runs(tmp_path: Path) -> None:
    methods = ["task_arithmetic", "diagonal_fisher", "regmean", "mats", "block_fisher"]
    suite = shrunk("paper-t0-8", ["QASC", "ROPES"], [*methods, "mats_two_rounds"])
    results = Run.at(tmp_path, suite, make_t5).all()
    check_comparison(suite, results)
    full, ia3 = results["full"], results["ia3"]
    assert {cell.objective for cell in full.heat_map} == {
        *("average", "diagonal_fisher", "regmean", "kfac")
    }
    assert {cell.objective for cell in ia3.heat_map} == {
        *("average", "diagonal_fisher", "block_fisher")
    }
    assert len(ia3.fisher) == 4
    assert [point.iterations for curve in ia3.curves for point in curve.points] == [0, 2, 0, 2]
    assert {cost.method for cost in full.costs} == {*suite.methods, JOINT}
    assert full.subspaces is not None


@pytest.mark.long
def test_ties_7_runs(tmp_path: Path) -> None:
    suite = shrunk("paper-ties-7", ["WSC", "QuaRTz"], ["task_arithmetic", "regmean", "mats"])
    check_comparison(suite, Run.at(tmp_path, suite, make_t5).all())


@pytest.mark.long
def test_vision_8_runs(tmp_path: Path) -> None:
    suite = shrunk("paper-vision-8", ["DTD", "SVHN"])
    check_comparison(suite, Run.at(tmp_path, suite, make_clip).all())


@pytest.mark.long
def test_intermediate_runs(tmp_path: Path) -> None:
    suite = shrunk("paper-intermediate", ["RTE", "MNLI"])
    results = Run.at(tmp_path, suite, make_bert).all()
    for variant, found in results.items():
        own = [m for m, of in suite.methods.items() if variant in (of.variants or [variant])]
        methods = [one.method for one in found.intermediate]
        assert set(methods) >= {INDIVIDUAL, ENSEMBLE, *own, "sequential"}
        assert {one.donor for one in found.intermediate} == {"MNLI"}
        assert found.target == "RTE"
