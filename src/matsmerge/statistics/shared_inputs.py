"""Linear maps that receive the very same input share one second moment.

Query, key and value do, gate and up projections do, and so do the cross-attention keys and values
of all decoder layers. Who shares is seen in a first small forward pass and checked in each one
after it; maps that cease to share get sums of their own.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from matsmerge.statistics.structure import check_unchanged, place_of


@dataclass
class _Arrival:
    """An input that some of a group's maps have received and others have yet to."""

    tensor: Tensor  # held, so that its memory is not given to another tensor meanwhile
    version: int
    waiting: set[str]

    def is_same(self, x: Tensor) -> bool:
        return x._version == self.version and place_of(x) == place_of(self.tensor)


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

    def members(self, name: str) -> list[str]:
        """The maps of a map's group."""
        return self._members[self.leaders[name]]

    def receive(self, name: str, x: Tensor) -> str | None:
        """Note that a map received an input; returns the leader once all of its group have."""
        leader = self.leaders[name]
        members = self._members[leader]
        if len(members) == 1:
            return leader
        arrivals = self._arrived.setdefault(leader, [])
        for arrival in arrivals:
            if name in arrival.waiting and arrival.is_same(x):
                arrival.waiting.remove(name)
                if arrival.waiting:
                    return None
                arrivals.remove(arrival)
                return leader
        arrivals.append(_Arrival(x, x._version, {*members} - {name}))
        return None

    def finish(self) -> Iterator[tuple[str, list[str], list[tuple[str, Tensor]]]]:
        """End of a forward pass: maps whose inputs were not the same after all go apart.

        Yields each such group's leader and members, which need sums of their own now, and the
        inputs that members have received and that were not counted.
        """
        for leader, arrivals in self._arrived.items():
            if arrivals:
                members = self._members[leader]
                self.leaders |= {name: name for name in members}
                self._members |= {name: [name] for name in members}
                for arrival in arrivals:
                    check_unchanged(leader, arrival.tensor, arrival.version)
                received = [(n, a.tensor) for a in arrivals for n in members if n not in a.waiting]
                yield leader, members, received
        self._arrived.clear()

    def forget(self) -> None:
        """Let go of inputs that are waited for; the pass they were in has failed."""
        self._arrived.clear()
