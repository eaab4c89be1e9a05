"""Views of subspaces against eigenvalues, projections and outputs computed densely, layer by layer."""

import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from transformers.pytorch_utils import Conv1D

import matsmerge
from matsmerge.checkpoints.checkpoint import Checkpoint
from matsmerge.checkpoints.in_memory import InMemoryCheckpoint
from matsmerge.lab.subspaces import subspace_view
from matsmerge.lab.subspaces.subspace_findings import SubspaceSize, SubspaceView, TaskSpectrum
from matsmerge.lab.subspaces.subspace_view import SubspaceTask, prepare_view
from matsmerge.linalg.subspaces import Directions, find_directions
from matsmerge.progress import Update
from matsmerge.statistics.statistics import Statistics

State = dict[str, Tensor]
F64 = torch.float64
ENERGY = 0.8


class Net(nn.Module):
    """Every layout there is, a shared input, groups, and a head that differs between tasks."""

    def __init__(self, num_labels: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 6)
        self.q = nn.Linear(6, 5)
        self.k = nn.Linear(6, 5)
        self.transposed = Conv1D(7, 5)
        self.conv = nn.Conv2d(1, 2, (2, 3))
        self.grouped = nn.Conv2d(2, 4, 2, groups=2)
        self.head = nn.Linear(4, num_labels)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = torch.tanh(self.transposed(torch.tanh(self.q(x)) * self.k(x)))
        x = torch.tanh(self.conv(x[:, None]))
        x = self.head(self.grouped(x).mean((2, 3)))
        assert isinstance(x, Tensor)
        return x


WEIGHTS = {
    "q": ("q.weight", "k.weight"),
    "transposed": ("transposed.weight",),
    "conv": ("conv.weight",),
}


def make_net(seed: int, num_labels: int = 2) -> Net:
    torch.manual_seed(seed)
    net = Net(num_labels).double().eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    return net


def make_ids(seed: int) -> Tensor:
    return torch.randint(0, 12, (9, 8), generator=torch.Generator().manual_seed(seed))


def make_task(seed: int, name: str, num_labels: int = 2) -> tuple[SubspaceTask, Net]:
    net = make_net(seed, num_labels)
    statistics = matsmerge.collect(net, [make_ids(seed)])
    return SubspaceTask(name, statistics, InMemoryCheckpoint(name, net)), net


def checkpoint(state: Mapping[str, Tensor], label: str = "merged") -> Checkpoint:
    return InMemoryCheckpoint(label, state)


def inputs_of(net: Net, ids: Tensor) -> dict[str, Tensor]:
    """The rows each layer received, by plain hooks; patches for the convolution."""
    seen: dict[str, Tensor] = {}
    for name in WEIGHTS:

        def keep(_: nn.Module, args: tuple[Tensor, ...], name: str = name) -> None:
            seen[name] = args[0].detach()

        net.get_submodule(name).register_forward_pre_hook(keep)
    net(ids)
    seen["conv"] = F.unfold(seen["conv"], (2, 3)).mT
    return {name: z.reshape(-1, z.shape[-1]) for name, z in seen.items()}


def as_matrix(name: str, weight: Tensor) -> Tensor:
    return weight.T if name.startswith("transposed") else weight.flatten(1)


def dense_basis(z: Tensor, energy: float = ENERGY) -> tuple[Tensor, Tensor]:
    """All eigenvalues, and a basis of the fewest directions that hold `energy`, from an SVD."""
    _, s, v = torch.linalg.svd(z / math.sqrt(len(z)), full_matrices=False)
    values = s.square()
    k = next(k for k in range(1, len(values) + 1) if values[:k].sum() >= energy * values.sum())
    return values, v[:k].T


def average(*nets: nn.Module, without: str = "head") -> State:
    states = [net.state_dict() for net in nets]
    return {
        name: torch.stack([state[name] for state in states]).mean(0)
        for name in states[0]
        if not name.startswith(without)
    }


@pytest.mark.parametrize("with_base", [True, False])
def test_against_dense(with_base: bool) -> None:
    (a, net_a), (b, net_b) = make_task(1, "a"), make_task(2, "b", num_labels=3)
    merged, base = average(net_a, net_b), make_net(3)
    view = prepare_view(
        [a, b],
        checkpoint(merged),
        InMemoryCheckpoint("base", base) if with_base else None,
        size=SubspaceSize(energy=ENERGY),
    ).run()
    assert view.tasks == ("a", "b")
    assert view.relative_to == ("base" if with_base else "model")
    assert {layer.name: layer.weights for layer in view.layers} == WEIGHTS
    assert {why.split(",")[0]: list(names) for why, names in view.skipped.items()} == {
        "of embeddings": ["embed.weight"],
        "of convolutions in groups": ["grouped.weight"],
        "not in the merged model": ["head.weight"],
    }
    rows = [inputs_of(net, make_ids(seed)) for seed, net in ((1, net_a), (2, net_b))]
    for layer in view.layers:
        dense = [dense_basis(own[layer.name]) for own in rows]
        for (values, basis), found in zip(dense, layer.spectra, strict=True):
            assert layer.dim == len(found.eigenvalues)
            padded = F.pad(values, (0, layer.dim - len(values)))
            torch.testing.assert_close(found.eigenvalues, padded, atol=1e-12, rtol=1e-7)
            shares = values / values.sum()
            entropy = float(-torch.special.xlogy(shares, shares).sum())
            assert found.effective_rank == pytest.approx(math.exp(entropy))
            assert found.rank == found.num_for_energy == basis.shape[1]
            assert found.share == pytest.approx(float(shares[: found.rank].sum()))
        (_, basis_a), (_, basis_b) = dense
        ranks = basis_a.shape[1], basis_b.shape[1]
        expected = float(torch.trace(basis_a @ basis_a.T @ basis_b @ basis_b.T)) / min(ranks)
        assert layer.overlaps[0][1] == pytest.approx(expected)
        assert layer.overlaps[1][0] == layer.mean_overlap == pytest.approx(expected)
        assert layer.overlaps[0][0] == pytest.approx(1)
        assert layer.at_random[0][1] == layer.mean_at_random == max(ranks) / layer.dim
        for i, net in enumerate((net_a, net_b)):
            z, basis = rows[i][layer.name], dense[i][1]
            assert tuple(d.weight for d in layer.distances[i]) == layer.weights
            for found_d in layer.distances[i]:
                own, star, start = (
                    as_matrix(found_d.weight, state[found_d.weight])
                    for state in (net.state_dict(), merged, base.state_dict())
                )
                moved = star - own
                size = float((own - start).norm() if with_base else own.norm())
                inside = moved @ basis @ basis.T
                assert found_d.inside * size == pytest.approx(float(inside.norm()))
                assert found_d.outside * size == pytest.approx(float((moved - inside).norm()))
                total = found_d.inside**2 + found_d.outside**2
                assert total * size**2 == pytest.approx(float(moved.square().sum()))
                assert found_d.inside_share == pytest.approx(found_d.inside**2 / total)
                assert found_d.inside_share_at_random == basis.shape[1] / layer.dim
                at_random = math.sqrt(total * basis.shape[1] / layer.dim)
                assert found_d.inside_at_random == pytest.approx(at_random)
                outputs = float((z @ moved.T).norm() / (z @ own.T).norm())
                assert found_d.at_outputs == pytest.approx(outputs)
    means = view.mean_distance(1)
    for key in ("inside", "outside", "at_outputs", "inside_share"):
        values_of = [getattr(d, key) for layer in view.layers for d in layer.distances[1]]
        assert means[key] == pytest.approx(sum(values_of) / len(values_of))
    overlaps = [layer.overlaps[0][1] for layer in view.layers]
    assert view.overlap(0, 1) == pytest.approx(sum(overlaps) / len(overlaps))


def test_the_same_task_twice() -> None:
    task, net = make_task(1, "a")
    view = prepare_view([task, task], checkpoint(net.state_dict())).run()
    for layer in view.layers:
        assert layer.mean_overlap == pytest.approx(1)
    for distance in view.distances(0):
        assert (distance.inside, distance.outside, distance.at_outputs) == (0, 0, 0)
        assert math.isnan(distance.inside_share)
    assert math.isnan(view.mean_distance(0)["inside_share"])
    assert "head.weight" in [d.weight for d in view.distances(0)]


def linear_task(z: Tensor, name: str, seed: int = 0) -> tuple[SubspaceTask, nn.Linear]:
    torch.manual_seed(seed)
    net = nn.Linear(z.shape[1], 3).double()
    model = InMemoryCheckpoint(name, net)
    return SubspaceTask(name, matsmerge.collect(net, [z]), model), net


def test_tasks_that_have_nothing_in_common() -> None:
    z = torch.randn(20, 6, dtype=F64)
    halves = torch.arange(6) < 3
    (a, net), (b, _), (c, _) = (
        linear_task(z * mask, name) for mask, name in ((halves, "a"), (~halves, "b"), (z > 9, "c"))
    )
    moved = {"weight": net.weight.detach() + ~halves * torch.randn(3, 6, dtype=F64)}
    view = prepare_view([a, b, c], checkpoint(moved)).run()
    assert view.overlap(0, 1) == pytest.approx(0, abs=1e-20)
    only_outside, found, _ = (view.distances(i)[0] for i in range(3))
    assert only_outside.inside == pytest.approx(0, abs=1e-12)
    assert only_outside.at_outputs == pytest.approx(0, abs=1e-7)
    assert found.outside < found.inside  # its three directions hold most of that change
    nothing = view.layers[0].spectra[2]
    assert (nothing.rank, nothing.effective_rank, nothing.share) == (0, 0, 0)
    assert math.isnan(view.overlap(0, 2))
    assert view.layers[0].mean_overlap == view.overlap(0, 1)


def test_regmean_changes_outputs_least() -> None:
    """Its solution is the least sum over tasks of what `at_outputs` measures, squared."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.linspace(0.1, 1, 6, dtype=F64)
    rows = [torch.randn(30, 6, generator=generator, dtype=F64) * scale for _ in range(2)]
    (a, net_a), (b, net_b) = (
        linear_task(z, n, s) for z, n, s in zip(rows, "ab", (1, 2), strict=True)
    )
    grams = [z.T @ z / len(z) for z in rows]
    weights = [net.weight.detach() for net in (net_a, net_b)]
    regmean = (weights[0] @ grams[0] + weights[1] @ grams[1]) @ (grams[0] + grams[1]).inverse()
    sizes = [float((w @ g * w).sum()) for w, g in zip(weights, grams, strict=True)]

    def total(weight: Tensor) -> float:
        view = prepare_view([a, b], checkpoint({"weight": weight})).run()
        changes = [view.distances(i)[0].at_outputs ** 2 for i in range(2)]
        return sum(change * size for change, size in zip(changes, sizes, strict=True))

    least = total(regmean)
    for share in (0.0, 0.3, 0.5, 1.0):
        assert least < total((1 - share) * weights[0] + share * weights[1])
    for _ in range(3):
        moved = 1e-3 * torch.randn(regmean.shape, generator=generator, dtype=F64)
        assert least < total(regmean + moved)


def spectrum_of(view: SubspaceView) -> TaskSpectrum:
    return view.layers[0].spectra[0]


def test_sizes_of_subspaces() -> None:
    task, _ = linear_task(torch.randn(4, 9, dtype=F64), "a")
    view = prepare_view([task], size=SubspaceSize(rank=2)).run()
    assert (spectrum_of(view).rank, len(view.layers)) == (2, 1)
    assert spectrum_of(view).num_for_energy == spectrum_of(prepare_view([task]).run()).rank
    # Four examples span four directions; a fifth would be one of rounding.
    assert spectrum_of(prepare_view([task], size=SubspaceSize(rank=7)).run()).rank == 4
    assert spectrum_of(prepare_view([task], size=SubspaceSize(energy=1.0)).run()).rank == 4
    assert math.isnan(view.layers[0].mean_overlap)
    for wrong in (0, -3):
        with pytest.raises(matsmerge.RecipeError, match=rf"rank: .*found {wrong}"):
            SubspaceSize(rank=wrong)
    for share in (0.0, -0.1, 1.1, math.nan):
        with pytest.raises(matsmerge.RecipeError, match="energy: "):
            SubspaceSize(energy=share)


def test_every_second_moment_is_decomposed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decomposed: list[int] = []

    def count(gram: Tensor) -> Directions:
        decomposed.append(len(gram))
        return find_directions(gram)

    monkeypatch.setattr(subspace_view, "find_directions", count)
    tasks = [make_task(seed, f"t{seed}")[0] for seed in (1, 2)]
    prepared = prepare_view(tasks)
    assert decomposed == []
    updates: list[Update] = []
    prepared.run(updates.append)
    assert decomposed == [6, 6, 5, 5, 6, 6, 4, 4]
    assert updates[-1].done == prepared.num_bytes == 8 * sum(d * (d + 1) // 2 for d in decomposed)


def test_large_weights_are_read_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    (a, net_a), (b, net_b) = make_task(1, "a"), make_task(2, "b")
    arguments = [a, b], checkpoint(average(net_a, net_b)), InMemoryCheckpoint("base", make_net(3))
    whole = prepare_view(*arguments).run()
    monkeypatch.setattr(subspace_view, "_BLOCK_ELEMENTS", 13)
    pieces = prepare_view(*arguments).run()
    for i in range(2):
        assert pieces.mean_distance(i) == pytest.approx(whole.mean_distance(i))


def test_a_base_without_the_leading_module() -> None:
    task, net = make_task(1, "a")
    base = make_net(3).state_dict()
    merged = checkpoint(average(net, make_net(4)))
    expected = prepare_view([task], merged, checkpoint(base, "base")).run()
    wrapped = nn.ModuleDict({"net": net})
    model = InMemoryCheckpoint("model", wrapped)
    header = task.statistics.header
    renamed = header.model_copy(
        update={
            "maps": tuple(m.model_copy(update={"weight": f"net.{m.weight}"}) for m in header.maps)
        }
    )
    longer = SubspaceTask("a", Statistics(renamed, task.statistics.arrays), model)
    star = checkpoint({f"net.{name}": values for name, values in average(net, make_net(4)).items()})
    found = prepare_view([longer], star, checkpoint(base, "base"), force=True).run()
    assert found.mean_distance(0) == expected.mean_distance(0)
    assert found.relative_to == "base"


def test_what_was_never_trained_has_no_relative_distance() -> None:
    task, net = make_task(1, "a")
    own = net.state_dict()
    base = make_net(3).state_dict() | {n: own[n].clone() for n in ("q.weight", "k.weight")}
    moved = {name: values + 0.1 for name, values in own.items() if name != "k.weight"}
    moved["k.weight"] = own["k.weight"]
    view = prepare_view([task], checkpoint(moved), checkpoint(base, "base")).run()
    by_weight = {d.weight: d for d in view.distances(0)}
    assert math.isnan(by_weight["q.weight"].inside)
    assert by_weight["q.weight"].at_outputs > 0
    assert by_weight["k.weight"].inside == by_weight["k.weight"].outside == 0
    assert view.mean_distance(0)["inside"] == pytest.approx(
        sum(d.inside for d in by_weight.values() if d.weight != "q.weight") / (len(by_weight) - 1)
    )


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 4)
        self.out = nn.Linear(4, 12, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.out(torch.tanh(self.embed(ids)))
        assert isinstance(x, Tensor)
        return x


def test_tied_weights_under_any_name() -> None:
    torch.manual_seed(0)
    net = Tied().double()
    task = SubspaceTask("a", matsmerge.collect(net, [make_ids(0)]), InMemoryCheckpoint("a", net))
    moved = net.embed.weight.detach() + 1
    merged = checkpoint({"out.weight": moved, "embed.weight": moved})
    assert merged.aliases
    view = prepare_view([task], merged).run()
    (found,) = view.distances(0)
    own = net.embed.weight.detach()
    total = math.hypot(found.inside, found.outside)
    assert total == pytest.approx(math.sqrt(own.numel()) / float(own.norm()))


def test_only_some_layers() -> None:
    tasks = [make_task(seed, f"t{seed}")[0] for seed in (1, 2)]
    for patterns, names in (
        (["k"], ["k"]),
        (["conv.weight", "trans*"], ["transposed", "conv"]),
        (["*"], ["q", "transposed", "conv", "head"]),
    ):
        view = prepare_view(tasks, layers=patterns).run()
        assert [layer.name for layer in view.layers] == names
    assert prepare_view(tasks, layers=["q"]).skipped == {}
    with pytest.raises(matsmerge.RecipeError, match=r"'tranposed' matches no.*'transposed'"):
        prepare_view(tasks, layers=["tranposed"])


def test_what_does_not_fit_is_counted() -> None:
    (a, net), (b, _) = make_task(1, "a"), make_task(2, "b", num_labels=3)
    state = net.state_dict()
    state["q.weight"] = torch.zeros(5, 7, dtype=F64)
    state["conv.weight"] = torch.zeros_like(state["conv.weight"], dtype=torch.int8)
    base = {n: values for n, values in make_net(3).state_dict().items() if n != "k.weight"}
    view = prepare_view([a, b], checkpoint(state), checkpoint(base, "base")).run()
    assert [layer.weights for layer in view.layers] == [("transposed.weight",)]
    skipped = {names[0]: why for why, names in view.skipped.items()}
    assert skipped["q.weight"] == "of another shape in the merged model"
    assert skipped["conv.weight"] == "not of floating point numbers in the merged model"
    assert skipped["k.weight"] == "not in the base"
    assert skipped["head.weight"] == "of another shape in every model"


def test_statistics_that_cannot_be_looked_at(tmp_path: Path) -> None:
    a, net = make_task(1, "a")
    other = linear_task(torch.randn(5, 3, dtype=F64), "other")[0]
    with pytest.raises(matsmerge.StatisticsError, match=r"no linear map.*not in every task"):
        prepare_view([a, other])
    z, y = torch.randn(5, 3, dtype=F64), torch.tensor([0, 1, 2, 0, 1])
    linear = nn.Linear(3, 3).double()
    loss = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none")  # noqa: E731
    fisher = matsmerge.collect(linear, [(z, y)], "fisher", loss=loss)
    with pytest.raises(matsmerge.StatisticsError, match="no Gram matrix, only fisher.*gram"):
        prepare_view([SubspaceTask("f", fisher)])
    wrong = SubspaceTask("a", a.statistics, InMemoryCheckpoint("b", make_net(2)))
    merged = checkpoint(net.state_dict())
    with pytest.raises(matsmerge.StatisticsError, match="another model.*than b .*--force"):
        prepare_view([wrong], merged)
    assert prepare_view([wrong], merged, force=True).run().mean_distance(0)["inside"] > 0
    with pytest.raises(matsmerge.RecipeError, match="models they were made of"):
        prepare_view([SubspaceTask("a", a.statistics)], merged)


def test_values_that_are_not_finite() -> None:
    task, net = make_task(1, "a")
    state = net.state_dict()
    state["conv.weight"] = state["conv.weight"] * math.inf
    with pytest.raises(matsmerge.NonFiniteError, match=r"merged: tensor 'conv\.weight'"):
        prepare_view([task], checkpoint(state)).run()
    arrays = {name: task.statistics.arrays[name] for name in task.statistics.arrays.specs}
    arrays["main/inputs/transposed"][0] = math.nan
    damaged = Statistics(task.statistics.header, checkpoint(arrays, "damaged"))
    with pytest.raises(matsmerge.NonFiniteError, match="damaged: the Gram matrix of 'transposed'"):
        prepare_view([SubspaceTask("a", damaged)]).run()
