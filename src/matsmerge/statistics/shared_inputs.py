"""Linear maps that receive the very same input share one second moment.

Query, key and value do, gate and up projections do, and so do the cross-attention keys and values
of all decoder layers. Who shares is seen in a first small forward pass and checked in each one
after it; maps that cease to share get sums of their own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from matsmerge.errors import DataError


@dataclass
class _Arrival:
    """An input that some of a group's maps have received and others have yet to."""

    tensor: Tensor  # held, so that its memory is not given to another tensor meanwhile
    version: int
    waiting: set[str]


class SharedInputs:
    """Groups of maps by the input they share; a group goes by the name of its first map."""

    def __init__(self) -> None:
        self.leaders: dict[str, str] = {}  # of each map
        self._members: dict[str, list[str]] = {}
        self._arrived: dict[str, list[_Arrival]] = {}

    def include(self, leaders: Mapping[str, str]) -> None:
        """Add maps that are not yet known, with the leader each is thought to have."""
        for name, leader in leaders.items():
            if name not in self.leaders:
                own = leader if self.leaders.get(leader, leader) == leader else name
                self.leaders[name] = own
                self._members.setdefault(own, []).append(name)

    def members(self, leader: str) -> list[str]:
        """The maps of a group."""
        return self._members[leader]

    def receive(self, name: str, x: Tensor) -> str | None:
        """Note that a map received an input; returns the leader if it is to be counted now."""
        leader = self.leaders[name]
        members = self.members(leader)
        if len(members) == 1:
            return leader
        arrivals = self._arrived.setdefault(leader, [])
        for arrival in arrivals:
            if name in arrival.waiting and _is_same(arrival, x):
                arrival.waiting.remove(name)
                if arrival.waiting:
                    return None
                arrivals.remove(arrival)
                return leader
        arrivals.append(_Arrival(x, x._version, {*members} - {name}))
        return None

    def finish(
        self, split: Callable[[str, list[str]], None], count: Callable[[str, Tensor], None]
    ) -> None:
        """End of a forward pass: maps whose inputs were not the same after all go apart.

        `split(leader, members)` copies the group's sums to each member; `count(name, x)` adds an
        input to a member's own.
        """
        for leader, arrivals in self._arrived.items():
            if not arrivals:
                continue
            members = self.members(leader)
            split(leader, members)
            self.leaders |= {name: name for name in members}
            self._members |= {name: [name] for name in members}
            for arrival in arrivals:
                if arrival.tensor._version != arrival.version:
                    raise DataError(
                        f"module '{leader}': its input was changed in place after it was used, by "
                        "the model's own code; its second moment cannot be taken"
                    )
                for name in members:
                    if name not in arrival.waiting:
                        count(name, arrival.tensor)
        self._arrived.clear()

    def forget(self) -> None:
        """Let go of inputs that are waited for; the pass they were in has failed."""
        self._arrived.clear()


def _is_same(arrival: _Arrival, x: Tensor) -> bool:
    held = arrival.tensor
    return x._version == arrival.version and (
        held is x
        or (
            held.data_ptr() == x.data_ptr()
            and held.shape == x.shape
            and held.stride() == x.stride()
            and held.dtype == x.dtype
            and held.device == x.device
        )
    )
