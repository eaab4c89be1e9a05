"""Several processes that each collect from a part of the data, by torch.distributed."""

import os
from dataclasses import dataclass

from torch import distributed as dist

from matsmerge.statistics.statistics import Statistics
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
    found = [own]
    if process.is_first:
        for rank in range(1, process.num_processes):  # one after the other, for they may be large
            dist.recv_object_list(found, rank)
            own = add_up([own, *found])
        found = [own]
    else:
        dist.send_object_list(found, 0)
    dist.broadcast_object_list(found, 0)
    return found[0]
