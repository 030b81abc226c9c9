"""Trials of this MPI stack: MPI does not say which operations are one-sided (a proposal for it: MPI Forum, 635).

Communication: the ranks gather their hosts; the ranks of each node try shared memory; then one pair for each kind of
peer tries the operations in turn (trial.py). All ranks have the same report at every moment.

As a program this is one rank of the probe, a child of `odc-mpi doctor` (`runtime.start.launch`). Rank 0 tells the
report so far before each operation and at the end.
"""

import shutil
import socket
import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from odc_mpi.errors import UserError
from odc_mpi.probe import cache
from odc_mpi.probe.gpu import has_gpu
from odc_mpi.probe.operations import COUNTER_BYTES
from odc_mpi.probe.repeat import timed
from odc_mpi.probe.report import OPERATIONS, ProbeReport, Problem, SharedMemory
from odc_mpi.probe.trial import LARGE_BYTES, TrialBudget, Trials, allocate, allocate_shared
from odc_mpi.runtime.library import thread_level
from odc_mpi.runtime.start.launch import ChildMessage, child_main
from odc_mpi.runtime.world import World

if TYPE_CHECKING:
    from odc_mpi.comm.device.device import Device

#: For `odc-mpi doctor`.
FULL = TrialBudget(idle_s=0.2, busy_s=0.5, bandwidth_s=1.5)
#: For the start of a training run.
QUICK = TrialBudget(idle_s=0.01, busy_s=0.04, bandwidth_s=0.15)
#: Seconds after which the program ends by itself; normally the doctor ends it before and still has the answer.
PROGRAM_S = 150.0

#: Called with the report so far and the next trial: "shared_memory", "KIND.OPERATION", or None at the end.
OnMessage = Callable[[ProbeReport, str | None], None]


def probe(
    world: World,
    budget: TrialBudget,
    *,
    on_message: OnMessage = lambda report, doing: None,
    device: "Device | None" = None,
) -> ProbeReport:
    """Try shared memory, windows and devices; return the same report on every rank. Collective.

    Args:
        world: All of its ranks take part.
        budget: Time to spend.
        on_message: Called on every rank before each trial.
        device: The device of this rank, to try windows on, which may end the process. All ranks have one, or none has.

    Raises:
        UserError: /dev/shm has no room for even a small window; on every rank.
    """
    report = replace(environment_report(world), shm_bytes=_free_shared_memory(world))
    on_message(report, "shared_memory")
    report = replace(report, shared_memory=_try_shared_memory(world))
    pairs = find_pairs(world.gather_objects(world.node))
    if pairs:
        with world.background_progress_off():
            report = _try_pairs(world, report, pairs, budget, on_message)
    if device is not None:
        # Not at the top: it brings torch, which takes a second, to where it is of use.
        from odc_mpi.probe.device_probe import try_device

        with world.background_progress_off():
            report = try_device(world, report, pairs, device, on_message)
    on_message(report, None)
    return report


def environment_report(world: World) -> ProbeReport:
    """Return the report before any trial: library, nodes and ranks."""
    return ProbeReport(
        library=world.mpi_library,
        thread_level=thread_level(),
        memory_model=world.memory_model,
        nodes=world.num_nodes,
        ranks_per_node=tuple(num_ranks for _, num_ranks in world.layout),
    )


def cached_or_quick_report(world: World) -> ProbeReport:
    """Return the cached report of this stack, at most a week old, or else that of a quick probe. Collective.

    The cache is rank 0's.
    """
    key = report_key(world)
    kept = cache.load(key) if world.rank == 0 else None
    with world.collective("hearing of the report that rank 0 kept"):
        kept = world.comm.bcast(kept)
    if kept is not None:
        # What belongs to this start, not to the stack.
        return replace(kept, thread_level=thread_level(), shm_bytes=_free_shared_memory(world))
    report = probe(world, QUICK)
    if world.rank == 0 and not report.problems:
        cache.store(key, report)
    return report


def report_key(world: World) -> dict[str, Any]:
    """Return the cache key of a report: library, environment, and the host of each rank. Collective."""
    ranks = world.gather_objects([world.node, socket.gethostname()])
    return {**cache.stack_key(MPI.Get_library_version()), "ranks": ranks}


def find_pairs(nodes: list[int]) -> dict[str, tuple[int, int]]:
    """Choose a pair of ranks for each kind of peer.

    Args:
        nodes: The node of each rank.

    Returns:
        Origin and target for each kind of peer in the job, in the order of `PEER_KINDS`.
    """
    pairs = {}
    for origin, node in enumerate(nodes):
        if node in nodes[origin + 1 :]:
            pairs["same_node"] = (origin, nodes.index(node, origin + 1))
            break
    away = [rank for rank, node in enumerate(nodes) if node != nodes[0]]
    if away:
        pairs["other_node"] = (0, away[0])
    return pairs


def _free_shared_memory(world: World) -> int | None:
    """Return the free bytes of /dev/shm on the node that has least. Collective."""
    free = None
    with suppress(OSError):  # not every system keeps shared memory there
        free = shutil.disk_usage("/dev/shm").free
    return min((value for value in world.gather_objects(free) if value is not None), default=None)


def _try_shared_memory(world: World) -> SharedMemory:
    """Let the ranks of each node read each other in place. Collective."""
    num_bytes = 5000  # no multiple of a page or a cache line: a gap would show
    node = world.split("node")
    rank, size = node.rank, node.size
    with node.collective("allocating shared memory"):
        win = MPI.Win.Allocate_shared(num_bytes, 1, MPI.INFO_NULL, node.comm)
        win.Lock_all(MPI.MODE_NOCHECK)
        pieces = [np.asarray(win.Shared_query(other)[0]) for other in range(size)]
        pieces[rank][:] = rank % 251 + 1
        win.Sync()
    node.wait_collective(node.comm.Ibarrier(), "writing shared memory")
    win.Sync()
    readable = all(piece.size == num_bytes and (piece == other % 251 + 1).all() for other, piece in enumerate(pieces))
    starts = [piece.ctypes.data for piece in pieces]
    contiguous = starts == [starts[0] + i * num_bytes for i in range(size)]
    load_s = _load_time_s(pieces[(rank + 1) % size]) if size > 1 else None
    everywhere = world.gather_objects((readable, contiguous, load_s))
    pieces.clear()
    with node.collective("freeing shared memory"):
        win.Unlock_all()
        win.Free()
    node.close()
    return SharedMemory(
        readable=all(readable for readable, _, _ in everywhere),
        contiguous=all(contiguous for _, contiguous, _ in everywhere),
        load_s=max((load_s for *_, load_s in everywhere if load_s is not None), default=None),
    )


def _load_time_s(piece: np.ndarray) -> float:
    """Return the median seconds to copy 64 bytes out of another rank's memory, numpy's own time included."""
    return statistics.median(timed(lambda: piece[:64].copy()) for _ in range(20))


def _try_pairs(
    world: World, report: ProbeReport, pairs: dict[str, tuple[int, int]], budget: TrialBudget, on_message: OnMessage
) -> ProbeReport:
    on_message(report, "window")
    far = {kind: pair for kind, pair in pairs.items() if kind == "other_node"}
    most_bytes = _max_bytes(world, report, len(pairs) + len(far))
    trials = Trials(world, pairs, budget, most_bytes, allocate)
    # Over what a node shares: so other nodes read parameters.
    far_reads = Trials(world, far, budget, most_bytes, allocate_shared) if far else trials
    # An operation with all kinds of peers before the next one: should it not come back, most is known.
    for name in OPERATIONS:
        for kind in pairs:
            on_message(report, f"{kind}.{name}")
            result = (far_reads if (kind, name) == ("other_node", "get") else trials).run(name, kind)
            report = report.with_operation(kind, name, result.operation)
            if result.problem:
                report = report.with_problem(Problem((kind, name), result.problem))
    if far:
        far_reads.close()
    trials.close()
    return report


def _max_bytes(world: World, report: ProbeReport, num_targets: int) -> int:
    """Return the largest size to try, so that half of /dev/shm stays free. Collective."""
    world.require_shared_memory(LARGE_BYTES[0] + COUNTER_BYTES, "the window of a probe")
    if report.shm_bytes is None:
        return LARGE_BYTES[-1]
    return max((size for size in LARGE_BYTES if 2 * num_targets * size <= report.shm_bytes), default=LARGE_BYTES[0])


def device_on_all_ranks(world: World) -> "Device | None":
    """Return this rank's device; None unless every rank has one. Collective."""
    device = None
    if has_gpu():
        from odc_mpi.comm.device.device import find_device

        with suppress(UserError):  # a GPU, but a torch that cannot use it
            device = find_device("cuda", world.host_rank)
            assert device is not None
            device.empty_for_windows(1)  # imports CuPy and makes the GPU ready
    return device if all(world.gather_objects(device is not None)) else None


def main(arguments: Sequence[str], tell: Callable[[ChildMessage], None]) -> None:
    """Probe, and tell the report. Collective."""
    with World(timeout_s=PROGRAM_S) as world:
        # Before the first news: loading CuPy may take longer than the deadline of an operation.
        device = device_on_all_ranks(world)
        keys = {"host": report_key(world)}
        if device is not None:
            from odc_mpi.probe.device_probe import device_cache_key

            keys["device"] = device_cache_key(world, device)

        def listen(report: ProbeReport, doing: str | None) -> None:
            tell({"report": report.to_dict(), "doing": doing, "keys": keys})

        probe(world, FULL, on_message=listen, device=device)


if __name__ == "__main__":
    child_main(main)
