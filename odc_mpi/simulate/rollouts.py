"""Post-training with rewards: completions are generated, then trained, in one minibatch. What each schedule would take.

    collective/barrier     ranks generate their prompts, wait for each other, then train in lockstep, evenly split
    window/barrier         the same, but ranks draw microbatches of what was generated
    window/on_demand_own   no barrier: a rank that has generated its completions trains them
    window/on_demand       no barrier: a rank that has generated its completions trains what anybody has finished,
                           in the order in which prompt groups are finished
    bound                  no schedule that generates so can end earlier: not before all work is done if nobody ever
                           waits, nor before the last completion to be generated is trained

Each prompt has several completions, its prompt group. A rank decodes all completions of its prompts at once: a step
gives each one more token, and takes a constant time and a time for each completion that is not done. A group can be
trained when its last completion is done, since only then are the advantages known; it is handed out in `SHARES` shares.

Speed-ups are ratios of the total time of all minibatches, over that of collective/barrier. Local; no MPI.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from odc_mpi.data.plan.balance import Plan, dynamic, lb_micro
from odc_mpi.data.plan.dynamic_packing import SequenceIndices
from odc_mpi.data.plan.partition import first_fit
from odc_mpi.simulate.events import SimulatedTiming, simulate_dynamic
from odc_mpi.simulate.options import GENERATION, validate_options
from odc_mpi.simulate.scenario import Scenario, SimulatedMinibatch
from odc_mpi.simulate.simulate import collect_timings, ratios, simulate_timing

BASELINE = "collective/barrier"
#: What is compared, as TRANSPORT/WAY.
SCHEDULES = (BASELINE, "window/barrier", "window/on_demand_own", "window/on_demand")
BOUND = "bound"
#: Into how many shares of about equal cost a finished prompt group is cut, each for whoever is free. Their number is
#: known before lengths are; fewer leave ranks waiting at the end, more cost a microbatch's constant more often.
SHARES = 4


@dataclass(frozen=True)
class RolloutScenario(Scenario):
    """A run of post-training with rewards: a scenario whose `per_rank` counts prompts.

    Attributes:
        completions: Of each prompt; `lengths` are theirs.
        decode_step_s: Seconds of a decode step on a rank of speed 1, besides its sequences.
        decode_sequence_s: Seconds of each sequence in a decode step.
    """

    lengths: str = "aime"
    completions: int = GENERATION["completions"].default
    decode_step_s: float = GENERATION["decode_step_s"].default
    decode_sequence_s: float = GENERATION["decode_sequence_s"].default

    def __post_init__(self) -> None:
        validate_options(GENERATION, self)
        super().__post_init__()

    @property
    def num_groups(self) -> int:
        """Prompts of a minibatch."""
        return self.ranks * self.per_rank

    @property
    def num_sequences(self) -> int:
        """Completions of a minibatch."""
        return self.num_groups * self.completions


@dataclass(frozen=True)
class SimulatedRollouts:
    """One minibatch. The completion `i` belongs to the prompt group `i // completions`.

    Attributes:
        scenario: Of what.
        minibatch: Lengths of all completions, what they take to train, and speeds.
    """

    scenario: RolloutScenario
    minibatch: SimulatedMinibatch

    def assigned_groups(self, rank: int) -> list[int]:
        """Return the prompt groups of a rank, dealt out in turn."""
        return list(range(rank, self.scenario.num_groups, self.scenario.ranks))

    def positions(self, group: int) -> range:
        """Return the positions of a prompt group's completions."""
        count = self.scenario.completions
        return range(group * count, (group + 1) * count)

    def decode_ends_s(self, rank: int, groups: Sequence[int]) -> list[tuple[float, int]]:
        """Return the end and the name of each of a rank's prompt groups, decoded at once, in that order."""
        lengths = np.array([self.minibatch.lengths[i] for group in groups for i in self.positions(group)])
        order = np.argsort(lengths, kind="stable")
        # Until the next one is done all that are left take a step for each token.
        left = np.arange(len(order), 0, -1)
        steps = np.diff(lengths[order], prepend=0)
        ends = np.cumsum(steps * (self.scenario.decode_step_s + self.scenario.decode_sequence_s * left))
        each = np.empty(len(order))
        each[order] = ends / self.minibatch.speeds[rank]
        last = each.reshape(len(groups), -1).max(axis=1).tolist()
        return sorted(zip(last, groups, strict=True))

    @cached_property
    def assigned_decode_ends_s(self) -> list[list[tuple[float, int]]]:
        """What `decode_ends_s` returns for each rank and the prompt groups that it is dealt."""
        return [self.decode_ends_s(rank, self.assigned_groups(rank)) for rank in range(self.scenario.ranks)]

    def shares(self, group: int) -> list[list[SequenceIndices]]:
        """Return the shares of a finished prompt group, each as its microbatches."""
        lengths = self.minibatch.lengths
        falling = sorted(self.positions(group), key=lambda i: (-lengths[i], i))
        # There and back again, so that the longest is with the shortest.
        turns = [*range(SHARES), *reversed(range(SHARES))]
        parts: list[list[int]] = [[] for _ in range(SHARES)]
        for turn, position in enumerate(falling):
            parts[turns[turn % len(turns)]].append(position)
        return [self.pack(part) for part in parts]

    def pack(self, positions: Sequence[int]) -> list[SequenceIndices]:
        """Pack completions into few microbatches."""
        bins = first_fit(self.minibatch.lengths[list(positions)], self.scenario.max_tokens)
        return [tuple(positions[k] for k in indices) for indices in bins]

    def plan(self, name: str) -> Plan:
        """Return the plan of training; `window/on_demand` has none, since it depends on what is finished."""
        scenario = self.scenario
        if name == "window/on_demand_own":
            positions_of_ranks = (
                [i for group in self.assigned_groups(rank) for i in self.positions(group)]
                for rank in range(scenario.ranks)
            )
            return Plan(tuple(tuple(self.pack(positions)) for positions in positions_of_ranks))
        balance = lb_micro if name == BASELINE else dynamic
        return balance(self.minibatch.lengths, scenario.ranks, scenario.max_tokens, scenario.planned_cost)

    def bounds_s(self) -> tuple[float, float]:
        """Return two times in seconds before which no schedule ends.

        Returns:
            That at which the completion that is generated last is trained, on the fastest rank, and that of all work on
            ranks that never wait.
        """
        minibatch, scenario = self.minibatch, self.scenario
        decoded = [ends_of_rank[-1] for ends_of_rank in self.assigned_decode_ends_s]
        end, group = max(decoded)
        cheapest = min(minibatch.sequence_s[i] for i in self.positions(group))
        fewest = math.ceil(int(minibatch.lengths.sum()) / scenario.max_tokens)
        work = math.fsum(minibatch.sequence_s.tolist()) + fewest * minibatch.overhead_s
        work += math.fsum(
            ends_of_rank * speed for (ends_of_rank, _), speed in zip(decoded, minibatch.speeds.tolist(), strict=True)
        )
        return end + cheapest / float(minibatch.speeds.max()), work / float(minibatch.speeds.sum())


def simulate_rollouts(rollouts: RolloutScenario) -> dict[str, Any]:
    """Compute what each schedule would take.

    Args:
        rollouts: The scenario; the same one gives the same outcome.

    Returns:
        One object: `scenario`; `speedup` over collective/barrier, `idle_fraction`, in which ranks wait or run padding,
        and `step_s`, the mean seconds of a minibatch, by schedule and for the bound; `generation_fraction`, the part of
        the baseline's busy time that is generation; `timeline` of the first minibatch, by schedule: for each rank when
        it generates or trains, in seconds.

    Raises:
        UserError: There are no such lengths.
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
    """Compute what a minibatch takes under a schedule; ranks work when they generate or train."""
    decoded = minibatch.assigned_decode_ends_s
    free = [ends_of_rank[-1][0] for ends_of_rank in decoded]
    if name == "window/on_demand":
        return _simulate_shared(minibatch, sorted(each for ends_of_rank in decoded for each in ends_of_rank), free)
    transport, way = name.split("/")
    found = simulate_timing(minibatch.minibatch, minibatch.plan(name), transport, minibatch.scenario.ticket_s)
    begins = [max(free)] * len(free) if way == "barrier" else free
    ends = [
        begin + (ends_of_rank[-1][1] if ends_of_rank else 0.0)
        for begin, ends_of_rank in zip(begins, found.timeline, strict=True)
    ]
    timeline = [
        [(0.0, end), *((begin + began, begin + ended) for began, ended in ends_of_rank)]
        for end, begin, ends_of_rank in zip(free, begins, found.timeline, strict=True)
    ]
    return SimulatedTiming(max(begins) + found.end_s if way == "barrier" else max(ends), timeline)


def _simulate_shared(
    minibatch: SimulatedRollouts, finished: Sequence[tuple[float, int]], free: Sequence[float]
) -> SimulatedTiming:
    """Let ranks that have generated draw shares of prompt groups, in the order in which these are finished."""
    ready, shares = zip(*((end, share) for end, group in finished for share in minibatch.shares(group)), strict=True)

    def duration(rank: int, k: int) -> float:
        return math.fsum(minibatch.minibatch.window_s(rank, each, is_first=False) for each in shares[k])

    found = simulate_dynamic(ready, free, duration, minibatch.scenario.ticket_s)
    return SimulatedTiming(
        found.end_s, [[(0.0, end), *intervals] for end, intervals in zip(free, found.timeline, strict=True)]
    )
