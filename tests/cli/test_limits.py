"""Numbers that no machine could do anything with: a clear error, at once and without memory."""

import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import typer
from forked_commands import run_mats
from torch import Tensor

import matsmerge
from matsmerge.byte_sizes import parse_bytes
from matsmerge.cli import commands
from matsmerge.cli.method_flags import made_params
from matsmerge.engine.local_executor import LocalExecutor
from matsmerge.engine.machine import num_cores
from matsmerge.errors import RecipeError
from matsmerge.lab.tuning.search_space import SearchSpace, parse_values
from matsmerge.limits import MOST_KEPT
from matsmerge.recipes.recipe import make_recipe

Run = Callable[..., tuple[int, str, str]]
State = dict[str, Tensor]


@pytest.fixture
def models(make_state: Callable[..., State], save_model: Callable[..., Path]) -> list[Path]:
    return [save_model(f"m{i}", make_state(i)) for i in range(3)]


def numeric_options() -> Iterator[tuple[tuple[str, ...], str, Any, Any]]:
    """Every number of every command: the command, the option, its Python type and its limits."""

    def of(app: typer.Typer, path: tuple[str, ...]) -> Iterator[Any]:
        for command in app.registered_commands:
            assert command.callback is not None
            name = command.name or command.callback.__name__
            for key, hint in get_type_hints(command.callback, include_extras=True).items():
                if hasattr(hint, "__metadata__"):
                    kind, info = (
                        hint.__args__[0] if hint.__metadata__ else hint,
                        hint.__metadata__[0],
                    )
                    kinds = {int, float} & {kind, *get_args(kind), *map(_inner, get_args(kind))}
                    if kinds:
                        option = next(
                            (o for o in info.param_decls or () if o.startswith("--")),
                            f"--{key.replace('_', '-')}",
                        )
                        yield (*path, name), option, kinds.pop(), info
        for group in app.registered_groups:
            assert group.typer_instance is not None
            yield from of(group.typer_instance, (*path, str(group.name)))

    yield from of(commands.make_app(*commands.COMMANDS), ())


def _inner(kind: Any) -> Any:
    return next(iter(get_args(kind)), kind)


def test_every_whole_number_has_limits() -> None:
    found = [(path, name, info) for path, name, kind, info in numeric_options() if kind is int]
    assert len(found) > 20
    for path, name, info in found:
        assert info.min is not None, (path, name)
        assert info.max is not None, (path, name)
        assert info.max <= 10**12


ABSURD = [
    "1000000000000000000",
    "9" * 5000,
    "-1",
    "0",
    "nan",
    "inf",
    "-inf",
    "1e308",
    "1e-320",
    "²",
]
METAVARS = ("NUMBER", "INTEGER")
EXTRA = {
    ("merge",): [
        *("--shard-size", "--max-memory", "--rank", "--trajectory"),
        *(flag for param in made_params() for flag in param.opts if param.metavar in METAVARS),
    ],
    ("experiment", "run"): ["--seeds"],
}


@pytest.mark.parametrize(
    ("path", "name"),
    [
        *(pytest.param(p, o, id=f"{' '.join(p)} {o}") for p, o, _, _ in numeric_options()),
        *(pytest.param(p, o, id=f"{' '.join(p)} {o}") for p, os in EXTRA.items() for o in os),
    ],
)
def test_absurd_values(
    mats: Run, models: list[Path], tmp_path: Path, path: tuple[str, ...], name: str
) -> None:
    base, a, b = models
    given: dict[tuple[str, ...], list[object]] = {
        ("merge",): ["--base", base, "--model", a, "--model", b, "--dry-run"],
        ("mergekit",): [tmp_path / "theirs.yaml", tmp_path / "out", "--resume"],
        ("train",): [a, "--task", tmp_path / "no.yaml", "-o", tmp_path / "out"],
        ("collect",): [a, "--data", tmp_path / "no.jsonl", "-o", tmp_path / "s.safetensors"],
        ("evaluate",): [a, "--task", tmp_path / "no.yaml"],
        ("tune",): [tmp_path / "recipe.yaml", "-o", tmp_path / "out"],
        ("extract-lora",): [a, "--base", base, "-o", tmp_path / "lora", "--overwrite"],
        ("cost",): ["--model", a],
        ("advise",): [a, b, "--base", base],
        ("inspect",): [a, "--subspace"],
        ("experiment", "run"): ["demo", "--base", tmp_path / "gone", "-o", tmp_path / "run"],
        ("experiment", "resume"): [tmp_path / "gone"],
        ("demo",): ["-o", a],
        ("stats", "compress"): [tmp_path / "no.safetensors", "-o", tmp_path / "s.safetensors"],
    }
    (tmp_path / "theirs.yaml").write_text(f"merge_method: linear\nmodels: [{{model: {a}}}]\n")
    (tmp_path / "recipe.yaml").write_text(f"models: [{a}, {b}]\nbase: {base}\nmethod: ties\n")
    methods: list[list[object]] = [[]]
    if path == ("merge",):
        methods = [["--method", m] for m in ("ties", "dare_ties", "actmat", "wudi", "average")]
    if path == ("extract-lora",) and name != "--rank":
        methods = [["--rank", 2]]
    for method in methods:
        for value in ABSURD:
            code, _, err = mats(*path, *given[path], *method, f"{name}={value}")
            assert code in (0, 1), (method, value, err)


@pytest.mark.parametrize("asked", ["1:1000000000:1", "0:99999999999999999999999:1", "1:1001:1"])
def test_trajectories(mats: Run, asked: str) -> None:
    code, _, err = mats("merge", "--method", "actmat", "--model", "a", "--trajectory", asked)
    assert code == 1
    assert f"--trajectory: '{asked}' are" in err
    assert "at most 1,000" in err


def test_a_long_trajectory_takes_no_memory(tmp_path: Path) -> None:
    def limit() -> None:
        num_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes + 500_000_000,) * 2)

    given = ("merge", "--method", "actmat", "--model", "a", "--trajectory", "1:1000000000:1")
    result = run_mats(*given, "-o", tmp_path / "out", prepare=limit)
    assert result.returncode == 1
    assert "1,000,000,000 models to write" in result.stderr


def test_trajectories_from_python() -> None:
    with pytest.raises(RecipeError, match="trajectory: list should have at most 1000 items"):
        matsmerge.merge([{}], None, "actmat", trajectory=range(10**9))


def test_recipes() -> None:
    with pytest.raises(RecipeError, match="trajectory: list should have at most 1000 items") as e:
        make_recipe({"models": ["a"], "method": "actmat", "trajectory": list(range(MOST_KEPT + 1))})
    assert len(str(e.value)) < 300
    for wrong in (
        {"method": {"name": "actmat", "iterations": 10**18}},
        {"method": {"name": "actmat", "tolerance": float("inf")}},
        {"method": "actmat", "trajectory": [10**18]},
        {"method": {"name": "dare_ties", "seed": 2**64}},
        {"method": "average", "rank": 10**18},
    ):
        with pytest.raises(RecipeError):
            make_recipe({"models": ["a", "b"], "base": "c", **wrong})


def test_searches() -> None:
    for text in ("0:1:1e-12", "0:1e308:1e-308", "1:1000000000:1"):
        with pytest.raises(RecipeError, match=f"'{text}' are .* values; at most 1,000"):
            parse_values("scale", text)
    with pytest.raises(RecipeError):
        parse_values("scale", "9" * 5000)
    assert parse_values("scale", "2020-99-99") == ["2020-99-99"]  # no date, and no traceback
    space = SearchSpace({"models": ["a"], "method": "ties"}, dict.fromkeys("abcd", range(1000)))
    with pytest.raises(RecipeError, match="1,000,000,000,000 combinations"):
        space.check()


def test_workers(mats: Run, models: list[Path], tmp_path: Path) -> None:
    for workers in (100_000, 0):
        with pytest.raises(RecipeError, match=f"this machine has {num_cores()} cores"):
            LocalExecutor(workers)
    code, _, err = mats("merge", "--model", models[0], "-o", tmp_path / "o", "--workers", 100_000)
    assert code == 1
    assert "workers: 100,000 at once" in err
    code, _, err = mats("experiment", "run", "demo", "-o", tmp_path / "run", "--workers", 100_000)
    assert code == 1
    assert "workers: 100,000 at once" in err
    assert not (tmp_path / "run").exists()


def test_sizes() -> None:
    for text in ("9" * 400, "1e9", "1" + "0" * 30 + "TB", "0.0001"):
        with pytest.raises(RecipeError, match="is not a size"):
            parse_bytes(text)
