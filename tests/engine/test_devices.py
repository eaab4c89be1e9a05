"""Merging on a device: the same values as on the processor, and nothing beside them."""

import ast
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft_models import adapt, make_base
from safetensors.torch import save_file
from solved_models import State, make_nets, make_statistics
from stand_in_device import DEVICE, Elsewhere, StandIn
from torch import Tensor, nn

import matsmerge
from matsmerge import RecipeError, SerialExecutor
from matsmerge.engine import local_executor, worker
from matsmerge.engine.devices import find_devices, spread
from matsmerge.engine.local_executor import LocalExecutor
from matsmerge.methods import METHODS
from matsmerge.recipes.recipe import make_recipe
from matsmerge.statistics.statistics import Statistics

pytestmark = pytest.mark.filterwarnings("ignore:merged:UserWarning")

SOURCE = Path(matsmerge.__file__).parent


# The stand-in refuses what a device refuses.


def test_the_stand_in_is_a_device_of_its_own() -> None:
    with StandIn() as counts:
        there = torch.ones(3).to(DEVICE)
        assert isinstance(there, Elsewhere)
        assert there.device.type == DEVICE
        assert (there * 2).cpu().tolist() == [2, 2, 2]
        assert float(there.sum() + torch.tensor(1.0)) == 4
        with pytest.raises(AssertionError, match="on the processor"):
            there + torch.ones(3)
        with pytest.raises(TypeError, match="numpy"):
            there.numpy()
    assert (counts.num_in, counts.num_out) == (3, 3)
    with pytest.raises(AssertionError, match="outside"):
        there + 1


# Every method and solver follows its site's device.


Models = tuple[nn.Module, Sequence[nn.Module], Sequence[Statistics]]


def whole() -> Models:
    """A base, models, and statistics of these."""
    return *make_nets(), make_statistics()


@cache
def sketched() -> Models:
    """The same of wider models, with statistics that are known by their leading directions."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(30, 26), nn.Tanh(), nn.Linear(26, 24)) for _ in range(4)]
    batches = [torch.randn(20, 30, generator=generator) for _ in range(4)]

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        found: Tensor = model(batch).square().sum(1)
        return found

    statistics = [matsmerge.collect(net, batches, "kfac", loss=loss, rank=2) for net in nets[1:]]
    return nets[0], nets[1:], statistics


OWN_DATA = {"mats_cross", "featcal", "regmean++"}  # for models in folders
GRAM, KFAC = {"name": "gram"}, {"name": "kfac"}
CASES: dict[str, dict[str, Any]] = {
    **{name: {"method": name} for name in METHODS if name not in {*OWN_DATA, "passthrough"}},
    "passthrough": {"method": "passthrough", "model": "model_1"},
    "nearswap": {"method": "nearswap", "t": 0.01},
    "jacobi": {"method": "mats", "solver": {"name": "cg", "preconditioner": "jacobi"}},
    "plain": {"method": "mats", "solver": {"name": "cg", "form": "plain"}},
    "held out": {"method": "mats", "solver": {"name": "cg", "stop": "held_out"}},
    "anchored": {"method": "mats", "objective": {**GRAM, "anchor": 0.1, "bias": True}},
    "embeddings": {"method": "mats_kfac", "objective": {**KFAC, "embeddings": True}},
    "float32": {"method": "mats", "solver": {"name": "closed_form", "precision": "float32"}},
    "kfac in closed form": {"method": "mats", "objective": KFAC, "solver": "closed_form"},
    "from tsv_m": {"method": "mats_kfac", "init": "tsv_m"},
    "from ties": {"method": "mats", "init": {"name": "ties", "density": 0.3}},
    "trajectory": {"method": "mats_kfac", "trajectory": [2, 5]},
    "sketched gram": {"method": "mats", "of": sketched},
    "sketched kfac": {"method": "mats_kfac", "of": sketched},
    "sketched, diagonal": {
        "method": "mats",
        "objective": {**GRAM, "off_diagonal": 0.9},
        "solver": "closed_form",
        "of": sketched,
    },
    "sketched, jacobi": {
        "method": "mats",
        "solver": {"name": "cg", "preconditioner": "jacobi"},
        "of": sketched,
    },
    "sketched, filtered": {
        "method": "mats",
        "solver": "spectral_filter",
        "of": sketched,
    },
}


def plan(options: dict[str, Any]) -> matsmerge.PlannedMerge:
    base, models, statistics = options.get("of", whole)()
    num = METHODS[options["method"]].num_models or (2 if options.get("objective") is KFAC else 3)
    rest = {key: value for key, value in options.items() if key != "of"}
    if "objective" in METHODS[options["method"]].model_fields:
        rest["statistics"] = statistics[:num]
    return matsmerge.plan([model.state_dict() for model in models[:num]], base.state_dict(), **rest)


@pytest.mark.parametrize("case", CASES)
def test_a_device_gives_the_same_bits(case: str) -> None:
    planned = plan(CASES[case])
    expected = planned.merge(executor=SerialExecutor())
    with StandIn() as counts:
        found = planned.merge(executor=SerialExecutor(devices=[DEVICE]))
    made = found.trajectory or {0: found}
    for at, one in (expected.trajectory or {0: expected}).items():
        for name, values in one.state_dict().items():
            assert torch.equal(made[at][name], values), name
    # What is merged leaves the device once, and nothing else does but single numbers; of layers,
    # once for each iteration that is kept.
    most = planned.num_parameters * len(made)
    assert planned.num_parameters <= counts.num_out <= most
    assert counts.num_in >= planned.num_parameters
    assert counts.num_operations > 0


def test_adapters_are_factored_on_the_device(tmp_path: Path) -> None:
    base = make_base("bert", tmp_path / "base")
    config = LoraConfig(r=2, target_modules=["query"])
    adapters = [adapt(base, config, tmp_path / f"lora{i}", seed=i) for i in range(2)]
    planned = matsmerge.plan(adapters, method="ties", rank=2)
    expected = planned.merge(executor=SerialExecutor())
    with StandIn() as counts:
        found = planned.merge(executor=SerialExecutor(devices=[DEVICE]))
    for name, values in expected.state_dict().items():
        assert torch.equal(found[name], values)
    assert counts.num_out == planned.num_parameters


def test_no_tensor_is_made_without_a_device() -> None:
    """But for few numbers, which the processor computes with, and what is moved at once."""
    factories = {"zeros", "ones", "empty", "eye", "arange", "full", "linspace", "tensor"}
    factories |= {"rand", "randn", "randint", "randperm", "from_numpy", "tril_indices"}
    found: dict[str, int] = {}
    for path in sorted([*SOURCE.glob("linalg/**/*.py"), *SOURCE.glob("methods/**/*.py")]):
        for call in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
                continue
            is_made = ast.unparse(call.func.value) == "torch" and call.func.attr in factories
            if is_made and "device" not in {keyword.arg for keyword in call.keywords}:
                found[path.name] = found.get(path.name, 0) + 1
    assert found == {
        "closed_form.py": 1,  # a start for iterations, moved
        "dare.py": 1,  # random numbers, moved
        "della.py": 1,  # a choice at random, moved
        "gram.py": 1,  # a zero
        "kfac.py": 1,  # a zero
        "kronecker_sums.py": 5,  # a number for each model, or for two
        "nystrom.py": 3,  # random directions and their groups, moved
        "operators.py": 1,  # a number
        "sce.py": 2,  # where entries are, in a measurement, which the processor makes
        "triangle.py": 1,  # a start for iterations, moved
    }


# Which devices there are, and which job goes where.


@dataclass(frozen=True)
class Work:
    index: int
    device: str
    peak_bytes: int = 1


@pytest.fixture
def _two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


@pytest.mark.usefixtures("_two_gpus")
def test_names_of_devices() -> None:
    assert find_devices(None) == find_devices("cpu") == ("cpu",)
    assert find_devices("cuda") == find_devices("auto") == ("cuda:0", "cuda:1")
    assert find_devices("cuda:1") == ("cuda:1",)
    with pytest.raises(RecipeError, match="no 'cuda:2' on this machine; there is cpu, cuda:0, cud"):
        find_devices("cuda:2")
    with pytest.raises(RecipeError, match="no 'mps'"):
        LocalExecutor(device="mps")


def test_the_best_device_of_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert find_devices("auto") == find_devices("mps") == ("mps",)
    with pytest.raises(RecipeError, match="no 'cuda' on this machine; there is cpu, mps"):
        find_devices("cuda")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert find_devices("auto") == ("cpu",)


def test_jobs_take_devices_in_turn() -> None:
    base, models = make_nets()
    states = [model.state_dict() for model in models]
    jobs = matsmerge.plan(states, base.state_dict(), "wudi").prepared.plan.jobs
    assert len(jobs) > 3
    found = [job.device for job in spread(jobs, ("cuda:0", "cuda:1"))]
    assert found == ["cuda:0", "cuda:1"] * (len(jobs) // 2) + ["cuda:0"] * (len(jobs) % 2)
    # After an interruption, a job is where it would have been.
    assert [job.device for job in spread(jobs[1:], ("cuda:0", "cuda:1"))] == found[1:]


@pytest.mark.usefixtures("_two_gpus")
def test_workers_and_memory_of_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are pinned to one device each, whose memory is a budget of its own."""
    memory = {"cuda:0": 2, "cuda:1": 4}
    monkeypatch.setattr(local_executor, "memory_bytes", memory.__getitem__)
    executor = LocalExecutor(5, device="cuda", fork=True)
    assert not executor.fork
    assert executor.shares_memory
    lock, threads = threading.Lock(), dict[str, set[str]]()
    now, most = dict[str, int](), dict[str, int]()
    both = threading.Barrier(2, timeout=60)

    def run(work: Work) -> int:
        with lock:
            threads.setdefault(work.device, set()).add(threading.current_thread().name)
            now[work.device] = now.get(work.device, 0) + work.peak_bytes
            most[work.device] = max(most.get(work.device, 0), now[work.device])
        if work.index < 4:  # 0 to 2 are on one device: it does not keep the other one waiting
            both.wait() if work.index in (0, 3) else None
        with lock:
            now[work.device] -= work.peak_bytes
        return work.index

    places = ["cuda:0"] * 3 + ["cuda:1"] * 3 + ["cpu"] * 2
    works = [Work(i, place, 2) for i, place in enumerate(places)]
    assert sorted(executor.map(run, works)) == list(range(8))
    assert most["cuda:0"] == 2  # one at a time
    assert most["cuda:1"] <= 4
    assert not threads["cuda:0"] & threads["cuda:1"]
    assert executor._lane("cuda:0", run).num_workers == 3
    assert executor._lane("cuda:1", run).num_workers == 2
    assert executor._lane("cpu", run).num_workers == 5
    assert LocalExecutor(1, 7, device="cuda")._lane("cuda:1", run).max_bytes == 7


def test_the_device_of_a_recipe_reaches_the_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    models: list[State] = [{"w": torch.ones(4)}, {"w": torch.zeros(4)}]
    with pytest.raises(RecipeError, match="device"):
        matsmerge.merge(models, device="gpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(RecipeError, match="torch finds no 'cuda:1' on this machine"):
        matsmerge.merge(models, device="cuda:1")
    with pytest.raises(RecipeError, match=r"cuda is not among those of the executor \(cpu\)"):
        matsmerge.merge(models, device="cuda", executor=LocalExecutor(1))
    for device in ("cpu", "auto"):
        merged = matsmerge.merge(models, device=device, executor=LocalExecutor(1))
        assert merged["w"].tolist() == [0.5] * 4
        assert merged.report["recipe"]["device"] == device


def test_a_recipe_is_merged_on_another_device(tmp_path: Path) -> None:
    for i in range(2):
        save_file({"w": torch.full((4,), float(i))}, tmp_path / f"{i}.safetensors")
    models = [str(tmp_path / f"{i}.safetensors") for i in range(2)]
    recipe = make_recipe({"models": models, "method": "average", "device": "cuda"})
    assert matsmerge.plan(recipe, device="cpu").recipe.device == "cpu"
    assert matsmerge.merge(recipe, device="cpu")["w"].tolist() == [0.5] * 4


# Devices without float64


@pytest.fixture
def _in_single_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither mps nor the stand-in has float64."""
    monkeypatch.setattr(worker, "has_float64", lambda device: device != DEVICE)


@pytest.mark.usefixtures("_in_single_precision")
def test_what_needs_float64_is_merged_on_the_processor() -> None:
    base, models = make_nets()
    states: list[State] = []
    for net in (base, *models):
        own = {name: values.bfloat16() for name, values in net.state_dict().items()}
        states.append(own | {"norm.weight": own["norm.weight"].float()})
    planned = matsmerge.plan(states[1:], states[0], "wudi", device="mps")
    layers = {p for layer in planned.prepared.plan.layers for p in layer.parameters}
    (note,) = [note for note in planned.notes if "float64" in note]
    kept = {*layers, "norm.weight"}
    assert note.startswith("merged on the processor, since they need float64, which mps does not")
    assert f"({len(kept)} of {len(states[0])} tensors)" in note
    expected = matsmerge.merge(states[1:], states[0], "wudi")
    with StandIn() as counts:
        executor = SerialExecutor(devices=[DEVICE])
        found = matsmerge.merge(states[1:], states[0], "wudi", executor=executor)
    for name, values in expected.state_dict().items():
        assert torch.equal(found[name], values)
    assert counts.num_out == sum(v.numel() for n, v in states[0].items() if n not in kept)
    assert planned.prepared.public_notes[-1] == note
