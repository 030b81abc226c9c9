"""The report of a probe of the MPI stack, as plain values that travel as JSON. Local; knows no MPI."""

from dataclasses import asdict, dataclass, is_dataclass, replace
from enum import Enum
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

#: Kinds of peers, as fields of `Peers`.
PEER_KINDS = ("same_node", "other_node")
#: Operations, as fields of `Peer`, in the order in which a probe tries them: the one most likely to fail comes last.
OPERATIONS = ("get", "put", "fetch_and_op", "accumulate")
#: How both are called in sentences.
LOCATIONS = {"same_node": "on the same node", "other_node": "on the other node"}
OPERATION_NAMES = {"get": "Get", "put": "Put", "fetch_and_op": "Fetch_and_op", "accumulate": "Accumulate"}
#: Operations on windows on a device, and from which memory of their origin, as fields of `DeviceWindows`, in the order
#: in which a probe tries them: what is needed first comes first, what has crashed libraries last.
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
    """The figures of one operation towards one kind of peer; None where there was no answer.

    Attributes:
        one_sided: Whether the operation completed while its target computed.
        idle_s: Seconds of a small operation (64 bytes; `fetch_and_op`: 8) whose target waits politely inside MPI.
        busy_s: Seconds of the same operation whose target computes without entering MPI.
        gb_per_s: 1e9 bytes per second with an attentive target, at the largest size that fitted the time.
    """

    one_sided: bool | None = None
    idle_s: float | None = None
    busy_s: float | None = None
    gb_per_s: float | None = None


@dataclass(frozen=True)
class Peer:
    """The operations towards one kind of peer."""

    get: OperationResult = OperationResult()
    put: OperationResult = OperationResult()
    accumulate: OperationResult = OperationResult()
    fetch_and_op: OperationResult = OperationResult()


@dataclass(frozen=True)
class Peers:
    """The operations for each kind of peer; None where no rank has such a peer."""

    same_node: Peer | None = None
    other_node: Peer | None = None


@dataclass(frozen=True)
class SharedMemory:
    """Windows from `Win.Allocate_shared`, on every node; None where there was no answer.

    Attributes:
        readable: Every rank of a node reads in place what the others wrote.
        contiguous: The ranks' pieces follow each other without a gap.
        load_s: Seconds to read 64 bytes of a neighbour in place, numpy's own time included.
    """

    readable: bool | None = None
    contiguous: bool | None = None
    load_s: float | None = None


@dataclass(frozen=True)
class DeviceWindows:
    """Windows over the memory of the ranks' devices; None where there was no answer.

    Attributes:
        names: Names of the devices, each once.
        cuda_support: Answer of MPIX_Query_cuda_support; None where the library has no such function.
        alloc_kinds: The kinds of memory that the library says it takes (MPI-4.1, `mpi_memory_alloc_kinds`).
        window: Whether such a window could be made.
        own_accumulate: Whether every rank could accumulate into its own window, from its device.
        from_device: The operations with device memory at the origin; `fetch_and_op` is not tried.
        from_host: The operations with host memory at the origin.
    """

    names: tuple[str, ...] = ()
    cuda_support: bool | None = None
    alloc_kinds: str | None = None
    window: bool | None = None
    own_accumulate: bool | None = None
    from_device: Peers = Peers()
    from_host: Peers = Peers()


class Cause(Enum):
    """The cause of a problem: the words with which its sentence begins."""

    WRONG = "what arrived is not what was sent"
    INCONCLUSIVE = "the machine is too busy to tell if it waits"
    NO_ANSWER = "no answer within"
    OTHER = ""


@dataclass(frozen=True)
class Problem:
    """A problem of a trial. Shown, and stored in JSON, as a sentence.

    Attributes:
        where: The trial in words: ("same_node", "put"), with the origin's memory before it for windows on devices:
            ("from_device", "same_node", "put"); ("device", "memory"), ("device", "window"), ("closing",) and others.
        cause: Its cause.
        detail: More about the cause: the time limit; of other causes all there is to say.
    """

    where: tuple[str, ...]
    cause: Cause
    detail: str = ""

    @property
    def what(self) -> str:
        """Return the sentence without the trial."""
        return f"{self.cause.value} {self.detail}".strip()

    def __str__(self) -> str:
        return f"{' '.join(self.where)}: {self.what}"

    @classmethod
    def read(cls, sentence: str) -> "Problem":
        """Return the problem of a sentence, as `str` made it."""
        where, _, what = sentence.partition(": ")
        cause = next(cause for cause in Cause if what.startswith(cause.value))
        return cls(tuple(where.split()), cause, what.removeprefix(cause.value).strip())


@dataclass(frozen=True)
class ProbeReport:
    """All findings of a probe.

    Attributes:
        library: Name and version of the MPI library.
        thread_level: The thread level that MPI granted, by its name in the standard.
        memory_model: Memory model of the library's windows: unified or separate.
        nodes: Number of nodes.
        ranks_per_node: Number of ranks of each node.
        shm_bytes: Free bytes in /dev/shm on the node with the least; None without /dev/shm.
        shared_memory: Shared memory on all nodes together.
        peers: The operations, for each kind of peer.
        device: Windows on devices; None unless every rank has a device.
        problems: What went wrong.
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
        """The kinds of peers that some rank has."""
        exist = {"same_node": max(self.ranks_per_node, default=0) > 1, "other_node": self.nodes > 1}
        return tuple(kind for kind in PEER_KINDS if exist[kind])

    def with_operation(self, kind: str, name: str, operation: OperationResult) -> "ProbeReport":
        """Return the report with the figures of an operation added."""
        return replace(self, peers=_with_operation(self.peers, kind, name, operation))

    def with_device(self, **answers: Any) -> "ProbeReport":
        """Return the report with findings about the devices added."""
        return replace(self, device=replace(self.device or DeviceWindows(), **answers))

    def with_device_operation(self, origin: str, kind: str, name: str, operation: OperationResult) -> "ProbeReport":
        """Return the report with the figures of an operation on windows on devices added."""
        peers = getattr(self.device or DeviceWindows(), origin)
        return self.with_device(**{origin: _with_operation(peers, kind, name, operation)})

    def with_problem(self, problem: Problem) -> "ProbeReport":
        """Return the report with a problem added."""
        return replace(self, problems=(*self.problems, problem))

    def problem(self, *where: str) -> Problem | None:
        """Return the problem of a trial (`Problem.where`), None if it had none."""
        return next((problem for problem in self.problems if problem.where == where), None)

    def is_wrong(self, *where: str) -> bool:
        """Return whether an operation (`Problem.where`) delivered wrong data."""
        problem = self.problem(*where)
        return problem is not None and problem.cause is Cause.WRONG

    def to_dict(self) -> dict[str, Any]:
        """Return the report as values for JSON."""
        return asdict(self) | {"problems": tuple(map(str, self.problems))}

    @classmethod
    def from_dict(cls, data: Any) -> "ProbeReport":
        """Return the report of values that `to_dict` made.

        Raises:
            ValueError: A field is missing, unknown or of another type.
        """
        report: ProbeReport = _build(cls, data)
        return report


def _with_operation(peers: Peers, kind: str, name: str, operation: OperationResult) -> Peers:
    peer = replace(getattr(peers, kind) or Peer(), **{name: operation})
    return replace(peers, **{kind: peer})


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
        own = str if item is Problem else item
        if not isinstance(value, list | tuple) or not all(type(each) is own for each in value):
            raise ValueError(f"{name}: expected a list, got {value!r:.80}")
        return tuple(map(Problem.read, value)) if item is Problem else tuple(value)
    if is_dataclass(kind):
        return _build(kind, value)
    if type(value) not in ((float, int) if kind is float else (kind,)):
        raise ValueError(f"{name}: expected {kind.__name__}, got {value!r:.80}")
    return value
