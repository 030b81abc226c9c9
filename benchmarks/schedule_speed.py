"""Compare step times of all transports and balancing strategies, with sleeps in place of computation.

    mpiexec -n 8 python benchmarks/schedule_speed.py [--per-rank 8] [--speed-variation 0.1] [--step-s 1] [--json]

Ranks must be on one node, and may outnumber its cores. Other options are those of `odc-mpi simulate`.

The times show how long ranks wait for each other, not bandwidth. The program uses the windows, collectives, tickets,
plans and synchronization points of a training run, but instead of computing a unit, a rank sleeps for the modeled
duration multiplied by a scale. Sleeping ranks can share a core. Units are small, so transfers take little time.

    one microbatch     for each unit: fetch it and sleep; then, for each unit in reverse order: fetch it, sleep twice as
                       long, and push a gradient
    one minibatch      all ranks begin at the same time; the time ends when the slowest rank has published parameters
    one round          all schedules run the same minibatch, sequentially, in an order that rotates

Results have the same keys as those of the simulator, with times divided by the scale, those of `measure.header`,
`slept_step_s`, and `simulated`: the speed-ups that the simulator computes. Schedules with split sequences are only
simulated, because their chunks wait for keys and values, which are not computed here.
"""

import argparse
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice, repeat
from typing import Any, NamedTuple

import numpy as np
import torch
from collectives import CollectiveCommunicator
from measure import Measure, header, rotate, run_program
from transport_speed import unit_layout
from typing_extensions import override

from odc_mpi.cli.options import Parser, add_scenario, build_scenario
from odc_mpi.comm.factory import window_transport
from odc_mpi.comm.group import Group
from odc_mpi.comm.tickets import Tickets
from odc_mpi.comm.work import Work
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
#: Options of the simulator that do not apply: mpiexec defines the number of ranks, and there are no islands.
OMITTED = ("ranks", "num_islands", "link_gb_per_s", "sync_every")


def main() -> int:
    """Measure, let rank 0 print the result, and return the exit code. Collective."""
    parser = Parser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add_scenario(parser, OMITTED, num_minibatches=10, num_units=4)
    help_text = "seconds of a perfectly balanced minibatch, to which all times are scaled; default: 1"
    parser.add_argument("--step-s", type=step_seconds, default=1.0, metavar="X", help=help_text)

    def prepare(arguments: argparse.Namespace) -> Measure:
        scenario = build_scenario(arguments)

        def measure_on(world: World, report: Callable[[str], None]) -> dict[str, Any]:
            resized = world.run_on_all(lambda: replace(scenario, ranks=world.size))
            return measure(world, resized, arguments.step_s, report)

        return measure_on

    return run_program(parser, prepare)


def step_seconds(text: str) -> float:
    """Parse the duration of a step, which must be from 0.001 to 3600 seconds."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1e-3 <= seconds <= 3600:  # nan fails both comparisons
        raise argparse.ArgumentTypeError(f"expected seconds from 0.001 to 3600, got {text!r}")
    return seconds


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
            f"schedules are measured on one node, got {world.num_nodes}: sleeping ranks make no progress for other "
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
    runners: dict[str, Runner] = {
        "window": WindowRunner(world, scenario.num_units, tickets),
        "collective": CollectiveRunner(world, scenario.num_units),
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
        slept: Intervals in which the rank slept, from the start of the minibatch. In contrast to the other attributes,
            they are divided by the argument `scale` of `Runner.run`.
    """

    end_s: float
    busy_s: float
    slept: Intervals


class TimedMicrobatch(NamedTuple):
    """One rank's microbatch. `seconds` is its modeled duration, summed over all units, before scaling."""

    seconds: float
    is_dummy: bool = False


class Runner(ABC):
    """Runs plans of minibatches. Subclasses define how the ranks communicate, and who runs which microbatches."""

    def __init__(self, world: World, num_units: int) -> None:
        self._world, self._num_units = world, num_units

    def run(self, minibatch: SimulatedMinibatch, plan: Plan, scale: float) -> MeasuredTiming:
        """Run a minibatch, with sleeps scaled by `scale`. All ranks begin at the same time. Collective."""
        sleeper, busy_s = Sleeper(), 0.0
        self._world.wait_collective(self._world.comm.Ibarrier(), "beginning a minibatch together")
        began = time.perf_counter()
        for microbatch in self.microbatches(minibatch, plan):
            before = len(sleeper.slept)
            self._run(sleeper, microbatch, scale)
            if microbatch.is_dummy:
                del sleeper.slept[before:]
            else:
                busy_s += scale * microbatch.seconds
        self.finish()
        end_s = time.perf_counter() - began
        slept = (((start - began) / scale, (stop - began) / scale) for start, stop in sleeper.slept)
        return MeasuredTiming(end_s, busy_s, merge_intervals(slept, PAUSE_S))

    @abstractmethod
    def microbatches(self, minibatch: SimulatedMinibatch, plan: Plan) -> Iterator[TimedMicrobatch]:
        """Yield this rank's microbatches. The caller must run each one before requesting the next."""

    @abstractmethod
    def use(self, unit: int, sleeper: "Sleeper", seconds: float) -> None:
        """Sleep for `seconds` with the full parameters of a unit."""

    @abstractmethod
    def push(self, unit: int) -> Work:
        """Start adding a full gradient of a unit to the shards of its owners."""

    @abstractmethod
    def finish(self) -> None:
        """Complete the gradients of all ranks, and publish the parameters. Collective."""

    @abstractmethod
    def close(self) -> None:
        """Free the memory and communicators of this runner. Collective."""

    def _run(self, sleeper: "Sleeper", microbatch: TimedMicrobatch, scale: float) -> None:
        seconds = scale * microbatch.seconds / self._num_units
        for unit in range(self._num_units):
            self.use(unit, sleeper, FORWARD * seconds)
        pushes = []
        for unit in reversed(range(self._num_units)):
            self.use(unit, sleeper, (1 - FORWARD) * seconds)
            pushes.append(self.push(unit))
        for push in pushes:
            push.wait()


class WindowRunner(Runner):
    """Runner with one-sided operations on windows. Construction is collective.

    Each rank runs its own microbatches, then claims those that any rank may run.
    """

    def __init__(self, world: World, num_units: int, tickets: Tickets) -> None:
        super().__init__(world, num_units)
        self._tickets, self._transport = tickets, window_transport(world)
        self._transport.allocate([unit_layout(UNIT_NUMEL, world.size)] * num_units)
        self._gradient = torch.ones(UNIT_NUMEL)

    @override
    def microbatches(self, minibatch: SimulatedMinibatch, plan: Plan) -> Iterator[TimedMicrobatch]:
        """Yield this rank's own microbatches, then those that it claims. One-sided."""
        rank = self._world.rank
        claimed = map(plan.pool.__getitem__, self._tickets.draw(len(plan.pool)) if plan.pool else ())
        for k, microbatch in enumerate(chain(filter(None, plan.microbatches[rank]), claimed)):
            yield TimedMicrobatch(minibatch.window_s(rank, microbatch, is_first=not k))

    @override
    def use(self, unit: int, sleeper: "Sleeper", seconds: float) -> None:
        """Fetch a unit, sleep, and release the unit. One-sided."""
        fetched = self._transport.parameters.fetch(unit).wait()
        sleeper.sleep(seconds)
        self._transport.parameters.release(fetched)

    @override
    def push(self, unit: int) -> Work:
        return self._transport.gradients.push(unit, self._gradient)

    @override
    def finish(self) -> None:
        self._transport.complete_gradients(np.zeros(1))
        self._tickets.reset()
        self._transport.publish_parameters()

    @override
    def close(self) -> None:
        self._transport.close()


class CollectiveRunner(Runner):
    """Runner with the communication pattern of FSDP: ranks synchronize at each unit. Construction is collective.

    All ranks run the same number of microbatches. A rank with fewer than others also runs dummy microbatches.
    """

    def __init__(self, world: World, num_units: int) -> None:
        super().__init__(world, num_units)
        self._group, self._collectives = Group(world), CollectiveCommunicator(world)
        self._group.open(self.close)
        shard_numel = unit_layout(UNIT_NUMEL, world.size).shard_numel
        self._shard = torch.zeros(shard_numel)
        self._full, self._gradient = torch.zeros(world.size * shard_numel), torch.ones(world.size * shard_numel)
        self._sums = torch.zeros(num_units, shard_numel)  # one for each reduction in flight

    @override
    def microbatches(self, minibatch: SimulatedMinibatch, plan: Plan) -> Iterator[TimedMicrobatch]:
        rank, count = self._world.rank, max(map(len, plan.microbatches))
        for microbatch in islice(chain(plan.microbatches[rank], repeat(())), count):
            yield TimedMicrobatch(minibatch.duration_s(rank, microbatch), is_dummy=not microbatch)

    @override
    def use(self, unit: int, sleeper: "Sleeper", seconds: float) -> None:
        """Gather a unit from all ranks, and sleep. Collective."""
        request = self._collectives.start_all_gather(self._shard, self._full)
        self._world.wait_collective(request, f"gathering unit {unit}")
        sleeper.sleep(seconds)

    @override
    def push(self, unit: int) -> Work:
        """Start summing the gradients of all ranks. Collective."""
        request = self._collectives.start_reduce_scatter(self._gradient, self._sums[unit])
        return Work(partial(self._world.wait_collective, request, f"reducing the gradient of unit {unit}"))

    @override
    def finish(self) -> None:
        self._group.gradients_complete(np.zeros(1))
        self._group.parameters_published()

    @override
    def close(self) -> None:
        self._collectives.free()
        self._group.free(())


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


if __name__ == "__main__":
    sys.exit(main())
