"""What is kept with each task's head: by headers, and by how far it moved."""

import pytest
import torch

from matsmerge.advice.own_layers import find_fresh, find_unshared, make_patterns, name_tables
from matsmerge.advice.task_vectors import TaskVectors, measure_task_vectors
from matsmerge.checkpoints.alignment import align, matches
from matsmerge.checkpoints.in_memory import InMemoryCheckpoint

Shapes = dict[str, tuple[int, ...]]
BODY: Shapes = {
    "embed.weight": (9, 4),
    "layer.0.w": (4, 4),
    "layer.1.w": (4, 4),
    "pooler.weight": (4, 4),
}


def make(shapes: Shapes, prefix: str = "") -> InMemoryCheckpoint:
    return InMemoryCheckpoint("x", {prefix + n: torch.randn(s) for n, s in shapes.items()})


def unshared(*shapes: Shapes) -> list[str]:
    return find_unshared([make(own) for own in shapes])


def test_models_that_share_everything_have_no_head() -> None:
    assert unshared(BODY, BODY, BODY) == []


def test_what_the_base_lacks_or_has_in_another_size() -> None:
    head = BODY | {"head.dense.w": (4, 4), "head.out.w": (3, 4), "head.out.b": (3,)}
    other = head | {"head.out.w": (5, 4), "head.out.b": (5,)}
    names = ["head.dense.w", "head.out.w", "head.out.b"]
    assert unshared(head, other, BODY) == names
    assert unshared(head, other, head) == ["head.out.w", "head.out.b"]
    assert unshared(BODY, BODY, head) == names  # the base alone has them
    # A head made of numbered modules is one, too.
    assert unshared(BODY | {"mlp.0.w": (4, 4), "mlp.2.w": (2, 4)}, BODY) == ["mlp.0.w", "mlp.2.w"]


def test_what_is_no_head() -> None:
    assert unshared(BODY | {"layer.2.w": (4, 4)}, BODY) == []  # one layer more
    assert unshared(BODY | {"embed.weight": (10, 4)}, BODY) == []  # another vocabulary
    assert unshared(BODY | {"pooler.weight": (4, 5)}, BODY) == []  # other inputs
    assert unshared(BODY, {"h.0.w": (4, 4), "wte.weight": (9, 4)}) == []  # another architecture


def test_names_may_begin_with_another_module() -> None:
    model, base = make(BODY | {"head.w": (3, 4)}, "bert."), make(BODY)
    assert find_unshared([model, base]) == ["bert.head.w"]
    assert all("bert.pooler.weight" in table for table in name_tables([model, base]))


def test_patterns_match_what_they_should_and_nothing_else() -> None:
    everything = ["a.x", "a.y", "b.p.x", "b.p.y", "b.q.x", "c[0].w", "c[1].w", "d"]
    for own, expected in (
        (["a.x", "a.y"], ["a.*"]),
        (["b.p.x", "b.p.y", "a.x"], ["b.p.*", "a.x"]),
        (["c[0].w", "d"], ["c[[]0].*", "d"]),
        ([], []),
    ):
        patterns = make_patterns(own, everything)
        assert patterns == expected
        assert [n for n in everything if matches(n, patterns)] == sorted(own)


def vectors(*moves: dict[str, float], also: str | None = None) -> TaskVectors:
    """Models whose parameters moved by these multiples of their norms, at random."""
    g = torch.Generator().manual_seed(0)
    shapes = BODY | ({also: (3, 8)} if also else {})
    base = {n: torch.randn(s, generator=g) for n, s in shapes.items()}
    models = {}
    for i, by in enumerate(moves):
        state = {}
        for name, values in base.items():
            step = torch.randn(values.shape, generator=g)
            state[name] = values + by.get(name, 0.01) * values.norm() / step.norm() * step
        models[f"m{i}"] = InMemoryCheckpoint(f"m{i}", state)
    return measure_task_vectors(align(models, InMemoryCheckpoint("base", base)))


def test_layers_learnt_from_scratch_stand_out() -> None:
    assert find_fresh(vectors({}, {}, {})) == {}
    far = {"pooler.weight": 0.1}
    assert find_fresh(vectors(far, far, {})) == {"pooler": pytest.approx(0.1)}
    assert find_fresh(vectors(far, {}, {})) == {}  # one model of three
    assert find_fresh(vectors({"pooler.weight": 0.015}, {"pooler.weight": 0.015})) == {}


def test_one_model_is_enough_where_nothing_of_the_base_is_left() -> None:
    assert find_fresh(vectors({"pooler.weight": 30.0}, {}, {})) == {"pooler": pytest.approx(30.0)}


def test_a_head_of_several_modules() -> None:
    """As that of a ResNet, whose linear layer comes after one that flattens."""
    name = "classifier.1.weight"
    found = find_fresh(vectors({name: 30.0}, {name: 30.0}, also=name))
    assert found == {"classifier.1": pytest.approx(30.0)}


@pytest.mark.parametrize("name", ["layer.1.w", "embed.weight"])
def test_layers_and_embeddings_are_never_a_head(name: str) -> None:
    assert find_fresh(vectors({name: 30.0}, {name: 30.0})) == {}
