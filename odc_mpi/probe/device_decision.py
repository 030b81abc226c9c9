"""Objections to windows on devices, based on the results of `odc-mpi doctor`. Does not use MPI.

Windows on devices are used only if `odc-mpi doctor` has successfully tested all necessary operations: Get, and either
Accumulate or Put (for a mailbox). Each must work with device memory at the origin and with every kind of peer, and Get
between devices must not be much slower than between hosts.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from odc_mpi.probe.report import LOCATIONS, OPERATION_NAMES, ProbeReport

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
        reduction_objections: Reasons not to use a reduction, keyed by its name ("accumulate" or "mailbox").
    """

    objection: str | None
    reduction_objections: Mapping[str, str]


def summarize(report: ProbeReport) -> DeviceFindings:
    """Derive the objections to windows on devices from a report."""
    if report.device is None:
        reductions = dict.fromkeys(_REDUCED_BY, "it was not tried on windows on GPUs")
        return DeviceFindings(f"windows on GPUs were not tried: {RUN_DOCTOR}", reductions)
    reductions = {
        name: objection
        for name, operation in _REDUCED_BY.items()
        if (objection := _operation_objection(report, operation)) is not None
    }
    if not report.device.own_accumulate:
        reductions.setdefault("accumulate", "Accumulate to a rank's own window on a GPU was not shown to work")
    objection = _window_objection(report) or _operation_objection(report, "get")
    if objection is None and len(reductions) == len(_REDUCED_BY):
        objection = reductions["mailbox"]
    return DeviceFindings(objection or _speed_objection(report), reductions)


def _window_objection(report: ProbeReport) -> str | None:
    if report.device is not None and report.device.window:
        return None
    problems = [text for text in report.problems if text.startswith(("device memory: ", "device window: "))]
    return f"windows on GPUs cannot be created ({problems[0] if problems else 'no answer'})"


def _operation_objection(report: ProbeReport, name: str) -> str | None:
    for kind, peer in report.results(on_device=True).items():
        if getattr(peer, name).idle_s is None:
            problem = report.problem(f"device {kind} {name}") or "not tried"
            return f"{OPERATION_NAMES[name]} with a peer {LOCATIONS[kind]}, on GPUs: {problem}"
    return None


def _speed_objection(report: ProbeReport) -> str | None:
    hosts = report.results()
    for kind, peer in report.results(on_device=True).items():
        between, by_host = peer.get.gb_per_s, hosts[kind].get.gb_per_s
        if between is not None and by_host is not None and between < MIN_SHARE_OF_HOST * by_host:
            return (
                f"Get from a peer {LOCATIONS[kind]} moves {between:.2g} GB/s between GPUs, {by_host:.2g} between hosts"
            )
    return None
