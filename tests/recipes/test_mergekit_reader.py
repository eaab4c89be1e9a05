"""Pieces of mergekit's YAML that are something else than expected: noted, and gone on."""

from typing import Any

import pytest

from matsmerge.recipes.mergekit_reader import MergekitReader


@pytest.fixture
def reader() -> MergekitReader:
    return MergekitReader()


@pytest.mark.parametrize("wrong", [None, 3, "x", {"a": 1}, [3], [{"a": 1}, "b"]])
def test_lists_of_mappings(reader: MergekitReader, wrong: Any) -> None:
    assert reader.read_entries(wrong, "slices") == []
    assert reader.problems == [f"'slices' must be a list of mappings, found {str(wrong)!r}"]


def test_long_values_are_cut(reader: MergekitReader) -> None:
    reader.read_entries("x" * 500, "models")
    assert len(reader.problems[0]) < 120


def test_entries_are_given_back(reader: MergekitReader) -> None:
    entries = [{"model": "a"}, {}]
    assert reader.read_entries(entries, "models") == entries
    assert reader.read_entries([], "models") == []
    assert reader.problems == []


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a/b", "a/b"),
        ("a@v1+b@v2", "a@v1+b@v2"),
        ({"path": "a"}, "a"),
        ({"path": "a", "revision": None}, "a"),
        ({"path": "a", "revision": "v1"}, "a@v1"),
        ({"model": "a"}, "a"),
        ({"model": {"path": "a", "revision": "v1"}}, "a@v1"),
        ({"model": "a", "lora": "l"}, "a+l"),
        ({"model": {"path": "a"}, "lora": {"path": "l", "revision": "v"}}, "a+l@v"),
        ({"model": "a", "lora": None}, "a"),
        ({"model": {"model": {"path": "a"}, "lora": "l"}}, "a+l"),
        ({"model": {"path": "a"}, "lora": None, "override_architecture": None}, "a"),
        ({"model": "a", "override_architecture": "LlamaForCausalLM"}, "a"),
    ],
)
def test_references(reader: MergekitReader, given: Any, expected: str) -> None:
    assert reader.read_path(given) == expected
    assert reader.problems == []


@pytest.mark.parametrize(
    "wrong", [None, 3, [], {}, {"lora": "l"}, {"model": None}, {"path": "a", "sha": 1}, {"x": 1}]
)
def test_references_to_nothing(reader: MergekitReader, wrong: Any) -> None:
    assert reader.read_path(wrong) == "?"
    assert reader.problems == [f"expected the name of a model, found {wrong!r}"]


def test_a_model_inside_that_is_none(reader: MergekitReader) -> None:
    assert reader.read_path({"model": {"path": "a"}, "lora": 3}) == "a+?"
    assert reader.problems == ["expected the name of a model, found 3"]


@pytest.mark.parametrize("layers", [[3, 12], ["3", "12"], [3, " 12"], [3.0, 12]])
def test_ranges(reader: MergekitReader, layers: list[Any]) -> None:
    assert repr(reader.read_range(layers, "slices.0")) == "[3, 12]"
    assert reader.problems == []


@pytest.mark.parametrize(
    "wrong",
    [None, 3, [], [1], [1, 2, 3], [2, 2], [3, 1], [-1, 2], [0.5, 2], ["a", "2"], [True, 2], "0-2"],
)
def test_ranges_that_are_none(reader: MergekitReader, wrong: Any) -> None:
    assert reader.read_range(wrong, "slices.4") is None
    assert reader.problems == [
        f"slices.4: expected layer_range: [FIRST, LAST + 1], found {wrong!r}"
    ]


def test_mappings(reader: MergekitReader) -> None:
    assert reader.read_mapping(None, "parameters") == {}
    assert reader.read_mapping({"a": 1}, "parameters") == {"a": 1}
    assert reader.problems == []
    assert reader.read_mapping([1], "parameters") == {}
    assert reader.problems == ["parameters: expected a mapping, found [1]"]


def test_keys_that_are_ignored(reader: MergekitReader) -> None:
    entry = {"model": "a", "parameters": {"weight": 1}, "layer_range": [0, 1], "paramters": {}}
    assert reader.read_source(entry, "models", "layer_range") == ("a", {"weight": 1})
    (note,) = reader.notes
    assert note.startswith("models: a: mergekit ignores the key 'paramters'")
    assert "did you mean 'parameters'" in note
    reader.read_source({"model": "a", "layer_range": [0, 1]}, "models")
    assert "mergekit ignores the key 'layer_range'" in reader.notes[-1]
