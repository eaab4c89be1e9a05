"""Where results come from: versions, commit, machine."""

import functools
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from matsmerge.engine.machine import default_memory_bytes, format_bytes, num_cores

_PACKAGES = ("matsmerge", "torch", "transformers", "peft", "datasets", "safetensors", "numpy")


@functools.cache
def origin() -> dict[str, Any]:
    """All of it."""
    return {"versions": versions(), "commit": commit(), "machine": machine()}


def versions() -> dict[str, str]:
    """Of what scores depend on."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """Of matsmerge's repository, if it runs from one; with a + if files were changed since."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", *arguments], cwd=here, capture_output=True, text=True, check=False
            )
        except OSError:  # no git
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    tracked = git("ls-files", "--error-unmatch", str(Path(__file__)))
    head = git("rev-parse", "HEAD") if tracked else None
    if head is None:
        return None
    return head + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


def machine() -> dict[str, Any]:
    """What it ran on; nothing that names it."""
    return {
        "system": platform.system(),
        "processor": _processor() or platform.machine(),
        "cores": num_cores(),
        "memory": format_bytes(_memory() or default_memory_bytes()),
    }


def _processor() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else None


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
