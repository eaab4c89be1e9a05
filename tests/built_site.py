"""The documentation, built as scripts/docs builds it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def build_site(folder: Path) -> Path:
    """Build the site into a folder; a warning is an error."""
    for package in ("mkdocs", "material", "mkdocstrings", "mkdocstrings_handlers"):
        pytest.importorskip(package, reason="needs mkdocs: pip install 'matsmerge[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder
