"""Ray clusters for tests: several nodes on this machine, on the loopback interface alone."""

import os
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_NODE: dict[str, Any] = {
    "num_cpus": 1,
    "memory": 2 * 10**9,
    "object_store_memory": 80 * 10**6,
    "include_dashboard": False,
    "node_ip_address": "127.0.0.2",
}
# A node that is killed is given up after some seconds, not after a quarter of a minute, and one that
# only waits for a processor is not; workers do not let all other work on the machine go first, and
# are not killed when that takes most of the memory, as they would.
_IMPATIENT = {
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 120_000,
    "health_check_failure_threshold": 3,
    "memory_monitor_refresh_ms": 0,
    "worker_niceness": 0,
}


def add_node(made: Any, **options: Any) -> None:
    made.add_node(**_NODE, **options)


def resize(made: Any, num_nodes: int) -> None:
    """Add nodes, or kill some, until there are so many."""
    while len(made.list_all_nodes()) > num_nodes:
        made.remove_node(made.worker_nodes.copy().pop(), allow_graceful=False)
    while len(made.list_all_nodes()) < num_nodes:
        add_node(made)
    made.wait_for_nodes(timeout=300)


@contextmanager
def cluster(num_nodes: int = 1) -> Iterator[Any]:
    """A cluster that this process is connected to, and that others find by `RAY_ADDRESS`."""
    before = dict(os.environ)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # workers import what tests define
    os.environ.setdefault("RAY_AUTH_TOKEN", uuid.uuid4().hex * 2)  # else Ray writes one to ~/.ray
    import ray
    from ray.cluster_utils import Cluster

    made = Cluster()
    try:
        add_node(made, _system_config=_IMPATIENT)
        resize(made, num_nodes)
        os.environ["RAY_ADDRESS"] = made.address
        ray.init(made.address, log_to_driver=False, logging_level="ERROR")
        yield made
    finally:
        ray.shutdown()
        made.shutdown()
        os.environ.clear()
        os.environ.update(before)


def processor_seconds(pid: int | None = None) -> float:
    """Of a process, by default this one, and all below it; also of those that have ended."""
    pid = os.getpid() if pid is None else pid
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        children = [c for task in threads for c in (task / "children").read_text().split()]
    except OSError:
        return 0.0
    own = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return own + sum(processor_seconds(int(child)) for child in children)
