"""The documentation, built as scripts/docs builds it."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def built_site(factory: pytest.TempPathFactory) -> Path:
    """The site; a warning is an error. All processes that run tests share one."""
    for package in ("mkdocs", "material", "mkdocstrings", "mkdocstrings_handlers"):
        pytest.importorskip(package, reason="needs mkdocs: pip install 'matsmerge[docs]'")
    own = factory.getbasetemp()
    place = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    with (place / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "site").exists():
            _build(place / "half-built")
            (place / "half-built").rename(place / "site")
    return place / "site"


def _build(folder: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
