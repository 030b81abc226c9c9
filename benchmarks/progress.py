"""Measure the effect of a progress thread on accesses to a rank that computes, and its cost for that rank.

    mpiexec -n 2 python benchmarks/progress.py [--sizes 64,1M,16M] [--push-sizes 512K,2M,8M,32M] [--repeats 9]

Every rank is bound to one core. Rank 0 accesses the target, a rank of another node if there is one; the others wait.

    get         rank 0 reads from an ordinary window of the target, which idles in MPI, or computes: in large matrix
                products, in small torch operations, in pure Python
    politeness  each rank trains a small net: without a thread, with the one of `accumulate`, which only makes MPI
                progress, and with the one of `mailbox`, which polls the inbox, too; no messages arrive
    reduction   rank 0 pushes to the target, which computes: a plain Put, and each reduction (`progress_pushes.py`)

Variants alternate in rounds. With MPIR_CVAR_ASYNC_PROGRESS=1 in the environment MPICH's own thread runs, too: the
increase of `without` is its cost.

`measure` returns, and rank 0 prints as one line of JSON:

    benchmark        "progress"
    library, ranks, nodes, repeats
    cores            core number of every rank
    target           the rank that rank 0 accesses
    other_node       true if it is on another node
    mpich_async_progress   true if MPICH's own asynchronous progress was enabled
    load_average     [before, after], the node's over a minute: above `ranks`, other programs were running
    get              a list, in the order of --sizes, of
        size_bytes
        kinds        {idle, large_products, small_operations, python: {median_s, longest_s, computed_s}}: of a Get,
                     complete at rank 0; and the median time for which the target computed meanwhile; 0 for idle
    politeness
        steps        of training a small net, in a sample
        seconds      {without, accumulate, mailbox: {low, median, high}}, the quartiles over the rounds of the slowest
                     rank's seconds: without a thread, and with the one of each reduction
        slow_down    {accumulate, mailbox: {low, median, high}}, increase of the time relative to `without` of the same
                     round
    reduction        a list, the smallest size first, of
        size_bytes   of a push, all of which the target owns
        variants     {put, accumulate, mailbox: {num_samples, seconds, gb_per_s, of_put}}: of a push, complete at the
                     target, or, for the mailbox, received by it, as {low, median, high}; GB/s are 10^9 bytes per
                     second; the speed as a multiple of Put's, the median over rounds
        left_out     {variant: reason}: those that were too slow in a smaller size
    goals            a list of {goal, size_bytes, variant, figure, expected, reached}; size_bytes is null if not
                     applicable
        get_delay_s      median seconds of a Get, beyond those from an idle target: at most 0.005
        slow_down        median: at most 0.05
        mailbox_of_put   at least 0.25
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from math import ceil
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from goals import Goal
from progress_computing import Sample, Spells, Work, find_target, kinds_of_work, take_one_core_each
from progress_pushes import measure_pushes
from torch import nn

from odc_mpi.bench.measure import header, interleaved, make_progress_printer, parse_sizes, slowest_s
from odc_mpi.bench.transport import require_host_memory, unit_layout
from odc_mpi.comm.factory import window_transport
from odc_mpi.comm.progress import ProgressThread
from odc_mpi.comm.reduce.mailbox import DEFAULT_MAILBOX_BYTES, MailboxGradientStore
from odc_mpi.comm.windows.rma import Window, messages
from odc_mpi.errors import AllRanksUserError
from odc_mpi.formatting import format_size
from odc_mpi.probe.trial import repeat_for
from odc_mpi.runtime.library import is_mpich
from odc_mpi.runtime.ranks import run_on_all_ranks
from odc_mpi.runtime.world import World
from odc_mpi.simulate.events import quartiles

GET_DELAY, SLOW_DOWN = Goal("get_delay_s", "<=", 5e-3), Goal("slow_down", "<=", 0.05)
MAILBOX_OF_PUT = Goal("mailbox_of_put", ">=", 0.25)
#: Values of MPICH's variables that enable something.
_ON = ("1", "y", "yes", "t", "true", "on")
#: A prime, so that no two consecutive pages of the window are equal.
_PERIOD = 251
#: Seconds of a sample of `politeness`, about a hundred polls of the thread, and of the trial that times a step.
SAMPLE_S, _TRIAL_S = 0.25, 0.1
_WIDTH, _NUM_LAYERS, _BATCH = 128, 4, 32
#: The variant of `politeness` that the others are compared with.
WITHOUT = "without"


def main() -> int:
    """Measure, let rank 0 print the object, and return the exit code. Collective."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="64,1M,16M", help="of Gets")
    parser.add_argument("--push-sizes", default="512K,2M,8M,32M", help="of pushes")
    parser.add_argument("--repeats", type=int, default=9, help="rounds")
    parser.add_argument("--budget-s", type=float, default=10.0, help="seconds for the pushes of a size by one variant")
    parser.add_argument("--timeout-s", type=float, default=900.0, help="maximum seconds of a wait for another rank")
    given = parser.parse_args()
    world = World(timeout_s=given.timeout_s, limit="--timeout-s")

    def work() -> None:
        sizes, push_sizes = parse_sizes(given.sizes), parse_sizes(given.push_sizes, "--push-sizes")
        result = measure(world, sizes, push_sizes, given.repeats, given.budget_s, make_progress_printer(world.rank))
        if world.rank == 0:
            print(json.dumps(result), flush=True)

    return run_on_all_ranks(world, work)


def measure(
    world: World,
    sizes: list[int],
    push_sizes: list[int],
    repeats: int,
    budget_s: float,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measure all three parts. Collective.

    Args:
        world: Two ranks or more.
        sizes: Sizes of Gets in bytes.
        push_sizes: Sizes of pushes in bytes, multiples of 4.
        repeats: Samples of each Get and push; there are twice as many rounds of politeness.
        budget_s: Seconds for the pushes of a size by one variant.
        report: Called with a line about the next measurement.

    Returns:
        The object that the module's docstring describes, the same on every rank.

    Raises:
        AgreedError: There is one rank, MPI does not support calls from threads, or memory is insufficient.
        RuntimeError: A value or sum is wrong.
    """
    _require(world, sizes, push_sizes)
    load = os.getloadavg()[0]
    target = find_target(world)
    cores = take_one_core_each(world, first=(0, target))
    report(f"Gets of {', '.join(map(format_size, sizes))} from rank {target}")
    read = measure_gets(world, target, sizes, repeats)
    report("cost of a thread without messages")
    polite = measure_politeness(world, 2 * repeats)
    report(f"pushes of {', '.join(map(format_size, sorted(push_sizes)))} to rank {target}")
    pushed = measure_pushes(world, target, push_sizes, repeats, budget_s)
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
    """Compare `get`, `politeness` and `reduction` of the object with the goals; return `goals`."""
    judged = []
    for size in read:
        kinds = {name: entry["median_s"] for name, entry in size["kinds"].items()}
        idle_s = kinds.pop("idle")
        judged += [
            GET_DELAY.evaluate(median_s - idle_s, size_bytes=size["size_bytes"], variant=name)
            for name, median_s in kinds.items()
        ]
    judged += [
        SLOW_DOWN.evaluate(spread["median"], size_bytes=None, variant=name)
        for name, spread in polite["slow_down"].items()
    ]
    for size in pushed:
        mailbox = size["variants"].get("mailbox")
        if mailbox is not None and mailbox["of_put"] is not None:
            judged.append(MAILBOX_OF_PUT.evaluate(mailbox["of_put"], size_bytes=size["size_bytes"], variant="mailbox"))
    return judged


def _require(world: World, sizes: list[int], push_sizes: list[int]) -> None:
    """Check the requirements of the machine. Collective."""
    if world.size == 1:
        raise AllRanksUserError("expected two ranks or more, got 1")
    if not all(world.gather_objects(window_transport(world).thread_safe)):
        raise AllRanksUserError("expected MPI to grant MPI_THREAD_MULTIPLE, which a progress thread needs")
    # Gets: a window and two copies. Pushes: windows and shards of all sizes, an inbox, sources of Puts, and copies.
    reading, inbox = 3 * max(sizes), DEFAULT_MAILBOX_BYTES
    pushing = 3 * sum(push_sizes) + inbox + 4 * max(push_sizes)
    wanted = world.local_size * max(reading, pushing)
    require_host_memory(world, wanted, "--sizes or --push-sizes")
    shared = max(max(sizes), sum(push_sizes) + max(push_sizes) + inbox)
    world.require_shared_memory(shared, "the windows")


def _async_progress(library: str, environment: Mapping[str, str]) -> bool:
    """Return True if MPICH's own asynchronous progress is enabled."""
    return is_mpich(library) and environment.get("MPIR_CVAR_ASYNC_PROGRESS", "").lower() in _ON


def read(world: World, window: Window, target: int, memory: np.ndarray) -> float:
    """Read the first bytes of a target's part of a window; return the seconds. One-sided.

    Args:
        window: Window of bytes that contains the `pattern` of each rank.
        target: Rank whose part is read.
        memory: Destination, uint8; its size is the number of bytes to read.

    Raises:
        RuntimeError: The data is wrong.
    """
    memory[:] = _PERIOD  # a value that the pattern does not contain
    began = perf_counter()
    with world.deadline(f"reading {len(memory)} bytes of a rank that computes", [target]):
        window.get_messages(memory, messages(target, 0, len(memory)))
        window.flush(target)
    seconds = perf_counter() - began
    if not np.array_equal(memory, pattern(len(memory), target)):
        raise RuntimeError(f"a Get of {len(memory)} bytes from rank {target} returned wrong data")
    return seconds


def measure_gets(world: World, target: int, sizes: list[int], repeats: int) -> list[dict[str, Any]]:
    """Read from a target that computes, alternating the kinds of work. Collective.

    Args:
        target: Rank that computes.
        sizes: Sizes of Gets in bytes.
        repeats: Samples of each kind and size.

    Returns:
        `get` of the object, the same on every rank.
    """
    window = Window(world, max(sizes), torch.uint8)
    window.tensor.numpy()[:] = pattern(max(sizes), world.rank)
    window.sync()
    buffer = np.empty(max(sizes) if world.rank == 0 else 0, dtype=np.uint8)
    spells = Spells(world, target)
    progress = ProgressThread(world, make_progress=lambda: False)
    kinds: dict[str, Work] = {"idle": None, **kinds_of_work()}
    result = []
    for num_bytes in sizes:
        read_once = partial(read, world, window, target, buffer[:num_bytes])
        spells.sample(None, read_once)  # includes connections and fresh pages
        samples = interleaved({name: partial(spells.sample, work, read_once) for name, work in kinds.items()}, repeats)
        result.append({"size_bytes": num_bytes, "kinds": {name: _get_entry(taken) for name, taken in samples.items()}})
    progress.close()
    spells.free()
    with world.collective("freeing a window"):
        window.free()
    return result


def _get_entry(samples: list[Sample]) -> dict[str, float]:
    seconds = [sample.seconds for sample in samples]
    computed_s = median(sample.computed_s for sample in samples)
    return {"median_s": median(seconds), "longest_s": max(seconds), "computed_s": computed_s}


def pattern(num_bytes: int, rank: int) -> np.ndarray:
    """Return the content of a rank's part of the window, `[num_bytes]` uint8."""
    period = np.roll(np.arange(_PERIOD, dtype=np.uint8), -rank)
    return np.resize(period, num_bytes)


def measure_politeness(world: World, rounds: int, sample_s: float = SAMPLE_S) -> dict[str, Any]:
    """Compute with and without a progress thread. Collective.

    Args:
        world: Ranks without a progress thread.
        rounds: Number of ratios to measure.
        sample_s: Seconds of a sample.

    Returns:
        `politeness` of the object, the same on every rank.
    """
    step = _training_step()
    step()  # the first one is slower
    steps = max(world.gather_objects(ceil(sample_s / _step_s(step))))
    mailbox = MailboxGradientStore(world, torch.float32)
    mailbox.plan([unit_layout(1, world.size)])
    mailbox.allocate()
    serving: dict[str, Callable[[], bool]] = {"accumulate": lambda: False, "mailbox": mailbox.make_progress}
    run = partial(_run, world, step, steps)
    variants = {name: partial(_run_with_thread, world, serve, run) for name, serve in serving.items()}
    times: dict[str, list[float]] = interleaved({WITHOUT: run, **variants}, rounds)
    with world.collective("freeing the windows"):
        mailbox.free()
    return {
        "steps": steps,
        "seconds": {name: quartiles(own) for name, own in times.items()},
        "slow_down": {name: quartiles(slow_downs(times[WITHOUT], times[name])) for name in serving},
    }


def slow_downs(without: list[float], with_thread: list[float]) -> list[float]:
    """Return the relative increase of the time in each round."""
    return [b / a - 1 for a, b in zip(without, with_thread, strict=True)]


def _run_with_thread(world: World, serve: Callable[[], bool], run: Callable[[], float]) -> float:
    progress = ProgressThread(world, serve)
    seconds = run()
    progress.close()
    return seconds


def _run(world: World, step: Callable[[], object], steps: int) -> float:
    """Return the slowest rank's seconds for steps that all ranks begin together. Collective."""

    def compute() -> None:
        # Only this rank's progress thread, if any, may enter MPI.
        with world.background_progress_off():
            for _ in range(steps):
                step()

    return slowest_s(world, "computing", compute)


def _training_step() -> Callable[[], object]:
    net = nn.Sequential(*(layer for _ in range(_NUM_LAYERS) for layer in (nn.Linear(_WIDTH, _WIDTH), nn.ReLU())))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    batch = torch.randn(_BATCH, _WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()

    return step


def _step_s(step: Callable[[], object]) -> float:
    began = perf_counter()
    steps = len(repeat_for(_TRIAL_S, step))
    return (perf_counter() - began) / steps


if __name__ == "__main__":
    sys.exit(main())
