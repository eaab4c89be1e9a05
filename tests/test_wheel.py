"""The wheel builds and works in an environment of its own, without the repository."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from matsmerge.optional_import import EXTRAS

ROOT = Path(__file__).parents[1]


@pytest.mark.long
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


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_all_is_everything_for_users() -> None:
    extras = PROJECT["optional-dependencies"]

    def reached(extra: str) -> set[str]:
        named = [re.match(r"matsmerge\[(.*)\]", needed) for needed in extras[extra]]
        parts = [part for found in named if found for part in found[1].split(",")]
        return {extra}.union(*(reached(part) for part in parts))

    assert reached("all") == extras.keys() - {"docs", "dev", "gs", "az"}  # other stores than S3


def test_errors_name_extras_that_there_are() -> None:
    extras = PROJECT["optional-dependencies"]
    brought = {"aiohttp": "s3fs"}  # by another package
    for package, extra in EXTRAS.items():
        assert any(n.startswith(brought.get(package, package)) for n in extras[extra]), package


def test_the_image_is_made_of_what_there_is() -> None:
    """Images are not built here: what is copied exists and is sent, what is installed, too."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    sent = (ROOT / ".dockerignore").read_text().split()
    assert sent == ["*", *(f"!{name}" for name in copied)]
    for name in copied:
        assert (ROOT / name).exists(), name
    needed = {PROJECT["readme"], "pyproject.toml", "src", *PROJECT["license-files"]}
    assert set(copied) == needed
    (extras,) = re.findall(r'"/source\[(.*)\]"', (ROOT / "Dockerfile").read_text())
    assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()
    (version,) = re.findall(r"^FROM python:([0-9.]+)", (ROOT / "Dockerfile").read_text(), re.M)
    assert f"Programming Language :: Python :: {version}" in PROJECT["classifiers"]
    (program,) = re.findall(r'ENTRYPOINT \["(.*)"\]', (ROOT / "Dockerfile").read_text())
    assert program in PROJECT["scripts"]
