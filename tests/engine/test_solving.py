"""Systems solved in the engine: folders, trajectories, resuming, what merge.json says, bad input."""

import itertools
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from solved_models import loss, make_batches, make_nets, make_statistics

import matsmerge
from matsmerge import OutputError, RecipeError, SerialExecutor, StatisticsError
from matsmerge.engine import output_folder, worker
from matsmerge.engine.evidence import lowest_eigenvalue
from matsmerge.engine.merge_run import RunOptions, merge_to_folder
from matsmerge.engine.prepared_merge import prepare_merge
from matsmerge.files.whole_outputs import staging_path
from matsmerge.recipes.recipe import make_recipe
from matsmerge.statistics.statistics_file import open_statistics, save_statistics

Save = Callable[..., Path]
BASE, MODELS = make_nets()
LAYERS = ["first.weight", "gate.weight", "second.weight", "conv.weight", "out.weight"]

pytestmark = pytest.mark.filterwarnings("ignore:merged by:UserWarning")


@pytest.fixture
def folders(save_model: Save) -> list[Path]:
    """The base and three models, each with its statistics beside it."""
    base = save_model("base", dict(BASE.state_dict()), config__json="{}")
    found = [save_model(f"m{i}", dict(m.state_dict())) for i, m in enumerate(MODELS)]
    for folder, statistics in zip(found, make_statistics(), strict=True):
        save_statistics(statistics, folder / "statistics.safetensors")
    return [base, *found]


def test_statistics_beside_the_models_are_found(folders: list[Path], tmp_path: Path) -> None:
    out = matsmerge.merge(folders[1:], folders[0], "mats_kfac", out=tmp_path / "out").folder
    expected = matsmerge.merge(MODELS, BASE, "mats_kfac", statistics=make_statistics())
    merged = load_file(out / "model.safetensors")
    for name, values in expected.items():
        torch.testing.assert_close(merged[name], values, rtol=1e-4, atol=1e-5)


def test_importance_is_for_systems_and_weight_for_the_init_too(
    folders: list[Path], tmp_path: Path
) -> None:
    """The closed form depends on weight times importance, the init on the weight alone."""

    def merged(importance: float, weight: float, **method: Any) -> dict[str, torch.Tensor]:
        models: list[Any] = [str(f) for f in folders[1:]]
        models[1] = {"model": models[1], "weight": weight, "importance": importance}
        recipe = make_recipe(
            {"models": models, "base": str(folders[0]), "method": {"name": "mats", **method}}
        )
        out = tmp_path / str(len(list(tmp_path.iterdir())))
        return load_file(matsmerge.merge(recipe, out=out).folder / "model.safetensors")

    solved = {"solver": "closed_form", "ridge": 0.1}
    expected = merged(1.0, 3.0, **solved)["out.weight"]
    torch.testing.assert_close(merged(6.0, 0.5, **solved)["out.weight"], expected)
    grams = [s.gram("out").double() for s in make_statistics()]
    counted = [
        c * (g + 0.1 * g.diagonal().mean() * torch.eye(len(g)))
        for g, c in zip(grams, (1.0, 3.0, 1.0), strict=True)
    ]
    own = [m.state_dict()["out.weight"].double() for m in MODELS]
    right = torch.stack([w @ g for w, g in zip(own, counted, strict=True)]).sum(0)
    dense = torch.linalg.solve(torch.stack(counted).sum(0), right.mT).mT
    torch.testing.assert_close(expected.double(), dense, rtol=1e-4, atol=1e-5)
    start = merged(6.0, 0.5, init={"name": "task_arithmetic", "scale": 1.0}, otherwise="init")
    base, *tables = (m.state_dict()["embed.weight"] for m in (BASE, *MODELS))
    deltas = [w * (own - base) for own, w in zip(tables, (1, 0.5, 1), strict=True)]
    torch.testing.assert_close(start["embed.weight"], base + sum(deltas))


def test_what_merge_json_says(folders: list[Path], tmp_path: Path) -> None:
    out = matsmerge.merge(
        folders[1:], folders[0], "mats", out=tmp_path / "out", iterations=7
    ).folder
    manifest = json.loads((out / "merge.json").read_text())
    for name in LAYERS:
        (report,) = manifest["parameters"][name]["solved"]
        assert report["objective"] == "gram"
        assert report["solver"] == "cg"
        assert len(report["residuals"]) == len(report["objective_values"]) <= 8
        assert report["objective_value"] == report["objective_values"][report["iterations"]]
        assert report["objective_value"] < report["objective_of_start"]
        falling = report["objective_values"]
        assert all(b <= a * (1 + 1e-6) for a, b in itertools.pairwise(falling))
    otherwise = {n for n, p in manifest["parameters"].items() if p.get("otherwise")}
    assert otherwise == set(BASE.state_dict()) - set(LAYERS)
    assert any("merged by average" in note and "embed.weight" in note for note in manifest["notes"])
    described = [entry for entry in manifest["inputs"] if "statistics" in entry]
    assert [entry["name"] for entry in described] == ["m0", "m1", "m2"]
    assert described[0]["num_examples"] == {"main": 90, "held_out": 30}


def test_a_trajectory_is_several_models(folders: list[Path], tmp_path: Path) -> None:
    recipe = make_recipe(
        {
            "models": [str(f) for f in folders[1:]],
            "base": str(folders[0]),
            "method": "mats",
            "trajectory": [2, 5, 40],
        }
    )
    trace = tmp_path / "trace.jsonl"
    out = merge_to_folder(prepare_merge(recipe), tmp_path / "out", RunOptions(trace=trace))
    steps = matsmerge.merge(folders[1:], folders[0], "mats", trajectory=[2, 5, 40]).trajectory
    assert sorted(p.name for p in out.iterdir()) == [
        ".gitignore", ".paths.json", "iteration-2", "iteration-40", "iteration-5", "merge.json",
    ]  # fmt: skip
    for at in (2, 5, 40):
        folder = out / f"iteration-{at}"
        assert (folder / "config.json").exists()
        assert json.loads((folder / "merge.json").read_text())["iteration"] == at
        written = load_file(folder / "model.safetensors")
        alone = matsmerge.merge(folders[1:], folders[0], "mats", iterations=at)
        for name, values in alone.items():
            assert torch.equal(written[name], steps[at][name])
            torch.testing.assert_close(written[name], values, rtol=1e-6, atol=1e-7)
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    assert {line["parameter"] for line in lines} == set(LAYERS)
    assert {line["iteration"] for line in lines if line["parameter"] == "out.weight"} >= {0, 1, 2}


@pytest.mark.parametrize("method", ["mats_kfac", "block_fisher", "actmat"])
def test_trajectories_of_other_objectives(folders: list[Path], method: str) -> None:
    steps = matsmerge.merge(folders[1:], folders[0], method, trajectory=[0, 1, 6]).trajectory
    for at in (0, 1, 6):
        alone = matsmerge.merge(folders[1:], folders[0], method, iterations=at)
        for name, values in alone.items():
            torch.testing.assert_close(steps[at][name], values, rtol=1e-5, atol=1e-6)


def test_the_same_merge_gives_the_same_bytes(folders: list[Path], tmp_path: Path) -> None:
    found = []
    for name in ("a", "b"):
        out = matsmerge.merge(folders[1:], folders[0], "mats_kfac", out=tmp_path / name).folder
        found.append((out / "model.safetensors").read_bytes() + (out / "merge.json").read_bytes())
    assert found[0] == found[1]


def test_statistics_that_change_before_resuming(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(output_folder.OutputFolder, "finish", stop)
        with pytest.raises(KeyboardInterrupt):
            matsmerge.merge(folders[1:], folders[0], "mats", out=out)
    os.utime(folders[2] / "statistics.safetensors", ns=(1, 1))
    with pytest.raises(OutputError, match="m1/statistics.safetensors: was modified"):
        matsmerge.merge(folders[1:], folders[0], "mats", out=out, resume=True)


def test_resuming(folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = matsmerge.merge(folders[1:], folders[0], "mats", out=tmp_path / "whole").folder
    solve, num_solved = worker.Worker._merge_whole, 0

    def stop_after_two(self: worker.Worker, *arguments: Any) -> None:
        nonlocal num_solved
        num_solved += 1
        if num_solved > 2:
            raise KeyboardInterrupt
        solve(self, *arguments)

    out = tmp_path / "out"
    monkeypatch.setattr(worker.Worker, "_merge_whole", stop_after_two)
    with pytest.raises(KeyboardInterrupt):
        matsmerge.merge(folders[1:], folders[0], "mats", out=out, executor=SerialExecutor())
    assert not out.exists()
    assert staging_path(out).exists()
    num_solved = -100
    matsmerge.merge(folders[1:], folders[0], "mats", out=out, resume=True)
    assert num_solved + 100 < len(LAYERS), "the finished layers were solved again"
    for file in ("model.safetensors", "merge.json"):
        assert (out / file).read_bytes() == (whole / file).read_bytes()


def test_an_override_lets_a_bias_go_its_own_way() -> None:
    merged = matsmerge.merge(
        MODELS,
        BASE,
        "regmean",
        statistics=make_statistics(),
        bias=True,
        overrides=[{"match": "out.bias", "method": {"name": "task_arithmetic", "scale": 0.0}}],
    )
    assert torch.equal(merged["out.bias"], BASE.state_dict()["out.bias"])
    apart = matsmerge.merge(MODELS, BASE, "regmean", statistics=make_statistics())
    torch.testing.assert_close(merged["out.weight"], apart["out.weight"])


def edited(path: Path, change: Callable[[dict[str, torch.Tensor], dict[str, Any]], None]) -> None:
    """Change arrays or header of a file of statistics."""
    arrays = load_file(path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    header = json.loads(metadata["matsmerge_statistics"])
    change(arrays, header)
    save_file(arrays, path, {"matsmerge_statistics": json.dumps(header)})


def _set(name: str, values: Any) -> Callable[[dict[str, torch.Tensor], dict[str, Any]], None]:
    def change(arrays: dict[str, torch.Tensor], header: dict[str, Any]) -> None:
        arrays[name] = values(arrays[name])

    return change


def _without_layer(arrays: dict[str, torch.Tensor], header: dict[str, Any]) -> None:
    header["maps"] = [m for m in header["maps"] if m["module"] != "second"]
    header["without"].setdefault("gram", {})["second.weight"] = "its module is not called"
    del arrays["main/fisher/second.weight"], header["forms"]["main/fisher/second.weight"]


def _without_examples(arrays: dict[str, torch.Tensor], header: dict[str, Any]) -> None:
    header["sets"]["main"]["num_examples"] = 0


BAD: list[tuple[Any, str, Sequence[str]]] = [
    (_set("main/inputs/second", lambda a: a * float("nan")), "mats", ["main/inputs/second", "nan"]),
    (_set("main/inputs/second", lambda a: -a), "mats", ["inputs/second", "eigenvalue", "collect"]),
    (_set("main/fisher/norm.weight", lambda a: a - 1), "diagonal_fisher", ["norm.weight"]),
    (
        _set("main/inputs/second", lambda a: a[:28].clone()),
        "mats",
        ["inputs/second", "[28]", "[36]", "another model"],
    ),
    (_without_layer, "regmean", ["m0", "no gram of 'second.weight'", "not called", "m1"]),
    (_without_layer, "diagonal_fisher", ["no fisher of 'second.weight'"]),
    (_without_examples, "mats", ["no examples"]),
]


@pytest.mark.parametrize(("change", "method", "texts"), BAD)
def test_damaged_statistics(
    folders: list[Path], tmp_path: Path, change: Any, method: str, texts: Sequence[str]
) -> None:
    edited(folders[1] / "statistics.safetensors", change)
    out = tmp_path / "out"
    with pytest.raises(StatisticsError) as error:
        matsmerge.merge(folders[1:], folders[0], method, out=out)
    assert all(text in str(error.value) for text in texts), str(error.value)
    assert not out.exists()
    assert not staging_path(out).exists()


def test_statistics_of_another_model(folders: list[Path]) -> None:
    shutil.copy(folders[2] / "statistics.safetensors", folders[1] / "statistics.safetensors")
    with pytest.raises(StatisticsError, match=r"another model(.|\n)*--force"):
        matsmerge.merge(folders[1:], folders[0], "mats")
    matsmerge.merge(folders[1:], folders[0], "mats", force=True)


def test_missing_statistics_are_all_named(folders: list[Path]) -> None:
    (folders[1] / "statistics.safetensors").unlink()
    (folders[3] / "statistics.safetensors").unlink()
    with pytest.raises(StatisticsError) as error:
        matsmerge.merge(folders[1:], folders[0], "mats_kfac")
    assert "m0" in str(error.value)
    assert "m2" in str(error.value)
    assert "--statistics kfac" in str(error.value)


def test_an_objective_without_its_statistic(folders: list[Path]) -> None:
    for i, (folder, model) in enumerate(zip(folders[1:], MODELS, strict=True)):
        statistics = matsmerge.collect(model, make_batches(i), "gram")
        save_statistics(statistics, folder / "statistics.safetensors")
    matsmerge.merge(folders[1:], folders[0], "regmean")
    with pytest.raises(StatisticsError, match="has gram and no kfac"):
        matsmerge.merge(folders[1:], folders[0], "mats_kfac")
    with pytest.raises(StatisticsError, match="no held-out set"):
        matsmerge.merge(folders[1:], folders[0], "mats", stop="held_out")


def test_held_out_sets_must_have_every_layer(folders: list[Path]) -> None:
    def without(arrays: dict[str, torch.Tensor], header: dict[str, Any]) -> None:
        del arrays["held_out/inputs/second"], header["forms"]["held_out/inputs/second"]

    edited(folders[2] / "statistics.safetensors", without)
    matsmerge.merge(folders[1:], folders[0], "mats")
    with pytest.raises(StatisticsError, match=r"m1.*has no inputs/second"):
        matsmerge.merge(folders[1:], folders[0], "mats", stop="held_out")


def test_kfac_brings_the_gram_along() -> None:
    statistics = [
        matsmerge.collect(m, make_batches(i), "kfac", loss=loss) for i, m in enumerate(MODELS)
    ]
    matsmerge.merge(MODELS, BASE, "regmean", statistics=statistics)


def test_joining_biases_needs_the_mean_input() -> None:
    statistics = [
        matsmerge.collect(m, make_batches(i), "gram", bias=False) for i, m in enumerate(MODELS)
    ]
    matsmerge.merge(MODELS, BASE, "regmean", statistics=statistics)
    with pytest.raises(StatisticsError, match="without --no-bias"):
        matsmerge.merge(MODELS, BASE, "regmean", statistics=statistics, bias=True)


def test_nothing_to_solve_is_refused() -> None:
    models = [{"scale": torch.ones(3) * i} for i in (1.0, 2.0)]
    with pytest.raises(StatisticsError, match="nothing for any"):
        matsmerge.merge(models, {"scale": torch.ones(3)}, "actmat")


def test_number_of_statistics() -> None:
    with pytest.raises(RecipeError, match="2 statistics for 3 models"):
        matsmerge.merge(MODELS, BASE, "mats", statistics=make_statistics()[:2])
    with pytest.raises(RecipeError, match="there is no model 'model_9'"):
        matsmerge.merge(MODELS, BASE, "mats", statistics={"model_9": make_statistics()[0]})


def test_trajectories_need_iterations() -> None:
    with pytest.raises(RecipeError, match="has no iterations"):
        matsmerge.merge(MODELS, BASE, "regmean", trajectory=[3])
    with pytest.raises(RecipeError, match="leave out either"):
        matsmerge.merge(MODELS, BASE, "mats", trajectory=[3], stop="held_out")


@pytest.mark.parametrize("dim", [5, 300])
def test_lowest_eigenvalue(dim: int) -> None:
    q = torch.linalg.qr(torch.randn(dim, dim, generator=torch.Generator().manual_seed(0)))[0]
    values = torch.linspace(0, 1, dim)
    assert lowest_eigenvalue(q @ values.diag() @ q.T) > -1e-4
    values[0] = -0.3
    assert lowest_eigenvalue(q @ values.diag() @ q.T) == pytest.approx(-0.3, abs=0.05)


def test_a_shared_module_counts_all_its_rows() -> None:
    """A weight that two places use is merged by the rows of both."""
    torch.manual_seed(0)
    models = [Twice() for _ in range(2)]
    batches = [torch.randn(20, 4) for _ in range(3)]
    statistics = [matsmerge.collect(m, batches, "gram") for m in models]
    merged = matsmerge.merge(models, None, "regmean", statistics=statistics, off_diagonal=1.0)
    grams = []
    for model in models:
        x = torch.cat(batches).double()
        y = torch.tanh(x @ model.one.weight.detach().double().T)
        grams.append((x.T @ x + y.T @ y) / (2 * len(x)))
    weights = [m.one.weight.detach().double() for m in models]
    top = weights[0] @ grams[0] + weights[1] @ grams[1]
    expected = (top @ torch.linalg.inv(grams[0] + grams[1])).float()
    torch.testing.assert_close(merged["one.weight"], expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(merged["one.weight"], merged["two.weight"])


class Twice(torch.nn.Module):
    """Two places that use one weight, and a scale without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Linear(4, 4, bias=False)
        self.two = torch.nn.Linear(4, 4, bias=False)
        self.two.weight = self.one.weight
        self.scale = torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.two(torch.tanh(self.one(x)))  # type: ignore[no-any-return]


def squares(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().sum(1)  # type: ignore[no-any-return]


def test_kfac_in_closed_form_is_refused_where_a_weight_is_used_twice() -> None:
    torch.manual_seed(0)
    models = [Twice() for _ in range(2)]
    statistics = [matsmerge.collect(m, [torch.randn(20, 4)], "kfac", loss=squares) for m in models]
    options: dict[str, Any] = {"objective": "kfac", "init": "average"}
    with pytest.raises(
        StatisticsError, match=r"one.weight' is used by several modules: .*4 models"
    ):
        matsmerge.merge(
            models, None, "mats", statistics=statistics, solver="closed_form", **options
        )
    matsmerge.merge(models, None, "mats", statistics=statistics, **options)


def test_parameters_without_dimensions() -> None:
    torch.manual_seed(0)
    models = [Twice() for _ in range(2)]
    with torch.no_grad():
        models[1].scale.fill_(3.0)
    statistics = [
        matsmerge.collect(m, [torch.randn(20, 4)], "fisher", loss=squares) for m in models
    ]
    merged = matsmerge.merge(models, None, "diagonal_fisher", statistics=statistics)
    fishers = [float(s.fisher("scale")) for s in statistics]
    expected = (fishers[0] * 1.5 + fishers[1] * 3.0) / sum(fishers)
    assert float(merged["scale"]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("method", ["mats_kfac", "regmean"])
def test_coarse_statistics_of_few_directions_are_no_damage(tmp_path: Path, method: str) -> None:
    """Rounded to three digits, second moments of low rank have negative eigenvalues."""
    torch.manual_seed(0)
    models = [torch.nn.Linear(24, 6, bias=False) for _ in range(3)]
    files = [tmp_path / f"{number}.safetensors" for number in range(3)]
    for model, file in zip(models, files, strict=True):
        data = [torch.randn(300, 8) @ torch.linalg.qr(torch.randn(24, 24))[0][:8]]
        matsmerge.collect(model, data, "kfac", loss=squares, dtype="bfloat16", out=file)
    lowest = min(
        float(values[0] / values[-1])
        for file in files
        for values in [torch.linalg.eigvalsh(open_statistics(file).gram("").double())]
    )
    assert lowest < -1e-3
    merged = matsmerge.merge(models, models[0], method, statistics=files)
    assert all(bool(value.isfinite().all()) for value in merged.values())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_singular_kfac_leaves_the_null_space_at_the_init(tmp_path: Path, dtype: str) -> None:
    """Inputs that live in a subspace say nothing of what is outside of it."""
    torch.manual_seed(0)
    basis = torch.linalg.qr(torch.randn(24, 24))[0]
    inside, outside = basis[:, :8], basis[:, 8:]
    base = torch.nn.Linear(24, 6, bias=False)
    models = [torch.nn.Linear(24, 6, bias=False) for _ in range(3)]
    statistics = [tmp_path / f"{number}.safetensors" for number in range(3)]
    for model, file in zip(models, statistics, strict=True):
        data = [torch.randn(300, 8) @ inside.T]
        matsmerge.collect(model, data, "kfac", loss=squares, dtype=dtype, out=file)
    init = matsmerge.merge(models, base, "task_arithmetic", scale=0.3)["weight"]
    options: dict[str, Any] = {"bias": False, "ridge": 0}
    for iterations in (10, 100, 1000):
        merged = matsmerge.merge(
            models, base, "mats_kfac", statistics=statistics, iterations=iterations, **options
        )["weight"]
        assert float(((merged - init) @ outside).norm()) < 1e-4
        assert float(((merged - init) @ inside).norm()) > 0.1


@pytest.mark.parametrize("method", ["actmat", "wudi", "tact", "centered_actmat"])
def test_gpt2_weights_are_told_by_their_shapes(method: str) -> None:
    """Attention that makes queries, keys and values at once is (d, 3 d) there, others (3 d, d)."""
    torch.manual_seed(0)
    base = {"h.0.attn.c_attn.weight": torch.randn(4, 12), "h.0.mlp.c_fc.weight": torch.randn(4, 16)}
    models = [{n: t + 0.1 * torch.randn_like(t) for n, t in base.items()} for _ in range(2)]
    merged = matsmerge.merge(models, base, method)
    turned = matsmerge.merge(
        [{n.replace("c_", "x_"): t.T.contiguous() for n, t in m.items()} for m in models],
        {n.replace("c_", "x_"): t.T.contiguous() for n, t in base.items()},
        method,
    )
    for name, values in merged.items():
        torch.testing.assert_close(values, turned[name.replace("c_", "x_")].T)


def test_memory_of_embeddings_is_not_that_of_a_matrix() -> None:
    torch.manual_seed(0)
    models = [torch.nn.Embedding(3000, 2) for _ in range(2)]
    statistics = {
        f"m{i}": matsmerge.collect(m, [torch.randint(0, 3000, (50,))], "gram")
        for i, m in enumerate(models)
    }
    recipe = make_recipe(
        {"models": ["m0", "m1"], "method": {"name": "regmean", "embeddings": True}}
    )
    prepared = prepare_merge(recipe, dict(zip(statistics, models, strict=True)), statistics)
    assert prepared.plan.peak_bytes(1) < 100e6


def test_trajectories_are_those_of_the_last_stage(folders: list[Path]) -> None:
    """What only an earlier stage has something for keeps that stage's iterations."""
    stages = [{"objective": "fisher", "iterations": 4}, {"objective": "gram", "iterations": 2}]
    steps = matsmerge.merge(
        folders[1:], folders[0], "mats", stages=stages, trajectory=[1, 2]
    ).trajectory
    alone = matsmerge.merge(folders[1:], folders[0], "mats", stages=stages)
    for name, values in alone.items():
        torch.testing.assert_close(steps[2][name], values, rtol=1e-6, atol=1e-7)
    assert torch.equal(steps[1]["norm.weight"], alone["norm.weight"])


def test_each_parameter_has_its_own_reports(folders: list[Path], tmp_path: Path) -> None:
    stages = [{"objective": "gram", "bias": True}, {"objective": "fisher"}]
    out = matsmerge.merge(
        folders[1:], folders[0], "mats", stages=stages, out=tmp_path / "out"
    ).folder
    parameters = json.loads((out / "merge.json").read_text())["parameters"]

    def solved(name: str) -> list[tuple[int, str]]:
        return [(r["stage"], r["objective"]) for r in parameters[name]["solved"]]

    assert solved("out.weight") == [(0, "gram"), (1, "fisher")]
    assert solved("out.bias") == [(1, "fisher")]
    assert solved("norm.weight") == [(1, "fisher")]


def test_arguments_that_are_not_lists() -> None:
    with pytest.raises(RecipeError, match="expected one for each model"):
        matsmerge.merge(MODELS[:1], BASE, "mats", statistics=make_statistics()[0])
    with pytest.raises(RecipeError, match="trajectory: .* valid list, found 5"):
        matsmerge.merge(MODELS, BASE, "mats", trajectory=5)


def test_a_trace_inside_the_output_is_refused(folders: list[Path], tmp_path: Path) -> None:
    recipe = make_recipe(
        {"models": [str(f) for f in folders[1:]], "base": str(folders[0]), "method": "mats"}
    )
    out = tmp_path / "out"
    with pytest.raises(matsmerge.OutputError, match="inside of the output"):
        merge_to_folder(prepare_merge(recipe), out, RunOptions(trace=out / "trace.jsonl"))


def test_statistics_inside_the_output_are_not_overwritten(
    folders: list[Path], tmp_path: Path
) -> None:
    out = matsmerge.merge(folders[1:], folders[0], "regmean", out=tmp_path / "out").folder
    moved = [out / f"{i}.safetensors" for i in range(3)]
    for folder, file in zip(folders[1:], moved, strict=True):
        shutil.move(folder / "statistics.safetensors", file)
    with pytest.raises(matsmerge.OutputError, match="overlaps"):
        matsmerge.merge(folders[1:], folders[0], "mats", statistics=moved, out=out, overwrite=True)
    assert all(file.exists() for file in moved)
