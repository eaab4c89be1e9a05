"""The wheel builds and works in an environment of its own, without the repository."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_it_builds_and_installs() -> None:
    """`scripts/wheel-walk` alone also follows the README and the tutorials, which takes minutes."""
    pytest.importorskip("hatchling", reason="needs hatchling: pip install 'matsmerge[dev]'")
    done = subprocess.run(
        [ROOT / "scripts" / "wheel-walk", "--build-only"],
        env=os.environ | {"MATSMERGE_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert ".whl and matsmerge-" in done.stdout


def test_all_is_everything_for_users() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]

    def reached(extra: str) -> set[str]:
        named = [re.match(r"matsmerge\[(.*)\]", needed) for needed in extras[extra]]
        parts = [part for found in named if found for part in found[1].split(",")]
        return {extra}.union(*(reached(part) for part in parts))

    assert reached("all") == extras.keys() - {"docs", "dev", "gs", "az"}  # other stores than S3
