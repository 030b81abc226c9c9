"""What a doctor has proved of windows on devices, and what speaks against them. Pure: no MPI, the same on every rank.

Unlike windows on the host, of which any MPI has to know, these are used only where each operation that it takes was
seen to work: Get from the owners, and Accumulate, or Put for a mailbox, each with device memory at the origin and with
every kind of peer that there is.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from odc_mpi.stack.report import DeviceWindows, Peer, Report

#: A Get between devices has at least so much of the bandwidth of one between hosts; else the way by the host is faster.
LEAST_SHARE_OF_HOST = 0.25
#: How windows on devices come into question.
RUN_DOCTOR = "run odc-mpi doctor once in this layout to have them tried"

_WHERE = {"same_node": "on the same node", "other_node": "on the other node"}
_NAMES = {"get": "Get", "put": "Put", "accumulate": "Accumulate"}
_REDUCED_BY = {"accumulate": "accumulate", "mailbox": "put"}


@dataclass(frozen=True)
class Proof:
    """What is known of windows on devices.

    Attributes:
        against: Why they are not to be used; None if they are.
        peers: The operations from device memory, for each kind of peer that there is.
        against_reductions: Why a way to reduce is not to be used; those without a reason are.
    """

    against: str | None
    peers: Mapping[str, Peer] = field(default_factory=dict)
    against_reductions: Mapping[str, str] = field(default_factory=dict)


def prove(report: Report) -> Proof:
    """Sum up what a report says of windows on devices. Local.

    Args:
        report: Of a probe, with what a doctor found about devices if it was there.
    """
    device = report.device
    peers = {kind: _peer(device, kind) for kind in report.kinds}
    if device is None:
        nothing = f"windows on GPUs were not tried: {RUN_DOCTOR}"
        return Proof(nothing, peers, dict.fromkeys(_REDUCED_BY, "it was not tried on windows on GPUs"))
    reductions = {
        name: why for name, operation in _REDUCED_BY.items() if (why := _unproved(report, peers, operation)) is not None
    }
    if not device.own_accumulate:
        reductions.setdefault("accumulate", "Accumulate into the own window, on GPUs, is not proved")
    against = [_against_windows(report, device), _unproved(report, peers, "get")]
    if len(reductions) == len(_REDUCED_BY):
        against.append(reductions["mailbox"])
    against += [_slow(report, kind, peer) for kind, peer in peers.items()]
    return Proof(next((why for why in against if why is not None), None), peers, reductions)


def _peer(device: DeviceWindows | None, kind: str) -> Peer:
    found = getattr(device.from_device, kind) if device is not None else None
    return found or Peer()


def _against_windows(report: Report, device: DeviceWindows) -> str | None:
    if device.window:
        return None
    problems = [problem for problem in report.problems if problem.startswith(("device memory", "device window"))]
    return f"no window on a GPU could be made ({problems[0] if problems else 'no answer'})"


def _unproved(report: Report, peers: Mapping[str, Peer], name: str) -> str | None:
    """Say with which peers an operation was not seen to work, and what came of it instead; None if with none."""
    for kind, peer in peers.items():
        if getattr(peer, name).idle_s is None:
            before = f"from_device {kind} {name}: "
            told = [problem.removeprefix(before) for problem in report.problems if problem.startswith(before)]
            return f"{_NAMES[name]} with a peer {_WHERE[kind]}, on GPUs: {told[0] if told else 'not tried'}"
    return None


def _slow(report: Report, kind: str, peer: Peer) -> str | None:
    host = getattr(report.peers, kind)
    between, by_host = peer.get.gb_per_s, host.get.gb_per_s if host is not None else None
    if between is None or by_host is None or between >= LEAST_SHARE_OF_HOST * by_host:
        return None
    return f"Get from a peer {_WHERE[kind]} moves {between:.2g} GB/s between GPUs, {by_host:.2g} between hosts"
