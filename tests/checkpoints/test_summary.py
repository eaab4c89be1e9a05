from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from matsmerge.checkpoints.source import open_checkpoint
from matsmerge.checkpoints.summary import compare_checkpoints, summarize
from matsmerge.progress import Update


def test_kinds(make_state: Callable[..., dict[str, Tensor]]) -> None:
    state = make_state() | {"conv.weight": torch.ones(2, 3, 4, 5)}
    summary = summarize(open_checkpoint(state))
    assert {k: (s.num_tensors, s.num_parameters) for k, s in summary.items()} == {
        "embedding": (1, 400),
        "matrix": (2, 128),
        "vector": (2, 16),
        "convolution": (1, 120),
        "other": (1, 1),
        "buffer": (1, 5),
        "total": (8, 670),
    }
    assert summary["total"].dtypes == {"float32": 7, "int64": 1}


def test_compare(make_state: Callable[..., dict[str, Tensor]]) -> None:
    a = make_state(1)
    b = {n: t.clone() for n, t in a.items()}
    b["layers.0.w"] = a["layers.0.w"] * 1.5
    b["layers.1.b"] = a["layers.1.b"].bfloat16()
    b["layers.1.w"] = torch.ones(3, 3)
    del b["layers.0.b"]
    b["new"] = torch.ones(1)
    updates: list[Update] = []
    found = compare_checkpoints(open_checkpoint(a), open_checkpoint(b), updates.append)
    assert found.only_first == ["layers.0.b"]
    assert found.only_second == ["new"]
    assert found.other_shape == ["layers.1.w"]
    assert found.other_dtype == ["layers.1.b"]
    assert found.num_equal == 3
    assert next(iter(found.changed)) == "layers.0.w"
    assert found.changed["layers.0.w"] == pytest.approx(0.5)
    assert updates[-1].done == updates[-1].total
    assert updates[-1].done > 0
