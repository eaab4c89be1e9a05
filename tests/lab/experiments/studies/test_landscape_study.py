"""Merging in a plane, against dense computations with all of a layer's parameters."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_suite import make_base, make_data

from matsmerge.lab import train
from matsmerge.lab.experiments.step import Given, Places, TaskInput
from matsmerge.lab.experiments.studies.landscape_study import Draw, Plane, merge_in_plane
from matsmerge.tasks.loaded_model import load_model
from matsmerge.tasks.splits import read_split
from matsmerge.tasks.task import encode_all
from matsmerge.tasks.task_file import TaskFile

LAYER = "bert.encoder.layer.1.output.dense.weight"


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("num_models", [2, 3])
def test_models_lie_in_their_plane(num_models: int) -> None:
    base, *models = random(1 + num_models, 4, 5)
    plane = Plane.through(base, models)
    for weight in models + ([base] if num_models == 2 else []):
        x, y = plane.place(weight)
        torch.testing.assert_close(plane.weight(x, y), weight)
    assert float((plane.u * plane.v).sum()) == pytest.approx(0, abs=1e-12)
    assert float(plane.u.norm()) == pytest.approx(float(plane.v.norm()))


def test_merges_solve_the_systems_of_two_parameters() -> None:
    models = random(3, 2)
    roots = random(3, 2, 2, seed=1)
    fisher = roots @ roots.mT
    base = random(2, seed=2)
    merges, path = merge_in_plane(models, fisher, base)
    torch.testing.assert_close(merges["average"], models.mean(0))
    expected = torch.linalg.solve(
        fisher.sum(0), sum(f @ m for f, m in zip(fisher, models, strict=True))
    )
    torch.testing.assert_close(merges["block Fisher"], expected)
    for i in range(2):
        weights = fisher[:, i, i]
        assert float(merges["diagonal Fisher"][i]) == pytest.approx(
            float((weights * models[:, i]).sum() / weights.sum())
        )
    torch.testing.assert_close(path[0], base + 0.3 * (models - base).sum(0))
    assert len(path) == 3
    torch.testing.assert_close(path[2], expected)  # as many steps as parameters


def test_a_real_slice(tmp_path: Path) -> None:
    """Losses and Fisher information are those of the models themselves."""
    base = make_base(tmp_path / "base")
    data = make_data(tmp_path / "data")
    names = ["has_a", "early"]
    files, models = [], {}
    for i, name in enumerate(names):
        content = {
            "name": name,
            "task": "sequence_classification",
            "labels": ["no", "yes"],
            "data": str(data / f"{name}.jsonl"),
        }
        files.append(TaskFile.model_validate(content))
        options: dict[str, Any] = {
            "max_steps": 2,
            "batch_size": 4,
            "validate": False,
            "learning_rate": 0.05,
        }
        file = TaskFile.model_validate({**content, "splits": {"train": 20, "validation": 8}})
        train(base, file, tmp_path / name / "model", seed=i, **options)
        models[name] = Given.at(tmp_path / name / "model")
    step = Draw(
        name="landscape",
        base=str(base),
        models=models,
        tasks=[TaskInput(file) for file in files],
        layer=LAYER,
        split=None,
        size=4,
        num_examples=5,
    )
    found = step.run(Places({given.key: given.path for given in models.values()}), tmp_path)
    assert [point.name for point in found.models] == [*names, "base"]
    # The base is the origin, and the first model one unit from it.
    assert [found.models[0].x, found.models[0].y] == pytest.approx([1, 0], abs=1e-6)
    assert [found.models[2].x, found.models[2].y] == pytest.approx([0, 0], abs=1e-9)
    # The loss at a corner of the grid, with the weight put there by hand.
    loaded = load_model(str(tmp_path / "has_a" / "model"), TaskFile(task="sequence_classification"))
    own = dict(loaded.model.named_parameters())
    other = load_model(str(tmp_path / "early" / "model"), TaskFile(task="sequence_classification"))
    zero = load_file(base / "model.safetensors")[LAYER.removeprefix("bert.")].double()
    weights = [m[LAYER].detach().double() for m in (own, dict(other.model.named_parameters()))]
    plane = Plane.through(zero, weights)
    with torch.no_grad():
        value = plane.weight(torch.tensor(found.xs[3]), torch.tensor(found.ys[0]))
        own[LAYER].copy_(value)
    rows = read_split(files[0])
    encoded = encode_all(loaded.task, rows, {}, list(range(5)))
    prediction = loaded.task.predict(loaded.model, loaded.task.collate(encoded))
    assert found.losses["has_a"][0][3] == pytest.approx(prediction.losses().mean().item(), rel=1e-4)
