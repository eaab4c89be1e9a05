from pathlib import Path

import pytest

from matsmerge.errors import DataError
from matsmerge.recipes.model_data import ModelData
from matsmerge.tasks.task import TaskOptions
from matsmerge.tasks.task_file import TaskFile, read_task_file

FULL = """
task: multiple_choice
data: data.jsonl
split: test
columns: {input: question, label: gold}
labels: ["no", "yes"]
max_length: 128
head: heads/x.safetensors
tokenizer: owner/name
length_normalize: true
template: "premise: {premise}"
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "task.yaml"
    path.write_text(text)
    return path


def test_everything(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").touch()
    found = read_task_file(write(tmp_path, FULL))
    assert found == TaskFile(
        task="multiple_choice",
        data=str(tmp_path / "data.jsonl"),
        split="test",
        columns={"input": "question", "label": "gold"},
        labels=["no", "yes"],
        max_length=128,
        head="heads/x.safetensors",
        tokenizer="owner/name",
        length_normalize=True,
        template="premise: {premise}",
        name="task",
    )
    assert found.options(need_targets=False) == TaskOptions(128, ["no", "yes"], True, False)
    assert read_task_file(write(tmp_path, '{"task": "seq2seq"}')).task == "seq2seq"
    assert TaskFile().options() == TaskOptions()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("colums: {}", "task.yaml: unknown key 'colums'; did you mean 'columns'?"),
        ("task: seq2sec", "there is no task 'seq2sec'; did you mean 'seq2seq'?"),
        (
            "max_length: many",
            "max_length: input should be a valid integer, found 'many'",
        ),
        ("max_length: 0", "max_length: input should be greater than or equal to 1, found 0"),
        ("labels: [no, yes]", "labels.0: input should be a valid string, found False"),
        ("columns: {1: x}", "the key '1' is not a name"),
        ("task: seq2seq\ntask: causal_lm", "the key 'task' is given twice"),
        ("a: [", "not valid YAML"),
        ("- a", "expected a mapping"),
        ("", "expected a mapping"),
        ("task: !!python/name:os.system", "not valid YAML"),
    ],
)
def test_mistakes(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        read_task_file(write(tmp_path, text))
    assert message in str(caught.value)
    assert "task.yaml" in str(caught.value)


def test_all_mistakes_at_once(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        read_task_file(write(tmp_path, "dat: x\nsplit: 3\n"))
    assert len(caught.value.problems) == 2


def test_unreadable(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file; a task file says"):
        read_task_file(tmp_path / "none.yaml")
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="not UTF-8 text"):
        read_task_file(tmp_path / "x.yaml")


def test_a_recipe_may_add_choices_to_the_template_of_a_file(tmp_path: Path) -> None:
    path = write(tmp_path, 'task: multiple_choice\ntemplate: "{q}?"\n')
    given = ModelData.model_validate({"path": str(path), "choices": ["yes", "no"]})
    wordings = given.task_file.wordings
    assert wordings is not None
    filled = wordings.fill({"q": "a"}, 0, "input")
    assert filled == {"input": "a?", "choices": ["yes", "no"]}
    with pytest.raises(DataError, match="choices go with a template"):
        read_task_file(write(tmp_path, "choices: [a, b]"))
    with pytest.raises(DataError, match=r"task.yaml: .*template '\{': "):
        read_task_file(write(tmp_path, 'template: "{"'))
