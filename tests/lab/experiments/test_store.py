"""Steps and what they leave: the same work is known again, damage is noticed."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from pydantic import BaseModel

from matsmerge.lab.experiments.step import (
    Given,
    Need,
    Places,
    Step,
    TaskInput,
    digest_tree,
    with_needs,
)
from matsmerge.lab.experiments.store import RECORD, Store
from matsmerge.tasks.task_file import TaskFile


class Found(BaseModel):
    score: float


@dataclass(frozen=True, kw_only=True)
class Work(Step[Found], kind="work", output="inner"):
    rate: float = 0.1
    needed: dict[str, Need] = field(default_factory=dict)
    tasks: tuple[TaskInput, ...] = ()

    def run(self, _: Places, __: Path, /) -> Found:
        return Found(score=0.5)


class OtherWork(Work, kind="other"):
    pass


def done(store: Store, step: Work) -> Path:
    partial = store.partial(step)
    (partial / "inner").mkdir(parents=True)
    (partial / "inner" / "numbers").write_bytes(b"1234")
    store.put(step, Found(score=0.5), 1.25)
    return store.path(step)


def test_a_step_is_known_by_what_goes_into_it(tmp_path: Path) -> None:
    base = Work(name="base")
    step = Work(name="a", needed={"base": base})
    assert step.key == Work(name="another name", needed={"base": base}).key
    assert step.needs == [base]
    task = TaskInput(TaskFile(name="t", seed=1), base)
    others = [
        OtherWork(name="a", needed={"base": base}),
        Work(name="a", rate=0.2, needed={"base": base}),
        Work(name="a", needed={"other": base}),
        Work(name="a", needed={"base": Work(name="base", rate=0.2)}),
        Work(name="a", tasks=(task,)),
        Work(name="a", tasks=(TaskInput(TaskFile(name="t", seed=2), base),)),
    ]
    assert others[-1].needs == [base]
    (tmp_path / "file").write_text("one")
    one = Given.at(tmp_path / "file")
    (tmp_path / "file").write_text("two")
    others += [Work(name="a", needed={"base": given}) for given in (one, Given.at(one.path))]
    assert len({step.key, *(other.key for other in others)}) == 1 + len(others)


def test_needs_come_first_and_once() -> None:
    a = Work(name="a")
    b = Work(name="b", rate=0.2, needed={"a": a})
    c = Work(name="c", rate=0.3, needed={"b": b, "a": a})
    again = Work(name="again", rate=0.2, needed={"a": a})
    assert [step.name for step in with_needs([c, again])] == ["a", "b", "c"]


def test_places_of_needs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("one")
    given, step, store = Given.at(tmp_path / "file"), Work(name="a"), Store(tmp_path)
    places = Places({need.key: store.output(need) for need in (given, step)})
    assert places.path(given) == tmp_path / "file"
    assert places.name(step) == str(tmp_path / step.folder_name / "inner")
    assert places.name("owner/name") == "owner/name"


def test_a_folder_is_known_by_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    first = digest_tree(tmp_path)
    (tmp_path / "a").rename(tmp_path / "b")
    second = digest_tree(tmp_path)
    (tmp_path / "b").write_text("2")
    assert len({first, second, digest_tree(tmp_path)}) == 3


def test_what_was_put_is_found_by_another_run(tmp_path: Path) -> None:
    step = Work(name="full 0 a/b")
    assert Store(tmp_path).load(step) is None
    done(Store(tmp_path), step)
    record = Store(tmp_path).load(step)
    assert record is not None
    assert record.found == Found(score=0.5)
    assert record.seconds == 1.25
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    "damage",
    [
        lambda p: (p / "inner" / "numbers").write_bytes(b"1235"),
        lambda p: (p / "inner" / "numbers").unlink(),
        lambda p: (p / "new").write_bytes(b""),
        lambda p: (p / RECORD).unlink(),
        lambda p: (p / RECORD).write_text("{"),
        lambda p: (p / RECORD).write_text("[]"),
        lambda p: (p / RECORD).write_text("null"),
        lambda p: (p / RECORD).write_text(
            json.dumps({**json.loads((p / RECORD).read_text()), "found": {"score": 0.9}})
        ),
    ],
    ids=["changed", "gone", "new", "no record", "cut off", "a list", "nothing", "better score"],
)
def test_what_is_damaged_is_not_trusted(tmp_path: Path, damage: object) -> None:
    step = Work(name="a")
    damage(done(Store(tmp_path), step))  # type: ignore[operator]
    store = Store(tmp_path)
    assert store.load(step) is None
    assert len(store.notes) == 1
    assert "done again" in store.notes[0]
    assert not store.path(step).exists()
    done(store, step)
    assert Store(tmp_path).load(step) is not None
