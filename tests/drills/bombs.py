"""Small inputs that stand for something huge or endless, and numbers nobody can mean."""

import gzip
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from drills.arena import Tally, run
from drills.mutants import COLLECT, MERGE, SOLVE

MERGE_README = ("merge", "plain.yaml", "--out", "out")
OF_DATA = ("--out", "out.safetensors")


def _aliases(levels: int = 10, each: int = 9) -> str:
    lines = [f"a0: &a0 [{', '.join(['x'] * each)}]"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * each)}]")
    return "\n".join(lines) + "\n"


def _header(entries: object, data: bytes = b"") -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


def _zeros(num_megabytes: int) -> bytes:
    """A gzip file of many members, which are read as one."""
    return gzip.compress(bytes(10**6), 9, mtime=0) * num_megabytes


def _write(file: str, content: bytes | str) -> Callable[[Path], None]:
    def write(place: Path) -> None:
        path = place / file
        path.write_bytes(content.encode() if isinstance(content, str) else content)

    return write


def _many_tensors(file: str, num: int) -> Callable[[Path], None]:
    """Made when it is planted: it takes seconds, and the tests import this module."""
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    return lambda place: _write(file, _header({f"t{i}": empty for i in range(num)}))(place)


def _link(file: str, target: str) -> Callable[[Path], None]:
    def link(place: Path) -> None:
        (place / file).unlink()
        (place / file).symlink_to(target)

    return link


def _pipe(file: str) -> Callable[[Path], None]:
    def pipe(place: Path) -> None:
        (place / file).unlink()
        os.mkfifo(place / file)

    return pipe


def _nothing(place: Path) -> None: ...


_ROW = json.dumps({"text": "a b " * 2_500_000, "label": 1}) + "\n"
_EMPTY = {"dtype": "F32", "shape": [0, 10**30], "data_offsets": [0, 0]}

# What is changed, in which file, and the command that has to refuse it or not mind.
BOMBS: dict[str, tuple[str, Callable[[Path], None], tuple[str, ...]]] = {
    "aliases in a recipe": ("plain.yaml", _write("plain.yaml", _aliases()), MERGE),
    "aliases in a task": ("one.yaml", _write("one.yaml", _aliases()), COLLECT),
    "aliases in a card": (
        "one/README.md", _write("one/README.md", f"---\n{_aliases()}---\n"), MERGE_README,
    ),
    "an alias of itself in a card": (
        "one/README.md", _write("one/README.md", "---\ndatasets: &a [*a]\n---\n"), MERGE_README,
    ),
    "brackets in a card": (
        "one/README.md", _write("one/README.md", f"---\n{'[' * 3000}\n---\n"), MERGE_README,
    ),
    "digits in a recipe": ("plain.yaml", _write("plain.yaml", f"base: {'9' * 5000}\n"), MERGE),
    "a date that is none": ("plain.yaml", _write("plain.yaml", "base: 2020-99-99\n"), MERGE),
    "brackets in a configuration": (
        "one/config.json", _write("one/config.json", "[" * 100_000), MERGE,
    ),
    "a recipe without end": ("plain.yaml", _link("plain.yaml", "/dev/zero"), MERGE),
    "a task without end": ("one.yaml", _link("one.yaml", "/dev/zero"), COLLECT),
    "data without end": ("one.jsonl", _link("one.jsonl", "/dev/zero"), COLLECT),
    "a configuration without end": ("one/config.json", _link("one/config.json", "/dev/zero"), MERGE),
    "a pipe as a model": ("one/model.safetensors", _pipe("one/model.safetensors"), MERGE),
    "a pipe as statistics": ("one.safetensors", _pipe("one.safetensors"), SOLVE),
    "a pipe as a recipe": ("plain.yaml", _pipe("plain.yaml"), MERGE),
    "a pipe as data": ("one.jsonl", _pipe("one.jsonl"), COLLECT),
    "a pipe as an adapter": ("lora/adapter_config.json", _pipe("lora/adapter_config.json"), (
        "inspect", "lora",
    )),
    "zeros in gzip": (
        "one.jsonl.gz", _write("one.jsonl.gz", _zeros(1500)),
        ("collect", "one", "--data", "one.jsonl.gz", *OF_DATA),
    ),
    "a line of 10 MB": ("one.jsonl", _write("one.jsonl", _ROW), COLLECT),
    "a million tensors": (
        "one/model.safetensors", _many_tensors("one/model.safetensors", 1_000_000),
        ("inspect", "one"),
    ),
    "a shape beyond numbers": (
        "one/model.safetensors", _write("one/model.safetensors", _header({"x": _EMPTY})),
        ("merge", "--model", "one", "--model", "one", "--out", "out"),
    ),
    "a header that says it is huge": (
        "one/model.safetensors", _write("one/model.safetensors", (2**60).to_bytes(8, "little")),
        ("inspect", "one"),
    ),
    "a trajectory of a billion": (
        "", _nothing, (*SOLVE, "--trajectory", "1:1000000000:1"),
    ),
    "a hundred thousand workers": ("", _nothing, (*MERGE, "--workers", "100000")),
    "a search of a trillion": ("", _nothing, (
        "tune", "plain.yaml", "--task", "one.yaml", "--search", "scale=0:1:0.000000000001",
        "--out", "out",
    )),
}  # fmt: skip


@contextmanager
def planted(place: Path, file: str, plant: Callable[[Path], None]) -> Iterator[None]:
    """Have a bomb in a file's place for a while."""
    kept = place.with_name(f"{place.name}.kept")
    if file:
        shutil.copy2(place / file, kept)
    try:
        plant(place)
        yield
    finally:
        if file:
            (place / file).unlink()
            kept.replace(place / file)


def drill_bombs(yard: Path, place: Path) -> Tally:
    """Each of the table once."""
    tally = Tally("bombs")
    shutil.copytree(yard, place)
    names = {path.name for path in place.iterdir()}
    for name, (file, plant, arguments) in BOMBS.items():
        with planted(place, file, plant):
            outcome = run(place, arguments)
        tally.count(outcome)
        problems = outcome.problems()
        if outcome.code != 0 and (place / "out").exists():
            problems.append("an output in spite of an error")
        for path in place.iterdir():
            if path.name not in names:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        if problems:
            tally.violations.append(f"{name}: {'; '.join(problems)}\n{outcome.text[-1500:]}")
    return tally
