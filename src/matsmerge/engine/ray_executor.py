"""Jobs as tasks of a Ray cluster, whose nodes see the same files as this process."""

import importlib
import os
import pickle
import signal
import socket
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from matsmerge.byte_sizes import format_bytes
from matsmerge.checkpoints.checkpoint import first_line
from matsmerge.engine.devices import PROCESSOR
from matsmerge.engine.executor import J, R
from matsmerge.engine.local_executor import gave_out
from matsmerge.engine.machine import keep_freed_memory, num_cores
from matsmerge.errors import ResourceError, machine_gave_out
from matsmerge.optional_import import import_optional

_RETRIES = 3  # of a job whose worker or node died; one that kills its worker ends there
_LOOPBACK = "127.0.0.2"  # for this machine alone; Ray takes 127.0.0.1 for all interfaces
_SECONDS_TO_ANSWER = 20.0  # for a cluster that is asked whether it is there
_SECONDS_TO_END = 10.0  # for jobs that are cancelled


class RayExecutor:
    """Workers of a Ray cluster, as many jobs at once as there are processors.

    A job is a task that asks for a processor, its `peak_bytes` of memory and `num_gpus`, so that
    Ray runs it on a node that has room. It is done again elsewhere when its worker or its node
    dies, which gives the same bytes in the same places.

    `address` is the cluster's, as `ray.init` takes it; by default that of `RAY_ADDRESS`, or of a
    cluster that runs on this machine, or else Ray is started here. Where this process is connected
    already, that connection is used. Inputs and outputs are in folders that all nodes see, and
    nodes have matsmerge installed and processors of one kind: on others last bits may differ.
    """

    shares_memory = False

    def __init__(
        self,
        address: str | None = None,
        num_workers: int | None = None,
        max_bytes: int | None = None,
        *,
        num_gpus: float = 0,
    ) -> None:
        self.address = address
        self.num_gpus = num_gpus
        # Ray shows a task its own GPUs only, of which the first is the one it was given.
        self.devices = ("cuda:0",) if num_gpus else (PROCESSOR,)
        self._given_workers, self._given_bytes = num_workers, max_bytes
        import_optional("ray")  # that it is lacking is said before any work

    @property
    def _ray(self) -> Any:
        """Ray, connected."""
        ray = import_optional("ray")
        if not ray.is_initialized():
            _connect(ray, self.address, self._given_workers)
        return ray

    @property
    def num_workers(self) -> int:
        found = sum(int(node["CPU"]) for node in self._nodes())
        return found if self._given_workers is None else min(self._given_workers, found)

    @property
    def max_bytes(self) -> int:
        if self._given_bytes is not None:
            return self._given_bytes
        return sum(int(node.get("memory", 0)) for node in self._nodes())

    @property
    def largest_job_bytes(self) -> int:
        """Memory of the node that has most of it."""
        return max(int(node.get("memory", 0)) for node in self._nodes())

    def _nodes(self) -> list[dict[str, float]]:
        """What each node has that jobs can run on."""
        nodes = [n["Resources"] for n in self._ray.nodes() if n["Alive"]]
        found = [node for node in nodes if node.get("CPU", 0) >= 1]
        if not found:
            raise ResourceError("the Ray cluster has no node with a processor for jobs")
        return found

    def check_sees(self, folder: Path) -> None:
        """Refuse a folder that not all nodes see, by a file that is put there for a moment."""
        ray = self._ray
        own = ray.get_runtime_context().get_node_id()
        others = [n for n in ray.nodes() if n["Alive"] and n["Resources"].get("CPU", 0) >= 1]
        others = [node for node in others if node["NodeID"] != own]
        if not others:
            return
        pinned = importlib.import_module("ray.util.scheduling_strategies")
        # By value: a node that only looks need not import us.
        look = ray.remote(lambda path: (Path(path).exists(), socket.gethostname()))
        with tempfile.NamedTemporaryFile(prefix=".matsmerge-", dir=folder) as mark:
            found = ray.get(
                [
                    look.options(
                        num_cpus=0,
                        scheduling_strategy=pinned.NodeAffinitySchedulingStrategy(
                            node["NodeID"], soft=True
                        ),
                    ).remote(mark.name)
                    for node in others
                ]
            )
        blind = sorted({host for sees, host in found if not sees})
        if blind:
            raise ResourceError(
                f"{folder}: {', '.join(blind)} of the Ray cluster do not see this folder; merge "
                "into one that all nodes see under the same name (of a remote output that is the "
                "cache, $MATSMERGE_CACHE)"
            )

    def map(self, function: Callable[[J], R], jobs: Iterable[J]) -> Iterator[R]:
        """Results as they come. A job that alone exceeds `max_bytes` runs by itself."""
        running: dict[Future[R], int] = {}
        num_workers, max_bytes = self.num_workers, self.max_bytes
        if self._given_workers is None:
            num_workers += 1  # it waits at its node, so that no worker waits for us
        with self.opened(function) as submit:
            for job in jobs:
                while running and (
                    len(running) >= num_workers
                    or sum(running.values()) + job.peak_bytes > max_bytes
                ):
                    yield from _take(running)
                running[submit(job)] = job.peak_bytes
            while running:
                yield from _take(running)

    @contextmanager
    def opened(self, function: Callable[[J], R]) -> Iterator[Callable[[J], Future[R]]]:
        """Yield what starts a job; jobs that have not ended when this is left are cancelled."""
        ray = self._ray
        perform = ray.remote(_perform)
        # In a list Ray leaves it where it is: only workers that do not know it yet fetch it.
        shipped, key = [ray.put(ray.cloudpickle.dumps(function))], uuid.uuid4().hex
        largest, folder = self.largest_job_bytes, Path.cwd()
        running: dict[Future[R], Any] = {}

        def submit(job: J) -> Future[R]:
            if job.peak_bytes > largest:
                raise ResourceError(
                    f"a job needs {format_bytes(job.peak_bytes)} of memory, and the largest node "
                    f"of the Ray cluster has {format_bytes(largest)}; use larger nodes"
                )
            reference = perform.options(
                num_cpus=1,
                num_gpus=self.num_gpus,
                memory=min(_rounded_up(job.peak_bytes), largest) or None,
                max_retries=_RETRIES,
            ).remote(key, shipped, folder, job)
            future: Future[R] = Future()
            running[future] = reference
            future.add_done_callback(running.pop)
            reference.future().add_done_callback(lambda ended: _settle(future, ended))
            return future

        try:
            yield submit
        finally:
            left = list(running.values())
            for reference in left:
                ray.cancel(reference, force=True)
            if left:  # so that nothing is written any more
                ray.wait(left, num_returns=len(left), timeout=_SECONDS_TO_END)


def _take(running: dict[Future[R], int]) -> Iterator[R]:
    for future in wait(running, return_when=FIRST_COMPLETED).done:
        del running[future]
        yield future.result()


def _rounded_up(num_bytes: int) -> int:
    """To three bits, so that Ray has few kinds of tasks: it starts those of one kind faster."""
    step = 1 << max(0, num_bytes.bit_length() - 3)
    return -(-num_bytes // step) * step


def _connect(ray: Any, address: str | None, num_workers: int | None) -> None:
    """Connect to a cluster, or start one here that ends with this process."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    named = address or os.environ.get("RAY_ADDRESS")
    try:
        try:
            if named:
                _check_answers(ray, named)
            ray.init(address or "auto", **quiet)
        except ConnectionError:
            if named:
                raise
            ray.init(
                "local",
                num_cpus=num_workers or num_cores(),
                include_dashboard=False,
                _node_ip_address=_LOOPBACK,
                **quiet,
            )
    except Exception as error:  # a node that does not start in time is a plain one
        raise ResourceError(
            f"Ray on {named or 'this machine'} cannot be used ({first_line(error)}); see with "
            "`ray status` whether it is running"
        ) from error
    finally:
        # Ray has handlers of its own, but Ctrl-C is dealt with as always.
        for number, handler in handlers.items():
            with suppress(ValueError):  # not in the main thread, where Ray sets none either
                signal.signal(number, handler)
    # Of every worker that dies Ray tells standard output, which is for results.
    with suppress(ImportError):
        printing: Any = importlib.import_module("ray._private.worker")
        printing.print_to_stdstream = _keep_silent


def _check_answers(ray: Any, address: str) -> None:
    """Refuse HOST:PORT where nobody listens; Ray would try it for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    hosts = [host.strip("[]")]
    if host in ("127.0.0.1", "localhost"):  # for which Ray takes the address of this machine
        hosts.append(ray.util.get_node_ip_address())
    for one in hosts:
        with (
            suppress(OSError),
            socket.create_connection((one, int(port)), _SECONDS_TO_ANSWER),
        ):
            return
    raise ConnectionError("nobody answers there")


def _keep_silent(*_: Any, **__: Any) -> None:
    pass


def _settle(future: Future[R], ended: Future[R]) -> None:
    """Pass on what became of a task: its result, or what the job raised, as it is."""
    error = ended.exception()
    if error is None:
        future.set_result(ended.result())
        return
    # What a job raised is the cause; without one it is Ray that has something to say.
    cause = getattr(error, "cause", None)
    if cause is None:
        future.set_exception(
            ResourceError(
                f"a worker or node of the Ray cluster died, {_RETRIES + 1} times with one job "
                f"({first_line(error)}); give nodes more memory, or lower --workers or "
                "--max-memory, and continue with --resume"
            )
        )
    else:
        future.set_exception(gave_out(cause) if machine_gave_out(cause) else cause)


_known: tuple[str, Callable[[Any], Any]] | None = None  # by this worker, since its last job


def _perform(key: str, shipped: list[Any], folder: Path, job: Any) -> Any:
    """Do a job in a worker, which keeps the function, and what that has opened, for the next."""
    global _known
    if _known is None or _known[0] != key:
        keep_freed_memory()
        torch.set_num_threads(1)
        with suppress(OSError):  # relative paths are the same as in the process that gave the job
            os.chdir(folder)
        _known = key, pickle.loads(import_optional("ray").get(shipped[0]))
    try:
        return _known[1](job)
    except FileNotFoundError as error:
        raise ResourceError(
            f"{error.filename}: the node {socket.gethostname()} does not see this file; inputs and "
            "outputs must be in folders that all nodes of the Ray cluster see under the same name"
        ) from error
