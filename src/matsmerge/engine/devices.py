"""What sites are merged on: the processor, or devices that torch has besides."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from matsmerge.engine.machine import default_memory_bytes
from matsmerge.errors import RecipeError

if TYPE_CHECKING:
    from matsmerge.engine.plan import Job

PROCESSOR = "cpu"
_USED_SHARE = 0.9  # of a device's free memory: what torch keeps in pieces is lost to it


def find_devices(asked: str | None) -> tuple[str, ...]:
    """The devices of this machine that `auto`, `cpu`, `cuda` (all of them), `cuda:1` or `mps` are.

    `auto` is all CUDA devices, or else `mps`, or else the processor.
    """
    if asked is None or asked == PROCESSOR:
        return (PROCESSOR,)
    cuda = tuple(f"cuda:{i}" for i in range(torch.cuda.device_count()))
    mps = ("mps",) if torch.backends.mps.is_available() else ()
    if asked == "auto":
        return cuda or mps or (PROCESSOR,)
    if asked == "cuda" and cuda:
        return cuda
    if asked in (*cuda, *mps):
        return (asked,)
    there = ", ".join((PROCESSOR, *cuda, *mps))
    raise RecipeError(f"device: torch finds no '{asked}' on this machine; there is {there}")


def has_float64(device: str) -> bool:
    """Whether a device computes in double precision."""
    return not device.startswith("mps")


def memory_bytes(device: str) -> int:
    """Memory to use on a device."""
    if device.startswith("cuda"):
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * _USED_SHARE)
    if device.startswith("mps"):
        used = torch.mps.driver_allocated_memory()
        return int((torch.mps.recommended_max_memory() - used) * _USED_SHARE)
    return default_memory_bytes()


def spread(jobs: "Iterable[Job]", devices: Sequence[str]) -> "list[Job]":
    """Jobs with a device each, in turn, as their numbers have it."""
    return [replace(job, device=devices[job.index % len(devices)]) for job in jobs]
