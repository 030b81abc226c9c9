"""What a progress thread achieves for those who turn to a rank that computes, and what it costs that rank.

Every rank keeps to one core. Rank 0 turns to the target, a rank of another node if there is one; the others wait.

    get         rank 0 reads from an ordinary window of the target, which idles in MPI, or computes: in large matrix
                products, in small torch operations, in pure Python (`bench.progress.gets`)
    politeness  all ranks compute, with and without a progress thread that has nothing to serve
                (`bench.progress.politeness`)
    reduction   rank 0 pushes to the target, which computes: a plain Put, and each reduction (`bench.progress.pushes`)

Whatever is compared takes turns, round after round. Run once more with MPIR_CVAR_ASYNC_PROGRESS=1 in the environment,
MPICH's own thread is there, too: how much longer `without` then takes is what that one costs.

`measure` returns, and `--json` prints, one object:

    benchmark        "progress"
    library, ranks, nodes, repeats
    cores            of every rank the number of the one that it keeps to
    target           the rank that rank 0 turns to
    other_node       whether it is on another node
    mpich_async_progress   whether MPICH's own asynchronous progress was on
    load_average     [before, after], the node's over a minute: above `ranks`, somebody else was computing
    get              a list, as asked for, of
        size_bytes
        kinds        {idle, large_products, small_operations, python: {median_s, longest_s, computed_s}}: of a Get,
                     complete at rank 0; and for how long the target computed around it, the median; 0 for idle
    politeness
        steps        of training a small net, in a sample
        seconds      {without, accumulate, mailbox: {low, median, high}}, the quartiles over the rounds of the slowest
                     rank's seconds: without a thread, and with the one of each reduction
        slow_down    {accumulate, mailbox: {low, median, high}}, by which part of `without` of the same round it took
                     longer
    reduction        a list, the smallest size first, of
        size_bytes   of a push, all of which the target owns
        variants     {put, accumulate, mailbox: {num_samples, seconds, gb_per_s, of_put}}: of a push, complete at the
                     target, or, for the mailbox, in its hands, as {low, median, high}; GB/s are 10^9 bytes per second;
                     the speed as a multiple of Put's, the median over rounds
        left_out     {variant: reason}: those that were too slow in a smaller size
    goals            a list of {goal, size_bytes, variant, figure, expected, reached}; size_bytes is null where there is
                     none
        get_delay_s      median seconds of a Get, beyond those from an idle target: at most 0.005
        slow_down        median: at most 0.05
        mailbox_of_put   at least 0.25
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

from odc_mpi.bench.fetch_and_push import require_host_memory
from odc_mpi.bench.measure import Goal
from odc_mpi.bench.progress import gets, politeness, pushes
from odc_mpi.bench.progress.computing import find_target, take_one_core_each
from odc_mpi.bench.together import header
from odc_mpi.comm.compose import window_transport
from odc_mpi.comm.reduce.mailbox import DEFAULT_MAILBOX_BYTES
from odc_mpi.errors import AgreedError
from odc_mpi.runtime.world import World
from odc_mpi.wording import format_size

GET_DELAY, SLOW_DOWN = Goal("get_delay_s", "<=", 5e-3), Goal("slow_down", "<=", 0.05)
MAILBOX_OF_PUT = Goal("mailbox_of_put", ">=", 0.25)
#: How MPICH writes that something is on.
_ON = ("1", "y", "yes", "t", "true", "on")


def measure(
    world: World,
    sizes: list[int],
    push_sizes: list[int],
    repeats: int,
    budget_s: float,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measure all three. Collective.

    Args:
        world: The ranks, two or more.
        sizes: In bytes, of Gets.
        push_sizes: In bytes, of pushes, multiples of 4.
        repeats: Samples of each Get and push; there are twice as many rounds of politeness.
        budget_s: Seconds for the pushes of a size by one variant.
        report: Called with a line on what comes next.

    Returns:
        What the module's docstring describes, the same on every rank.

    Raises:
        AgreedError: There is one rank; MPI does not let threads call it; there is too little memory.
        RuntimeError: Something was read or summed wrongly.
    """
    _require(world, sizes, push_sizes)
    load = os.getloadavg()[0]
    target = find_target(world)
    cores = take_one_core_each(world, first=(0, target))
    report(f"Gets of {', '.join(map(format_size, sizes))} from rank {target}")
    read = gets.measure(world, target, sizes, repeats)
    report("what a thread with nothing to serve costs")
    polite = politeness.measure(world, 2 * repeats)
    report(f"pushes of {', '.join(map(format_size, sorted(push_sizes)))} to rank {target}")
    pushed = pushes.measure(world, target, push_sizes, repeats, budget_s)
    return {
        **header(
            world,
            "progress",
            load,
            repeats=repeats,
            cores=cores,
            target=target,
            other_node=world.num_nodes > 1,
            mpich_async_progress=all(world.gather_objects(_async_progress(world.mpi_library, os.environ))),
        ),
        "get": read,
        "politeness": polite,
        "reduction": pushed,
        "goals": judge(read, polite, pushed),
    }


def judge(read: list[dict[str, Any]], polite: dict[str, Any], pushed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare `get`, `politeness` and `reduction` of the object with the goals; return `goals`. Local."""
    judged = []
    for size in read:
        kinds = {name: entry["median_s"] for name, entry in size["kinds"].items()}
        idle_s = kinds.pop("idle")
        judged += [
            GET_DELAY.judge(median_s - idle_s, size_bytes=size["size_bytes"], variant=name)
            for name, median_s in kinds.items()
        ]
    judged += [
        SLOW_DOWN.judge(spread["median"], size_bytes=None, variant=name) for name, spread in polite["slow_down"].items()
    ]
    for size in pushed:
        mailbox = size["variants"].get("mailbox")
        if mailbox is not None and mailbox["of_put"] is not None:
            judged.append(MAILBOX_OF_PUT.judge(mailbox["of_put"], size_bytes=size["size_bytes"], variant="mailbox"))
    return judged


def _require(world: World, sizes: list[int], push_sizes: list[int]) -> None:
    """Check what the machine has to have. Collective."""
    if world.size == 1:
        raise AgreedError("bench progress: expected two ranks or more, of which one computes, got 1")
    if not all(world.gather_objects(window_transport(world).threads)):
        raise AgreedError("bench progress: expected MPI to grant MPI_THREAD_MULTIPLE, which a progress thread needs")
    # Of Gets: a window, and two copies. Of pushes: windows and shards of all sizes, an inbox, what is put, and copies.
    reading, inbox = 3 * max(sizes), DEFAULT_MAILBOX_BYTES
    pushing = 3 * sum(push_sizes) + inbox + 4 * max(push_sizes)
    wanted = world.local_size * max(reading, pushing)
    require_host_memory(world, wanted, "--sizes or --push-sizes")
    shared = max(max(sizes), sum(push_sizes) + max(push_sizes) + inbox)
    world.require_shared_memory(shared, "the windows")


def _async_progress(library: str, environment: Mapping[str, str]) -> bool:
    """Whether MPICH was asked for its own asynchronous progress. Local."""
    return library.startswith("MPICH") and environment.get("MPIR_CVAR_ASYNC_PROGRESS", "").lower() in _ON
