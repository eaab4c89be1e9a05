"""What is public, pinned: a change here is a change for users."""

import inspect

import pytest

import matsmerge
from matsmerge.methods import METHODS
from matsmerge.methods.mats import Mats
from matsmerge.methods.objectives import OBJECTIVES
from matsmerge.methods.solvers import SOLVERS
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
        "evaluate",
        "merge",
        "merge_trajectory",
        "open_checkpoint",
        "open_statistics",
        "train",
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
        "models", "base", "method", "out", "statistics", "data", "weights", "overrides", "heads",
        "dtype", "output", "rank", "align", "ignore_tokenizers", "allow_nonfinite", "force", "overwrite",
        "resume", "verify", "parameters",
    ]  # fmt: skip
    assert list(inspect.signature(matsmerge.merge_trajectory).parameters) == [
        "models", "base", "method", "iterations", "statistics", "weights", "overrides", "heads",
        "dtype", "output", "rank", "align", "ignore_tokenizers", "allow_nonfinite", "force", "parameters",
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
    solving = [name for name, cls in METHODS.items() if issubclass(cls, Mats)]
    assert solving == [
        "mats", "mats_kfac", "diagonal_fisher", "regmean", "regmean++", "block_fisher",
        "kronecker_of_sums", "actmat", "wudi", "tact", "centered_actmat",
    ]  # fmt: skip
    fields = ["init", "inputs", "objective", "otherwise", "solver", "stages"]
    assert all(described.pop(name) == fields for name in solving)
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


def test_objectives_and_solvers() -> None:
    assert {name: sorted(cls.model_fields) for name, cls in OBJECTIVES.items()} == {
        "identity": [],
        "fisher": ["floor"],
        "gram": ["bias", "embeddings", "equalize", "off_diagonal", "ridge"],
        "kfac": ["bias", "embeddings", "equalize", "off_diagonal", "per", "ridge"],
        "block_fisher": [],
        "actmat": [],
        "wudi": [],
        "tact": ["density"],
        "centered_actmat": ["ridge"],
    }
    assert {name: sorted(cls.model_fields) for name, cls in SOLVERS.items()} == {
        "cg": ["damping", "form", "iterations", "preconditioner", "stop", "tolerance"],
        "closed_form": [],
        "summed_factors": [],
    }
