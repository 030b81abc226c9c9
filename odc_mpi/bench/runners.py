"""Runners of simulated minibatches for `bench.schedule`: real communication, with sleeps in place of computation."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice, repeat
from typing import NamedTuple

import numpy as np
import torch
from typing_extensions import override

from odc_mpi.bench.fetch_and_push import unit_layout
from odc_mpi.comm.factory import collective_transport, window_transport
from odc_mpi.comm.tickets import Tickets
from odc_mpi.comm.transport import Transport
from odc_mpi.data.plan.balance import Plan
from odc_mpi.runtime.world import World
from odc_mpi.simulate.events import FORWARD, Intervals, merge_intervals
from odc_mpi.simulate.scenario import SimulatedMinibatch
from odc_mpi.simulate.simulate import PAUSE_S

#: Number of elements of a unit.
UNIT_NUMEL = 1024


@dataclass(frozen=True)
class MeasuredTiming:
    """Times of one rank for one minibatch, in seconds, without dummy microbatches in `busy_s` and `slept`.

    `end_s` is the time from the common beginning until parameters are published, `busy_s` the sleep requested in it,
    and `slept` has the intervals of sleep since the beginning, divided by the scale.
    """

    end_s: float
    busy_s: float
    slept: Intervals


class TimedMicrobatch(NamedTuple):
    """A microbatch on one rank. `seconds` is the modeled time of all units together, before scaling."""

    seconds: float
    is_dummy: bool = False


class Runner(ABC):
    """Base class of runners, which run plans on a new transport. Construction is collective."""

    def __init__(self, world: World, transport: Transport, num_units: int) -> None:
        self._world, self._transport = world, transport
        transport.allocate([unit_layout(UNIT_NUMEL, world.size)] * num_units)
        self._units = range(num_units)
        self._gradient = torch.ones(UNIT_NUMEL)

    def run(self, minibatch: SimulatedMinibatch, plan: Plan, scale: float) -> MeasuredTiming:
        """Run a minibatch on all ranks, which begin together. Collective. Modeled times are multiplied by `scale`."""
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
        self._transport.complete_gradients(np.zeros(1))
        self.prepare_next()
        self._transport.publish_parameters()
        end_s = time.perf_counter() - began
        slept = (((start - began) / scale, (stop - began) / scale) for start, stop in sleeper.slept)
        return MeasuredTiming(end_s, busy_s, merge_intervals(slept, PAUSE_S))

    @abstractmethod
    def microbatches(self, minibatch: SimulatedMinibatch, plan: Plan) -> Iterator[TimedMicrobatch]:
        """Yield this rank's microbatches, each after the previous one has run. One-sided."""

    def prepare_next(self) -> None:  # noqa: B027 - optional
        """Reset the state for the next minibatch. Called between completing gradients and publishing parameters."""

    def close(self) -> None:
        """Free the transport. Collective."""
        self._transport.close()

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


class WindowRunner(Runner):
    """Runs plans on windows. A rank runs its own microbatches, then claims more from the pool."""

    def __init__(self, world: World, num_units: int) -> None:
        super().__init__(world, window_transport(world), num_units)
        self._tickets = Tickets(world)

    @override
    def microbatches(self, minibatch: SimulatedMinibatch, plan: Plan) -> Iterator[TimedMicrobatch]:
        rank = self._world.rank
        claimed = map(plan.pool.__getitem__, self._tickets.draw(len(plan.pool)) if plan.pool else ())
        for k, microbatch in enumerate(chain(filter(None, plan.microbatches[rank]), claimed)):
            yield TimedMicrobatch(minibatch.window_s(rank, microbatch, is_first=not k))

    @override
    def prepare_next(self) -> None:
        self._tickets.reset()

    @override
    def close(self) -> None:
        self._tickets.close()
        super().close()


class CollectiveRunner(Runner):
    """Runs plans on collectives. A rank with fewer microbatches than others adds dummy microbatches."""

    def __init__(self, world: World, num_units: int) -> None:
        super().__init__(world, collective_transport(world), num_units)

    @override
    def microbatches(self, minibatch: SimulatedMinibatch, plan: Plan) -> Iterator[TimedMicrobatch]:
        rank = self._world.rank
        turns = max(map(len, plan.microbatches))
        for microbatch in islice(chain(plan.microbatches[rank], repeat(())), turns):
            yield TimedMicrobatch(minibatch.duration_s(rank, microbatch), is_dummy=not microbatch)


class Sleeper:
    """Sleeps with an exact total: after a long sleep, the next is shorter. `slept` has begin and end of each."""

    def __init__(self) -> None:
        self.slept: Intervals = []
        self._late_s = 0.0

    def sleep(self, seconds: float) -> None:
        """Sleep for `seconds`, minus the excess of the previous sleep."""
        due = seconds - self._late_s
        began = time.perf_counter()
        if due > 0:
            time.sleep(due)
        ended = time.perf_counter()
        self._late_s = ended - began - due
        self.slept.append((began, ended))
