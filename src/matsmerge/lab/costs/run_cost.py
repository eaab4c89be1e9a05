"""What a run took: operations by torch's counter, seconds and peak memory."""

import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from matsmerge.errors import ResourceError

_EIGENDECOMPOSITION = 9.0  # n^3 of one with vectors (Golub & Van Loan)


@dataclass(frozen=True)
class MeasuredCost:
    """One run of a command."""

    seconds: float
    peak_bytes: int  # of its largest process


def count_operations(run: Callable[[], Any]) -> int:
    """Multiply-adds of matrix products, convolutions and decompositions in this thread.

    torch counts a multiplication and an addition as two; formulas count them as one. What works
    entry by entry is not counted.
    """
    mapping = {
        torch.ops.aten._linalg_eigh: _eigh,
        torch.ops.aten.linalg_cholesky_ex: _cholesky,
        torch.ops.aten.cholesky_solve: _cholesky_solve,
    }
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        run()
    return int(counter.get_total_flops()) // 2


def _eigh(shape: Any, *_: Any, **__: Any) -> int:
    return int(2 * math.prod(shape[:-2]) * _EIGENDECOMPOSITION * shape[-1] ** 3)


def _cholesky(shape: Any, *_: Any, **__: Any) -> int:
    return int(2 * math.prod(shape[:-2]) * shape[-1] ** 3 / 6)


def _cholesky_solve(right: Any, factor: Any, *_: Any, **__: Any) -> int:
    return int(2 * math.prod(factor[:-2]) * factor[-1] ** 2 * right[-1])


def measure_command(arguments: list[str]) -> MeasuredCost:
    """Run `mats` with these arguments in a process of its own."""
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "matsmerge", *arguments], capture_output=True, text=True, check=False
    )
    seconds = time.perf_counter() - begin
    if done.returncode != 0:
        raise ResourceError(f"mats {' '.join(arguments)}: failed\n{done.stderr.strip()}")
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * unit
    return MeasuredCost(seconds, peak)
