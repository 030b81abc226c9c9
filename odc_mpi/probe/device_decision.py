"""Objections to windows on devices, based on the results of `odc-mpi doctor`. Does not use MPI.

Windows on devices are used only if `odc-mpi doctor` has successfully tested all necessary operations: Get, and either
Accumulate or Put (for a mailbox). Each must work with device memory at the origin and with every kind of peer, and Get
between devices must not be much slower than between hosts.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from odc_mpi.probe.report import LOCATIONS, OPERATION_NAMES, Peer, ProbeReport

#: Minimum bandwidth of Get between devices, as a fraction of the bandwidth between hosts. Below this minimum, staging
#: through host memory is faster.
MIN_SHARE_OF_HOST = 0.25
#: Advice given in a reason if windows on devices have not been tested.
RUN_DOCTOR = "run odc-mpi doctor once in this layout to test them"

_REDUCED_BY = {"accumulate": "accumulate", "mailbox": "put"}


@dataclass(frozen=True)
class DeviceFindings:
    """Objections to windows on devices.

    Attributes:
        objection: Reason not to use windows on devices at all, or None if they can be used.
        peers: Results with device memory at the origin, keyed by kind of peer ("same_node" or "other_node").
        reduction_objections: Reasons not to use a reduction, keyed by its name ("accumulate" or "mailbox").
    """

    objection: str | None
    peers: Mapping[str, Peer]
    reduction_objections: Mapping[str, str]


def summarize(report: ProbeReport) -> DeviceFindings:
    """Derive the objections to windows on devices from a report."""
    device = report.device
    if device is None:
        not_tried = f"windows on GPUs were not tried: {RUN_DOCTOR}"
        reductions = dict.fromkeys(_REDUCED_BY, "it was not tried on windows on GPUs")
        return DeviceFindings(not_tried, dict.fromkeys(report.kinds, Peer()), reductions)
    peers = {kind: getattr(device.peers, kind) or Peer() for kind in report.kinds}
    reductions = {
        name: objection
        for name, operation in _REDUCED_BY.items()
        if (objection := _operation_objection(report, peers, operation)) is not None
    }
    if not device.own_accumulate:
        reductions.setdefault("accumulate", "Accumulate to a rank's own window on a GPU was not shown to work")
    objections = [_operation_objection(report, peers, "get")]
    if not device.window:
        problem = report.problem("device", "memory") or report.problem("device", "window")
        objections.insert(0, f"windows on GPUs cannot be created ({problem or 'no answer'})")
    if len(reductions) == len(_REDUCED_BY):
        objections.append(reductions["mailbox"])
    objections += [_speed_objection(report, kind, peer) for kind, peer in peers.items()]
    return DeviceFindings(next((each for each in objections if each is not None), None), peers, reductions)


def _operation_objection(report: ProbeReport, peers: Mapping[str, Peer], name: str) -> str | None:
    for kind, peer in peers.items():
        if getattr(peer, name).idle_s is None:
            problem = report.problem("device", kind, name)
            what = problem.what if problem else "not tried"
            return f"{OPERATION_NAMES[name]} with a peer {LOCATIONS[kind]}, on GPUs: {what}"
    return None


def _speed_objection(report: ProbeReport, kind: str, peer: Peer) -> str | None:
    host = getattr(report.peers, kind)
    between, by_host = peer.get.gb_per_s, host.get.gb_per_s if host is not None else None
    if between is None or by_host is None or between >= MIN_SHARE_OF_HOST * by_host:
        return None
    return f"Get from a peer {LOCATIONS[kind]} moves {between:.2g} GB/s between GPUs, {by_host:.2g} between hosts"
