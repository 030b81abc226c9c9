"""Generation and training in one minibatch on the real runtime, with sleeps in place of both.

As `bench.schedule`; the schedules are those of `simulate.rollouts`. Under `window/on_demand` everything that ranks hand
to each other goes through windows:

    prompts     a rank draws as many prompt groups as it decodes at once (`comm.tickets`)
    generate    it sleeps until the next of its groups is finished, and posts the group's shares on a board on rank 0
    train       when all of its groups are finished it draws positions on the board (`comm.tickets`), waits until there
                is a share at the position, and trains it, whoever generated it
    A to B      owners of counters and of the board set them to zero
"""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, ClassVar

import numpy as np
import torch

from odc_mpi.bench.runners import CollectiveRunner, Runner, Sample, Sleeper, WindowRunner
from odc_mpi.bench.schedule import compared, in_turns
from odc_mpi.comm.tickets import Tickets
from odc_mpi.comm.windows.rma import Window
from odc_mpi.data.plan.balance import Plan
from odc_mpi.runtime.world import World
from odc_mpi.simulate.rollouts import (
    BASELINE,
    SCHEDULES,
    SHARES,
    RolloutOutcome,
    Rollouts,
    RolloutTrial,
    simulate_rollouts,
)
from odc_mpi.simulate.scenario import Trial

#: Seconds between two looks at a place of the board that is still empty.
LOOK_S = 1e-3


def measure(
    world: World, rollouts: Rollouts, step_s: float, report: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Run every schedule on the same minibatches, and simulate them. Collective.

    Args:
        world: As many ranks as the scenario has.
        rollouts: What is tried.
        step_s: Seconds that an even share of a minibatch sleeps, in the mean: all times are scaled to that.
        report: Called with a line on what comes next.

    Returns:
        The figures of `RolloutOutcome`, where they were measured, and on rank 0 the simulator's speed-ups, `simulated`.

    Raises:
        AgreedError: There are several nodes; on every rank.
    """
    return compared(
        world,
        step_s,
        lambda: _run_schedules(world, rollouts, step_s, report),
        lambda: simulate_rollouts(rollouts).speedup,
    )


def _run_schedules(world: World, rollouts: Rollouts, step_s: float, report: Callable[[str], None]) -> RolloutOutcome:
    trials = list(rollouts.trials())
    scale = step_s / float(np.mean([shared for _, shared in (trial.bounds_s() for trial in trials)]))
    num_units = rollouts.scenario.num_units
    runners: dict[str, Generates] = {
        BASELINE: CollectiveBarrier(world, num_units),
        "window/barrier": WindowBarrier(world, num_units),
        "window/on_demand_own": WindowOwn(world, num_units),
        "window/on_demand": WindowOnDemand(world, num_units, rollouts.num_groups),
    }

    def run(name: str, rollout_trial: RolloutTrial) -> Sample:
        runners[name].rollout_trial = rollout_trial
        return runners[name].run(rollout_trial.trial, rollout_trial.plan(name), scale)

    ends, busy, timeline = in_turns(world, SCHEDULES, trials, run, scale, report)
    for runner in runners.values():
        runner.close()
    return RolloutOutcome.of(rollouts, ends, {name: float(own.sum()) for name, own in busy.items()}, timeline)


class Generates(Runner):
    """A runner that generates before it trains.

    Attributes:
        rollout_trial: The minibatch that comes next.
        waits: Whether ranks wait until all have generated, before they train.
    """

    rollout_trial: RolloutTrial
    waits: ClassVar[bool]

    def before_microbatches(self, sleeper: Sleeper, trial: Trial, plan: Plan, scale: float) -> float:
        """Generate this rank's completions; return the seconds that it was to sleep for. Collective or one-sided."""
        done_s = 0.0
        for end_s, group in self.rollout_trial.decoded_s(self._world.rank, self.prompts()):
            self.decode(sleeper, scale * (end_s - done_s))
            self.finished(group)
            done_s = end_s
        if self.waits:
            self._world.meet(self._world.comm.Ibarrier(), "waiting until all ranks have generated")
        return scale * done_s

    def decode(self, sleeper: Sleeper, seconds: float) -> None:
        """Read every unit once, and sleep for the time of all decode steps until a group is finished. One-sided."""
        for unit in self._units:
            self._with_unit(unit, lambda: sleeper.sleep(seconds / len(self._units)))

    def prompts(self) -> Sequence[int]:
        """Return the prompt groups that this rank decodes. Local, or one-sided."""
        return self.rollout_trial.dealt(self._world.rank)

    def finished(self, group: int) -> None:
        """Tell that a prompt group is finished. Local, or one-sided."""


class CollectiveBarrier(Generates, CollectiveRunner):
    """Generation, a barrier, training in lockstep; parameters are resident while ranks generate."""

    waits = True

    def decode(self, sleeper: Sleeper, seconds: float) -> None:
        """Sleep: units that are gathered once per step by all ranks would make them meet in every step. Local."""
        sleeper.sleep(seconds)


class WindowBarrier(Generates, WindowRunner):
    """Generation, a barrier, training by tickets."""

    waits = True


class WindowOwn(Generates, WindowRunner):
    """Generation, then training of the rank's own completions."""

    waits = False


class WindowOnDemand(WindowOwn):
    """Prompt groups by tickets, then shares of finished ones by tickets, whoever generated them."""

    def __init__(self, world: World, num_units: int, num_groups: int) -> None:
        super().__init__(world, num_units)
        self._num_groups = num_groups
        self._prompts, self._board = Tickets(world), FinishedBoard(world, num_groups * SHARES)

    def prompts(self) -> Sequence[int]:  # noqa: D102
        return list(islice(self._prompts.draw(self._num_groups), self._num_groups // self._world.size))

    def finished(self, group: int) -> None:  # noqa: D102
        self._board.post(range(group * SHARES, (group + 1) * SHARES))

    def microbatches(self, plan: Plan) -> Iterator[Sequence[int]]:  # noqa: D102
        for position in self._tickets.draw(self._num_groups * SHARES):
            group, share = divmod(self._board.wait(position), SHARES)
            yield from self.rollout_trial.shares(group)[share]

    def prepare_next(self, plan: Plan) -> None:  # noqa: D102
        super().prepare_next(plan)
        self._prompts.reset()
        self._board.reset()

    def close(self) -> None:  # noqa: D102
        self._board.close()
        self._prompts.close()
        super().close()


class FinishedBoard:
    """A list on rank 0 that all ranks append to, and read: what is finished, in that order. Making one is collective.

    Args:
        world: The ranks; the board is freed with it.
        most: Entries that a minibatch has at most.
    """

    def __init__(self, world: World, most: int) -> None:
        self._world, self._most = world, most
        # How many places are taken, then the entries, each one more than what was posted; 0: nothing yet.
        self._window = Window(world, 1 + most, torch.int64)
        world.on_close(self.close)
        world.meet(world.comm.Ibarrier(), "emptying the board of finished prompt groups")

    def post(self, entries: Sequence[int]) -> None:
        """Append entries, each at least 0. One-sided."""
        with self._world.deadline("posting a finished prompt group", [0]):
            first = self._window.fetch_and_add(0, 0, len(entries))
            for place, entry in enumerate(entries, 1 + first):
                self._window.replace(0, place, entry + 1)

    def wait(self, position: int) -> int:
        """Return the entry at a position, once there is one. One-sided."""
        with self._world.deadline("waiting for a finished prompt group", [0]):
            while not (entry := self._window.read(0, 1 + position)):
                time.sleep(LOOK_S)
        return entry - 1

    def reset(self) -> None:
        """Start over. Local, on every rank: after A, when all entries were read, and before B."""
        if self._world.rank == 0:
            with self._world.deadline("emptying the board of finished prompt groups", [0]):
                for place in range(1 + self._most):
                    self._window.replace(0, place, 0)

    def close(self) -> None:
        """Free the board. Collective; a second call does nothing."""
        if self._most:
            self._most = 0
            with self._world.meeting("freeing the board of finished prompt groups"):
                self._window.free()
            self._world.forget(self.close)
