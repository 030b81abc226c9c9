"""Benchmark of the step times of all transports and balancing strategies, with more ranks than cores.

Windows, collectives, tickets, plans and synchronization points are those of a training run. Only the computation of a
unit is replaced by a sleep of its modeled time, scaled down. A sleeping rank does not need a core of its own.
Units are small for the same reason. The benchmark measures how ranks wait for each other, not bandwidth.

    one microbatch     for each unit: fetch, sleep; then for each unit in reverse: fetch, sleep twice as long, push a
                       gradient
    one minibatch      ranks begin together; the time of the slowest rank until parameters are published counts
    one round          all schedules run the same minibatch, one after the other, in an order that rotates

Results have the type of the simulator, `SimulationResult`. Their times are divided by the scale. Split sequences are
simulated only: their chunks wait for each other's keys and values, which are not computed here.
"""

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from odc_mpi.bench.measure import header, rotate
from odc_mpi.bench.runners import CollectiveRunner, MeasuredTiming, Runner, WindowRunner
from odc_mpi.errors import AllRanksUserError
from odc_mpi.runtime.world import World
from odc_mpi.simulate.scenario import Scenario
from odc_mpi.simulate.simulate import SCHEDULES, SPLIT, SimulationResult, floor_s, plan, simulate

#: Schedules to measure, all without split sequences.
MEASURED = tuple(name for name in SCHEDULES if name != SPLIT)


def measure(
    world: World, scenario: Scenario, step_s: float, report: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Run all schedules on the same minibatches, and also simulate them. Collective.

    `step_s` is the average sleep for an even share of a minibatch; it determines the scale of all times. The JSON
    object has the keys of `header`, the measured `SimulationResult`, and, on rank 0, the simulator's speed-ups in
    `simulated`.

    Raises `AllRanksUserError` if the ranks run on several nodes.
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
        **result.as_json(),
        "simulated": simulate(scenario).speedup if world.rank == 0 else None,
    }


def _run_schedules(world: World, scenario: Scenario, step_s: float, report: Callable[[str], None]) -> SimulationResult:
    minibatches = list(scenario.minibatches())
    scale = step_s / float(np.mean([floor_s(minibatch, scenario.max_tokens)[1] for minibatch in minibatches]))
    runners: dict[str, Runner] = {
        "window": WindowRunner(world, scenario.num_units),
        "collective": CollectiveRunner(world, scenario.num_units),
    }
    samples: dict[str, list[MeasuredTiming]] = {name: [] for name in MEASURED}
    for turn, minibatch in enumerate(minibatches):
        report(f"minibatch {turn + 1} of {len(minibatches)}")
        for name in rotate(MEASURED, turn):
            transport, balance = name.split("/")
            samples[name].append(runners[transport].run(minibatch, plan(scenario, minibatch, balance), scale))
    for runner in runners.values():
        runner.close()
    timings_of_ranks = world.gather_objects(samples)
    turns = range(len(minibatches))
    return SimulationResult.from_times(
        scenario,
        {
            name: [max(timings[name][turn].end_s for timings in timings_of_ranks) / scale for turn in turns]
            for name in MEASURED
        },
        {
            name: np.array([sum(s.busy_s for s in timings[name]) for timings in timings_of_ranks]) / scale
            for name in MEASURED
        },
        {name: [timings[name][0].slept for timings in timings_of_ranks] for name in MEASURED},
    )
