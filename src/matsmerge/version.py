"""The version of matsmerge, and those of what results depend on."""

import platform
from importlib import import_module

__version__ = "0.1.0"


def versions(*packages: str) -> dict[str, str]:
    """Versions to write beside results: of matsmerge, and of packages, of which `python` is one."""
    found = {"matsmerge": __version__}
    for name in packages:
        is_python = name == "python"
        found[name] = platform.python_version() if is_python else import_module(name).__version__
    return {name: str(version) for name, version in found.items()}
