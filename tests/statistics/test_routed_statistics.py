"""Statistics of fused experts against products that the model's own code makes, token by token."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from dense_statistics import dense_fisher, module_rows, per_example_gradients
from statistics_cases import EXPERTS, Case, make_case
from test_against_dense import assert_same, gather
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from matsmerge.statistics.statistics import UNROUTED, Statistics
from matsmerge.statistics.statistics_sum import combine_statistics

Rows = dict[tuple[str, int], list[Tensor]]  # by fused parameter and expert


class Products(TorchFunctionMode):
    """Notes what is multiplied by a slice of a 3-D parameter, and the gradients at the product."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.fused = {n: p for n, p in model.named_parameters() if p.ndim == 3}
        self.inputs: Rows = defaultdict(list)
        self.grads: Rows = defaultdict(list)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func in (F.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__):
            x, weight = args[:2]
            for name, p in self.fused.items():
                at = (weight.data_ptr() - p.data_ptr()) / (p[0].numel() * p.element_size())
                if 0 <= at < len(p):
                    key = name, int(at)
                    self.inputs[key].append(x.detach())
                    output.register_hook(lambda g, key=key: self.grads[key].append(g))
        return output


@pytest.fixture(params=EXPERTS)
def case(request: pytest.FixtureRequest) -> Case:
    case = make_case(request.param)
    model: Any = case.model
    model.set_experts_implementation("eager")  # the one that works in float64
    return case


def products(case: Case, runs: Sequence[Callable[[], Tensor]]) -> Products:
    found = Products(case.model)
    with found:
        for run in runs:
            run().backward()
    return found


def part_of(module: str) -> tuple[str, int, str]:
    """The fused parameter, the expert, and its part, that a map is of."""
    prefix, number, part = module.rsplit(".", 2)
    fused = "gate_up_proj" if part in ("gate_proj", "up_proj") else part
    return f"{prefix}.{fused}", int(number), part


def half(values: Tensor, part: str) -> Tensor:
    """The rows of a gate or of what it lets through; all of them of what is neither."""
    first, second = values.chunk(2) if part in ("gate_proj", "up_proj") else (values, values)
    return first if part == "gate_proj" else second


@pytest.mark.parametrize("size", [1, 3])
def test_factors(case: Case, size: int) -> None:
    statistics = gather(case, size, padding=2)
    dense = products(case, case.runs())
    num = len(case.examples)
    seen = set()
    for m in statistics.header.maps:
        if ".experts." in m.module:
            name, number, part = part_of(m.module)
            seen.add((name, number))
            z = torch.cat(dense.inputs[name, number])
            o = half(torch.cat(dense.grads[name, number]).T, part).T
            rows = statistics.header.sets["main"].num_rows[f"inputs/{m.inputs}"]
            assert rows == len(z)
        else:
            z, o = module_rows(case.model, m.module, case.runs())
            if m.layout == "embedding":
                continue
        assert_same(statistics.gram(m.module), z.T @ z / len(z), f"inputs of {m.module}")
        assert_same(statistics.output_factor(m.module), o.T @ o / num, f"outputs of {m.module}")
    assert seen == dense.inputs.keys()


def test_fisher(case: Case) -> None:
    statistics = gather(case, 3)
    gradients = per_example_gradients(case.model, case.runs())
    expected = dense_fisher(gradients, len(case.examples))
    checked = 0
    for parameter in statistics.parameters("fisher"):
        if ".experts." not in parameter:
            assert_same(statistics.fisher(parameter), expected[parameter], parameter)
            continue
        module, _, attribute = parameter.rpartition(".")
        name, number, part = part_of(module)
        name = name if attribute == "weight" else f"{name}_bias"
        assert_same(statistics.fisher(parameter), half(expected[name][number], part), parameter)
        checked += statistics.fisher(parameter).numel()
    assert checked == sum(v.numel() for n, v in expected.items() if ".experts." in n)


def test_gate_and_up_share_their_input(case: Case) -> None:
    maps = {m.module: m.inputs for m in gather(case, 3).header.maps if ".experts." in m.module}
    for module, inputs in maps.items():
        assert inputs == module.replace(".up_proj", ".gate_proj")


def test_biases_are_joined() -> None:
    case = make_case("gpt-oss")
    statistics = gather(case, 3)
    dense_z = products(eager(case), case.runs()).inputs
    module = "model.layers.0.mlp.experts.1.down_proj"
    m = statistics.map_of(module)
    assert (m.layout, m.bias) == ("conv1d", f"{module}.bias")
    z = torch.cat(dense_z["model.layers.0.mlp.experts.down_proj", 1])
    z = F.pad(z, (0, 1), value=1.0)
    assert_same(statistics.gram(module, bias=True), z.T @ z / len(z), module)


def test_an_expert_without_tokens_is_named() -> None:
    statistics = gather(make_case("gpt-oss"), 3)
    unused = {n for n, why in statistics.header.without["kfac"].items() if why == UNROUTED}
    module = "model.layers.1.mlp.experts.2"
    assert unused == {
        f"{module}.{part}_proj.{attribute}"
        for part in ("gate_up", "down")
        for attribute in ("weight", "bias")
    }
    assert all(statistics.header.is_unused(name) for name in unused)
    assert not any(m.module.startswith(module) for m in statistics.header.maps)


def test_the_model_is_as_it_was(case: Case) -> None:
    before = dict(case.model.named_modules()), case.model.state_dict()
    gather(case, 3)
    modules, state = dict(case.model.named_modules()), case.model.state_dict()
    assert modules == before[0]
    assert state.keys() == before[1].keys()
    assert all(torch.equal(state[name], values) for name, values in before[1].items())
    assert all(p.requires_grad for p in case.model.parameters())


def test_parts_of_the_data_add_up() -> None:
    """Also of experts that only one of the parts uses."""
    case = eager(make_case("mixtral"))
    whole = gather(case, 2)
    parts = [gather(_with(case, i), 2) for i in (slice(0, 1), slice(1, None))]
    assert parts[0].header.without["kfac"] != parts[1].header.without["kfac"]
    assert_equal(combine_statistics(parts, force=True), whole)


def _with(case: Case, chosen: slice) -> Case:
    return Case(case.model, case.examples[chosen], case.collate, case.predict)


def assert_equal(found: Statistics, expected: Statistics) -> None:
    assert {m.module for m in found.header.maps} == {m.module for m in expected.header.maps}
    assert found.header.without == expected.header.without
    assert found.header.sets == expected.header.sets
    for name in expected.arrays.specs:
        assert_same(found.arrays[name].double(), expected.arrays[name], name)


def eager(case: Case) -> Case:
    model: Any = case.model
    model.set_experts_implementation("eager")
    return case


def test_experts_that_are_modules() -> None:
    """All of them have statistics, but for those that no token was routed to."""
    case = make_case("switch")
    statistics = gather(case, 3, padding=1)
    header = statistics.header
    weights = {n for n, _ in case.model.named_parameters() if ".experts." in n}
    measured = {m.weight for m in header.maps}
    assert len(weights & measured) >= 6
    assert all(name in measured or header.is_unused(name) for name in weights)
    rows = header.sets["main"].num_rows
    tokens = sum(len(example["ids"]) for example in case.examples)
    of_encoder = [k for k in rows if k.startswith("inputs/encoder.") and k.endswith(".wi")]
    assert sum(rows[key] for key in of_encoder) == tokens
