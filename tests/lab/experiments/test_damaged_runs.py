"""Files of a run of a suite as they should not be."""

import hashlib
import json
from pathlib import Path

import pytest
from damaged_files import mutants, mutated_texts, refused

from matsmerge.errors import RecipeError
from matsmerge.lab.experiments.steps import Train
from matsmerge.lab.experiments.store import RECORD, Store
from matsmerge.lab.experiments.suite import find_suite, read_suite
from matsmerge.lab.experiments.suite_run import LOCAL, SUITE, read_run
from matsmerge.lab.training.training_options import TrainingOptions


def test_records_of_steps(tmp_path: Path) -> None:
    step = Train(name="a step", base="owner/base", tasks=[], options=TrainingOptions())
    first = Store(tmp_path)
    first.partial(step).mkdir()
    first.put(step, 0.5, 1.5)
    path = first.path(step) / RECORD
    content = json.loads(path.read_text())
    texts = list(mutated_texts(content))
    for what, mutant in mutants(content):
        if isinstance(mutant, dict):  # and with the digest of what is wrong
            mutant.pop("digest", None)
            plain = json.dumps(mutant, sort_keys=True)
            mutant["digest"] = hashlib.sha256(plain.encode()).hexdigest()
            texts.append((what, json.dumps(mutant).encode()))
    num_damaged = 0
    for what, text in texts:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(text)
        store = Store(tmp_path)
        try:
            found = store.load(step)
        except Exception as error:
            raise AssertionError(what) from error
        if found is None:
            num_damaged += 1
            assert not path.exists()
            assert "its output was damaged" in store.notes[0], what
        else:
            assert found.seconds >= 0, what
            assert found.found is None or isinstance(found.found, float), what
            json.dumps([found.found, found.origin])
    assert num_damaged > 100


@pytest.mark.parametrize("name", [SUITE, LOCAL])
def test_files_of_a_run(name: str, tmp_path: Path) -> None:
    task = {"task": "sequence_classification", "data": "rte.jsonl"}
    suite = {
        "title": "t", "about": "a", "base": "owner/base", "tasks": {"rte": task, "cb": task},
        "methods": {"average": {"method": "average"}}, "variants": {"full": {}},
    }  # fmt: skip
    contents = {SUITE: suite | {"name": "s"}, LOCAL: {"base": "/a", "data": "/b"}}
    for file, content in contents.items():
        (tmp_path / file).write_text(json.dumps(content))
    read_run(tmp_path)
    found = refused(tmp_path / name, mutated_texts(contents[name]), lambda: read_run(tmp_path))
    assert len(found) > 20


def test_a_suite_that_is_no_file(tmp_path: Path) -> None:
    folder = tmp_path / "suite.yaml"
    folder.mkdir()
    with pytest.raises(RecipeError, match=r"suite\.yaml: not a regular file"):
        find_suite(str(folder))
    link = tmp_path / "zero.yaml"
    link.symlink_to("/dev/zero")
    with pytest.raises(RecipeError, match=r"zero\.yaml: not a regular file"):
        read_suite(link)
