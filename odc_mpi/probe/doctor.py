"""The command `odc-mpi doctor`, which prints measurements of this MPI stack, and the choices for a training run.

This process does not start MPI. Its child process takes part in the job (`probe.probe`) and sends each result
immediately, so that a report is printed even if the MPI library crashes or hangs.

The results are cached for training runs with the same layout of ranks.
"""

import json
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
    DeviceWindows,
    OperationResult,
    ProbeReport,
)
from odc_mpi.runtime.memory import free_shm_bytes
from odc_mpi.runtime.start.launch import ENDED_BY_LAUNCHER, ChildResult, launched_rank, run_in_child
from odc_mpi.runtime.start.pmi import srun_advice

#: Command that starts the child process.
PROBE = (sys.executable, "-m", "odc_mpi.probe.probe")
#: Time limit for the entire probe, in seconds, including the start of MPI. The trials usually take 3 s with peers on
#: the same node, and 20 s with peers on other nodes.
DEADLINE_S = 55.0
#: Time limit for the trial of one operation, in seconds. A trial takes 5 s if the operation waits for its target.
OPERATION_S = 12.0
#: Additional time on machines with a GPU, in seconds, for loading GPU libraries and trying windows on the GPU.
DEVICE_S = 60.0

_MODELS = {"unified": "unified", "separate": "separate (not supported: use another MPI library)", None: "no answer"}
_YES_NO = {True: "yes", False: "no", None: "no answer"}
_ONE_SIDED = {True: "yes", False: "no (waits for target)", None: "inconclusive"}


def doctor(as_json: bool) -> int:
    """Probe the MPI stack in child processes, and print the results on rank 0 as tables or as JSON. Collective.

    Returns the exit code, which is 1 on rank 0 if MPI did not start, otherwise 0. After a time limit, the results so
    far are printed.
    """
    rank = launched_rank()
    deadline_s = DEADLINE_S + (DEVICE_S if has_gpu() else 0.0)
    with run_in_child(PROBE, rank, deadline_s, OPERATION_S) as result:
        return 0 if rank else _print_result(result, as_json)


def _print_result(result: ChildResult, as_json: bool) -> int:
    report = _report(result)
    _store_report(result, report)
    decision = decide(report) if report.library else None
    on_device = None
    if report.device is not None:
        error = report.device.mapping_error if report.nodes == 1 else None
        on_device = decide(report, on_device=True, mapping_error=error)
    if as_json:
        output = report.to_dict() | {"decision": decision and decision.to_dict()}
        print(json.dumps(output | ({"device_decision": on_device.to_dict()} if on_device else {})), flush=True)
    else:
        _print_tables(report, decision, on_device)
    if result.failure:
        lines = result.output_tail or "(none)"
        print(f"The last lines of the failed process:\n{lines}", file=sys.stderr, flush=True)
    return 0 if decision else 1


def _report(result: ChildResult) -> ProbeReport:
    """Return the last report from the child. If the child failed, the failure is added to it as a problem."""
    report = ProbeReport.from_dict(result.message["report"]) if "report" in result.message else ProbeReport()
    operation = result.message.get("operation", "starting MPI")
    if operation is None and result.failure is None:
        return report
    failure = result.failure or "ended early"
    if "(SIGBUS" in failure:
        free = free_shm_bytes()
        free_mib = "no" if free is None else free >> 20
        failure += f". /dev/shm is probably too small: it has {free_mib} MiB free (docker --shm-size)"
    return report.with_problem(operation or "closing", failure)


def _store_report(result: ChildResult, report: ProbeReport) -> None:
    """Cache the report for training runs.

    Results for the host are cached if there were no problems. Results for devices are cached even after a crash in a
    trial, because training runs do not repeat these trials, but not if the launcher ended the probe.
    """
    keys = result.message.get("keys", {})
    if report.device is not None and result.failure != ENDED_BY_LAUNCHER:
        cache.store(keys["device"], report)
    if keys and not report.problems:
        cache.store(keys["host"], replace(report, device=None))


def _print_tables(report: ProbeReport, decision: Decision | None, on_device: Decision | None) -> None:
    # Ranks of Open MPI write to a terminal even if the output of mpiexec is redirected, so colors are disabled.
    console = Console(color_system=None, highlight=False)
    if decision is None:
        console.print(f"MPI gave no answer. {report.problems[-1]}", *filter(None, [srun_advice()]), sep="\n")
        return
    layout = " + ".join(str(number) for number in report.ranks_per_node)
    shared_memory = "none" if report.shm_bytes is None else f"{report.shm_bytes / 2**20:,.0f} MiB free"
    properties = Table.grid(padding=(0, 3))
    properties.add_row("MPI library", report.library)
    properties.add_row("loaded, opened", "\n".join(report.files))
    properties.add_row("its variables", "\n".join(report.variables) or "none")
    properties.add_row("thread level", report.thread_level)
    properties.add_row("memory model", _MODELS[report.memory_model])
    properties.add_row("nodes, ranks", f"{report.nodes}, {layout}")
    properties.add_row("/dev/shm", shared_memory)
    console.print(properties, "", sep="\n")
    if not report.kinds:
        console.print("only one rank, nothing to measure: run mpiexec -n 2 odc-mpi doctor", "", sep="\n")
    else:
        console.print(_operations(report, OPERATIONS), "")
    if report.device is not None:
        operations = _operations(report, DEVICE_OPERATIONS, on_device=True)
        console.print(_device_properties(report.device), operations, "", sep="\n")
    console.print("a run will use", _choices(decision), sep="\n")
    if on_device is not None:
        console.print("", "with run.device cuda", _choices(on_device), sep="\n")
    if "/dev/cxi" in " ".join(report.files) and "FI_MR_CACHE_MONITOR=userfaultfd" not in report.variables:
        console.print("Slingshot: set FI_MR_CACHE_MONITOR=userfaultfd; without it, jobs have been seen to hang")
    for problem in report.problems:
        console.print(f"Problem: {problem}")


def _choices(decision: Decision) -> Table:
    table = Table("setting", "choice", "reason", box=box.SIMPLE_HEAD, pad_edge=False)
    for name, choice in decision.to_dict().items():
        table.add_row(name.replace("_", "-"), choice["choice"], choice["reason"])
    return table


def _device_properties(device: DeviceWindows) -> Table:
    created, to_self = _YES_NO[device.window], _YES_NO[device.own_accumulate]
    properties = Table.grid(padding=(0, 3))
    properties.add_row("GPUs", "; ".join(device.names))
    properties.add_row("CUDA support", f"{_YES_NO[device.cuda_support]} (MPIX_Query_cuda_support)")
    mapping = "no answer" if device.mapping_error is None else device.mapping_error or "yes"
    properties.add_row("mapped by ranks", mapping)
    properties.add_row("GPU windows", f"created: {created}, Accumulate to self: {to_self}")
    return properties


def _operations(report: ProbeReport, operations: Sequence[str], *, on_device: bool = False) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("peer", "on the GPU" if on_device else "operation"):
        table.add_column(column, no_wrap=True)
    for column in ("target idle", "target busy", "GB/s", "fresh reads"):
        table.add_column(column, justify="right")
    table.add_column("one-sided")
    for kind, peer in report.results(on_device=on_device).items():
        for name in operations:
            problem = report.problem(f"device {kind} {name}" if on_device else f"{kind} {name}")
            cells = _cells(getattr(peer, name), problem)
            table.add_row(kind.replace("_", " "), OPERATION_NAMES[name], *cells)
    return table


def _cells(operation: OperationResult, problem: str | None) -> tuple[str, ...]:
    fresh = "" if operation.num_fresh_reads is None else f"{operation.num_fresh_reads:,}"
    if operation.idle_s is None or operation.busy_s is None or operation.gb_per_s is None:
        return "", "", "", fresh, problem or "not tried"
    idle, busy = format_seconds(operation.idle_s), format_seconds(operation.busy_s)
    return idle, busy, f"{operation.gb_per_s:.2g}", fresh, _ONE_SIDED[operation.one_sided]
