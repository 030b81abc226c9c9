"""`odc-mpi doctor`: the measured behaviour of this MPI stack, and the decision of the runtime.

This process does not start MPI. A child takes its part in the job and reports each finding at once, so that there is an
answer even if the MPI library crashes or hangs. Communication: that of `stack.probe`, in the children.

The findings are cached for training runs in the same layout and replace the cached findings of these runs. For windows
on GPUs a crash is cached, too: runs do not try them, since a trial might end the run.
"""

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace

from rich import box
from rich.console import Console
from rich.table import Table

from odc_mpi.formatting import format_seconds
from odc_mpi.probe import cache
from odc_mpi.probe.decision import Decision, decide
from odc_mpi.probe.gpu import has_gpu
from odc_mpi.probe.report import (
    DEVICE_OPERATIONS,
    OPERATION_NAMES,
    OPERATIONS,
    Cause,
    DeviceWindows,
    OperationResult,
    ProbeReport,
    Problem,
)
from odc_mpi.runtime.start.launch import ChildResult, FailureKind, launched_rank, run_in_child
from odc_mpi.runtime.start.pmi import hint

#: The command of the child, which takes part in MPI.
PROBE = (sys.executable, "-m", "odc_mpi.probe.probe")
#: Seconds for the whole probe: the start of MPI and, typically, 3 s for peers on the same node and 20 s for others.
DEADLINE_S = 55.0
#: Seconds for one operation with all repetitions, which take 5 s if it waits for its target.
OPERATION_S = 12.0
#: Seconds more where there is a GPU: for loading its libraries and trying windows on it.
DEVICE_S = 60.0

_ORIGINS = {"from_device": "device", "from_host": "host"}
_MODELS = {
    "unified": "unified",
    "separate": "separate: no windows, use another MPI library",
    None: "no answer",
}
_EXPLANATIONS = {True: "yes", False: "no", None: "no answer"}
_SINGLE_RANK = "there is no peer to try: run mpiexec -n 2 odc-mpi doctor"


def doctor(
    as_json: bool, *, probe: Sequence[str] = PROBE, deadline_s: float = DEADLINE_S, operation_s: float = OPERATION_S
) -> int:
    """Probe the MPI stack and print the findings, from rank 0. Collective, in the children.

    Args:
        as_json: Print one JSON object instead of a table.
        probe: Command of the child.
        deadline_s: Seconds after which the answer is the findings so far.
        operation_s: The same for a single operation.

    Returns:
        The exit code: 0 if there was an answer, 1 if MPI did not even start.
    """
    rank = launched_rank()
    if has_gpu():
        deadline_s += DEVICE_S
    with run_in_child(probe, rank, deadline_s, operation_s) as ending:
        return 0 if rank else _print_result(ending, as_json)


def _print_result(result: ChildResult, as_json: bool) -> int:
    """Print the findings and return the exit code."""
    report = _report(result)
    _store_report(result, report)
    decision = decide(report) if report.library else None
    on_device = decide(report, on_device=True) if report.device is not None else None
    if as_json:
        found = report.to_dict() | {"decision": decision and decision.to_dict()}
        print(json.dumps(found | ({"device_decision": on_device.to_dict()} if on_device else {})), flush=True)
    else:
        _print(report, decision, on_device)
    result.print_output_tail()
    return 0 if decision else 1


def _report(result: ChildResult) -> ProbeReport:
    """Return the last report of the child, with the failure that ended the child."""
    report = ProbeReport.from_dict(result.messages["report"]) if "report" in result.messages else ProbeReport()
    if result.failure_point is None:
        return report
    doing, failure = result.failure_point
    where = tuple(doing.replace(".", " ").split())
    if failure.kind is FailureKind.NO_ANSWER:
        return report.with_problem(Problem(where, Cause.NO_ANSWER, failure.description))
    told = str(failure)
    if failure.description == "SIGBUS":
        told += f". /dev/shm is probably too small: it has {_free_mib()} MiB free (docker --shm-size)"
    return report.with_problem(Problem(where, Cause.OTHER, told))


def _store_report(result: ChildResult, report: ProbeReport) -> None:
    """Cache the report for training runs in the same layout.

    Windows on devices: also after a crash, since no run tries them, but not if the launcher ended the probe. The other
    findings: only if there was no problem.
    """
    keys = result.messages.get("keys", {})
    by_launcher = result.failure is not None and result.failure.kind is FailureKind.ENDED_BY_LAUNCHER
    if report.device is not None and not by_launcher:
        cache.store(keys["device"], report)
    if keys and not report.problems:
        cache.store(keys["host"], replace(report, device=None))


def _free_mib() -> str:
    try:
        return str(shutil.disk_usage("/dev/shm").free >> 20)
    except OSError:
        return "no"


def _print(report: ProbeReport, decision: Decision | None, on_device: Decision | None) -> None:
    # Open MPI gives its ranks a terminal of their own, whatever mpiexec writes to: no colours.
    console = Console(color_system=None, highlight=False)
    if decision is None:
        console.print(f"MPI gave no answer. {report.problems[-1]}", *filter(None, [hint()]), sep="\n")
        return
    layout = " + ".join(str(number) for number in report.ranks_per_node)
    room = "none" if report.shm_bytes is None else f"{report.shm_bytes / 2**20:,.0f} MiB free"
    facts = Table.grid(padding=(0, 3))
    facts.add_row("MPI library", report.library)
    facts.add_row("thread level", report.thread_level)
    facts.add_row("memory model", _MODELS[report.memory_model])
    facts.add_row("nodes, ranks", f"{report.nodes}, {layout}")
    facts.add_row("/dev/shm", room)
    console.print(facts, "", sep="\n")
    if report.ranks == 1:
        console.print(_SINGLE_RANK, "", sep="\n")
    else:
        console.print(_operations(report), "")
    if report.device is not None:
        console.print(*_device(report, report.device), "", sep="\n")
    console.print(_chosen("the runtime uses", decision))
    if on_device is not None:
        console.print("", _chosen("with run.device cuda", on_device), sep="\n")
    for problem in report.problems:
        console.print(f"Problem: {problem}")


def _chosen(title: str, decision: Decision) -> Table:
    table = Table(title, "", "because", box=box.SIMPLE_HEAD, pad_edge=False)
    for name, choice in decision.to_dict().items():
        table.add_row(name.replace("_", "-"), choice["choice"], choice["reason"])
    return table


def _operations(report: ProbeReport) -> Table:
    table = _table("peer", "operation")
    for kind in report.kinds:
        for name in OPERATIONS:
            operation = getattr(getattr(report.peers, kind), name, OperationResult())
            table.add_row(kind.replace("_", " "), OPERATION_NAMES[name], *_cells(operation, report.problem(kind, name)))
    return table


def _device(report: ProbeReport, device: DeviceWindows) -> tuple[Table, Table]:
    """Return two tables about windows on devices: their properties, and the operations."""
    facts = Table.grid(padding=(0, 3))
    facts.add_row("GPUs", "; ".join(device.names))
    facts.add_row("MPI for CUDA", f"{_EXPLANATIONS[device.cuda_support]} (MPIX_Query_cuda_support)")
    facts.add_row("memory kinds", device.alloc_kinds or "no answer")
    facts.add_row(
        "windows there", f"made: {_EXPLANATIONS[device.window]}, own Accumulate: {_EXPLANATIONS[device.own_accumulate]}"
    )
    table = _table("peer", "on the device", "from")
    for kind in report.kinds:
        for name, origin in DEVICE_OPERATIONS:
            operation = getattr(getattr(getattr(device, origin), kind), name, OperationResult())
            cells = _cells(operation, report.problem(origin, kind, name))
            table.add_row(kind.replace("_", " "), OPERATION_NAMES[name], _ORIGINS[origin], *cells)
    return facts, table


def _table(*headings: str) -> Table:
    table = Table(*headings, box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("target idle", "target busy", "GB/s"):
        table.add_column(title, justify="right")
    table.add_column("one-sided")
    return table


def _cells(operation: OperationResult, problem: Problem | None) -> tuple[str, ...]:
    if operation.idle_s is None or operation.busy_s is None or operation.gb_per_s is None:
        return "", "", "", problem.what if problem else "not tried"
    verdict = {True: "yes", False: "no: waits", None: "unsure"}[operation.one_sided]
    return format_seconds(operation.idle_s), format_seconds(operation.busy_s), f"{operation.gb_per_s:.2g}", verdict
