"""Ranks that work through the minibatches of a scenario on the real runtime, with sleeps in place of computing.

`bench.schedule` describes what they run, and how.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from odc_mpi.bench.fetch_and_push import unit_layout
from odc_mpi.bench.piece_flags import PieceFlags
from odc_mpi.comm.compose import collective_transport, window_transport
from odc_mpi.comm.tickets import Tickets
from odc_mpi.comm.transport import Transport
from odc_mpi.data.plan.balance import Plan
from odc_mpi.data.plan.pieces import Split
from odc_mpi.runtime.world import World
from odc_mpi.simulate.events import FORWARD, Intervals, merged
from odc_mpi.simulate.scenario import Trial
from odc_mpi.simulate.simulate import PAUSE_S

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

    def _run_microbatch(
        self, sleeper: "Sleeper", seconds: float, meet: Callable[[int], None] = lambda step: None
    ) -> None:
        """Run a microbatch, or a piece, which meets others.

        Args:
            sleeper: Sleeps in place of computing.
            seconds: How long in all units together.
            meet: Called with the number of units come to in forward and done with in backward so far: before each
                unit's forward, and after its backward, before its gradients are pushed.
        """
        num_units = len(self._units)
        for unit in self._units:
            meet(unit)
            self._with_unit(unit, lambda: sleeper.sleep(FORWARD * seconds / num_units))
        pushes = []
        for unit in reversed(self._units):
            self._with_unit(unit, lambda: sleeper.sleep((1 - FORWARD) * seconds / num_units))
            meet(2 * num_units - 1 - unit)
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
                meet = partial(meet_pieces, self._flags, len(self._units), place, split, index)
                self._run_microbatch(sleeper, seconds, meet)
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


def meet_pieces(flags: PieceFlags, num_units: int, place: int, split: Split, index: int, step: int) -> None:
    """Show a step of a piece; wait for keys and values of those before it, or for gradients of those behind it.

    One-sided.

    Args:
        flags: Of this rank.
        num_units: Units of the model.
        place: Of the sequence among those that are cut.
        split: The sequence.
        index: Of this rank's piece.
        step: Number of units come to in forward and done with in backward, as of `Runner`.
    """
    flags.show(place, step)
    flags.wait(place, step, split, range(index) if step < num_units else range(index + 1, len(split.ranks)))


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
