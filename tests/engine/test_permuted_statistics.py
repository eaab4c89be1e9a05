"""Statistics of rows that only some models have, against systems that are written out."""

from pathlib import Path
from typing import Any

import pytest
import torch
from solved_models import solve_dense
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from vocabulary_folders import save_folder

import matsmerge
from matsmerge.errors import RecipeError, StatisticsError
from matsmerge.statistics.statistics import Statistics

WORDS = ["t0", "t1", "t2", "t3"]
# <y> is in two of the three, <x> in one, and b has its tokens in another order.
VOCABULARIES = {"a": WORDS, "b": ["t2", "<y>", "t0", "<x>", "t1", "t3"], "c": [*WORDS, "<y>"]}
OUT = [*WORDS, "<y>", "<x>"]  # as a union is ordered: b's tokens by their ids
KINDS = ("gram", "kfac", "fisher")


class Net(nn.Module):
    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(num_tokens, 3)
        self.lm_head = nn.Linear(3, num_tokens, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(torch.tanh(self.embed(tokens)))  # type: ignore[no-any-return]


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    scores = model(tokens[:, :-1]).transpose(1, 2)
    return F.cross_entropy(scores, tokens[:, 1:], reduction="none").sum(1)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Net, Statistics]]:
    root, found = tmp_path_factory.mktemp("models"), {}
    for seed, (name, words) in enumerate(VOCABULARIES.items()):
        torch.manual_seed(seed)
        net = Net(len(words))
        batches = [torch.randint(0, len(words), (8, 5)) for _ in range(6)]
        statistics = matsmerge.collect(net, batches, KINDS, loss=loss)
        found[name] = save_folder(root / name, net.state_dict(), words), net, statistics
    return found


def merge(
    models: dict[str, tuple[Path, Net, Statistics]], names: str, method: Any, tokenizer: Any
) -> matsmerge.Merged:
    return matsmerge.plan(
        {name: models[name][0] for name in names},
        method=method,
        statistics=[models[name][2] for name in names],
        tokenizer=tokenizer,
    ).merge()


def order(name: str, tokens: list[str]) -> Tensor:
    """The matrix (tokens of the output, own tokens) that puts rows in order."""
    matrix = torch.zeros(len(tokens), len(VOCABULARIES[name]), dtype=torch.float64)
    for i, word in enumerate(VOCABULARIES[name]):
        matrix[tokens.index(word), i] = 1
    return matrix


def seen(models: dict[str, Any], names: str, parameter: str, tokens: list[str]) -> list[Tensor]:
    """The rows that each model is merged with: own ones, or the mean of those that there are."""
    own = [order(n, tokens) @ models[n][1].state_dict()[parameter].double() for n in names]
    has = [order(n, tokens).sum(1, keepdim=True) for n in names]
    mean = torch.stack(own).sum(0) / torch.stack(has).sum(0)
    return [torch.where(h > 0, o, mean) for o, h in zip(own, has, strict=True)]


def covariance(statistics: Statistics, kind: str, parameter: str, p: Tensor) -> Tensor:
    """One model's covariance of the flat rows of the output; nothing where it has no row."""
    module = parameter.removesuffix(".weight")
    if kind == "fisher":
        return torch.diag((p @ statistics.fisher(parameter).double()).flatten())
    inputs = statistics.gram(module).double()
    outputs = statistics.output_factor(module).double()
    if module == "embed":  # rows are inputs, known by their counts
        return torch.kron(torch.diag(p @ inputs), outputs if kind == "kfac" else torch.eye(3))
    left = p @ outputs @ p.mT if kind == "kfac" else torch.eye(len(p), dtype=torch.float64)
    return torch.kron(left, inputs)


CG = {"name": "cg", "iterations": 400, "tolerance": 1e-12}
CASES: dict[str, dict[str, Any]] = {
    "fisher": {"name": "mats", "init": "average", "objective": "fisher", "solver": CG},
    "kfac": {
        "name": "mats",
        "init": "average",
        "objective": {"name": "kfac", "embeddings": True},
        "solver": CG,
    },
}


@pytest.mark.parametrize("kind", CASES)
def test_rows_that_a_model_lacks_do_not_count(models: dict[str, Any], kind: str) -> None:
    merged = merge(models, "abc", CASES[kind], "union")
    for parameter in ("embed.weight", "lm_head.weight"):
        thetas = seen(models, "abc", parameter, OUT)
        covariances = [covariance(models[n][2], kind, parameter, order(n, OUT)) for n in "abc"]
        expected = solve_dense(covariances, thetas, torch.stack(thetas).mean(0))
        torch.testing.assert_close(merged[parameter].double(), expected, rtol=1e-3, atol=1e-4)
    alone = OUT.index("<x>")
    row = models["b"][1].embed.weight[VOCABULARIES["b"].index("<x>")]
    torch.testing.assert_close(merged["embed.weight"][alone], row)


def test_inputs_alone_are_enough_for_rows_of_one_model(models: dict[str, Any]) -> None:
    method = {"name": "regmean", "off_diagonal": 1.0, "embeddings": True}
    merged = merge(models, "ab", method, "union")
    for parameter in ("embed.weight", "lm_head.weight"):
        thetas = seen(models, "ab", parameter, OUT)
        covariances = [covariance(models[n][2], "gram", parameter, order(n, OUT)) for n in "ab"]
        expected = solve_dense(covariances, thetas, torch.stack(thetas).mean(0))
        torch.testing.assert_close(merged[parameter].double(), expected, rtol=1e-3, atol=1e-4)


def test_inputs_alone_are_refused_for_rows_of_some_models(models: dict[str, Any]) -> None:
    with pytest.raises(StatisticsError, match="'lm_head.weight': 1 of its rows are in some"):
        merge(models, "abc", "regmean", "union")
    forced = {"tokens": {"<y>": {"source": {"kind": "mean"}, "force": True}}}
    merged = merge(models, "abc", "regmean", forced)
    rows = [models[n][1].lm_head.weight[VOCABULARIES[n].index("<y>")] for n in "bc"]
    torch.testing.assert_close(merged["lm_head.weight"][4], torch.stack(rows).mean(0))
    assert merge(models, "abc", "regmean", "a")["lm_head.weight"].shape == (4, 3)


def test_a_vocabulary_that_changes_nothing_changes_no_statistics(models: dict[str, Any]) -> None:
    plan = matsmerge.plan(
        {"a": models["a"][0]}, method="regmean", statistics=[models["a"][2]], tokenizer="union"
    )
    assert plan.prepared.evidence[0].statistics is models["a"][2]


def test_running_one_model_for_all_is_refused(models: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text("{}\n")
    with pytest.raises(RecipeError, match="the tokens of one vocabulary"):
        matsmerge.plan(
            [models["b"][0], models["c"][0]],
            models["a"][0],
            "mats_cross",
            data=[tmp_path / "data.jsonl"] * 2,
            tokenizer="union",
        )
