import json
from pathlib import Path

import pytest
from damaged_files import damaged_texts, mutants, mutated_texts, refused

from matsmerge.errors import DataError, OutputError
from matsmerge.evaluation.outcome import Outcome
from matsmerge.evaluation.results_folder import check_folder

HEAD = {"task": "rte", "kind": "x", "split": None, "data": "1", "num_examples": 1}
ANSWER = {"number": 0, "target": [1, 0], "prediction": 1, "probabilities": [[0.5]], "loss": 0.1}


@pytest.mark.parametrize("line", [0, 1])
def test_lines_of_predictions(line: int) -> None:
    num_refused = 0
    for what, mutant in mutants([HEAD, ANSWER][line]):
        lines = [json.dumps(HEAD), json.dumps(ANSWER)]
        lines[line] = json.dumps(mutant)
        try:
            list(Outcome.from_lines(lines).to_lines())
        except DataError:
            num_refused += 1
        except Exception as error:
            raise AssertionError(what) from error
    assert num_refused > 50


def test_an_output_folder_with_damaged_results(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    content: dict[str, object] = {"scores": {}, "versions": {}}
    texts = [*mutated_texts(content), *damaged_texts(json.dumps(content))]

    def use() -> None:
        try:
            check_folder(tmp_path, overwrite=True)
        except OutputError as error:
            raise OutputError(f"{path}: {error}") from error

    assert len(refused(path, texts, use)) > 20
