"""The decision how ranks reach each other, from the report of a probe. Pure: no MPI, the same on every rank.

    window      shared memory on each node where that works, else `Win.Allocate`
    zero_copy   a fetch is a view, where the shards of a node lie side by side and can be read in place
    reduction   Accumulate where it is one-sided, or not much slower than Put; else Put into a mailbox
    progress    a thread that serves peers, where Get or the reduction waits for a target that computes, or drawing a
                ticket from another node

    window_device   for a model on a GPU: windows on the GPU, where a doctor has proved every operation that they need;
                    else on the host, through pinned memory

A setting that is not `auto` wins. Every choice comes with its reason and the figure behind it.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from odc_mpi.errors import UserError
from odc_mpi.formatting import format_seconds
from odc_mpi.probe.device_decision import RUN_DOCTOR, DeviceFindings, summarize
from odc_mpi.probe.report import LOCATIONS, OPERATION_NAMES, OperationResult, Peer, ProbeReport

#: Accumulate may be slower than Put by this factor: the owner of a mailbox adds in its own time.
MIN_SHARE_OF_PUT = 0.25
#: A thread that serves peers calls MPI beside the one that computes.
THREADS_NEEDED = "MPI_THREAD_MULTIPLE"

#: The reason for zero-copy where there is nobody else.
ONLY_RANK_REASON = "the only rank of its node reads its own memory"

#: What the settings of these names take.
ZeroCopySetting = Literal["auto", "off"]
ReductionSetting = Literal["auto", "accumulate", "mailbox"]
ProgressSetting = Literal["auto", "off", "thread"]
WindowDeviceSetting = Literal["auto", "cuda", "cpu"]
_SETTINGS = {
    "zero_copy": ZeroCopySetting,
    "reduction": ReductionSetting,
    "progress": ProgressSetting,
    "window_device": WindowDeviceSetting,
}


@dataclass(frozen=True)
class CommSettings:
    """The settings `comm.zero_copy`, `comm.reduction`, `comm.progress` and `comm.window_device`.

    Raises:
        UserError: A value that the setting does not have.
    """

    zero_copy: str = "auto"
    reduction: str = "auto"
    progress: str = "auto"
    window_device: str = "auto"

    @property
    def is_complete(self) -> bool:
        """Whether the settings leave no choice, so that no probe is needed."""
        return "auto" not in (self.zero_copy, self.reduction, self.progress)

    def __post_init__(self) -> None:
        for name, setting in _SETTINGS.items():
            value, values = getattr(self, name), get_args(setting)
            if value not in values:
                raise UserError(f"comm.{name}: expected {' or '.join(values)}, got {value}")


@dataclass(frozen=True)
class Choice:
    """A choice and its reason in a few words."""

    value: str
    reason: str


@dataclass(frozen=True)
class Decision:
    """All choices of the runtime."""

    window: Choice
    zero_copy: Choice
    reduction: Choice
    progress: Choice
    #: Where the model computes on a device: whether its windows are there, too.
    window_device: Choice | None = None

    @property
    def transport(self) -> str:
        """How parameters and gradients move: window or collective."""
        return "collective" if self.window.value == "none" else "window"

    @property
    def windows_on_device(self) -> bool:
        """Whether the windows are on devices."""
        return self.window_device is not None and self.window_device.value == "cuda"

    def one_line(self) -> str:
        """Return all choices, for a log; with the reason where it is a warning, or says what to do."""
        names = ("window_device", "zero_copy", "reduction", "progress")
        named = [(name.replace("_", "-"), made) for name in names if (made := getattr(self, name)) is not None]
        return ", ".join(f"{name} {made.value}{_is_urgent(made.reason)}" for name, made in named)

    def to_dict(self) -> dict[str, Any]:
        """Return choice and reason of each setting that applies, for JSON."""
        choices: dict[str, Choice | None] = vars(self)
        return {name: {"choice": made.value, "reason": made.reason} for name, made in choices.items() if made}


def decide_collective() -> Decision:
    """Return the decision for a model over collectives: the baseline, without windows."""
    made = {"window": "none", "zero_copy": "off", "reduction": "reduce_scatter", "progress": "off"}
    return Decision(**{name: Choice(choice, "over collectives") for name, choice in made.items()})


def _is_urgent(reason: str) -> str:
    """Return a reason in brackets if a person has to see it without asking."""
    return f" ({reason})" if "warning" in reason or RUN_DOCTOR in reason else ""


def decide(report: ProbeReport, settings: CommSettings = CommSettings(), *, on_device: bool = False) -> Decision:
    """Decide how ranks reach each other.

    Args:
        report: Report of a probe; a missing answer counts against the operation.
        settings: The settings.
        on_device: Whether the model computes on a device.

    Raises:
        UserError: A setting asks for something that this MPI does not grant.
    """
    if not on_device and settings.window_device == "cuda":
        raise UserError("comm.window_device: cuda goes with run.device cuda, got run.device cpu: set it to auto or cpu")
    if on_device:
        proof = summarize(report)
        made = _window_device(proof, settings)
        if made.value == "cuda":
            return _on_device(report, proof, settings, made)
        return replace(decide(report, replace(settings, window_device="cpu")), window_device=made)
    zero_copy = _zero_copy(report, settings.zero_copy)
    peers = {kind: getattr(report.peers, kind) or Peer() for kind in report.kinds}
    reduction = _reduction(peers, settings.reduction)
    progress = _progress(report, peers, settings.progress, reduction.value)
    return Decision(_window(zero_copy), zero_copy, reduction, progress)


def refuse_wrong_data(report: ProbeReport, decision: Decision, *, tickets: bool = False) -> None:
    """Refuse to train with operations that delivered wrong data in the probe.

    Args:
        report: Report of a probe.
        decision: The choices of the runtime.
        tickets: Whether ranks draw their microbatches, too.

    Raises:
        UserError: An operation in use delivered wrong data.
    """
    origin = ("from_device",) if decision.windows_on_device else ()
    for kind in report.kinds:
        for name in ("get", "put" if decision.reduction.value == "mailbox" else "accumulate"):
            if report.is_wrong(*origin, kind, name):
                where, cure = LOCATIONS[kind], ""
                if decision.windows_on_device:
                    where, cure = f"{where}, on devices,", ", or set comm.window_device to cpu"
                raise UserError(
                    f"{OPERATION_NAMES[name]} with a peer {where} delivers wrong data under {report.library}: expected an MPI "
                    f"whose one-sided operations work (odc-mpi doctor){cure}"
                )
        if tickets and report.is_wrong(kind, "fetch_and_op"):
            raise UserError(
                f"Fetch_and_op with a peer {LOCATIONS[kind]} delivers wrong data under {report.library}: expected an MPI "
                "with which ranks can draw microbatches (odc-mpi doctor), or set data.balance to lb_mini"
            )


def _window(zero_copy: Choice) -> Choice:
    if zero_copy.value == "on":
        return Choice("allocate_shared", "parameters in memory that a node's ranks share, gradients from Win.Allocate")
    return Choice("allocate", f"zero-copy is off: {zero_copy.reason}")


def _window_device(findings: DeviceFindings, settings: CommSettings) -> Choice:
    wish, against = settings.window_device, findings.objection or findings.reduction_objections.get(settings.reduction)
    if wish == "cuda" and against is not None:
        return Choice(wish, f"set by comm.window_device; warning: {against}")
    if wish != "auto":
        return Choice(wish, "set by comm.window_device")
    if against is not None:
        return Choice("cpu", against)
    return Choice("cuda", "odc-mpi doctor has seen what they take work on windows on GPUs")


def _on_device(
    report: ProbeReport, findings: DeviceFindings, settings: CommSettings, window_device: Choice
) -> Decision:
    """Make the other choices where windows are on devices."""
    reduction = _reduction_on_device(findings, settings.reduction)
    return Decision(
        window=Choice("create", "Win.Create over memory of the GPUs"),
        zero_copy=_zero_copy_on_device(report, settings.zero_copy),
        reduction=reduction,
        progress=_progress(report, findings.peers, settings.progress, reduction.value),
        window_device=window_device,
    )


def _zero_copy_on_device(report: ProbeReport, setting: str) -> Choice:
    if report.kinds:
        return Choice("off", "nothing is read in place on another GPU")
    return Choice("on", ONLY_RANK_REASON) if setting == "auto" else Choice(setting, "set by comm.zero_copy")


def _reduction_on_device(findings: DeviceFindings, setting: str) -> Choice:
    against = findings.reduction_objections
    if setting != "auto":
        return Choice(setting, "set by comm.reduction")
    if findings.peers and "accumulate" in against:
        # Where not even Put is proved, the user has set window_device: Put is more likely to work.
        return Choice("mailbox", against["accumulate"])
    if findings.peers and "mailbox" in against:
        return Choice("accumulate", against["mailbox"])
    return _reduction(findings.peers, setting)


def _zero_copy(report: ProbeReport, setting: str) -> Choice:
    if setting != "auto":
        return Choice(setting, "set by comm.zero_copy")
    shared = report.shared_memory
    if shared.readable is None or shared.contiguous is None:
        return Choice("off", "Win.Allocate_shared gave no answer")
    if not shared.readable:
        return Choice("off", "a rank cannot read its neighbour's shared memory in place")
    if not shared.contiguous:
        return Choice("off", "the ranks' pieces of shared memory do not lie side by side")
    if shared.load_s is None:
        return Choice("on", ONLY_RANK_REASON)
    return Choice("on", f"a node's ranks read each other in place, 64 bytes in {format_seconds(shared.load_s)}")


def _reduction(peers: Mapping[str, Peer], setting: str) -> Choice:
    if setting != "auto":
        return Choice(setting, "set by comm.reduction")
    if not peers:
        # MPICH's Accumulate of a process that is alone moves a quarter of what that of two does.
        return Choice("mailbox", "there is no peer, and the owner adds its own")
    against = [text for kind, peer in peers.items() if (text := _accumulate_objection(kind, peer))]
    if against and any(peer.put.idle_s is None for peer in peers.values()):
        return Choice("accumulate", f"{against[0]}, nor did Put")
    if against:
        return Choice("mailbox", against[0])
    waiting = [kind for kind, peer in peers.items() if not peer.accumulate.one_sided]
    if not waiting:
        return Choice("accumulate", "Accumulate is one-sided towards all peers")
    return Choice("accumulate", f"Accumulate to a peer {_speeds(waiting[0], peers[waiting[0]])}")


def _accumulate_objection(kind: str, peer: Peer) -> str | None:
    """Return the reason against Accumulate towards these peers, None if there is none."""
    adding, putting = peer.accumulate, peer.put
    if adding.idle_s is None:
        return f"Accumulate to a peer {LOCATIONS[kind]} gave no answer"
    if adding.one_sided or putting.gb_per_s is None:
        return None
    if adding.gb_per_s is not None and adding.gb_per_s >= MIN_SHARE_OF_PUT * putting.gb_per_s:
        return None
    return f"Accumulate to a peer {_speeds(kind, peer)}"


def _speeds(kind: str, peer: Peer) -> str:
    adding, putting = peer.accumulate.gb_per_s or 0.0, peer.put.gb_per_s or 0.0
    return f"{LOCATIONS[kind]} moves {adding:.2g} GB/s, Put {putting:.2g}"


def _progress(report: ProbeReport, peers: Mapping[str, Peer], setting: str, reduction: str) -> Choice:
    """Choose whether a thread serves: by `peers` for the windows in use, by the report for tickets."""
    granted = report.thread_level or "no answer"
    if setting == "thread" and granted != THREADS_NEEDED:
        raise UserError(
            f"comm.progress: thread needs {THREADS_NEEDED}, {report.library} grants {granted}: set it to off or auto"
        )
    if setting != "auto":
        return Choice(setting, "set by comm.progress")
    if not peers:
        return Choice("off", "there is no peer to serve")
    needed = ["get", "accumulate" if reduction == "accumulate" else "put"]
    uses = [(kind, name, getattr(peer, name)) for kind, peer in peers.items() for name in needed]
    if "other_node" in report.kinds:
        # Tickets: within a node there is shared memory to draw from, whatever the window of the trial was.
        uses.append(("other_node", "fetch_and_op", (report.peers.other_node or Peer()).fetch_and_op))
    waiting = [_waits_for_target(kind, name, operation) for kind, name, operation in uses if not operation.one_sided]
    if not waiting:
        *names, last = [OPERATION_NAMES[name] for name in dict.fromkeys(name for _, name, _ in uses)]
        return Choice("off", f"{', '.join(names)} and {last} are one-sided towards all peers")
    if granted != THREADS_NEEDED:
        return Choice("off", f"warning: {waiting[0]}, but a thread needs {THREADS_NEEDED} and {granted} is granted")
    return Choice("thread", waiting[0])


def _waits_for_target(kind: str, name: str, operation: OperationResult) -> str:
    """Say that an operation waits for its target, with the figures."""
    direction = "from" if name == "get" else "to"
    what = f"{OPERATION_NAMES[name]} {direction} a peer {LOCATIONS[kind]}"
    if operation.one_sided is None or operation.busy_s is None or operation.idle_s is None:
        return f"{what} gave no answer"
    busy, idle = format_seconds(operation.busy_s), format_seconds(operation.idle_s)
    return f"{what} waits for the target: {busy} against {idle} idle"
