"""Imports go down only, and `import matsmerge` stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import matsmerge

SOURCE = Path(matsmerge.__file__).parent
# From the top; a layer may import itself and what stands below it.
LAYERS = [
    "cli",
    "reports",
    "experiments",
    "api",
    "tuning",
    "engine",
    "recipes",
    "methods",
    "statistics",
    "evaluation",
    "training",
    "costs",
    "tasks",
    "adapters",
    "linalg",
    "checkpoints",
    "strict_yaml",
    "guarded_files",
    "markdown_text",
    "whole_folder",
    "errors",
    "limits",
    "version",
]
SIDE_BY_SIDE = {("linalg", "checkpoints"), ("tasks", "linalg")}


def layer_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "matsmerge"


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
            if node.module == "matsmerge":
                found |= {f"matsmerge.{alias.name}" for alias in node.names}
    return {name for name in found if name.startswith("matsmerge.")}


def test_imports_go_down_only() -> None:
    wrong = []
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        layer = parts[0]
        if layer in ("__init__", "__main__"):
            continue
        assert layer in LAYERS, f"{path}: the layer '{layer}' is not listed here"
        for name in imports(path):
            target = layer_of(name)
            lower = LAYERS.index(target) >= LAYERS.index(layer)
            if not lower or (layer, target) in SIDE_BY_SIDE:
                wrong.append(f"{path.relative_to(SOURCE)} imports {name}")
    assert not wrong


def test_importing_is_light() -> None:
    code = (
        "import sys, matsmerge; matsmerge.merge, matsmerge.collect; "
        "heavy = ['transformers', 'peft', 'ray', 'plotly', 'datasets', 'accelerate', 'typer', "
        "'huggingface_hub']; print([m for m in heavy if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys; from matsmerge.cli import main; print('torch' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "False"
