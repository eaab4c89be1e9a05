"""Damaged inputs: every kind of file that a command reads, changed at random."""

import gzip
import json
import os
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from drills.arena import Tally, run
from drills.yard import HALF_COLLECTION, HALF_MERGE, interrupt_work, task_options

Change = Callable[[bytes, random.Random], bytes]
Command = tuple[str, ...]

MERGE = ("merge", "plain.yaml", "--out", "out")
SOLVE = ("merge", "recipe.yaml", "--out", "out")
COLLECT = ("collect", "one", "--task", "one.yaml", "--split", "train", "--out", "out.safetensors")
EVALUATE = ("evaluate", "merged", *task_options(), "--split", "validation", "--out", "out")
# The files, and commands that read them.
TARGETS: Mapping[str, tuple[Command, ...]] = {
    "one/model.safetensors": (("inspect", "one"), MERGE, COLLECT),
    "one/config.json": (MERGE, COLLECT, EVALUATE),
    "one/README.md": (MERGE,),
    "one/tokenizer.json": (MERGE, COLLECT),
    "one/tokenizer_config.json": (MERGE, COLLECT),
    "sharded/model.safetensors.index.json": (
        ("inspect", "sharded"),
        ("merge", "--model", "sharded", "--model", "two", "--out", "out"),
    ),
    "pickled.bin": (("inspect", "pickled.bin"),),
    "lora/adapter_config.json": (
        ("inspect", "lora"),
        ("merge", "--model", "lora", "--model", "lora", "--out", "out"),
    ),
    "lora/adapter_model.safetensors": (
        ("merge", "--model", "lora", "--model", "lora", "--out", "out"),
    ),
    "ia3/adapter_config.json": (("merge", "--model", "ia3", "--model", "ia3", "--out", "out"),),
    "recipe.yaml": (("merge", "recipe.yaml", "--dry-run"), ("cost", "recipe.yaml"), SOLVE),
    "mergekit.yaml": (("merge", "mergekit.yaml", "--out", "out"),),
    "one.yaml": (COLLECT, EVALUATE),
    "one.jsonl": (COLLECT,),
    "one.jsonl.gz": (("collect", "one", "--data", "one.jsonl.gz", "--out", "out.safetensors"),),
    "one.csv": (("collect", "one", "--data", "one.csv", "--out", "out.safetensors"),),
    "one.tsv": (("collect", "one", "--data", "one.tsv", "--out", "out.safetensors"),),
    "one.json": (("collect", "one", "--data", "one.json", "--out", "out.safetensors"),),
    ".half.partial/journal.jsonl": ((*HALF_MERGE, "--resume"),),
    ".half.safetensors.partial": ((*HALF_COLLECTION, "--resume"),),
    "one.safetensors": (
        ("inspect", "one.safetensors"),
        SOLVE,
        ("stats", "combine", "one.safetensors", "one.safetensors", "--out", "out.safetensors"),
    ),
    "merged/merge.json": (
        ("report", "merged", "--out", "out.html"),
        ("inspect", "merged"),
        ("evaluate", "merged", *task_options(), "--split", "validation"),
    ),
    "merged/heads/one.safetensors": (EVALUATE,),
    "scores/results.json": (("report", "merged", "--scores", "scores", "--out", "out.html"),),
}
_WEIRD: tuple[Any, ...] = (
    None, True, -1, 0, 1e400, float("nan"), 10**30, "", "x" * 5000, "../../etc/passwd", "\0", [], {},
    [[]], {"a": {"b": 1}}, ["x", 1, None], "🙂", "[/red]", ":100:",
)  # fmt: skip


def drill_mutants(yard: Path, place: Path, seed: int, num: int) -> Tally:
    """Try `num` damaged inputs, one after the other, in a copy of the yard."""
    tally = Tally("damaged inputs")
    shutil.copytree(yard, place)
    interrupt_work(place)
    interrupted = {path.name: _content(path) for path in place.iterdir() if "half" in path.name}
    before = _listing(place)
    pairs = [(file, command) for file, commands in TARGETS.items() for command in commands]
    for number in range(num):
        name = f"seed {seed}, number {number}"
        draw = random.Random(f"{seed} {number}")
        file, command = pairs[number % len(pairs)]
        path = place / file
        original, seen = path.read_bytes(), path.stat()
        change = draw.choice(_changes_of(path))
        path.write_bytes(change(original, draw))
        outcome = run(place, command)
        tally.count(outcome)
        problems = outcome.problems()
        if outcome.code != 0 and (place / "out").exists():
            problems.append("an output in spite of an error")
        if ".half" in file:
            _restore(place, interrupted)
        else:
            path.write_bytes(original)
            os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))  # or nothing can be resumed
        for made in _listing(place) - before:
            if made.split("/")[0].lstrip(".").startswith("out"):
                _remove(place / made.split("/")[0])
            else:
                problems.append(f"left {made} behind")
                _remove(place / made)
        if problems:
            tally.violations.append(
                f"{name}: {file}, {change.__name__}, mats {' '.join(command)}: {'; '.join(problems)}"
                f"\n{outcome.text[-1500:]}"
            )
    return tally


def _content(path: Path) -> dict[str, bytes]:
    files = path.rglob("*") if path.is_dir() else [path]
    return {str(f.relative_to(path)): f.read_bytes() for f in files if f.is_file()}


def _restore(place: Path, interrupted: Mapping[str, Mapping[str, bytes]]) -> None:
    """Put back work that was interrupted, which may have been finished meanwhile."""
    for path in place.iterdir():
        if "half" in path.name:
            _remove(path)
    for name, files in interrupted.items():
        for file, content in files.items():
            path = place / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def _listing(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _changes_of(path: Path) -> list[Change]:
    changes: list[Change] = [flip, cut, repeat, fill]
    if path.suffix in (".json", ".yaml"):
        changes += [replace_value] * 6 + [drop_value] * 2
    if path.name.endswith(".safetensors.partial"):
        changes += [replace_in_header] * 6
    if path.suffix == ".jsonl":
        changes += [replace_in_line] * 4
    if path.suffix == ".safetensors":
        changes += [replace_in_header] * 6
    if path.name.endswith(".gz"):
        changes += [within_gzip] * 4
    if path.name == "README.md":
        changes += [replace_front_matter] * 6
    return changes


def flip(content: bytes, draw: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 4, 40))):
        changed[draw.randrange(len(changed))] = draw.randrange(256)
    return bytes(changed)


def cut(content: bytes, draw: random.Random) -> bytes:
    return content[: draw.randrange(len(content))]


def repeat(content: bytes, draw: random.Random) -> bytes:
    at, to = sorted(draw.randrange(len(content)) for _ in range(2))
    return content[:to] + content[at:to] * draw.choice((1, 3)) + content[to:]


def fill(content: bytes, draw: random.Random) -> bytes:
    at, to = sorted(draw.randrange(len(content)) for _ in range(2))
    return content[:at] + draw.choice((b"\0", b"\xff", b"[", b"9")) * (to - at) + content[to:]


def replace_value(content: bytes, draw: random.Random) -> bytes:
    """Another value somewhere in JSON or YAML."""
    return json.dumps(_replaced(yaml.safe_load(content), draw)).encode()


def drop_value(content: bytes, draw: random.Random) -> bytes:
    return json.dumps(_replaced(yaml.safe_load(content), draw, drop=True)).encode()


def replace_in_line(content: bytes, draw: random.Random) -> bytes:
    lines = content.splitlines(keepends=True)
    at = draw.randrange(len(lines))
    lines[at] = json.dumps(_replaced(json.loads(lines[at]), draw)).encode() + b"\n"
    return b"".join(lines)


def replace_in_header(content: bytes, draw: random.Random) -> bytes:
    """Another value in the header of a safetensors file, whose length is put right."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    metadata = header.get("__metadata__", {})
    key = next((k for k, v in metadata.items() if v.startswith("{")), None)
    if key is not None and draw.random() < 0.6:
        metadata[key] = json.dumps(_replaced(json.loads(metadata[key]), draw))
    else:
        header = _replaced(header, draw)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + size :]


def within_gzip(content: bytes, draw: random.Random) -> bytes:
    change = draw.choice((flip, cut, repeat, replace_in_line))
    return gzip.compress(change(gzip.decompress(content), draw), mtime=0)


def replace_front_matter(content: bytes, draw: random.Random) -> bytes:
    card = _replaced(yaml.safe_load(content.split(b"---\n")[1]), draw)
    return b"---\n" + json.dumps(card).encode() + b"\n---\n\n# A model\n"


def _replaced(content: Any, draw: random.Random, drop: bool = False) -> Any:
    """The same with another value at a random place, or without what is there."""
    places: list[tuple[Any, Any]] = []

    def visit(value: Any) -> None:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            places.append((value, key))
            if isinstance(inner, (dict, list)):
                visit(inner)

    if not isinstance(content, (dict, list)) or draw.random() < 0.03:
        return draw.choice(_WEIRD)
    visit(content)
    if not places:
        return draw.choice(_WEIRD)
    holder, key = draw.choice(places)
    if drop:
        del holder[key]
    else:
        holder[key] = draw.choice(_WEIRD)
    return content
