"""Several processes that each collect from a part of the data, by torch.distributed."""

import json
import os
from dataclasses import dataclass

import torch
from safetensors.torch import load, save
from torch import Tensor
from torch import distributed as dist

from matsmerge.statistics.statistics import Header, Statistics, in_memory
from matsmerge.statistics.statistics_sum import add_up


@dataclass(frozen=True)
class Process:
    """Which of how many processes this is."""

    rank: int = 0
    num_processes: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def suffix(self) -> str:
        """For files of a process's own."""
        return f".{self.rank}of{self.num_processes}" if self.num_processes > 1 else ""


def this_process() -> Process:
    """As `torchrun` or `accelerate launch` started it and `init_process_group` set it up."""
    if dist.is_available() and dist.is_initialized():
        return Process(dist.get_rank(), dist.get_world_size())
    return Process()


def join_processes() -> Process:
    """Find the other processes, if a launcher such as `torchrun` started several."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
    return this_process()


def wait_for_processes() -> None:
    """Until every process has come here."""
    if this_process().num_processes > 1:
        dist.barrier()


def add_over_processes(own: Statistics) -> Statistics:
    """The statistics of all processes added up, in each of them."""
    process = this_process()
    if process.num_processes == 1:
        return own
    if process.is_first:
        total = own
        for rank in range(1, process.num_processes):
            total = add_up([total, _decode(_receive(rank))])
        _spread(_encode(total))
        return total
    _send(_encode(own))
    return _decode(_spread(None))


def _encode(statistics: Statistics) -> Tensor:
    arrays = {name: statistics.arrays[name].contiguous() for name in statistics.arrays.specs}
    header = json.dumps(statistics.header.model_dump()).encode()
    data = len(header).to_bytes(8, "little") + header + save(arrays)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _decode(message: Tensor) -> Statistics:
    data = message.numpy().tobytes()
    length = int.from_bytes(data[:8], "little")
    header = Header.model_validate_json(data[8 : 8 + length])
    return in_memory(header, load(data[8 + length :]))


def _device() -> torch.device:
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def _send(message: Tensor) -> None:
    dist.send(torch.tensor([len(message)], device=_device()), 0)
    dist.send(message.to(_device()), 0)


def _receive(rank: int) -> Tensor:
    length = torch.zeros(1, dtype=torch.long, device=_device())
    dist.recv(length, rank)
    message = torch.empty(int(length), dtype=torch.uint8, device=_device())
    dist.recv(message, rank)
    return message.cpu()


def _spread(message: Tensor | None) -> Tensor:
    """The first process's message, in every process."""
    length = torch.tensor([0 if message is None else len(message)], device=_device())
    dist.broadcast(length, 0)
    content = torch.empty(int(length), dtype=torch.uint8, device=_device())
    if message is not None:
        content.copy_(message)
    dist.broadcast(content, 0)
    return content.cpu()
