"""The report of a probe of the MPI stack, which can be converted to JSON and back. Does not use MPI.

None stands for a missing result, where nothing else is said.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, is_dataclass, replace
from enum import Enum
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

#: Kinds of peers, as fields of `Peers`.
PEER_KINDS = ("same_node", "other_node")
#: Operations, as fields of `Peer`, in the order in which a probe tries them: the one most likely to fail comes last.
OPERATIONS = ("get", "put", "fetch_and_op", "accumulate")
#: Their names in messages.
LOCATIONS = {"same_node": "on the same node", "other_node": "on the other node"}
OPERATION_NAMES = {"get": "Get", "put": "Put", "fetch_and_op": "Fetch_and_op", "accumulate": "Accumulate"}
#: Operations on windows on a device and the memory of their origin, fields of `DeviceWindows`, in the order in which
#: a probe tries them: those needed most come first, those that have crashed libraries last.
DEVICE_OPERATIONS = (
    ("get", "from_device"),
    ("put", "from_device"),
    ("get", "from_host"),
    ("put", "from_host"),
    ("accumulate", "from_host"),
    ("accumulate", "from_device"),
)


@dataclass(frozen=True)
class OperationResult:
    """Measurements of one operation with one kind of peer.

    Attributes:
        one_sided: True if the operation completed while its target computed.
        idle_s: Seconds of a small operation (64 bytes; `fetch_and_op`: 8) while the target waits inside MPI.
        busy_s: Seconds of the same operation while the target computes without entering MPI.
        gb_per_s: Bandwidth in 1e9 bytes per second while the target waits, for the largest size within the time limit.
    """

    one_sided: bool | None = None
    idle_s: float | None = None
    busy_s: float | None = None
    gb_per_s: float | None = None


@dataclass(frozen=True)
class Peer:
    """Measurements of the operations with one kind of peer."""

    get: OperationResult = OperationResult()
    put: OperationResult = OperationResult()
    accumulate: OperationResult = OperationResult()
    fetch_and_op: OperationResult = OperationResult()


@dataclass(frozen=True)
class Peers:
    """Measurements for each kind of peer; None if no rank has such a peer."""

    same_node: Peer | None = None
    other_node: Peer | None = None


@dataclass(frozen=True)
class SharedMemory:
    """Windows of `Win.Allocate_shared` on all nodes.

    Attributes:
        readable: True if every rank of a node can read by load instructions what the others wrote.
        contiguous: True if the segments of the ranks follow each other without gaps.
        load_s: Seconds to read 64 bytes of another rank by load instructions, including the overhead of numpy.
    """

    readable: bool | None = None
    contiguous: bool | None = None
    load_s: float | None = None


@dataclass(frozen=True)
class DeviceWindows:
    """Windows on the memory of the ranks' devices.

    Attributes:
        names: Distinct names of the devices.
        cuda_support: Result of MPIX_Query_cuda_support; None if the library does not have the function.
        alloc_kinds: Kinds of memory that the library supports by its own account (MPI-4.1, `mpi_memory_alloc_kinds`).
        window: True if such a window could be created.
        own_accumulate: True if every rank could accumulate from its device to its own window.
        from_device: Operations with device memory at the origin, without `fetch_and_op`.
        from_host: Operations with host memory at the origin, without `fetch_and_op`.
    """

    names: tuple[str, ...] = ()
    cuda_support: bool | None = None
    alloc_kinds: str | None = None
    window: bool | None = None
    own_accumulate: bool | None = None
    from_device: Peers = Peers()
    from_host: Peers = Peers()


class Cause(Enum):
    """The cause of a problem, as the text with which its description begins."""

    WRONG = "received data differs from what was sent"
    INCONCLUSIVE = "the machine is too busy to decide if it is one-sided"
    NO_ANSWER = "no answer within"
    OTHER = ""


@dataclass(frozen=True)
class Problem:
    """A problem of a trial, printed and stored in JSON as text.

    Attributes:
        where: The trial: ("same_node", "put"); for windows on devices, preceded by the memory of the origin:
            ("from_device", "same_node", "put"); ("device", "memory"), ("device", "window"), ("closing",) and others.
        detail: Time limit, or for `Cause.OTHER` the complete description.
    """

    where: tuple[str, ...]
    cause: Cause
    detail: str = ""

    @property
    def what(self) -> str:
        """The description without the trial."""
        return f"{self.cause.value} {self.detail}".strip()

    def __str__(self) -> str:
        return f"{' '.join(self.where)}: {self.what}"

    @classmethod
    def read(cls, text: str) -> "Problem":
        """Parse a problem that was formatted by `str`."""
        where, _, what = text.partition(": ")
        cause = next(cause for cause in Cause if what.startswith(cause.value))
        return cls(tuple(where.split()), cause, what.removeprefix(cause.value).strip())


@dataclass(frozen=True)
class ProbeReport:
    """All results of a probe.

    Attributes:
        library: Name and version of the MPI library.
        thread_level: Granted thread level, such as MPI_THREAD_MULTIPLE.
        memory_model: Memory model of windows: unified or separate.
        shm_bytes: Minimum over nodes of the free bytes in /dev/shm; None without /dev/shm.
        device: Windows on devices; None unless every rank has a device.
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
    def ranks(self) -> int:
        """Number of ranks."""
        return sum(self.ranks_per_node)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of peers in the job."""
        exist = {"same_node": max(self.ranks_per_node, default=0) > 1, "other_node": self.nodes > 1}
        return tuple(kind for kind in PEER_KINDS if exist[kind])

    def with_device(self, **fields: Any) -> "ProbeReport":
        """Return a copy with other fields of `device`."""
        return replace(self, device=replace(self.device or DeviceWindows(), **fields))

    def with_operation(self, where: tuple[str, ...], result: OperationResult, problem: Cause | None) -> "ProbeReport":
        """Return a copy with the result of a trial (see `Problem.where`) and its problem."""
        *origin, kind, name = where
        peers = getattr(self.device or DeviceWindows(), origin[0]) if origin else self.peers
        peers = replace(peers, **{kind: replace(getattr(peers, kind) or Peer(), **{name: result})})
        report = self.with_device(**{origin[0]: peers}) if origin else replace(self, peers=peers)
        return report.with_problem(Problem(where, problem)) if problem else report

    def with_problem(self, problem: Problem) -> "ProbeReport":
        """Return a copy with another problem."""
        return replace(self, problems=(*self.problems, problem))

    def problem(self, *where: str) -> Problem | None:
        """Return the problem of a trial (see `Problem.where`), if it had one."""
        return next((problem for problem in self.problems if problem.where == where), None)

    def is_wrong(self, *where: str) -> bool:
        """Return True if an operation (see `Problem.where`) delivered wrong data."""
        problem = self.problem(*where)
        return problem is not None and problem.cause is Cause.WRONG

    def to_dict(self) -> dict[str, Any]:
        """Convert the report to a JSON-serializable dictionary."""
        return asdict(self) | {"problems": tuple(map(str, self.problems))}

    @classmethod
    def from_dict(cls, data: Any) -> "ProbeReport":
        """Convert the result of `to_dict`, or its JSON, to a report; raise `ValueError` if a field is invalid."""
        report: ProbeReport = _build(cls, data)
        return report


#: Function of the report so far and the next trial: "shared_memory", "KIND.OPERATION" and others; None at the end.
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
