"""Results on disk: a folder that is complete or absent."""

import json
from pathlib import Path
from typing import Any

from matsmerge.errors import DataError
from matsmerge.files.guarded_files import read_json
from matsmerge.files.output_place import check_folder
from matsmerge.files.whole_outputs import StagedFolder, writing
from matsmerge.lab.evaluation.results import Results

RESULTS = "results.json"
# Half of a character, as data may hold, is written as JSON escapes it.
_TEXT: Any = {"encoding": "utf-8", "errors": "backslashreplace"}


def read_evaluation(path: Path) -> Results:
    """The scores in a results.json."""
    return Results.from_json(read_json(path, DataError), str(path))


def check_results_target(target: Path, *, overwrite: bool) -> None:
    """Refuse an output that must not or cannot be written, before any work."""
    check_folder(target, "evaluation", _holds_results, overwrite=overwrite)


def _holds_results(folder: Path) -> bool:
    try:
        content = read_json(folder / RESULTS, DataError)
    except DataError:
        return False
    return isinstance(content, dict) and {"scores", "versions"} <= content.keys()


def write_folder(results: Results, target: Path, *, overwrite: bool = False) -> None:
    """Write results.json, results.md and predictions/MODEL/TASK.jsonl."""
    check_results_target(target, overwrite=overwrite)
    staged = StagedFolder(target, "evaluation")
    staged.open()
    try:
        with writing(target):
            staged.clear()
            staged.output.mkdir()
            for model, by_task in results.outcomes.items():
                folder = staged.output / "predictions" / model
                folder.mkdir(parents=True)
                for task, outcome in by_task.items():
                    with (folder / f"{task}.jsonl").open("w", **_TEXT) as file:
                        file.writelines(f"{line}\n" for line in outcome.to_lines())
            (staged.output / "results.md").write_text(results.to_markdown(), **_TEXT)
            text = json.dumps(results.to_json(), indent=2, ensure_ascii=False)
            (staged.output / RESULTS).write_text(text + "\n", **_TEXT)
            staged.put_in_place()
    finally:
        staged.discard()
