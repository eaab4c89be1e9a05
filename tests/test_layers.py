"""Packages import what the picture says and nothing else, and `import matsmerge` stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import matsmerge
import matsmerge.lab

SOURCE = Path(matsmerge.__file__).parent
# What knows nothing of merging, and every package may import.
GROUND = {
    "byte_sizes",
    "errors",
    "files",
    "limits",
    "markdown_text",
    "notebook_table",
    "optional_import",
    "problems",
    "progress",
    "version",
}
# Who imports whom. The library does not know the lab; only the command line brings both together.
LIBRARY = {
    "linalg": set(),
    "checkpoints": set(),
    "adapters": {"linalg", "checkpoints"},
    "data": {"checkpoints"},
    "models": {"adapters", "checkpoints", "data"},
    "tasks": {"adapters", "checkpoints", "data", "models"},
    "statistics": {"linalg", "checkpoints", "data", "models", "tasks"},
    "methods": {"linalg", "checkpoints", "statistics"},
    "recipes": {"checkpoints", "methods", "statistics", "tasks"},
    "engine": {
        "linalg",
        "checkpoints",
        "adapters",
        "data",
        "models",
        "tasks",
        "statistics",
        "methods",
        "recipes",
    },
    "advice": {
        "checkpoints",
        "data",
        "linalg",
        "models",
        "tasks",
        "statistics",
        "recipes",
        "engine",
    },
    "api": {"checkpoints", "methods", "recipes", "engine", "advice"},
}
LAB = {
    "lab.run_logs": set(),
    "lab.costs": set(),
    "lab.evaluation": set(),
    "lab.training": set(),
    "lab.tuning": {"lab.evaluation", "lab.run_logs"},
    "lab.subspaces": set(),
    "lab.experiments": {
        "lab.run_logs",
        "lab.costs",
        "lab.evaluation",
        "lab.subspaces",
        "lab.training",
        "lab.tuning",
    },
    "lab.reports": {"lab.evaluation", "lab.experiments", "lab.subspaces", "lab.tuning"},
    "lab.commands": {
        "lab.costs",
        "lab.evaluation",
        "lab.experiments",
        "lab.reports",
        "lab.subspaces",
        "lab.training",
        "lab.tuning",
        "cli",
    },
}
ALLOWED: dict[str, set[str]] = {
    **{name: GROUND | used for name, used in LIBRARY.items()},
    **{name: GROUND | set(LIBRARY) | used for name, used in LAB.items()},
    "cli": GROUND | set(LIBRARY) | {"lab.commands"},
    **dict.fromkeys(GROUND, GROUND),
}


def package_of(module: str) -> str:
    """`lab.reports` of matsmerge.lab.reports.page, `engine` of matsmerge.engine.plan."""
    parts = module.split(".")[1:] or ["matsmerge"]
    return ".".join(parts[:2]) if parts[0] == "lab" else parts[0]


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
            if node.module == "matsmerge":
                names = {alias.name for alias in node.names}
                public = names & set(matsmerge.__all__)  # the surface, which is made in api
                found |= {f"matsmerge.{name}" for name in names - public}
                found |= {"matsmerge.api"} if public else set()
    return {name for name in found if name.startswith("matsmerge.")}


def test_packages_import_what_the_picture_says() -> None:
    wrong = []
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        package = package_of(".".join(["matsmerge", *parts]))
        if package in ("__init__", "__main__", "lab.__init__"):
            continue
        assert package in ALLOWED, f"{path}: the package '{package}' is not in the picture"
        for name in imports(path):
            target = package_of(name)
            if target != package and target not in ALLOWED[package]:
                wrong.append(f"{path.relative_to(SOURCE)} imports {name}")
    assert not wrong


def test_no_two_modules_have_the_same_name() -> None:
    names = [p.stem for p in SOURCE.rglob("*.py") if p.stem != "__init__"]
    assert sorted(names) == sorted(set(names))


def defined_names(path: Path) -> set[str]:
    """Types and functions that a module defines for others."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            names = {t.id for t in node.targets if isinstance(t, ast.Name)}
            found |= {name for name in names if name[0].isupper() and not name.isupper()}
    return {name for name in found if not name.startswith("_")}


def test_a_name_means_one_thing() -> None:
    homes: dict[str, list[str]] = {}
    for path in SOURCE.rglob("*.py"):
        # A command is called as what it does is called in Python.
        if path.parent.name in ("cli", "commands"):
            commands = {"run", *matsmerge.__all__, *matsmerge.lab.__all__, "inspect"}
        else:
            commands = set()
        for name in defined_names(path) - commands:
            homes.setdefault(name, []).append(str(path.relative_to(SOURCE)))
    assert not {name: found for name, found in homes.items() if len(found) > 1}


def test_no_module_is_long() -> None:
    lines = {path: len(path.read_text().splitlines()) for path in SOURCE.rglob("*.py")}
    assert not {str(path): num for path, num in lines.items() if num > 400}
    assert sorted(lines.values())[len(lines) // 2] <= 130


def test_importing_is_light() -> None:
    code = (
        "import sys, matsmerge; matsmerge.merge, matsmerge.collect; "
        "heavy = ['transformers', 'peft', 'ray', 'datasets', 'accelerate', 'typer', "
        "'huggingface_hub', 'fsspec', 's3fs']; print([m for m in heavy if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--help"], "Usage: mats"),
        (["merge", "--help"], "--scale"),
        (["collect", "--help"], "Usage: mats collect"),
        (["merge", "syntax.yaml", "-o", "out"], "not valid YAML"),
        (["merge", "names.yaml", "-o", "out"], "unknown key 'bsae'; did you mean 'base'?"),
        (["merge", "--model", "a", "--modle", "b"], "No such option"),
    ],
)
def test_help_and_first_errors_do_not_wait_for_torch(
    tmp_path: Path, arguments: list[str], says: str
) -> None:
    (tmp_path / "syntax.yaml").write_text("models: [a")
    (tmp_path / "names.yaml").write_text("models: [a]\nbsae: b\nmethod: ties\n")
    code = (
        f"import sys; from matsmerge.cli import main; main.run({arguments}); "
        "print('torch' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert says in result.stdout + result.stderr
    assert result.stdout.strip().endswith("False")
