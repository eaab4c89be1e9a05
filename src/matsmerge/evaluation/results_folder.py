"""Results on disk: a folder that is complete or absent."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from matsmerge.errors import DataError, OutputError
from matsmerge.evaluation.results import Results
from matsmerge.guarded_files import read_json
from matsmerge.whole_folder import is_vacant, name_problems, put_in_place

RESULTS = "results.json"
# Half of a character, as data may hold, is written as JSON escapes it.
_TEXT: Any = {"encoding": "utf-8", "errors": "backslashreplace"}


def check_folder(target: Path, *, overwrite: bool) -> None:
    """Refuse an output that must not or cannot be written, before any work."""
    if problems := name_problems(target):
        raise OutputError(problems)
    if not target.name or target.is_symlink():
        raise OutputError(f"{target}: is not the name of a folder to make; choose another --out")
    if not is_vacant(target):
        if not _holds_results(target):
            raise OutputError(f"{target}: exists and holds no results; choose another --out")
        if not overwrite:
            raise OutputError(f"{target}: exists already; replace it with --overwrite")
    parent = next(p for p in target.absolute().parents if p.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise OutputError(f"{parent}: cannot be written to; choose another --out")


def read_results(path: Path) -> Results:
    """The scores in a results.json."""
    return Results.from_json(read_json(path, DataError), str(path))


def _holds_results(folder: Path) -> bool:
    try:
        content = read_json(folder / RESULTS, DataError)
    except DataError:
        return False
    return isinstance(content, dict) and {"scores", "versions"} <= content.keys()


def write_folder(results: Results, target: Path, *, overwrite: bool = False) -> None:
    """Write results.json, results.md and predictions/MODEL/TASK.jsonl."""
    check_folder(target, overwrite=overwrite)
    staging = target.with_name(f".{target.name}.results")
    replaced = target.with_name(f".{target.name}.replaced")
    try:
        if staging.exists():
            shutil.rmtree(staging)
        for model, by_task in results.outcomes.items():
            folder = staging / "predictions" / model
            folder.mkdir(parents=True)
            for task, outcome in by_task.items():
                with (folder / f"{task}.jsonl").open("w", **_TEXT) as file:
                    file.writelines(f"{line}\n" for line in outcome.to_lines())
        staging.mkdir(parents=True, exist_ok=True)
        (staging / "results.md").write_text(results.to_markdown(), **_TEXT)
        text = json.dumps(results.to_json(), indent=2, ensure_ascii=False)
        (staging / RESULTS).write_text(text + "\n", **_TEXT)
        shutil.rmtree(replaced, ignore_errors=True)
        put_in_place(staging, target, replaced)
    except OSError as error:
        raise OutputError(f"{target}: cannot be written ({error.strerror})") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        if target.exists():
            shutil.rmtree(replaced, ignore_errors=True)
