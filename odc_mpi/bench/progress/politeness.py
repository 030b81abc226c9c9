"""What a progress thread with nothing to serve takes from a rank that computes.

All ranks train a small net each, without a word to each other: without a thread, with the one that `accumulate` has,
which only drives MPI, and with the one that `mailbox` has, which looks into the inbox, too. In turn, round after round;
the slowest rank's time counts.
"""

from collections.abc import Callable
from functools import partial
from math import ceil
from time import perf_counter
from typing import Any

import torch
from torch import nn

from odc_mpi.bench.fetch_and_push import unit_layout
from odc_mpi.bench.measure import interleaved, quartiles
from odc_mpi.bench.together import slowest_s
from odc_mpi.comm.progress import ProgressThread
from odc_mpi.comm.reduce.mailbox import MailboxReduction
from odc_mpi.runtime.world import World
from odc_mpi.stack.repeat import each_for

#: A sample takes about so long: a hundred looks of the thread.
SAMPLE_S = 0.25
#: How long to find out what a step takes.
_TRIAL_S = 0.1
_WIDTH, _NUM_LAYERS, _BATCH = 128, 4, 32

#: The variant that the others are compared with.
WITHOUT = "without"


def measure(world: World, rounds: int, sample_s: float = SAMPLE_S) -> dict[str, Any]:
    """Compute with and without a progress thread. Collective.

    Args:
        world: The ranks, none of which has a progress thread.
        rounds: Ratios to take.
        sample_s: Seconds of a sample.

    Returns:
        `politeness` of `bench.progress.benchmark`, the same on every rank.
    """
    step = _training_step()
    step()  # the first is none like the others
    steps = max(world.gather_objects(ceil(sample_s / _step_s(step))))
    mailbox = MailboxReduction(world, torch.float32)
    mailbox.plan([unit_layout(1, world.size)])
    mailbox.allocate()
    serving: dict[str, Callable[[], bool]] = {"accumulate": lambda: False, "mailbox": mailbox.serve}
    run = partial(_run, world, step, steps)
    variants = {name: partial(_run_with_thread, world, serve, run) for name, serve in serving.items()}
    times: dict[str, list[float]] = interleaved({WITHOUT: run, **variants}, rounds)
    with world.meeting("freeing the windows"):
        mailbox.free()
    return {
        "steps": steps,
        "seconds": {name: quartiles(own) for name, own in times.items()},
        "slow_down": {name: quartiles(slow_downs(times[WITHOUT], times[name])) for name in serving},
    }


def slow_downs(without: list[float], with_thread: list[float]) -> list[float]:
    """Return for each round by which part of the time it took longer. Local."""
    return [b / a - 1 for a, b in zip(without, with_thread, strict=True)]


def _run_with_thread(world: World, serve: Callable[[], bool], run: Callable[[], float]) -> float:
    progress = ProgressThread(world, serve)
    seconds = run()
    progress.close()
    return seconds


def _run(world: World, step: Callable[[], object], steps: int) -> float:
    """Return the slowest rank's seconds for some steps that all begin together. Collective."""

    def compute() -> None:
        # Nothing of this rank but the thread, if there is one, is to enter MPI.
        with world.inattentive():
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
    steps = len(each_for(_TRIAL_S, step))
    return (perf_counter() - began) / steps
