"""Steps and what they leave: the same work is known again, damage is noticed."""

import json
from pathlib import Path

import pytest

from matsmerge.experiments.step import Given, Step, digest, with_needs
from matsmerge.experiments.store import RECORD, Store


def done(store: Store, step: Step) -> Path:
    partial = store.partial(step)
    (partial / "inner").mkdir(parents=True)
    (partial / "inner" / "numbers").write_bytes(b"1234")
    store.put(step, {"score": 0.5}, 1.25)
    return store.path(step)


def test_a_step_is_known_by_what_goes_into_it(tmp_path: Path) -> None:
    base = Step("make", "base", {"source": "x"})
    step = Step("train", "a", {"rate": 0.1}, {"base": base})
    assert step.key == Step("train", "another name", {"rate": 0.1}, {"base": base}).key
    others = [
        Step("collect", "a", {"rate": 0.1}, {"base": base}),
        Step("train", "a", {"rate": 0.2}, {"base": base}),
        Step("train", "a", {"rate": 0.1}, {"other": base}),
        Step("train", "a", {"rate": 0.1}, {"base": Step("make", "base", {"source": "y"})}),
    ]
    (tmp_path / "file").write_text("one")
    one = Given.at(tmp_path / "file")
    (tmp_path / "file").write_text("two")
    others += [Step("train", "a", {"rate": 0.1}, {"base": g}) for g in (one, Given.at(one.path))]
    assert len({step.key, *(other.key for other in others)}) == 1 + len(others)


def test_needs_come_first_and_once() -> None:
    a = Step("make", "a", {})
    b = Step("train", "b", {}, {"a": a})
    c = Step("merge", "c", {}, {"b": b, "a": a})
    assert [s.name for s in with_needs([c, Step("train", "again", {}, {"a": a})])] == [
        "a",
        "b",
        "c",
    ]


def test_a_folder_is_known_by_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    first = digest(tmp_path)
    (tmp_path / "a").rename(tmp_path / "b")
    second = digest(tmp_path)
    (tmp_path / "b").write_text("2")
    assert len({first, second, digest(tmp_path)}) == 3


def test_what_was_put_is_found_by_another_run(tmp_path: Path) -> None:
    step = Step("train", "full 0 a/b", {"rate": 0.1})
    assert Store(tmp_path).load(step) is None
    done(Store(tmp_path), step)
    record = Store(tmp_path).load(step)
    assert record is not None
    assert record.found == {"score": 0.5}
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
    step = Step("train", "a", {})
    damage(done(Store(tmp_path), step))  # type: ignore[operator]
    store = Store(tmp_path)
    assert store.load(step) is None
    assert len(store.notes) == 1
    assert "done again" in store.notes[0]
    assert not store.path(step).exists()
    done(store, step)
    assert Store(tmp_path).load(step) is not None
