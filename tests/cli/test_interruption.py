"""Ctrl-C and SIGTERM at any moment: one line, an exit code, no half output."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from slow_commands import SLOW_MATS, wait_for_jobs
from torch import Tensor

from matsmerge.cli import interruption, main
from matsmerge.engine.plan import JOB_ELEMENTS

State = dict[str, Tensor]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@pytest.fixture(autouse=True)
def _ctrl_c_is_heard() -> Iterator[None]:
    """What runs in the background ignores Ctrl-C, and its children inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def wait_until_it_listens(process: "subprocess.Popen[str]") -> None:
    """Before Python has started no program can say what a signal does."""
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        found = re.search(r"SigCgt:\s+(\w+)", Path(f"/proc/{process.pid}/status").read_text())
        if found and int(found[1], 16) >> (signal.SIGTERM - 1) & 1:
            return
        time.sleep(0.001)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_at_any_moment(
    make_state: Callable[..., State], save_model: Callable[..., Path], tmp_path: Path, number: int
) -> None:
    models = [f"--model={save_model(f'm{i}', make_state(i))}" for i in range(2)]
    for i in range(6):
        out = tmp_path / f"out{i}"
        process = subprocess.Popen(
            [sys.executable, "-m", "matsmerge", "merge", *models, "-o", out],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        wait_until_it_listens(process)
        time.sleep(i * 0.25)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
        assert process.returncode in (0, 128 + number), err
        assert "Traceback" not in err
        assert "ignored" not in err
        if process.returncode:
            assert len(re.findall("error: interrupted", err)) == 1
        assert out.exists() == (process.returncode == 0)
        assert not out.exists() or (out / "merge.json").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_workers_end_with_it_and_say_nothing(
    save_model: Callable[..., Path], tmp_path: Path, number: int
) -> None:
    """A terminal sends Ctrl-C to all processes of a command, and some tools SIGTERM."""
    models = [
        f"--model={save_model(f'm{i}', {'w': torch.full((12 * JOB_ELEMENTS,), i).half()})}"
        for i in range(2)
    ]
    out = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_MATS, "merge", *models, "-o", out, "--workers", "2"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    wait_for_jobs(process, out)
    os.killpg(process.pid, number)
    printed, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, err
    assert printed == ""
    assert [line for line in err.splitlines() if "merging" not in line and line] == [
        "error: interrupted; continue with --resume"
    ]
    assert not out.exists()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:  # the kernel may take a moment to end the workers
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            break
        time.sleep(0.01)
    else:
        pytest.fail("a worker is still there")


SWALLOWED = """
import os, signal, sys, time
from matsmerge.cli import interruption, main, commands

class Dropped:
    def __del__(self):
        os.kill(os.getpid(), NUMBER)
        time.sleep(0.01)

def in_a_destructor():
    Dropped()

def in_a_library():
    try:
        os.kill(os.getpid(), NUMBER)
        time.sleep(0.01)
    except BaseException:
        pass

def in_an_import():
    import interrupted_module

def as_another_error():
    try:
        os.kill(os.getpid(), NUMBER)
        time.sleep(0.01)
    except BaseException as error:
        raise RuntimeError("no module for you")

def twice():
    try:
        os.kill(os.getpid(), NUMBER)
        time.sleep(0.01)
    finally:
        os.kill(os.getpid(), NUMBER)
        time.sleep(0.01)
        print("cleaned up")

def in_a_copy():
    if os.fork() == 0:
        os.kill(os.getpid(), NUMBER)
        time.sleep(0.01)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 128 + NUMBER
    os.kill(os.getpid(), NUMBER)

def call(arguments):
    globals()[arguments[0]]()
    for _ in range(3000):
        time.sleep(0.01)
    return 0

commands.call = call
main.main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    "moment",
    ["in_a_destructor", "in_a_library", "in_an_import", "as_another_error", "twice", "in_a_copy"],
)
def test_it_is_not_lost(tmp_path: Path, moment: str, number: int) -> None:
    script = SWALLOWED.replace("NUMBER", str(int(number)))
    (tmp_path / "script.py").write_text(script)
    (tmp_path / "interrupted_module.py").write_text(
        f"import os, time\ntry:\n    os.kill(os.getpid(), {int(number)})\n    time.sleep(0.1)\n"
        "except BaseException:\n    raise ImportError('half of a module')\n"
    )
    result = subprocess.run(
        [sys.executable, tmp_path / "script.py", moment],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert (result.returncode, result.stderr) == (128 + number, "error: interrupted\n")
    assert result.stdout == ("cleaned up\n" if moment == "twice" else "")


def test_nothing_heavy_comes_before_signals_are_heard() -> None:
    code = (
        "import sys; from matsmerge.cli import main; "
        "print([m for m in ('typer', 'rich', 'pydantic', 'torch') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_starting_ends_on_the_spot() -> None:
    code = (
        "import os, signal, time; from matsmerge.cli.interruption import Listener\n"
        "Listener().begin()\n"
        "try:\n    os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)\nfinally:\n    print('no')"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (143, "", "error: interrupted\n")


def test_the_third_signal_does_not_wait() -> None:
    code = (
        "import os, signal, time; from matsmerge.cli.interruption import Listener\n"
        "listener = Listener(); listener.begin(); listener.starting = False\n"
        "def press():\n    os.kill(os.getpid(), signal.SIGINT); time.sleep(0.01)\n"
        "try:\n    press()\nfinally:\n    press(); print('cleaning up', flush=True); press()\n"
        "    print('for hours')"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout) == (130, "cleaning up\n")


@pytest.mark.parametrize(
    ("command", "continuation"),
    [
        (["merge"], "; continue with --resume"),
        (["collect", "model"], "; continue with --resume"),
        (
            ["collect", "model", "--max-memory", "2GB"],
            "; collecting block by block begins again with the same command",
        ),
        (["demo", "--out", "x"], "; the same command continues"),
        (["inspect"], ""),
    ],
)
def test_what_it_says(
    command: list[str],
    continuation: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def call(_: object) -> int:
        raise KeyboardInterrupt(signal.SIGTERM)

    monkeypatch.setattr("matsmerge.cli.commands.call", call)
    assert main.run(command) == 143
    assert capsys.readouterr().err == f"error: interrupted{continuation}\n"


def test_signals_that_are_ignored_stay_so() -> None:
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}
    hook = sys.unraisablehook
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as of a command that ends with &
    try:
        interruption.Listener().begin()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is not before[signal.SIGTERM]
    finally:
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)
