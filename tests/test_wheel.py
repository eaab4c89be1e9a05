"""The wheel builds and works in an environment of its own, without the repository."""

import os
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
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = extras["optional-dependencies"]
    assert extras["all"] == ["matsmerge[lab,lm-eval]"]
    assert set(extras) == {"hf", "lab", "lm-eval", "all", "docs", "dev"}
