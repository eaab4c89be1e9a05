"""What most steps begin with: tasks, the base model and a recipe, from settings and paths."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matsmerge.tasks.task_file import TaskFile

Settings = Mapping[str, Any]
Needs = Mapping[str, Path]


def read_tasks(settings: Settings, needs: Needs) -> list[TaskFile]:
    """The step's tasks, with their data."""
    tasks = []
    for content in settings["tasks"]:
        data = content.get("data")
        if (made := needs.get(f"data:{content['name']}")) is not None:
            data = data_in(made)
        tasks.append(TaskFile.model_validate({**content, "data": data}))
    return tasks


def data_in(path: Path) -> str | dict[str, str]:
    """A file; or of a folder with a file for each split, all of them by name."""
    if path.is_file():
        return str(path)
    files = sorted(p for p in path.iterdir() if p.is_file() and p.name != "step.json")
    if len(files) == 1 and files[0].stem.split(".")[0] == "data":
        return str(files[0])
    return {file.name.split(".")[0]: str(file) for file in files}


def base_of(settings: Settings, needs: Needs) -> str:
    """What was fine-tuned, or is to be: from a step, or by its name on the hub."""
    if "start" in needs:
        return str(needs["start"] / "model")
    return str(needs["base"]) if "base" in needs else str(settings["base"])


def recipe_of(settings: Settings, needs: Needs) -> dict[str, Any]:
    """A recipe for the models of a step's tasks."""
    method = settings["method"]
    models = []
    for name in settings["merged"]:
        entry = {"name": name, "model": settings["models"].get(name) or _folder(needs, name)}
        if (collected := needs.get(f"statistics:{name}")) is not None:
            entry["statistics"] = str(collected / "statistics.safetensors")
        models.append(entry)
    return {
        "base": base_of(settings, needs),
        "models": models,
        "method": {"name": method} if isinstance(method, str) else dict(method),
        **({"heads": settings["heads"]} if settings["heads"] else {}),
    }


def _folder(needs: Needs, name: str) -> str:
    return str(needs[f"model:{name}"] / "model")
