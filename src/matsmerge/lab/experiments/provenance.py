"""Where results come from: versions, commit, machine."""

import functools
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from matsmerge.byte_sizes import format_bytes
from matsmerge.engine.machine import num_cores

_PACKAGES = ("matsmerge", "torch", "transformers", "peft", "datasets", "safetensors", "numpy")


@functools.cache
def origin() -> dict[str, Any]:
    """Versions of what scores depend on, the commit of matsmerge, and the machine."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {"versions": versions, "commit": _commit(), "machine": _machine()}


def _commit() -> str | None:
    """The commit of matsmerge's repository, if it runs from one; with a + if files were changed."""

    def git(*arguments: str) -> str | None:
        here = Path(__file__).parent
        try:
            done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True)
        except OSError:  # no git
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    tracked = git("ls-files", "--error-unmatch", str(Path(__file__)))
    head = git("rev-parse", "HEAD") if tracked else None
    if head is None:
        return None
    return head + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


def _machine() -> dict[str, Any]:
    """The hardware, without the machine's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "system": platform.system(),
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "cores": num_cores(),
        "memory": format_bytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
    }
