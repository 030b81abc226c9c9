"""Report of a probe of the MPI stack, which can be converted to JSON and back. Does not use MPI.

A field is None if its result is missing, unless its description says otherwise.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, is_dataclass, replace
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

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


@dataclass(frozen=True)
class SharedMemory:
    """Results for windows created by `Win.Allocate_shared`, combined over all nodes.

    Attributes:
        readable: True if the ranks on each node can read each other's data with load instructions.
        contiguous: True if the memory segments of the ranks on each node are contiguous.
        load_s: Time in seconds to read 64 bytes of another rank's memory with load instructions, including NumPy's
            overhead. Also None if no node has several ranks.
    """

    readable: bool | None = None
    contiguous: bool | None = None
    load_s: float | None = None


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
class Problem:
    """Problem in a trial. It is printed, and stored in JSON, as a string.

    Attributes:
        where: Name of the trial, such as ("closing",) or ("same_node", "put"). For device windows, it begins with
            "device", as in ("device", "window") or ("device", "same_node", "put").
        what: `WRONG`, `STALE`, `INCONCLUSIVE`, `NO_ANSWER` followed by a time limit, or another description.
    """

    where: tuple[str, ...]
    what: str

    def __str__(self) -> str:
        return f"{' '.join(self.where)}: {self.what}"

    @classmethod
    def read(cls, text: str) -> "Problem":
        """Parse the result of `str(problem)`."""
        where, _, what = text.partition(": ")
        return cls(tuple(where.split()), what)


@dataclass(frozen=True)
class ProbeReport:
    """All results of a probe.

    `shm_bytes` is the minimum number of free bytes in /dev/shm over all nodes, or None if no node has /dev/shm.
    """

    library: str | None = None
    thread_level: str | None = None
    memory_model: str | None = None
    nodes: int = 0
    ranks_per_node: tuple[int, ...] = ()
    shm_bytes: int | None = None
    shared_memory: SharedMemory = SharedMemory()
    peers: Peers = Peers()
    device: DeviceWindows | None = None
    problems: tuple[Problem, ...] = ()

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of peers: "same_node" if any node has several ranks, "other_node" if the job has several nodes."""
        exist = {"same_node": max(self.ranks_per_node, default=0) > 1, "other_node": self.nodes > 1}
        return tuple(kind for kind in LOCATIONS if exist[kind])

    def with_device(self, **fields: Any) -> "ProbeReport":
        """Return a copy in which the given fields of `device` are replaced."""
        return replace(self, device=replace(self.device or DeviceWindows(), **fields))

    def with_operation(self, where: tuple[str, ...], result: OperationResult, problem: str | None) -> "ProbeReport":
        """Return a copy that includes the result of the trial `where` and any problem."""
        *device, kind, name = where
        peers = (self.device or DeviceWindows()).peers if device else self.peers
        peers = replace(peers, **{kind: replace(getattr(peers, kind) or Peer(), **{name: result})})
        report = self.with_device(peers=peers) if device else replace(self, peers=peers)
        return report.with_problem(Problem(where, problem)) if problem else report

    def with_problem(self, problem: Problem) -> "ProbeReport":
        """Return a copy with an additional problem."""
        return replace(self, problems=(*self.problems, problem))

    def problem(self, *where: str) -> Problem | None:
        """Return the first problem of the trial `where`, or None."""
        return next((problem for problem in self.problems if problem.where == where), None)

    def wrong_data(self, *where: str) -> str | None:
        """Return the description of `problem(*where)` if the data was wrong or stale, otherwise None."""
        problem = self.problem(*where)
        return problem.what if problem is not None and problem.what in (WRONG, STALE) else None

    def to_dict(self) -> dict[str, Any]:
        """Convert the report to a JSON-serializable dictionary."""
        return asdict(self) | {"problems": tuple(map(str, self.problems))}

    @classmethod
    def from_dict(cls, data: Any) -> "ProbeReport":
        """Create a report from the result of `to_dict` or its parsed JSON. Raise `ValueError` if it is invalid."""
        report: ProbeReport = _build(cls, data)
        return report


#: Function called with the report so far and the name of the next trial, such as "shared_memory" or "same_node.put", or
#: None at the end.
OnMessage = Callable[[ProbeReport, str | None], None]


def _build(kind: Any, data: Any) -> Any:
    hints = get_type_hints(kind)
    if not isinstance(data, dict) or data.keys() != hints.keys():
        raise ValueError(f"expected an object with {sorted(hints)}, got {data!r:.80}")
    return kind(**{name: _value(name, hints[name], value) for name, value in data.items()})


def _value(name: str, hint: Any, value: Any) -> Any:
    kind, *others = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    if value is None and others:
        return None
    if get_origin(kind) is tuple:
        item = get_args(kind)[0]
        stored = str if item is Problem else item
        if not isinstance(value, list | tuple) or not all(type(each) is stored for each in value):
            raise ValueError(f"{name}: expected a list, got {value!r:.80}")
        return tuple(map(Problem.read, value)) if item is Problem else tuple(value)
    if is_dataclass(kind):
        return _build(kind, value)
    if type(value) not in ((float, int) if kind is float else (kind,)):
        raise ValueError(f"{name}: expected {kind.__name__}, got {value!r:.80}")
    return value
