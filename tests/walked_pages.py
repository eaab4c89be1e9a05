"""Pages walked as a reader does: files written, Python run, commands given, from top to bottom.

Blocks of `python` are run in one namespace, blocks of `bash` and those without a language are
commands, and a block with a `title` is a file. Blocks of `text` are for readers alone. As a
program, `python walked_pages.py PAGE...` walks pages with the matsmerge of its own environment,
and needs nothing of the repository.
"""

import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

_BLOCK = re.compile(r"^```([a-z]*)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Step:
    """A block of a page."""

    language: str
    title: str
    code: str

    @property
    def commands(self) -> list[list[str]]:
        """The commands of `mats` in it, without the first word."""
        if self.language not in ("", "bash"):
            return []
        lines = self.code.replace("\\\n", " ").splitlines()
        found = [shlex.split(line, comments=True) for line in lines if line.startswith("mats ")]
        return [words[1:] for words in found]


def steps(text: str) -> list[Step]:
    return [Step(*found) for found in _BLOCK.findall(text)]


def walk(text: str, mats: Callable[[list[str]], object], *, name: str = "page") -> None:
    """Do in the current folder what a page says; `mats` runs a command and raises if it fails."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    for step in steps(text):
        if step.title:
            Path(step.title).write_text(step.code, encoding="utf-8")
        elif step.language == "python":
            exec(compile(step.code, name, "exec"), namespace)
        for command in step.commands:
            for made in outputs(command):
                clear(Path(made))
            mats(command)


def outputs(command: list[str]) -> Iterator[str]:
    """What a command makes; pages may make the same folder several times."""
    for option, value in pairwise(command):
        if option == "--out" and "--resume" not in command:
            yield value


def clear(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _run(command: list[str]) -> None:
    """Run a command in this process, which has imported everything once."""
    from matsmerge.cli.main import run

    print("mats", shlex.join(command), flush=True)
    if code := run([*command, *_quiet(command)]):
        sys.exit(f"mats {shlex.join(command)}: ended with {code}")


def _quiet(command: list[str]) -> list[str]:
    return ["--quiet"] if command[0] in ("merge", "collect", "train") else []


def _main(arguments: list[str]) -> None:
    """Walk pages, each in a new folder, or in one that is there: `--in FOLDER PAGE`."""
    given = Path(arguments[1]).resolve() if arguments[0] == "--in" else None
    for page in [Path(a).resolve() for a in arguments[2 if given else 0 :]]:
        print(f"== {page.name}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(given or folder)
            walk(page.read_text(encoding="utf-8"), _run, name=page.name)
            os.chdir(page.parent)


if __name__ == "__main__":
    _main(sys.argv[1:])
