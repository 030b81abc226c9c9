"""Choice of how ranks communicate, based on the report of a probe. All ranks choose the same. Does not use MPI.

    window          with zero_copy, shared memory on each node; otherwise `Win.Allocate`; on devices, memory that the
                    ranks of a node map, or `Win.Create`
    zero_copy       on if the shards of a node are in contiguous shared memory, so that a fetch can return a view
    reduction       Accumulate if it is one-sided, not much slower than Put, or of unknown speed (after the self-test of
                    one node), otherwise Put into a mailbox; always a mailbox if ranks map the memory of devices
    progress        a progress thread if gradients are put into a mailbox, or if Get, Accumulate or, between nodes,
                    Fetch_and_op does not complete while the target computes; only if MPI grants MPI_THREAD_MULTIPLE
    node_cache      on if nodes have several ranks that read shared memory, unless it turns out that there is no memory
    window_device   for a model on a GPU: the GPU if the ranks are on one node and can map the memory of each other's
                    GPUs, or if `odc-mpi doctor` has tested all necessary operations successfully; otherwise the host,
                    with copies through pinned memory

A setting other than `auto` takes precedence. Every choice comes with a reason, which may include a measured value.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from odc_mpi.comm.settings import CommConfig
from odc_mpi.errors import UserError
from odc_mpi.formatting import format_seconds
from odc_mpi.probe.device_decision import RUN_DOCTOR, DeviceFindings, summarize
from odc_mpi.probe.report import LOCATIONS, OPERATION_NAMES, OperationResult, Peer, ProbeReport

#: Minimum bandwidth of Accumulate, as a fraction of Put's bandwidth. With Put, the owner of the shard also has to
#: add the gradients, which takes time that is not measured.
MIN_SHARE_OF_PUT = 0.25
#: Thread level that a progress thread requires.
THREADS_NEEDED = "MPI_THREAD_MULTIPLE"

#: Reason for a progress thread if gradients go through mailboxes.
MAILBOX_REASON = "a full mailbox delays other ranks until its owner adds the gradients"
#: Reason for zero-copy if every node has only one rank.
ONLY_RANK_REASON = "the only rank of a node reads its own memory"

#: Text for each value of a choice in the log.
_LOG_TEXTS: dict[str, dict[str, str]] = {
    "window_device": {"cuda": "windows on GPUs", "cpu": "windows in host memory"},
    "zero_copy": {"on": "zero-copy on", "off": "zero-copy off"},
    "reduction": {"accumulate": "gradients by MPI_Accumulate", "mailbox": "gradients by mailbox"},
    "progress": {"off": "no progress thread", "thread": "progress thread"},
}


@dataclass(frozen=True)
class Choice:
    """Value chosen for a setting, and the reason for the choice."""

    value: str
    reason: str


@dataclass(frozen=True)
class Decision:
    """Choices of how ranks communicate, and the settings on which they are based.

    `window_device` is None unless the model computes on a device.
    """

    window: Choice
    zero_copy: Choice
    reduction: Choice
    progress: Choice
    node_cache: Choice
    window_device: Choice | None = None
    settings: CommConfig = CommConfig()

    @property
    def maps_devices(self) -> bool:
        """True if the windows are in device memory that all ranks map, so that MPI does not access them."""
        return self.window.value == "map"

    @property
    def windows_on_device(self) -> bool:
        """True if the windows are in device memory."""
        return self.window_device is not None and self.window_device.value == "cuda"

    @property
    def comm(self) -> CommConfig:
        """The settings with the choices in place of "auto", where "auto" remains for what is on."""
        values = {name: getattr(self, name).value for name in ("reduction", "progress", "zero_copy", "node_cache")}
        chosen: dict[str, Any] = {name: "auto" if value == "on" else value for name, value in values.items()}
        return replace(self.settings, **chosen)

    def one_line(self) -> str:
        """Format the choices in one line for a log, with the reasons that are warnings or advice."""
        parts = []
        for name, texts in _LOG_TEXTS.items():
            if (choice := getattr(self, name)) is not None:
                is_urgent = "warning" in choice.reason or RUN_DOCTOR in choice.reason
                parts.append(texts[choice.value] + (f" ({choice.reason})" if is_urgent else ""))
        return ", ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Return the choices as a dict for JSON: `{setting: {"choice": value, "reason": reason}}`."""
        choices = {name: choice for name, choice in vars(self).items() if isinstance(choice, Choice)}
        return {name: {"choice": choice.value, "reason": choice.reason} for name, choice in choices.items()}


def decide(
    report: ProbeReport,
    settings: CommConfig = CommConfig(),
    *,
    on_device: bool = False,
    mapping_error: str | None = None,
    device_objection: str | None = None,
) -> Decision:
    """Decide how ranks communicate.

    Raises `UserError` if `settings.window_device` is "cuda" but `on_device` is False, or if `settings.progress` is
    "thread" but MPI does not grant MPI_THREAD_MULTIPLE.

    Args:
        report: Report of a probe. Operations for which it has no result are avoided where possible.
        on_device: True if the model computes on a device.
        mapping_error: Reason why ranks cannot map the memory of each other's devices, "" if they can map it, or None if
            this was not tested.
        device_objection: Reason not to place windows on devices, or None. It applies only if `settings.window_device`
            is "auto".
    """
    if not on_device and settings.window_device == "cuda":
        raise UserError("comm.window_device: cuda requires run.device cuda, got run.device cpu: set it to auto or cpu")
    is_allowed = settings.window_device == "cuda" or (settings.window_device == "auto" and device_objection is None)
    has_copies = bool(report.kinds) or settings.zero_copy != "auto"
    peers, findings = report.results(), summarize(report)
    window_device = _window_device(report, findings, settings, mapping_error, device_objection) if on_device else None
    if mapping_error == "" and has_copies and is_allowed and settings.reduction != "accumulate":
        window = Choice("map", "each rank maps the memory of the other ranks' GPUs (CUDA IPC)")
        window_device = Choice("cuda", window.reason)
        if settings.window_device != "auto":
            window_device = Choice("cuda", "set by comm.window_device")
        zero_copy = Choice("off", "parameters are copied from the owners' GPUs before use")
        reduction = Choice("mailbox", "gradients are copied into mailboxes on the owners' GPUs")
    elif window_device is not None and window_device.value == "cuda":
        peers = report.results(on_device=True)
        window = Choice("create", "Win.Create on memory of the GPUs")
        zero_copy = _zero_copy(report, settings.zero_copy, on_device=True)
        reduction = _reduction(peers, settings.reduction, findings.reduction_objections)
    else:
        zero_copy = _zero_copy(report, settings.zero_copy, on_device=False)
        window = Choice("allocate", f"zero-copy is off: {zero_copy.reason}")
        if zero_copy.value == "on":
            window = Choice("allocate_shared", "parameters in shared memory of each node, gradients in Win.Allocate")
        reduction = _reduction(peers, settings.reduction, {})
    progress = _progress(report, peers, settings.progress, reduction.value)
    node_cache = _node_cache(report, settings.node_cache, zero_copy)
    return Decision(window, zero_copy, reduction, progress, node_cache, window_device, settings)


def require_correct_data(report: ProbeReport, decision: Decision, *, tickets: bool = False) -> None:
    """Raise `UserError` if an operation that the decision uses delivered wrong or stale data in the probe.

    `tickets` is True if ranks draw microbatches from shared counters (`Tickets`), which also requires Fetch_and_op.
    """
    used = ("", "", "")  # beginning of the trial's name, words for the message
    if decision.windows_on_device and not decision.maps_devices:
        used = ("device ", ", on devices,", ", or set comm.window_device to cpu")
    reduction = "put" if decision.reduction.value == "mailbox" else "accumulate"
    uses = [(name, *used) for name in ("get", reduction)]
    if tickets:
        uses.append(("fetch_and_op", "", "", ", or set data.balance to lb_mini"))
    for kind in report.kinds:
        for name, memory, where, advice in uses:
            if wrong := report.wrong_data(f"{memory}{kind} {name}"):
                raise UserError(
                    f"{OPERATION_NAMES[name]} with a peer {LOCATIONS[kind]}{where} delivers wrong data under "
                    f"{report.library} ({wrong}): use another MPI library (odc-mpi doctor tests it){advice}"
                )


def _window_device(
    report: ProbeReport,
    findings: DeviceFindings,
    settings: CommConfig,
    mapping_error: str | None,
    device_objection: str | None,
) -> Choice:
    setting = settings.window_device
    if setting == "auto" and device_objection is not None:
        return Choice("cpu", device_objection)
    if setting == "auto" and not report.kinds and settings.zero_copy == "auto":
        return Choice("cuda", "the only rank transfers nothing")
    objection = findings.objection or findings.reduction_objections.get(settings.reduction)
    if setting != "auto":
        warning = f"; warning: {objection}" if setting == "cuda" and objection else ""
        return Choice(setting, f"set by comm.window_device{warning}")
    if objection is not None:
        return Choice("cpu", f"{objection}; {mapping_error}" if mapping_error else objection)
    return Choice("cuda", "odc-mpi doctor has seen all operations work that windows on GPUs need")


def _zero_copy(report: ProbeReport, setting: str, *, on_device: bool) -> Choice:
    if on_device and report.kinds:
        return Choice("off", "parameters are fetched from the owners' GPUs before use")
    if setting != "auto":
        return Choice(setting, "set by comm.zero_copy")
    if on_device:
        return Choice("on", ONLY_RANK_REASON)
    shared = report.shared_memory
    if shared.readable is None or shared.contiguous is None:
        return Choice("off", "Win.Allocate_shared gave no answer")
    if not shared.readable:
        return Choice("off", "a rank cannot read the shared memory of another rank on its node")
    if not shared.contiguous:
        return Choice("off", "the shared memory of the ranks on a node is not contiguous")
    return Choice("on", "ranks of a node read shared memory" if "same_node" in report.kinds else ONLY_RANK_REASON)


def _node_cache(report: ProbeReport, setting: str, zero_copy: Choice) -> Choice:
    if setting != "auto":
        return Choice(setting, "set by comm.node_cache")
    if len(report.kinds) < 2:
        return Choice("off", "each node has one rank" if report.nodes > 1 else "all ranks are on one node")
    if zero_copy.value == "off":
        return Choice("off", f"zero-copy is off: {zero_copy.reason}")
    return Choice("on", "if there is memory, ranks of a node share what they fetch from other nodes")


def _reduction(peers: Mapping[str, Peer], setting: str, objections_on_device: Mapping[str, str]) -> Choice:
    if setting != "auto":
        return Choice(setting, "set by comm.reduction")
    if not peers:
        # With one process, Accumulate of MPICH has a quarter of the bandwidth that it has between two.
        return Choice("mailbox", "the only rank adds its gradients itself")
    # If windows on GPUs are used although neither works, the user has set window_device: Put is more likely to work.
    for name, other in (("accumulate", "mailbox"), ("mailbox", "accumulate")):
        if name in objections_on_device:
            return Choice(other, objections_on_device[name])
    objections = [text for kind, peer in peers.items() if (text := _accumulate_objection(kind, peer))]
    if objections and any(peer.put.idle_s is None for peer in peers.values()):
        return Choice("accumulate", f"{objections[0]}, nor did Put")
    if objections:
        return Choice("mailbox", objections[0])
    waiting = [kind for kind, peer in peers.items() if not peer.accumulate.one_sided]
    if not waiting:
        return Choice("accumulate", "Accumulate is one-sided towards all peers")
    return Choice("accumulate", f"Accumulate to a peer {_speeds(waiting[0], peers[waiting[0]])}")


def _accumulate_objection(kind: str, peer: Peer) -> str | None:
    accumulate, put = peer.accumulate, peer.put
    if accumulate.idle_s is None:
        return f"Accumulate to a peer {LOCATIONS[kind]} gave no answer"
    if accumulate.one_sided or put.gb_per_s is None:
        return None
    if accumulate.gb_per_s is not None and accumulate.gb_per_s >= MIN_SHARE_OF_PUT * put.gb_per_s:
        return None
    return f"Accumulate to a peer {_speeds(kind, peer)}"


def _speeds(kind: str, peer: Peer) -> str:
    if peer.put.gb_per_s is None:
        return f"{LOCATIONS[kind]} waits for the target (odc-mpi doctor compares its speed with that of Put)"
    return f"{LOCATIONS[kind]} moves {peer.accumulate.gb_per_s or 0.0:.2g} GB/s, Put {peer.put.gb_per_s or 0.0:.2g}"


def _progress(report: ProbeReport, peers: Mapping[str, Peer], setting: str, reduction: str) -> Choice:
    """Choose `progress` from Fetch_and_op in `report` and the other operations in `peers`."""
    granted = report.thread_level or "no answer"
    if setting == "thread" and granted != THREADS_NEEDED:
        raise UserError(
            f"comm.progress: thread requires {THREADS_NEEDED}, got {granted} from {report.library}: set it to off or "
            "auto"
        )
    uses_mailbox = reduction == "mailbox" and bool(peers)
    if setting != "auto":
        warning = f"; warning: {MAILBOX_REASON}" if uses_mailbox and setting == "off" else ""
        return Choice(setting, f"set by comm.progress{warning}")
    if not peers:
        return Choice("off", "there is only one rank")
    needed = ["get", "put" if uses_mailbox else "accumulate"]
    uses = [(kind, name, getattr(peer, name)) for kind, peer in peers.items() for name in needed]
    if "other_node" in report.kinds:
        # Within a node, the counter of the tickets is in shared memory, whatever window the trial used.
        uses.append(("other_node", "fetch_and_op", report.results()["other_node"].fetch_and_op))
    waiting = [_waits_for_target(kind, name, operation) for kind, name, operation in uses if not operation.one_sided]
    if uses_mailbox:
        waiting.append(MAILBOX_REASON)
    if not waiting:
        *names, last = [OPERATION_NAMES[name] for name in dict.fromkeys(name for _, name, _ in uses)]
        return Choice("off", f"{', '.join(names)} and {last} are one-sided towards all peers")
    if granted != THREADS_NEEDED:
        return Choice("off", f"warning: {waiting[0]}, but a thread requires {THREADS_NEEDED}, got {granted}")
    return Choice("thread", waiting[0])


def _waits_for_target(kind: str, name: str, operation: OperationResult) -> str:
    direction = "from" if name == "get" else "to"
    what = f"{OPERATION_NAMES[name]} {direction} a peer {LOCATIONS[kind]}"
    if operation.one_sided is None or operation.busy_s is None or operation.idle_s is None:
        return f"{what} gave no answer"
    busy, idle = format_seconds(operation.busy_s), format_seconds(operation.idle_s)
    return f"{what} waits for the target: {busy} against {idle} idle"
