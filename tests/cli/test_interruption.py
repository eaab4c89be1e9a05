"""Ctrl-C and SIGTERM at any moment: one line, an exit code, no half output."""

import contextlib
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
from forked_commands import ForkedCommand, run_mats
from slow_commands import slow_down, wait_for_jobs
from torch import Tensor

from matsmerge.cli import interruption, main
from matsmerge.engine import plan
from matsmerge.methods.site import BLOCK_ELEMENTS

State = dict[str, Tensor]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@pytest.fixture(autouse=True)
def _ctrl_c_is_heard() -> Iterator[None]:
    """What runs in the background ignores Ctrl-C, and its children inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def _no_explanations(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said while a command ends slowly is not said, however slow the machine."""
    monkeypatch.setattr(interruption, "_SECONDS_IN_SILENCE", 3600)


def wait_until_it_listens(process: "subprocess.Popen[str]") -> None:
    """Before Python has started no program can say what a signal does."""
    deadline = time.monotonic() + 300
    while process.poll() is None:
        assert time.monotonic() < deadline
        found = re.search(r"SigCgt:\s+(\w+)", Path(f"/proc/{process.pid}/status").read_text())
        if found and int(found[1], 16) >> (signal.SIGTERM - 1) & 1:
            return
        time.sleep(0.001)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_at_any_moment(
    make_state: Callable[..., State], save_model: Callable[..., Path], tmp_path: Path, number: int
) -> None:
    models = [f"--model={save_model(f'm{i}', make_state(i))}" for i in range(2)]
    for i in (0, 1, 4):  # the other moments are those of scripts/drills
        out = tmp_path / f"out{i}"
        process = subprocess.Popen(
            [sys.executable, "-m", "matsmerge", "merge", *models, "-o", out],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        wait_until_it_listens(process)
        time.sleep(i * 0.25)
        process.send_signal(number)
        _, err = process.communicate(timeout=300)
        assert process.returncode in (0, 128 + number), err
        assert "Traceback" not in err
        assert "ignored" not in err
        if process.returncode:
            assert len(re.findall("error: interrupted", err)) == 1
        assert out.exists() or process.returncode  # which may come when the output is there
        assert not out.exists() or (out / "merge.json").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_workers_end_with_it_and_say_nothing(
    save_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A terminal sends Ctrl-C to all processes of a command, and some tools SIGTERM."""
    monkeypatch.setattr(plan, "JOB_ELEMENTS", BLOCK_ELEMENTS)
    models = [
        f"--model={save_model(f'm{i}', {'w': torch.full((12 * BLOCK_ELEMENTS,), i).half()})}"
        for i in range(2)
    ]
    out = tmp_path / "out"
    given: list[str | Path] = ["merge", *models, "-o", out, "--workers", "2"]
    command = ForkedCommand(given, slow_down(tmp_path / "go on"))
    wait_for_jobs(command, out)
    command.send_signal(number, with_workers=True)
    (tmp_path / "go on").touch()
    ended = command.wait()
    assert (ended.returncode, ended.stdout) == (128 + number, ""), ended.stderr
    assert [line for line in ended.stderr.splitlines() if "merging" not in line and line] == [
        "error: interrupted; continue with --resume"
    ]
    assert not out.exists()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:  # the kernel may take a moment to end the workers
        try:
            os.killpg(command.pid, 0)
        except ProcessLookupError:
            break
        time.sleep(0.01)
    else:
        pytest.fail("a worker is still there")


class Dropped:
    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        get(self.number)


def get(number: int) -> None:
    """Get a signal, here and now."""
    os.kill(os.getpid(), number)
    time.sleep(0.01)


def in_a_destructor(number: int) -> None:
    Dropped(number)


def in_a_library(number: int) -> None:
    with contextlib.suppress(BaseException):
        get(number)


def in_an_import(number: int) -> None:
    os.environ["NUMBER"] = str(int(number))
    import interrupted_module  # type: ignore[import-not-found]  # noqa: F401


INTERRUPTED_MODULE = """
import os, time
try:
    os.kill(os.getpid(), int(os.environ["NUMBER"]))
    time.sleep(0.1)
except BaseException:
    raise ImportError("half of a module")
"""


def as_another_error(number: int) -> None:
    try:
        get(number)
    except BaseException as error:
        raise RuntimeError("no module for you") from error


def twice(number: int) -> None:
    try:
        get(number)
    finally:
        get(number)
        print("cleaned up")


def in_a_copy(number: int) -> None:
    if os.fork() == 0:
        get(number)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 128 + number
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    "moment", [in_a_destructor, in_a_library, in_an_import, as_another_error, twice, in_a_copy]
)
def test_it_is_not_lost(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    moment: Callable[[int], None],
    number: int,
) -> None:
    def call(_: object) -> int:
        moment(number)
        for _ in range(3000):
            time.sleep(0.01)
        return 0

    (tmp_path / "interrupted_module.py").write_text(INTERRUPTED_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("matsmerge.cli.commands.call", call)
    result = run_mats("merge")
    assert result.returncode == 128 + number
    assert result.stderr == "error: interrupted; continue with --resume\n"
    assert result.stdout == ("cleaned up\n" if moment is twice else "")


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


@pytest.mark.parametrize("is_over", [False, True])
def test_says_what_it_waits_for_unless_it_has_ended(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], is_over: bool
) -> None:
    later: list[Callable[[], None]] = []

    class Later:
        """A timer whose time comes when the test says so."""

        daemon = False

        def __init__(self, _seconds: float, function: Callable[[], None]) -> None:
            later.append(function)

        def start(self) -> None:
            assert self.daemon  # or it would keep the process alive

    monkeypatch.setattr("threading.Timer", Later)
    listener = interruption.Listener()
    listener.starting = False
    with pytest.raises(interruption.Interrupted) as raised:
        listener._hear(signal.SIGINT, None)
    listener._hear(signal.SIGINT, None)  # is waited for, too, and says nothing new
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        if is_over:
            listener.end()
        (explain,) = later
        explain()
        listener.end()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert ("waiting for work that has begun" in capfd.readouterr().err) != is_over
    del raised
