"""Simulation of GRPO schedules. In each minibatch, ranks generate completions, then train on them.

    collective/barrier     ranks generate, wait for each other, then train with collectives on balanced microbatches
    window/barrier         ranks generate, wait for each other, then claim microbatches to train on
    window/on_demand       no barrier: after generating, a rank trains on finished prompt groups of any rank, in the
                           order in which they finish
    bound                  lower bound: the time that all work takes if no rank ever waits or, if later, the earliest
                           time at which training on a completion of the last generated group can end

The completions of a prompt form its prompt group. A rank decodes all completions of its prompts together. Each decode
step adds a token to every unfinished completion, and takes a constant time plus a time per unfinished completion.
Training on a group can begin only when its last completion is finished, because its advantages are unknown until then.
For window/on_demand, each group is divided into `SHARES` shares, which idle ranks claim.

The speed-up of a schedule is the total time of collective/barrier for all minibatches, divided by that of the schedule.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import cycle
from typing import Any

import numpy as np
from typing_extensions import override

from odc_mpi.data.plan.balance import dynamic, lb_micro
from odc_mpi.data.plan.dynamic_packing import SequenceIndices
from odc_mpi.data.plan.partition import first_fit
from odc_mpi.errors import UserError
from odc_mpi.simulate.events import SimulatedTiming, simulate_dynamic
from odc_mpi.simulate.options import RolloutOptions
from odc_mpi.simulate.scenario import Scenario, SimulatedMinibatch
from odc_mpi.simulate.simulate import collect_timings, ratios, simulate_timing

BASELINE, ON_DEMAND = "collective/barrier", "window/on_demand"
#: Schedules to compare, as TRANSPORT/SYNCHRONIZATION.
SCHEDULES = (BASELINE, "window/barrier", ON_DEMAND)
BOUND = "bound"
#: Number of shares of about equal cost into which a prompt group is divided. It must be fixed before lengths are known.
#: With fewer shares, ranks wait at the end; with more, the constant cost of a microbatch is incurred more often.
SHARES = 4


@dataclass(frozen=True)
class RolloutScenario(RolloutOptions, Scenario):
    """Scenario of a simulated GRPO run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_islands > 1:
            raise UserError(f"--islands: expected 1 with --workload grpo, got {self.num_islands}")

    @property
    def num_groups(self) -> int:
        """Number of prompts in a minibatch."""
        return self.ranks * self.per_rank

    @property
    @override
    def num_sequences(self) -> int:
        return self.num_groups * self.completions


@dataclass(frozen=True)
class SimulatedRollouts:
    """Simulated minibatch of completions. Completion `i` belongs to prompt group `i // scenario.completions`."""

    scenario: RolloutScenario
    minibatch: SimulatedMinibatch

    def positions(self, group: int) -> range:
        """Return the indices of the completions of a prompt group."""
        count = self.scenario.completions
        return range(group * count, (group + 1) * count)

    def decode_ends_s(self, rank: int, groups: Sequence[int]) -> list[tuple[float, int]]:
        """Return sorted pairs of end time (in seconds) and group, for `groups` that `rank` decodes together."""
        lengths = np.array([self.minibatch.lengths[i] for group in groups for i in self.positions(group)])
        order = np.argsort(lengths, kind="stable")
        # Between the ends of two completions, the unfinished ones need one step per token.
        num_unfinished = np.arange(len(order), 0, -1)
        steps = np.diff(lengths[order], prepend=0)
        ends = np.cumsum(steps * (self.scenario.decode_step_s + self.scenario.decode_sequence_s * num_unfinished))
        each = np.empty(len(order))
        each[order] = ends / self.minibatch.speeds[rank]
        last = each.reshape(len(groups), -1).max(axis=1).tolist()
        return sorted(zip(last, groups, strict=True))

    @cached_property
    def assigned_decode_ends_s(self) -> list[list[tuple[float, int]]]:
        """Result of `decode_ends_s` for the prompt groups that each rank generates, as a list indexed by rank."""
        num_groups, ranks = self.scenario.num_groups, self.scenario.ranks
        return [self.decode_ends_s(rank, range(rank, num_groups, ranks)) for rank in range(ranks)]

    def shares(self, group: int) -> list[list[SequenceIndices]]:
        """Return the shares of a finished prompt group, each as a list of microbatches."""
        lengths = self.minibatch.lengths
        longest_first = sorted(self.positions(group), key=lambda i: (-lengths[i], i))
        # Forth and back over the shares, so that the longest is with the shortest.
        order = [*range(SHARES), *reversed(range(SHARES))]
        shares: list[list[int]] = [[] for _ in range(SHARES)]
        for position, share in zip(longest_first, cycle(order)):
            shares[share].append(position)
        packed = []
        for share in shares:
            bins = first_fit(lengths[share], self.scenario.max_tokens)
            packed.append([tuple(share[k] for k in indices) for indices in bins])
        return packed

    def bounds_s(self) -> tuple[float, float]:
        """Return two lower bounds, in seconds, on the time that any schedule needs.

        The first is the earliest time at which the fastest rank can finish training on the cheapest completion of the
        last generated prompt group. The second is the time that all work takes if no rank ever waits.
        """
        minibatch, scenario = self.minibatch, self.scenario
        decoded = [ends_of_rank[-1] for ends_of_rank in self.assigned_decode_ends_s]
        end, group = max(decoded)
        cheapest = min(minibatch.sequence_s[i] for i in self.positions(group))
        fewest = math.ceil(int(minibatch.lengths.sum()) / scenario.max_tokens)
        work = math.fsum(minibatch.sequence_s.tolist()) + fewest * scenario.overhead_s
        work += math.fsum(
            ends_of_rank * speed for (ends_of_rank, _), speed in zip(decoded, minibatch.speeds.tolist(), strict=True)
        )
        return end + cheapest / float(minibatch.speeds.max()), work / float(minibatch.speeds.sum())


def simulate_rollouts(rollouts: RolloutScenario) -> dict[str, Any]:
    """Simulate all schedules of a GRPO run, and return the result as a JSON object. The result is deterministic.

    `speedup` (over collective/barrier), `idle_fraction` and `step_s` contain a number for each schedule and for the
    lower bound, `BOUND`. `timeline` maps each schedule to the intervals in which each rank generates or trains in the
    first minibatch (see `simulate.summarize`). `generation_fraction` is the fraction of the busy time of
    collective/barrier in which ranks generate.
    """
    minibatches = [SimulatedRollouts(rollouts, minibatch) for minibatch in rollouts.minibatches()]
    ends, busy, timeline = collect_timings(
        {name: _simulate_schedule(minibatch, name) for name in SCHEDULES} for minibatch in minibatches
    )
    bounds = [minibatch.bounds_s() for minibatch in minibatches]
    work = {name: float(seconds.sum()) for name, seconds in busy.items()}
    work[BOUND] = rollouts.ranks * math.fsum(shared for _, shared in bounds)
    generated = sum(seconds[-1][0] for minibatch in minibatches for seconds in minibatch.assigned_decode_ends_s)
    return {
        "workload": "grpo",
        "scenario": asdict(rollouts),
        **ratios({**ends, BOUND: [max(seconds) for seconds in bounds]}, work, BASELINE, rollouts.ranks),
        "generation_fraction": generated / work[BASELINE],
        "timeline": timeline,
    }


def _simulate_schedule(minibatch: SimulatedRollouts, name: str) -> SimulatedTiming:
    """Simulate one minibatch. Ranks are busy while they generate or train."""
    decoded = minibatch.assigned_decode_ends_s
    free = [ends_of_rank[-1][0] for ends_of_rank in decoded]
    if name == ON_DEMAND:
        return _simulate_shared(minibatch, sorted(each for ends_of_rank in decoded for each in ends_of_rank), free)
    scenario, lengths, begin = minibatch.scenario, minibatch.minibatch.lengths, max(free)
    balance = lb_micro if name == BASELINE else dynamic
    plan = balance(lengths, scenario.ranks, scenario.max_tokens, scenario.planned_cost)
    training = simulate_timing(minibatch.minibatch, plan, name.split("/")[0])
    timeline = [
        [(0.0, end), *((begin + began, begin + ended) for began, ended in intervals)]
        for end, intervals in zip(free, training.timeline, strict=True)
    ]
    return SimulatedTiming(begin + training.end_s, timeline)


def _simulate_shared(
    minibatch: SimulatedRollouts, finished: Sequence[tuple[float, int]], free: Sequence[float]
) -> SimulatedTiming:
    """Simulate ranks that, after generating, claim shares of prompt groups in the order in which the groups finish."""
    ready, shares = zip(*((end, share) for end, group in finished for share in minibatch.shares(group)), strict=True)

    def duration(rank: int, k: int) -> float:
        return math.fsum(minibatch.minibatch.window_s(rank, each, is_first=False) for each in shares[k])

    training = simulate_dynamic(ready, free, duration)
    timeline = [[(0.0, end), *intervals] for end, intervals in zip(free, training.timeline, strict=True)]
    return SimulatedTiming(training.end_s, timeline)
