"""Report of a probe of the MPI stack, which can be converted to JSON and back. Does not use MPI.

A field is None if its result is missing, unless its description says otherwise.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

#: Message text for each kind of peer, keyed by the field names of `Peers`.
LOCATIONS = {"same_node": "on the same node", "other_node": "on the other node"}
#: Name of each operation in messages, keyed by the field names of `Peer`.
OPERATION_NAMES = {"get": "Get", "put": "Put", "fetch_and_op": "Fetch_and_op", "accumulate": "Accumulate"}
#: Operations in the order of the trials. The one most likely to fail comes last.
OPERATIONS = tuple(OPERATION_NAMES)
#: Operations on device windows, in the order of the trials. The one that has crashed libraries comes last.
DEVICE_OPERATIONS = ("get", "put", "accumulate")

#: Problems found by a trial.
WRONG = "received data differs from what was sent"
STALE = "a read returned an old value after a new one had been announced"
INCONCLUSIVE = "the machine is too busy to decide if it is one-sided"
#: Beginning of the problem's description if a trial exceeded its time limit.
NO_ANSWER = "no answer within"


@dataclass(frozen=True)
class OperationResult:
    """Measurements of one operation with one kind of peer.

    Attributes:
        one_sided: True if the operation completed while its target was computing, False if it waited for the target.
        idle_s: Median duration in seconds of a small operation (64 bytes, or 8 bytes for `fetch_and_op`) while the
            target waits inside MPI.
        busy_s: Median duration in seconds of a small operation while the target computes without entering MPI.
        gb_per_s: Bandwidth while the target waits inside MPI, in 1e9 bytes per second, for the largest size that could
            be tried within the time limit.
        num_fresh_reads: Number of reads that returned a new value after it had been announced. None if not tested.
    """

    one_sided: bool | None = None
    idle_s: float | None = None
    busy_s: float | None = None
    gb_per_s: float | None = None
    num_fresh_reads: int | None = None


@dataclass(frozen=True)
class Peer:
    """Measurements of all operations with one kind of peer."""

    get: OperationResult = OperationResult()
    put: OperationResult = OperationResult()
    accumulate: OperationResult = OperationResult()
    fetch_and_op: OperationResult = OperationResult()


@dataclass(frozen=True)
class Peers:
    """Measurements for each kind of peer."""

    same_node: Peer | None = None
    other_node: Peer | None = None

    def with_result(self, kind: str, name: str, result: OperationResult) -> "Peers":
        """Return a copy that includes the measurements of operation `name` with one kind of peer."""
        return replace(self, **{kind: replace(getattr(self, kind) or Peer(), **{name: result})})


@dataclass(frozen=True)
class SharedMemory:
    """Results for windows created by `Win.Allocate_shared`, combined over all nodes.

    Attributes:
        readable: True if the ranks on each node can read each other's data with load instructions.
        contiguous: True if the memory segments of the ranks on each node are contiguous.
    """

    readable: bool | None = None
    contiguous: bool | None = None


@dataclass(frozen=True)
class DeviceWindows:
    """Results for windows in device memory.

    Attributes:
        names: Distinct names of the devices of all ranks.
        cuda_support: Result of MPIX_Query_cuda_support, if the MPI library has this function.
        mapping_error: Reason why ranks cannot map each other's memory, or "" if they can map it.
        window: True if all ranks could create a window together.
        own_accumulate: True if Accumulate from each rank's device into its own window worked on all ranks.
        peers: Results with device memory at the origin as well. `fetch_and_op` is not tried.
    """

    names: tuple[str, ...] = ()
    cuda_support: bool | None = None
    mapping_error: str | None = None
    window: bool | None = None
    own_accumulate: bool | None = None
    peers: Peers = Peers()


@dataclass(frozen=True)
class ProbeReport:
    """All results of a probe.

    Attributes:
        files: Paths of the MPI libraries that rank 0 has loaded, and of network devices that it has open.
        variables: Environment variables that configure the MPI library, as "NAME=value".
        shm_bytes: Minimum number of free bytes in /dev/shm over all nodes, or None if no node has /dev/shm.
        problems: Problems of trials, each as "trial: problem", such as "same_node put: no answer within 12 s". Names of
            trials of device windows begin with "device", as in "device window" or "device same_node put".
    """

    library: str | None = None
    files: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    thread_level: str | None = None
    memory_model: str | None = None
    nodes: int = 0
    ranks_per_node: tuple[int, ...] = ()
    shm_bytes: int | None = None
    shared_memory: SharedMemory = SharedMemory()
    peers: Peers = Peers()
    device: DeviceWindows | None = None
    problems: tuple[str, ...] = ()

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of peers: "same_node" if any node has several ranks, "other_node" if the job has several nodes."""
        exist = {"same_node": max(self.ranks_per_node, default=0) > 1, "other_node": self.nodes > 1}
        return tuple(kind for kind in LOCATIONS if exist[kind])

    def with_device(self, **fields: Any) -> "ProbeReport":
        """Return a copy in which the given fields of `device` are replaced."""
        return replace(self, device=replace(self.device or DeviceWindows(), **fields))

    def with_problem(self, trial: str, problem: str | None) -> "ProbeReport":
        """Return a copy to which the problem of a trial is added, unless `problem` is None."""
        return replace(self, problems=(*self.problems, f"{trial}: {problem}")) if problem else self

    def results(self, *, on_device: bool = False) -> dict[str, Peer]:
        """Return the measurements for each of `kinds`, for windows in host memory or on devices."""
        peers = self.peers if not on_device else self.device.peers if self.device else Peers()
        return {kind: getattr(peers, kind) or Peer() for kind in self.kinds}

    def problem(self, trial: str) -> str | None:
        """Return the first problem of a trial, without the name of the trial, or None."""
        return next((text.partition(": ")[2] for text in self.problems if text.startswith(f"{trial}: ")), None)

    def wrong_data(self, trial: str) -> str | None:
        """Return `problem(trial)` if the data was wrong or stale, otherwise None."""
        problem = self.problem(trial)
        return problem if problem in (WRONG, STALE) else None

    def to_dict(self) -> dict[str, Any]:
        """Convert the report to a JSON-serializable dictionary."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> "ProbeReport":
        """Create a report from the result of `to_dict` or its parsed JSON.

        Raises `ValueError` or `TypeError` if any field is missing or unknown. Types of values are not checked.
        """
        report: ProbeReport = _build(cls, data)
        return report


#: Function called with the report so far and the name of the next trial, such as "shared_memory" or "same_node put", or
#: None at the end.
OnMessage = Callable[[ProbeReport, str | None], None]

#: Class of each field that contains several values.
_CLASSES = {"shared_memory": SharedMemory, "peers": Peers, "device": DeviceWindows}
_CLASSES |= dict.fromkeys(LOCATIONS, Peer) | dict.fromkeys(OPERATIONS, OperationResult)


def _build(kind: Any, data: Any) -> Any:
    names = [field.name for field in fields(kind)]
    if set(data) != set(names):
        raise ValueError(f"expected an object with {names}, got {data!r:.80}")
    return kind(**{name: _value(name, data[name]) for name in names})


def _value(name: str, value: Any) -> Any:
    if name in _CLASSES and value is not None:
        return _build(_CLASSES[name], value)
    return tuple(value) if isinstance(value, list) else value
