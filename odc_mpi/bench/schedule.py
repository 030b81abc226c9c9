"""Benchmark of the step times of all transports and balancing strategies. Ranks may outnumber cores.

The benchmark measures how long ranks wait for each other, not bandwidth. It uses the windows, collectives, tickets,
plans and synchronization points of a training run, but instead of computing a unit, a rank sleeps for the modeled
duration multiplied by a scale. Sleeping ranks can share a core. Units are small, so transfers take little time.

    one microbatch     for each unit: fetch it and sleep; then, for each unit in reverse order: fetch it, sleep twice as
                       long, and push a gradient
    one minibatch      all ranks begin at the same time; the time ends when the slowest rank has published parameters
    one round          all schedules run the same minibatch, sequentially, in an order that rotates

Results have the same keys as those of the simulator, with times divided by the scale. Schedules with split sequences
are only simulated, because their chunks wait for keys and values, which are not computed here.
"""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice, repeat
from typing import Any, NamedTuple

import numpy as np
import torch

from odc_mpi.bench.measure import header, rotate
from odc_mpi.bench.transport import unit_layout
from odc_mpi.comm.factory import collective_transport, window_transport
from odc_mpi.comm.tickets import Tickets
from odc_mpi.comm.transport import Transport
from odc_mpi.data.plan.balance import Plan
from odc_mpi.errors import AllRanksUserError
from odc_mpi.runtime.world import World
from odc_mpi.simulate.events import FORWARD, Intervals, merge_intervals
from odc_mpi.simulate.scenario import Scenario, SimulatedMinibatch
from odc_mpi.simulate.simulate import PAUSE_S, SCHEDULES, SPLIT, floor_s, plan, simulate, summarize

#: Schedules to measure, which are all schedules without split sequences.
MEASURED = tuple(name for name in SCHEDULES if name != SPLIT)
#: Number of elements in a unit.
UNIT_NUMEL = 1024


def measure(
    world: World, scenario: Scenario, step_s: float, report: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Measure the schedules in `MEASURED` on the same minibatches, and simulate all schedules on rank 0. Collective.

    Times are scaled so that a perfectly balanced minibatch takes `step_s` seconds on average. Returns a JSON object
    with the keys of `header`, the measured results (see `summarize`), and `simulated`, which contains the simulated
    speed-ups on rank 0 and is None on other ranks. Raises `AllRanksUserError` if there are several nodes.
    """
    if world.num_nodes > 1:
        raise AllRanksUserError(
            f"bench schedule measures on one node, got {world.num_nodes}: sleeping ranks make no progress for other "
            "nodes. Use odc-mpi simulate, with any number of ranks"
        )
    before = os.getloadavg()[0]
    result = _run_schedules(world, scenario, step_s, report)
    return {
        **header(world, "schedule", before, slept_step_s=step_s),
        **result,
        "simulated": simulate(scenario)["speedup"] if world.rank == 0 else None,
    }


def _run_schedules(world: World, scenario: Scenario, step_s: float, report: Callable[[str], None]) -> dict[str, Any]:
    minibatches = list(scenario.minibatches())
    scale = step_s / float(np.mean([floor_s(minibatch)[1] for minibatch in minibatches]))
    tickets = Tickets(world)
    runners = {
        "window": Runner(world, window_transport(world), scenario.num_units, tickets),
        "collective": Runner(world, collective_transport(world), scenario.num_units),
    }
    samples: dict[str, list[MeasuredTiming]] = {name: [] for name in MEASURED}
    for number, minibatch in enumerate(minibatches):
        report(f"minibatch {number + 1} of {len(minibatches)}")
        for name in rotate(MEASURED, number):
            transport, balance = name.split("/")
            samples[name].append(runners[transport].run(minibatch, plan(minibatch, balance), scale))
    for runner in runners.values():
        runner.close()
    tickets.close()
    timings_of_ranks = world.gather_objects(samples)
    numbers = range(len(minibatches))
    return summarize(
        scenario,
        {
            name: [max(timings[name][number].end_s for timings in timings_of_ranks) / scale for number in numbers]
            for name in MEASURED
        },
        {
            name: np.array([sum(s.busy_s for s in timings[name]) for timings in timings_of_ranks]) / scale
            for name in MEASURED
        },
        {name: [timings[name][0].slept for timings in timings_of_ranks] for name in MEASURED},
    )


@dataclass(frozen=True)
class MeasuredTiming:
    """Times of one rank in one minibatch, in seconds. Dummy microbatches count only toward `end_s`.

    Attributes:
        end_s: Time from the start of the minibatch until the parameters are published.
        busy_s: Sum of the requested sleep times.
        slept: Intervals in which the rank slept, relative to the start of the minibatch and divided by the scale.
    """

    end_s: float
    busy_s: float
    slept: Intervals


class TimedMicrobatch(NamedTuple):
    """One rank's microbatch. `seconds` is its modeled duration, summed over all units, before scaling."""

    seconds: float
    is_dummy: bool = False


class Runner:
    """Runs plans of minibatches over a transport. Construction is collective.

    With `tickets`, each rank runs its own microbatches, then claims those that any rank may run. Without them, as
    collectives require, a rank with fewer microbatches than others also runs dummy microbatches.
    """

    def __init__(self, world: World, transport: Transport, num_units: int, tickets: Tickets | None = None) -> None:
        self._world, self._transport, self._tickets = world, transport, tickets
        transport.allocate([unit_layout(UNIT_NUMEL, world.size)] * num_units)
        self._units = range(num_units)
        self._gradient = torch.ones(UNIT_NUMEL)

    def run(self, minibatch: SimulatedMinibatch, plan: Plan, scale: float) -> MeasuredTiming:
        """Run a minibatch, with sleeps scaled by `scale`. All ranks begin at the same time. Collective."""
        sleeper, busy_s = Sleeper(), 0.0
        self._world.wait_collective(self._world.comm.Ibarrier(), "beginning a minibatch together")
        began = time.perf_counter()
        for microbatch in self._microbatches(minibatch, plan):
            before = len(sleeper.slept)
            self._run(sleeper, microbatch, scale)
            if microbatch.is_dummy:
                del sleeper.slept[before:]
            else:
                busy_s += scale * microbatch.seconds
        self._transport.complete_gradients(np.zeros(1))
        if self._tickets:
            self._tickets.reset()
        self._transport.publish_parameters()
        end_s = time.perf_counter() - began
        slept = (((start - began) / scale, (stop - began) / scale) for start, stop in sleeper.slept)
        return MeasuredTiming(end_s, busy_s, merge_intervals(slept, PAUSE_S))

    def close(self) -> None:
        """Free the transport. Collective."""
        self._transport.close()

    def _microbatches(self, minibatch: SimulatedMinibatch, plan: Plan) -> Iterator[TimedMicrobatch]:
        """Yield this rank's microbatches. The caller must run each one before requesting the next. One-sided."""
        rank = self._world.rank
        assigned = plan.microbatches[rank]
        if self._tickets is None:
            for microbatch in islice(chain(assigned, repeat(())), max(map(len, plan.microbatches))):
                yield TimedMicrobatch(minibatch.duration_s(rank, microbatch), is_dummy=not microbatch)
            return
        claimed = map(plan.pool.__getitem__, self._tickets.draw(len(plan.pool)) if plan.pool else ())
        for k, microbatch in enumerate(chain(filter(None, assigned), claimed)):
            yield TimedMicrobatch(minibatch.window_s(rank, microbatch, is_first=not k))

    def _run(self, sleeper: "Sleeper", microbatch: TimedMicrobatch, scale: float) -> None:
        num_units, seconds = len(self._units), scale * microbatch.seconds
        for unit in self._units:
            self._with_unit(unit, sleeper, FORWARD * seconds / num_units)
        pushes = []
        for unit in reversed(self._units):
            self._with_unit(unit, sleeper, (1 - FORWARD) * seconds / num_units)
            pushes.append(self._transport.gradients.push(unit, self._gradient))
        for push in pushes:
            push.wait()

    def _with_unit(self, unit: int, sleeper: "Sleeper", seconds: float) -> None:
        fetched = self._transport.parameters.fetch(unit).wait()
        sleeper.sleep(seconds)
        self._transport.parameters.release(fetched)


class Sleeper:
    """Sleeps without accumulating errors. `slept` contains the start and end of each sleep."""

    def __init__(self) -> None:
        self.slept: Intervals = []
        self._late_s = 0.0

    def sleep(self, seconds: float) -> None:
        """Sleep for `seconds`, minus the time by which the previous sleep overran."""
        due = seconds - self._late_s
        began = time.perf_counter()
        if due > 0:
            time.sleep(due)
        ended = time.perf_counter()
        self._late_s = ended - began - due
        self.slept.append((began, ended))
