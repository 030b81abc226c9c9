"""What each transport and balance makes of a scenario on the real runtime, on more ranks than there are cores.

Windows, collectives, tickets, planner and ordering points are those of a training run. Only the computation of a unit
is replaced by a sleep of its modelled time, scaled down, so that ranks need no core of their own to be timed honestly.
Units are small for the same reason: what is measured is who waits for whom, not how fast bytes move.

    one microbatch     each unit is fetched and slept for; then, in reverse, fetched, slept for twice as long, and a
                       gradient of it pushed
    one piece          the same; before each sleep in forward it waits for the pieces before it, after each in backward
                       for those behind it (`bench.piece_flags`)
    one minibatch      begun together; the slowest rank's time to point B counts
    one round          every schedule runs the same minibatch, one after the other, in an order that goes around

`Outcome` is that of the simulator, with times as if nothing had been scaled.
"""

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from odc_mpi.bench.fetch_and_push import unit_layout
from odc_mpi.bench.measure import around
from odc_mpi.bench.piece_flags import PieceFlags
from odc_mpi.bench.together import header
from odc_mpi.comm.compose import collective_transport, window_transport
from odc_mpi.comm.tickets import Tickets
from odc_mpi.comm.transport import Transport
from odc_mpi.data.plan.balance import Plan
from odc_mpi.data.plan.pieces import Split
from odc_mpi.errors import AgreedError
from odc_mpi.runtime.world import World
from odc_mpi.simulate.events import FORWARD, Intervals, merged
from odc_mpi.simulate.scenario import Scenario, Trial
from odc_mpi.simulate.simulate import (
    PAUSE_S,
    SCHEDULES,
    Outcome,
    floor_s,
    plan,
    simulate,
)

#: Elements of a unit.
UNIT_NUMEL = 1024


@dataclass(frozen=True)
class Sample:
    """A minibatch under one schedule, seconds of one rank.

    Attributes:
        end_s: From the common beginning to point B.
        busy_s: Of that, what was to be slept for.
        slept: When, from the common beginning on and as if nothing had been scaled; padding left out.
    """

    end_s: float
    busy_s: float
    slept: Intervals


def measure(
    world: World, scenario: Scenario, step_s: float, report: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Run every schedule on the same minibatches, and simulate them. Collective.

    Args:
        world: The ranks.
        scenario: What is tried.
        step_s: See `run_schedules`.
        report: Called with a line on what comes next.

    Returns:
        The figures of `Outcome`, where they were measured, and on rank 0 the simulator's speed-ups, `simulated`.

    Raises:
        AgreedError: There are several nodes; on every rank.
    """
    require_one_node(world)
    before = os.getloadavg()[0]
    outcome = run_schedules(world, scenario, step_s, report)
    return {
        **header(world, "schedule", before, slept_step_s=step_s),
        **outcome.as_json(),
        "simulated": simulate(scenario).speedup if world.rank == 0 else None,
    }


def require_one_node(world: World) -> None:
    """Refuse ranks on several nodes. Local.

    Raises:
        AgreedError: There are several nodes; on every rank.
    """
    if world.num_nodes > 1:
        raise AgreedError(
            f"bench schedule measures on one node, got {world.num_nodes}: ranks that sleep serve no other node's, "
            "odc-mpi simulate reckons for any"
        )


def run_schedules(world: World, scenario: Scenario, step_s: float, report: Callable[[str], None]) -> Outcome:
    """Run every schedule on the same minibatches. Collective.

    Args:
        world: As many ranks as the scenario has.
        scenario: What is tried.
        step_s: Seconds that an even share of a minibatch sleeps, in the mean: all times are scaled to that.
        report: Called with a line on what comes next.

    Returns:
        The same on every rank.
    """
    assert world.size == scenario.ranks, f"{scenario.ranks} ranks for a world of {world.size}"
    trials = list(scenario.trials())
    scale = step_s / float(np.mean([floor_s(trial, scenario.max_tokens)[1] for trial in trials]))
    samples: dict[str, list[Sample]] = {name: [] for name in SCHEDULES}
    runners: dict[str, Runner] = {
        "window": WindowRunner(world, scenario.num_units),
        "collective": CollectiveRunner(world, scenario.num_units),
    }
    for turn, trial in enumerate(trials):
        report(f"minibatch {turn + 1} of {len(trials)}")
        for name in around(SCHEDULES, turn):
            transport, balance = name.split("/")
            samples[name].append(runners[transport].run(trial, plan(scenario, trial, balance), scale))
    for runner in runners.values():
        runner.close()
    everyone = world.gather_objects(samples)
    ends = {name: [max(s.end_s for s in turn) / scale for turn in _turns(everyone, name)] for name in SCHEDULES}
    busy = {name: np.array([sum(s.busy_s for s in own[name]) for own in everyone]) / scale for name in SCHEDULES}
    return Outcome.of(scenario, ends, busy, {name: [own[name][0].slept for own in everyone] for name in SCHEDULES})


class Runner(ABC):
    """One transport, and how ranks work through a plan on it. Making one is collective.

    Args:
        world: The ranks.
        transport: Not allocated yet.
        num_units: How many units.
    """

    def __init__(self, world: World, transport: Transport, num_units: int) -> None:
        self._world, self._transport = world, transport
        transport.allocate([unit_layout(UNIT_NUMEL, world.size)] * num_units)
        self._units = range(num_units)
        self._gradient = torch.ones(UNIT_NUMEL)

    def run(self, trial: Trial, plan: Plan, scale: float) -> Sample:
        """Run a minibatch, begun together. Collective."""
        sleeper = Sleeper()
        self._world.meet(self._world.comm.Ibarrier(), "beginning a minibatch together")
        began = time.perf_counter()
        busy_s = self.before_microbatches(sleeper, trial, plan, scale)
        for microbatch in self.microbatches(plan):
            seconds = scale * self.seconds(trial, microbatch, is_first=not sleeper.slept)
            before = len(sleeper.slept)
            self._run_microbatch(sleeper, seconds)
            if microbatch:
                busy_s += seconds
            else:
                del sleeper.slept[before:]  # padding is no work
        self._transport.complete_gradients(np.zeros(1))
        self.prepare_next(plan)
        self._transport.publish_parameters()
        end_s = time.perf_counter() - began
        slept = (((start - began) / scale, (stop - began) / scale) for start, stop in sleeper.slept)
        return Sample(end_s, busy_s, merged(slept, PAUSE_S))

    def seconds(self, trial: Trial, microbatch: Sequence[int], *, is_first: bool) -> float:
        """Return the seconds of a microbatch on this rank, less what its caches save. Local."""
        return trial.duration_s(self._world.rank, microbatch)

    def before_microbatches(self, sleeper: "Sleeper", trial: Trial, plan: Plan, scale: float) -> float:
        """Run this rank's pieces, and return the seconds that it was to sleep for. One-sided."""
        assert not plan.splits, "collectives share no sequence"
        return 0.0

    @abstractmethod
    def microbatches(self, plan: Plan) -> Iterator[Sequence[int]]:
        """Yield this rank's microbatches, each when the one before it is done. Local, or one-sided."""

    def prepare_next(self, plan: Plan) -> None:  # noqa: B027 - not everybody has to
        """Do what belongs between A and B. Local."""

    def close(self) -> None:
        """Free the transport. Collective."""
        self._transport.close()

    def _run_microbatch(self, sleeper: "Sleeper", seconds: float, waits: "Waits | None" = None) -> None:
        """Run a microbatch, or a piece, which waits for others."""
        waits = waits or Waits()
        for unit in self._units:
            waits.before_forward(unit)
            self._with_unit(unit, lambda: sleeper.sleep(FORWARD * seconds / len(self._units)))
        pushes = []
        for unit in reversed(self._units):
            self._with_unit(unit, lambda: sleeper.sleep((1 - FORWARD) * seconds / len(self._units)))
            waits.after_backward(unit)
            pushes.append(self._transport.gradients.push(unit, self._gradient))
        for push in pushes:
            push.wait()

    def _with_unit(self, unit: int, compute: Callable[[], None]) -> None:
        fetched = self._transport.parameters.fetch(unit).wait()
        compute()
        self._transport.parameters.release(fetched)


class WindowRunner(Runner):
    """Ranks have their own microbatches, or draw them; nobody runs an empty one."""

    def __init__(self, world: World, num_units: int) -> None:
        super().__init__(world, window_transport(world), num_units)
        self._tickets = Tickets(world)
        self._flags = PieceFlags(world, num_units)

    def before_microbatches(self, sleeper: "Sleeper", trial: Trial, plan: Plan, scale: float) -> float:  # noqa: D102
        busy_s, rank = 0.0, self._world.rank
        for place, split in enumerate(plan.splits):
            if rank in split.ranks:
                index = split.ranks.index(rank)
                seconds = scale * trial.piece_s(rank, split, index, is_first=not sleeper.slept)
                waits = PieceWaits(self._flags, place, split, index, len(self._units))
                self._run_microbatch(sleeper, seconds, waits)
                busy_s += seconds
        return busy_s

    def microbatches(self, plan: Plan) -> Iterator[Sequence[int]]:  # noqa: D102
        yield from filter(None, plan.microbatches[self._world.rank])
        if plan.pool:
            for position in self._tickets.draw(len(plan.pool)):
                yield plan.pool[position]

    def seconds(self, trial: Trial, microbatch: Sequence[int], *, is_first: bool) -> float:  # noqa: D102
        return trial.window_s(self._world.rank, microbatch, is_first=is_first)

    def prepare_next(self, plan: Plan) -> None:  # noqa: D102
        self._tickets.reset()
        self._flags.next_minibatch(len(plan.splits))

    def close(self) -> None:  # noqa: D102
        self._flags.close()
        self._tickets.close()
        super().close()


class CollectiveRunner(Runner):
    """All ranks run as many microbatches, empty ones where they have no more."""

    def __init__(self, world: World, num_units: int) -> None:
        super().__init__(world, collective_transport(world), num_units)

    def microbatches(self, plan: Plan) -> Iterator[Sequence[int]]:  # noqa: D102
        own = plan.microbatches[self._world.rank]
        for turn in range(max(map(len, plan.microbatches))):
            yield own[turn] if turn < len(own) else ()


class Waits:
    """What a microbatch waits for in a unit: nothing."""

    def before_forward(self, unit: int) -> None:
        """Wait before the unit computes. One-sided."""

    def after_backward(self, unit: int) -> None:
        """Wait before the unit's gradients are pushed. One-sided."""


class PieceWaits(Waits):
    """A piece waits for keys and values of the pieces before it, and for gradients from those behind it."""

    def __init__(self, flags: PieceFlags, place: int, split: Split, index: int, num_units: int) -> None:
        self._flags, self._num_units = flags, num_units
        self._place, self._split, self._index = place, split, index

    def before_forward(self, unit: int) -> None:  # noqa: D102
        self._meet(unit, range(self._index))

    def after_backward(self, unit: int) -> None:  # noqa: D102
        self._meet(2 * self._num_units - 1 - unit, range(self._index + 1, len(self._split.ranks)))

    def _meet(self, step: int, others: range) -> None:
        self._flags.show(self._place, step)
        self._flags.wait(self._place, step, self._split, others)


class Sleeper:
    """Sleeps for as long as it is told to, over many sleeps: each makes up for how much the last one overslept.

    Attributes:
        slept: When it did.
    """

    def __init__(self) -> None:
        self.slept: Intervals = []
        self._late_s = 0.0

    def sleep(self, seconds: float) -> None:
        """Sleep. Local."""
        due = seconds - self._late_s
        began = time.perf_counter()
        if due > 0:
            time.sleep(due)
        ended = time.perf_counter()
        self._late_s = ended - began - due
        self.slept.append((began, ended))


def _turns(everyone: Sequence[dict[str, list[Sample]]], name: str) -> Iterator[tuple[Sample, ...]]:
    """Yield each minibatch's samples of all ranks."""
    return zip(*(samples[name] for samples in everyone), strict=True)
