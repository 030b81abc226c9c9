"""What a probe of the MPI stack found, as plain values that travel as JSON. Local; knows no MPI."""

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

#: Kinds of peers, as fields of `Peers`.
PEER_KINDS = ("same_node", "other_node")
#: What the problem of an operation is called that came back and did something else than it should.
WRONG = "what arrived is not what was sent"
#: Operations, as fields of `Peer`, in the order in which a probe tries them: the one most likely to fail comes last.
OPERATIONS = ("get", "put", "fetch_and_op", "accumulate")


@dataclass(frozen=True)
class Operation:
    """What one operation does towards one kind of peer; None where there was no answer.

    Attributes:
        one_sided: It came back while its target computed.
        idle_s: Seconds for a small one (64 bytes; `fetch_and_op`: 8) whose target waits politely inside MPI.
        busy_s: Seconds for the same one whose target computes without entering MPI.
        gb_per_s: 1e9 bytes per second with an attentive target, at the largest size that fitted the time.
    """

    one_sided: bool | None = None
    idle_s: float | None = None
    busy_s: float | None = None
    gb_per_s: float | None = None


@dataclass(frozen=True)
class Peer:
    """The operations towards one kind of peer."""

    get: Operation = Operation()
    put: Operation = Operation()
    accumulate: Operation = Operation()
    fetch_and_op: Operation = Operation()


@dataclass(frozen=True)
class Peers:
    """A kind of peer is None where no rank has one."""

    same_node: Peer | None = None
    other_node: Peer | None = None

    def existing(self) -> dict[str, Peer]:
        """Return the kinds of peers that there are. Local."""
        return {kind: peer for kind in PEER_KINDS if (peer := getattr(self, kind)) is not None}


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
class Report:
    """All that a probe found.

    Attributes:
        library: Name and version of the MPI library.
        thread_level: What MPI granted, by its name in the standard.
        nodes: Number of nodes.
        ranks_per_node: Of each node.
        shm_bytes: Free bytes in /dev/shm, of the node that has least; None where there is no such place.
        shared_memory: Of all nodes together.
        peers: The operations, for each kind of peer.
        problems: What went wrong, a sentence each.
    """

    library: str | None = None
    thread_level: str | None = None
    nodes: int = 0
    ranks_per_node: tuple[int, ...] = ()
    shm_bytes: int | None = None
    shared_memory: SharedMemory = SharedMemory()
    peers: Peers = Peers()
    problems: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """Number of ranks. Local."""
        return sum(self.ranks_per_node)

    def with_operation(self, kind: str, name: str, operation: Operation) -> "Report":
        """Return a report that has this answer too. Local."""
        peer = replace(getattr(self.peers, kind) or Peer(), **{name: operation})
        return replace(self, peers=replace(self.peers, **{kind: peer}))

    def with_problem(self, problem: str) -> "Report":
        """Return a report that tells this problem too. Local."""
        return replace(self, problems=(*self.problems, problem))

    def is_wrong(self, kind: str, name: str) -> bool:
        """Tell whether an operation towards a kind of peer delivered wrong data. Local."""
        return f"{kind} {name}: {WRONG}" in self.problems

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can hold. Local."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> "Report":
        """Return the report that `to_dict` made into this. Local.

        Raises:
            ValueError: It is no such thing: a field is missing, unknown or of another type.
        """
        return _build(cls, data)


#: Fields that hold something of their own kind, and what the others may hold.
_NESTED = {"shared_memory": SharedMemory, "peers": Peers, "same_node": Peer, "other_node": Peer}
_NESTED |= dict.fromkeys(OPERATIONS, Operation)
_TYPES: dict[str, tuple[type, ...]] = {
    "library": (str,),
    "thread_level": (str,),
    "nodes": (int,),
    "shm_bytes": (int,),
    "one_sided": (bool,),
    "readable": (bool,),
    "contiguous": (bool,),
    "idle_s": (float, int),
    "busy_s": (float, int),
    "gb_per_s": (float, int),
    "load_s": (float, int),
}
_LISTS = {"ranks_per_node": int, "problems": str}
_NOT_NULL = {"nodes", "shared_memory", "peers", *OPERATIONS}


def _build(kind: type, data: Any) -> Any:
    names = {field.name for field in fields(kind)}
    if not isinstance(data, dict) or data.keys() != names:
        raise ValueError(f"expected an object with {sorted(names)}, got {data!r:.80}")
    return kind(**{name: _value(name, value) for name, value in data.items()})


def _value(name: str, value: Any) -> Any:
    if name in _LISTS:
        if not isinstance(value, list | tuple) or not all(type(item) is _LISTS[name] for item in value):
            raise ValueError(f"{name}: expected a list, got {value!r:.80}")
        return tuple(value)
    if value is None and name not in _NOT_NULL:
        return None
    if name in _NESTED:
        return _build(_NESTED[name], value)
    if type(value) not in _TYPES[name]:
        raise ValueError(f"{name}: expected {_TYPES[name][0].__name__}, got {value!r:.80}")
    return value
