"""Whether windows on devices are usable, by the findings of a doctor. Pure: no MPI, the same on every rank.

Every MPI supports windows on the host. Windows on devices are used only where each operation that they need was seen to
work: Get from the owners, and Accumulate, or Put for a mailbox, each with device memory at the origin and with every
kind of peer in the job.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from odc_mpi.probe.report import LOCATIONS, OPERATION_NAMES, DeviceWindows, Peer, ProbeReport

#: The least bandwidth of a Get between devices, relative to one between hosts; below it staging on the host is faster.
MIN_SHARE_OF_HOST = 0.25
#: The advice where nothing was proved.
RUN_DOCTOR = "run odc-mpi doctor once in this layout to have them tried"

_REDUCED_BY = {"accumulate": "accumulate", "mailbox": "put"}


@dataclass(frozen=True)
class DeviceFindings:
    """The findings about windows on devices.

    Attributes:
        objection: The reason not to use them; None if there is none.
        peers: The operations from device memory, for each kind of peer in the job.
        reduction_objections: For each reduction that is not to be used, the reason.
    """

    objection: str | None
    peers: Mapping[str, Peer]
    reduction_objections: Mapping[str, str]


def summarize(report: ProbeReport) -> DeviceFindings:
    """Sum up the findings of a report about windows on devices.

    Args:
        report: Report of a probe, with the findings of a doctor about devices if there are any.
    """
    device = report.device
    peers = {kind: _peer(device, kind) for kind in report.kinds}
    if device is None:
        nothing = f"windows on GPUs were not tried: {RUN_DOCTOR}"
        return DeviceFindings(nothing, peers, dict.fromkeys(_REDUCED_BY, "it was not tried on windows on GPUs"))
    reductions = {
        name: why
        for name, operation in _REDUCED_BY.items()
        if (why := _untested_operations(report, peers, operation)) is not None
    }
    if not device.own_accumulate:
        reductions.setdefault("accumulate", "Accumulate into the own window, on GPUs, is not proved")
    against = [_window_objection(report, device), _untested_operations(report, peers, "get")]
    if len(reductions) == len(_REDUCED_BY):
        against.append(reductions["mailbox"])
    against += [_slow(report, kind, peer) for kind, peer in peers.items()]
    return DeviceFindings(next((why for why in against if why is not None), None), peers, reductions)


def _peer(device: DeviceWindows | None, kind: str) -> Peer:
    found = getattr(device.from_device, kind) if device is not None else None
    return found or Peer()


def _window_objection(report: ProbeReport, device: DeviceWindows) -> str | None:
    if device.window:
        return None
    problem = report.problem("device", "memory") or report.problem("device", "window")
    return f"no window on a GPU could be made ({problem or 'no answer'})"


def _untested_operations(report: ProbeReport, peers: Mapping[str, Peer], name: str) -> str | None:
    """Say with which peers an operation was not seen to work, and its problem there; None if it worked with all."""
    for kind, peer in peers.items():
        if getattr(peer, name).idle_s is None:
            problem = report.problem("from_device", kind, name)
            return f"{OPERATION_NAMES[name]} with a peer {LOCATIONS[kind]}, on GPUs: {problem.what if problem else 'not tried'}"
    return None


def _slow(report: ProbeReport, kind: str, peer: Peer) -> str | None:
    host = getattr(report.peers, kind)
    between, by_host = peer.get.gb_per_s, host.get.gb_per_s if host is not None else None
    if between is None or by_host is None or between >= MIN_SHARE_OF_HOST * by_host:
        return None
    return f"Get from a peer {LOCATIONS[kind]} moves {between:.2g} GB/s between GPUs, {by_host:.2g} between hosts"
