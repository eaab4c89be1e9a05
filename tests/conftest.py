"""Small models made on the fly; nothing is downloaded."""

import gc
import os
import random
import shutil
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
import torch
from faulty_store import FaultyStore, use_faulty_store
from hypothesis import HealthCheck, settings
from safetensors.torch import save_file
from torch import Tensor

from matsmerge.cli import main
from matsmerge.files import remote_file, remote_store

os.environ["HF_HUB_OFFLINE"] = "1"
# Of a job in the background Ctrl-C may be ignored, and so it would be by all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(int(os.environ.get("MATSMERGE_TEST_THREADS", "1")))
# The same cases every time: a test that fails by chance tells nobody anything.
settings.register_profile(
    "matsmerge",
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],  # which depends on what else runs
)
settings.load_profile("matsmerge")

State = dict[str, Tensor]
# They take longest, and come first: else one process is left with one of them at the end.
SLOWEST = (
    "engine/test_ray_executor.py",
    "integration/test_ray_commands.py",
    "lab/experiments/test_suite_run.py",
    "lab/experiments/test_paper_suites.py",
    "test_tutorials.py",
    "test_site_in_browser.py",
    "integration/test_s3.py",
)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported stays: it takes time to look for garbage in it, now and in every test."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slowest files first; tests in a random order, for scripts/test-everywhere."""
    places = {Path(__file__).parent / name: i for i, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
    if seed := os.environ.get("MATSMERGE_TEST_ORDER"):
        random.Random(seed).shuffle(items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """What a test draws at random does not depend on which tests came before it."""
    torch.manual_seed(104_729)  # which no test has for a seed of its own


@pytest.fixture
def make_state() -> Callable[..., State]:
    """A state dict with layers, a vector and an integer buffer; `seed` says which."""

    def make(seed: int = 0, dtype: torch.dtype = torch.float32, spread: float = 0.1) -> State:
        base = torch.Generator().manual_seed(1234)
        own = torch.Generator().manual_seed(seed)
        shapes = {
            "embed.weight": (50, 8),
            "layers.0.w": (8, 8),
            "layers.0.b": (8,),
            "layers.1.w": (8, 8),
            "layers.1.b": (8,),
            "scalar": (),
        }
        state = {}
        for name, shape in shapes.items():
            values = torch.randn(shape, generator=base)
            if seed:
                values = values + spread * torch.randn(shape, generator=own)
            state[name] = values.to(dtype)
        state["position_ids"] = torch.arange(5)
        return state

    return make


@pytest.fixture
def save_model(tmp_path: Path) -> Callable[..., Path]:
    """Write a state dict as a model folder."""

    def save(name: str, state: State, **files: str) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        save_file({k: v.contiguous() for k, v in state.items()}, folder / "model.safetensors")
        for file, text in files.items():
            (folder / file.replace("__", ".")).write_text(text)
        return folder

    return save


@pytest.fixture
def mats(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command in this process; returns its exit code and what it printed."""

    def run(*arguments: object) -> tuple[int, str, str]:
        code = main.run([str(a) for a in arguments])
        output = capsys.readouterr()
        return code, output.out, output.err

    return run


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyStore]:
    """An empty store behind `memory://`, and an empty cache; requests are repeated at once."""
    monkeypatch.setenv("MATSMERGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote_store, "_DELAYS", (0.0, 0.0))
    yield use_faulty_store()
    remote_file.fetching().shutdown()  # or what is still fetched counts as of the next test
    remote_file._threads.cache_clear()
    FaultyStore.reset()


@pytest.fixture
def browser() -> str:
    """The browser that draws pictures; a test that needs one is skipped without."""
    found = shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("needs a browser: install chromium")
    return found
