"""Ctrl-C and SIGTERM at a random moment, from the start of the interpreter on."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from drills.arena import Outcome, Tally
from drills.kills import digest

_COMMANDS = (
    ("merge", "recipe.yaml", "--out", "out"),
    ("merge", "mergekit.yaml", "--out", "out", "--workers", "2"),
    ("collect", "one", "--task", "one.yaml", "--split", "train", "--out", "out.safetensors"),
    ("inspect", "one"),
)
_ENDS = {signal.SIGINT: (0, 130), signal.SIGTERM: (0, 143)}
_GIVE_UP_SECONDS = 600


def drill_signals(yard: Path, place: Path, seed: int, num: int) -> Tally:
    """Send `num` signals to commands that were started anew."""
    tally = Tally("signals")
    shutil.copytree(yard, place)
    names = {path.name for path in place.iterdir()}
    draw = random.Random(seed)
    lengths: dict[tuple[str, ...], tuple[float, str]] = {}
    for command in _COMMANDS[:num]:
        outcome = _start(place, command, None, signal.SIGINT)
        assert outcome.code == 0, outcome.text
        lengths[command] = outcome.seconds, _output(place)
        _clear(place, names)
    for number in range(num):
        command = _COMMANDS[number % len(_COMMANDS)]
        which = draw.choice((signal.SIGINT, signal.SIGTERM))
        seconds, expected = lengths[command]
        moment = draw.uniform(0.05, seconds)
        outcome = _start(place, command, moment, which)
        tally.count(outcome)
        problems = []
        if outcome.code not in _ENDS[which]:
            problems.append(f"exit code {outcome.code}")
        if "Traceback" in outcome.text or "Exception ignored" in outcome.text:
            problems.append("a traceback")
        if outcome.code == 0 and _output(place) != expected:
            problems.append("another output")
        if outcome.code != 0 and _output(place) not in ("", expected):
            problems.append("half an output")
        _clear(place, names)
        if problems:
            tally.violations.append(
                f"seed {seed}, number {number}: {which.name} after {moment:.2f} s, mats "
                f"{' '.join(command)}: {'; '.join(problems)}\n{outcome.text[-1500:]}"
            )
    return tally


def _start(
    place: Path, command: tuple[str, ...], moment: float | None, which: signal.Signals
) -> Outcome:
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "matsmerge", *command],
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        if moment is not None:
            time.sleep(moment)
            # As a terminal does: to the command and all its workers.
            os.killpg(process.pid, which) if process.poll() is None else None
        output = process.communicate(timeout=_GIVE_UP_SECONDS)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output = process.communicate()[0]
    text, seconds = output.decode(errors="replace"), time.monotonic() - began
    # What it used of processor and memory is not asked for: how it ends is what counts here.
    return Outcome(process.returncode, text, seconds, processor_seconds=0.0, growth_bytes=0)


def _output(place: Path) -> str:
    found = [path for path in place.iterdir() if path.name.startswith("out")]
    return "".join(digest(path) for path in found)


def _clear(place: Path, names: set[str]) -> None:
    for path in place.iterdir():
        if path.name not in names:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
