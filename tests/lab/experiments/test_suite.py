"""Suite files: what they may say, and what is wrong with those that say something else."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_suite import METHODS, tiny_suite

from matsmerge.errors import DataError, RecipeError
from matsmerge.lab.experiments.sources import SOURCES, VERSIONS
from matsmerge.lab.experiments.steps import Train
from matsmerge.lab.experiments.store import Store
from matsmerge.lab.experiments.suite import Suite, find_suite, read_suite, suite_files
from matsmerge.lab.experiments.suite_parts import Made, MethodOfSuite
from matsmerge.lab.experiments.suite_plan import SuitePlan
from matsmerge.lab.experiments.suite_results import ScoredModel, Scores
from matsmerge.lab.experiments.suite_setup import Setup, local
from matsmerge.methods.task_arithmetic import TaskArithmetic


@pytest.mark.parametrize("name", suite_files())
def test_suites_of_the_package_can_be_planned(name: str) -> None:
    suite = find_suite(name)
    assert suite.name == name
    steps = SuitePlan(suite).steps
    assert len({step.key for step in steps}) == len(steps)
    sources = [task.source for task in suite.tasks.values() if task.source is not None]
    sources += [suite.base.source] if isinstance(suite.base, Made) else []
    assert set(sources) <= set(SOURCES)
    if suite.offline:
        assert all(task.source for task in suite.tasks.values())
        assert isinstance(suite.base, Made)


def problems(**changes: Any) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        tiny_suite(**changes)
    return caught.value.problems


def test_all_that_is_wrong_is_said_at_once() -> None:
    methods = {
        "one": {"method": "avrage"},
        "two": {"method": "mats", "search": {"iterations": "1:x:2"}},
        "three": {"method": "average", "variants": ["ful"]},
    }
    studies = {
        "heat_map": {"inits": ["one", "four"], "objectives": {"a": "grm"}, "seeds": [7]},
        "intermediate": {"target": "has_b", "donors": ["early"]},
    }
    found = problems(methods=methods, studies=studies, paper={"none": "t0-8/full"})
    text = "\n".join(found)
    for part in (
        "unknown method 'avrage'; did you mean 'average'",
        "1:x:2",
        "there is no 'ful'; did you mean 'full'",
        "there is no 'four'",
        "there is no 'grm'; did you mean 'gram'",
        "there is no '7'",
        "there is no 'has_b'; did you mean 'has_a'",
        "paper: there is no 'none'",
    ):
        assert part in text
    assert all(problem.startswith("tiny: ") for problem in found)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": [0, 0]}, "different numbers"),
        ({"seeds": [-1]}, "from 0 on"),
        ({"methods": {"joint": {"method": "average"}}}, "'joint' is the name of a row"),
        ({"methods": {"a": {"method": {"name": "ties", "densty": 0.2}}}}, "densty"),
        ({"methods": {"a": {"method": "mats", "search": {"iteration": [1]}}}}, "iteration"),
        ({"variants": {"full": {"statistics": ["grm"]}}}, "grm"),
        ({"variants": {"full": {"training": {"learning_rat": 1}}}}, "learning_rat"),
        ({"variants": {"full": {"models": {"other": "x"}}}}, "there is no 'other'"),
        ({"base": {"source": "minlm"}}, "did you mean 'minilm'"),
        (
            {"base": {"source": "minilm", "settings": {"num_rows": 1}}},
            "base: settings: unknown key 'num_rows'; it takes none",
        ),
        (
            {"base": {"source": "small_vit", "settings": {"num_step": 3}}},
            "base: settings: unknown key 'num_step'; did you mean 'num_steps'",
        ),
        ({"base": {"source": "small_vit", "settings": {"seed": "3"}}}, "found '3'"),
    ],
)
def test_what_would_fail_later_is_said_now(changes: Any, message: str) -> None:
    assert message in problems(**changes)[0]


def test_unknown_keys_are_named() -> None:
    assert problems(speed=1) == ["tiny: unknown key 'speed'; did you mean 'seeds'?"]
    assert problems(variants={"full": {"trainings": {}}}) == [
        "tiny: variants.full: unknown key 'trainings'; did you mean 'training'?"
    ]


def test_unknown_suites() -> None:
    with pytest.raises(RecipeError, match="did you mean 'text-small'"):
        find_suite("text-smal")
    with pytest.raises(RecipeError, match="there is no suite"):
        find_suite("nothing.yaml")


def own_file(folder: Path) -> Path:
    content = tiny_suite().model_dump(mode="json", exclude_unset=True)
    for name in content["tasks"]:
        (folder / f"{name}.jsonl").write_text("{}\n")
        content["tasks"][name]["data"] = f"{name}.jsonl"
    (folder / "own.yaml").write_text(yaml.safe_dump(content))
    return folder / "own.yaml"


def test_data_lie_beside_a_suite_and_count_by_content(tmp_path: Path) -> None:
    def key() -> str:
        suite = read_suite(own_path)
        assert suite.tasks["early"].data == str(tmp_path / "early.jsonl")
        step = Setup(suite, "full", 0).model("early")
        assert isinstance(step, Train)
        return step.key

    own_path = own_file(tmp_path)
    before = key()
    assert key() == before
    (tmp_path / "has_a.jsonl").write_text('{"text": "a"}\n')
    assert key() == before  # another task's
    (tmp_path / "early.jsonl").write_text('{"text": "a"}\n')
    assert key() != before


def test_local_data_take_the_place_of_the_suites(tmp_path: Path) -> None:
    (tmp_path / "early").mkdir()
    (tmp_path / "early" / "train.jsonl").write_text("{}")
    (tmp_path / "has_a.jsonl").write_text("{}")
    found = local(None, tmp_path, ["early", "has_a", "more"])
    assert found.data["early"].path == tmp_path / "early"
    assert found.data["has_a"].path == tmp_path / "has_a.jsonl"
    assert set(found.data) == {"early", "has_a"}
    with pytest.raises(DataError, match="has nothing for the suite's tasks"):
        local(None, tmp_path, ["more"])


def test_seeds_change_training_and_splits() -> None:
    suite = tiny_suite()
    models = [Setup(suite, "full", seed).model("early") for seed in (0, 1)]
    steps = [model for model in models if isinstance(model, Train)]
    assert [step.options.seed for step in steps] == [0, 1]
    assert [step.tasks[0].file.seed for step in steps] == [0, 1]


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("average", False),
        ("actmat", False),
        ("mats", True),
        ({"name": "mats", "objective": "identity"}, False),
        ({"name": "mats", "objective": "identity", "init": "regmean"}, True),
    ],
)
def test_statistics_are_collected_for_those_who_need_them(method: Any, expected: bool) -> None:
    merging = Setup(tiny_suite(), "full", 0).merging(MethodOfSuite(method=method))
    assert bool(merging.statistics) is expected


def test_only_what_is_needed_is_planned() -> None:
    def kinds(suite: Suite) -> set[str]:
        return {step.kind for step in SuitePlan(suite).steps}

    assert "collect" not in kinds(tiny_suite(methods={"average": METHODS["average"]}))
    assert "collect" in kinds(tiny_suite())


def test_results_wait_for_all_that_they_are_made_of(tmp_path: Path) -> None:
    """The init of a cell was damaged, and is to be done again."""
    study = {"inits": ["average"], "objectives": {"RegMean": "gram"}}
    plan = SuitePlan(tiny_suite(studies={"heat_map": study}))
    store = Store(tmp_path)
    for step in plan.steps:
        if step.name == "merge full 0 average to RegMean":
            store.partial(step).mkdir()
            outcome = ScoredModel(test=Scores(tasks={"early": 0.5}, errors={"early": 0.1}))
            store.put(step, outcome, 1.0)
            assert store.load(step) is not None
    assert plan.results(store)["full"].heat_map == []


def test_a_merge_is_known_by_its_defaults_too() -> None:
    step = Setup(tiny_suite(), "full", 0).compared("task_arithmetic")
    defaults = {**step.merging.with_defaults}
    assert defaults.pop("scale") == TaskArithmetic().scale
    changed = replace(step, merging=replace(step.merging, with_defaults=defaults))
    assert changed.key != step.key


def test_a_changed_source_is_a_changed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    suite = find_suite("text-small")

    def keys() -> dict[str, str]:
        return {
            step.name: step.key for step in SuitePlan(suite).steps if step.kind in ("make", "train")
        }

    before = keys()
    monkeypatch.setitem(VERSIONS, "tweets", 2)
    second = keys()
    changed = {name for name in before if before[name] != second[name]}
    assert "data tweets" in changed
    assert changed == {name for name in before if name.endswith(("tweets", "joint"))}
    monkeypatch.setitem(VERSIONS, "tweets", 3)
    assert keys()["data tweets"] != second["data tweets"]


def test_versions_are_of_sources() -> None:
    assert VERSIONS.keys() <= SOURCES.keys()
    assert all(version > 1 for version in VERSIONS.values())
