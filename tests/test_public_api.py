"""What is public, pinned: a change here is a change for users."""

import inspect

import pytest

import matsmerge
from matsmerge.methods import METHODS
from matsmerge.statistics.options import Options


def test_names() -> None:
    assert matsmerge.__all__ == [
        "AlignmentError",
        "CheckpointError",
        "DataError",
        "MatsError",
        "NonFiniteError",
        "OutputError",
        "RecipeError",
        "ResourceError",
        "StatisticsError",
        "__version__",
        "collect",
        "merge",
        "open_checkpoint",
        "open_statistics",
    ]
    for name in matsmerge.__all__:
        assert getattr(matsmerge, name) is not None
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = matsmerge.no_such_thing


def test_errors_are_one_tree() -> None:
    for name in matsmerge.__all__:
        if name.endswith("Error"):
            assert issubclass(getattr(matsmerge, name), matsmerge.MatsError)


def test_merge_signature() -> None:
    assert list(inspect.signature(matsmerge.merge).parameters) == [
        "models", "base", "method", "out", "weights", "overrides", "heads", "dtype",
        "allow_nonfinite", "overwrite", "resume", "parameters",
    ]  # fmt: skip


def test_collect_signature() -> None:
    assert list(inspect.signature(matsmerge.collect).parameters) == [
        "model", "batches", "statistics", "loss", "checkpoint", "name", "data", "out", "dtype",
        "overwrite", "resume", "options",
    ]  # fmt: skip
    assert list(Options.model_fields) == [
        "statistics", "fisher", "reduction", "num_samples", "seed", "bias", "parameters", "held_out",
    ]  # fmt: skip


def test_methods() -> None:
    described = {name: sorted(cls.model_fields) for name, cls in METHODS.items()}
    assert described == {
        "average": ["normalize"],
        "task_arithmetic": ["normalize", "scale"],
        "ties": ["density", "normalize", "scale", "trim"],
        "dare_linear": ["density", "normalize", "rescale", "scale", "seed"],
        "dare_ties": ["density", "normalize", "rescale", "scale", "seed"],
        "slerp": [],
        "model_stock": [],
        "passthrough": ["model"],
    }
