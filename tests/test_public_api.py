"""What is public, pinned: a change here is a change for users."""

import dataclasses
import inspect

import pytest

import matsmerge
import matsmerge.lab
from matsmerge import methods
from matsmerge.methods import METHODS
from matsmerge.methods.mats import Mats
from matsmerge.methods.objectives import OBJECTIVES
from matsmerge.methods.solvers import SOLVERS
from matsmerge.statistics.collection_options import CollectionOptions


def test_names() -> None:
    assert matsmerge.__all__ == [
        "Advice", "AlignmentError", "Checkpoint", "CheckpointError", "DataError", "Executor",
        "Finding", "LocalExecutor", "MatsError", "Merged", "NonFiniteError", "OutputError",
        "PlannedMerge", "RayExecutor", "Recipe", "RecipeError", "ResourceError", "SerialExecutor", "Statistics",
        "StatisticsCallback", "StatisticsError", "__version__", "advise", "collect", "export", "extract_lora", "load",
        "merge", "methods", "open_checkpoint", "open_statistics", "plan", "push", "read_recipe",
    ]  # fmt: skip
    for name in matsmerge.__all__:
        assert getattr(matsmerge, name) is not None
    assert dir(matsmerge) == sorted(matsmerge.__all__)
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = matsmerge.no_such_thing


def test_errors_are_one_tree() -> None:
    for name in matsmerge.__all__:
        if name.endswith("Error"):
            assert issubclass(getattr(matsmerge, name), matsmerge.MatsError)


def test_the_lab_has_its_own_names() -> None:
    assert matsmerge.lab.__all__ == ["evaluate", "report", "train", "tune"]
    for name in matsmerge.lab.__all__:
        assert callable(getattr(matsmerge.lab, name))
        with pytest.raises(AttributeError, match=r"is in matsmerge\.lab"):
            getattr(matsmerge, name)


def test_merge_signature() -> None:
    assert list(inspect.signature(matsmerge.merge).parameters) == [
        "models", "base", "method", "out", "executor", "progress", "overwrite", "resume", "verify",
        "allow_nonfinite", "options",
    ]  # fmt: skip
    assert list(inspect.signature(matsmerge.plan).parameters) == [
        "models", "base", "method", "statistics", "data", "weights", "overrides", "heads",
        "match_heads", "dtype", "device", "output", "rank", "align", "trajectory", "tokenizer",
        "ignore_tokenizers", "force", "parameters",
    ]  # fmt: skip
    assert list(inspect.signature(matsmerge.PlannedMerge.merge).parameters) == [
        "self", "out", "executor", "progress", "overwrite", "resume", "verify", "allow_nonfinite",
        "max_shard_bytes", "trace", "intermediates",
    ]  # fmt: skip
    assert list(inspect.signature(matsmerge.extract_lora).parameters) == [
        "model", "base", "rank", "modules", "keep_rest", "dtype", "out", "executor", "progress",
        "overwrite",
    ]  # fmt: skip


def test_push_signature() -> None:
    assert list(inspect.signature(matsmerge.push).parameters) == [
        "source", "repo", "statistics", "public",
    ]  # fmt: skip


def test_advice() -> None:
    assert list(inspect.signature(matsmerge.advise).parameters) == [
        "models", "base", "statistics", "data", "num_examples", "ignore_tokenizers", "progress",
    ]  # fmt: skip
    assert [field.name for field in dataclasses.fields(matsmerge.Advice)] == [
        "summary", "findings", "recipe", "models", "layers", "cosines", "notes", "arguments",
    ]  # fmt: skip
    assert [field.name for field in dataclasses.fields(matsmerge.Finding)] == [
        "subject", "level", "text", "models",
    ]  # fmt: skip


def test_collect_signature() -> None:
    assert list(inspect.signature(matsmerge.collect).parameters) == [
        "model", "batches", "statistics", "loss", "checkpoint", "name", "data", "out", "rank",
        "dtype", "overwrite", "resume", "progress", "options",
    ]  # fmt: skip
    assert list(inspect.signature(matsmerge.StatisticsCallback).parameters) == [
        "data", "statistics", "num_examples", "on", "loss", "name", "rank", "dtype", "options",
    ]  # fmt: skip
    assert list(CollectionOptions.model_fields) == [
        "statistics", "fisher", "reduction", "num_samples", "seed", "bias", "rank", "parameters",
        "held_out",
    ]  # fmt: skip


def test_classes_of_methods() -> None:
    classes = {cls.__name__: cls for cls in METHODS.values()}
    assert sorted(methods.__all__) == sorted(["METHODS", "Method", *classes])
    assert all(getattr(methods, name) is cls for name, cls in classes.items())


def test_methods() -> None:
    described = {name: sorted(cls.model_fields) for name, cls in METHODS.items()}
    solving = [name for name, cls in METHODS.items() if issubclass(cls, Mats)]
    assert solving == [
        "mats", "mats_kfac", "mats_cross", "featcal", "diagonal_fisher", "regmean", "regmean++",
        "block_fisher", "actmat", "wudi", "swudi", "tact", "centered_actmat", "svc",
        "essential_subspaces",
    ]  # fmt: skip
    fields = [
        "from_init", "init", "inputs", "objective", "otherwise", "solver", "stages", "targets",
    ]  # fmt: skip
    assert all(described.pop(name) == fields for name in solving)
    assert described == {
        "average": ["normalize"],
        "task_arithmetic": ["normalize", "scale"],
        "ties": ["density", "normalize", "rescale", "scale", "trim"],
        "dare_linear": ["density", "normalize", "rescale", "scale", "seed"],
        "dare_ties": ["density", "normalize", "rescale", "scale", "seed"],
        "breadcrumbs": ["density", "gamma", "normalize", "rescale", "scale"],
        "breadcrumbs_ties": ["density", "gamma", "normalize", "rescale", "scale"],
        "della": ["density", "epsilon", "normalize", "rescale", "scale", "seed"],
        "della_linear": ["density", "epsilon", "normalize", "rescale", "scale", "seed"],
        "magnitude_prune": ["density", "normalize", "rescale", "scale"],
        "sce": ["select_topk"],
        "ram": ["epsilon"],
        "ramplus_tl": ["alpha", "epsilon", "r"],
        "magmax": ["scale"],
        "localize_and_stitch": ["density"],
        "slerp": [],
        "nuslerp": ["nuslerp_flatten", "nuslerp_row_wise", "task_vectors"],
        "multislerp": ["eps", "normalize_weights", "task_vectors"],
        "karcher": ["max_iter", "tol"],
        "nearswap": ["t"],
        "arcee_fusion": [],
        "model_stock": ["filter_wise"],
        "tsv_m": ["scale"],
        "iso_c": ["scale"],
        "iso_cts": ["common", "scale"],
        "ace": ["eps", "heterogeneity", "refined", "scale"],
        "linear": ["normalize"],
        "passthrough": ["model", "scale"],
        "polarize_layers": ["power", "scale"],
    }


def test_objectives_and_solvers() -> None:
    gram = ["anchor", "bias", "embeddings", "equalize", "norms", "off_diagonal", "ridge"]
    kfac = sorted([*gram, "joint_rank", "output_ridge", "per"])
    assert {name: sorted(cls.model_fields) for name, cls in OBJECTIVES.items()} == {
        "identity": [],
        "fisher": ["floor"],
        "gram": gram,
        "kfac": kfac,
        "kfac_scales": kfac,
        "block_fisher": [],
        "actmat": [],
        "wudi": [],
        "tact": ["density"],
        "centered_actmat": ["ridge"],
    }
    assert {name: sorted(cls.model_fields) for name, cls in SOLVERS.items()} == {
        "cg": ["damping", "form", "iterations", "preconditioner", "stop", "tolerance"],
        "closed_form": ["precision"],
        "spectral_filter": ["share", "time"],
        "svc": ["least"],
        "essential_subspaces": ["input_power", "power", "task_power"],
    }
