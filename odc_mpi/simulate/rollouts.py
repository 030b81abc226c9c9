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
from odc_mpi.data.plan.cut import Microbatch
from odc_mpi.data.plan.partition import first_fit
from odc_mpi.simulate.events import Timing, drawn
from odc_mpi.simulate.options import GENERATION, check
from odc_mpi.simulate.scenario import Scenario, Trial
from odc_mpi.simulate.simulate import collected, ratios, timing

BASELINE = "collective/barrier"
#: What is compared, as TRANSPORT/WAY.
SCHEDULES = (BASELINE, "window/barrier", "window/on_demand_own", "window/on_demand")
BOUND = "bound"
#: Into how many shares of about equal cost a finished prompt group is cut, each for whoever is free. Their number is
#: known before lengths are; fewer leave ranks waiting at the end, more cost a microbatch's constant more often.
SHARES = 4


@dataclass(frozen=True)
class Rollouts(Scenario):
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
        check(GENERATION, self)
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
class RolloutTrial:
    """One minibatch. The completion `i` belongs to the prompt group `i // completions`.

    Attributes:
        rollouts: Of what.
        trial: Lengths of all completions, what they take to train, and speeds.
    """

    rollouts: Rollouts
    trial: Trial

    def dealt(self, rank: int) -> list[int]:
        """Return the prompt groups of a rank, dealt out in turn. Local."""
        return list(range(rank, self.rollouts.num_groups, self.rollouts.ranks))

    def positions(self, group: int) -> range:
        """Return the positions of a prompt group's completions. Local."""
        count = self.rollouts.completions
        return range(group * count, (group + 1) * count)

    def decoded_s(self, rank: int, groups: Sequence[int]) -> list[tuple[float, int]]:
        """Return the end and the name of each of a rank's prompt groups, decoded at once, in that order. Local."""
        lengths = np.array([self.trial.lengths[i] for group in groups for i in self.positions(group)])
        order = np.argsort(lengths, kind="stable")
        # Until the next one is done all that are left take a step for each token.
        left = np.arange(len(order), 0, -1)
        steps = np.diff(lengths[order], prepend=0)
        ends = np.cumsum(steps * (self.rollouts.decode_step_s + self.rollouts.decode_sequence_s * left))
        each = np.empty(len(order))
        each[order] = ends / self.trial.speeds[rank]
        last = each.reshape(len(groups), -1).max(axis=1).tolist()
        return sorted(zip(last, groups, strict=True))

    @cached_property
    def dealt_s(self) -> list[list[tuple[float, int]]]:
        """What `decoded_s` returns for each rank and the prompt groups that it is dealt."""
        return [self.decoded_s(rank, self.dealt(rank)) for rank in range(self.rollouts.ranks)]

    def shares(self, group: int) -> list[list[Microbatch]]:
        """Return the shares of a finished prompt group, each as its microbatches. Local."""
        lengths = self.trial.lengths
        falling = sorted(self.positions(group), key=lambda i: (-lengths[i], i))
        # There and back again, so that the longest is with the shortest.
        turns = [*range(SHARES), *reversed(range(SHARES))]
        parts: list[list[int]] = [[] for _ in range(SHARES)]
        for turn, position in enumerate(falling):
            parts[turns[turn % len(turns)]].append(position)
        return [self.packed(part) for part in parts]

    def packed(self, positions: Sequence[int]) -> list[Microbatch]:
        """Pack completions into few microbatches. Local."""
        bins = first_fit(self.trial.lengths[list(positions)], self.rollouts.max_tokens)
        return [tuple(positions[k] for k in own) for own in bins]

    def plan(self, name: str) -> Plan:
        """Return the plan of training; `window/on_demand` has none, since it depends on what is finished. Local."""
        scenario = self.rollouts
        if name == "window/on_demand_own":
            own = ([i for group in self.dealt(rank) for i in self.positions(group)] for rank in range(scenario.ranks))
            return Plan(tuple(tuple(self.packed(positions)) for positions in own))
        balance = lb_micro if name == BASELINE else dynamic
        return balance(self.trial.lengths, scenario.ranks, scenario.max_tokens, scenario.planned_cost)

    def bounds_s(self) -> tuple[float, float]:
        """Return two times in seconds before which no schedule ends. Local.

        Returns:
            That at which the completion that is generated last is trained, on the fastest rank, and that of all work on
            ranks that never wait.
        """
        trial, scenario = self.trial, self.rollouts
        decoded = [own[-1] for own in self.dealt_s]
        end, group = max(decoded)
        cheapest = min(trial.sequence_s[i] for i in self.positions(group))
        fewest = math.ceil(int(trial.lengths.sum()) / scenario.max_tokens)
        work = math.fsum(trial.sequence_s.tolist()) + fewest * trial.overhead_s
        work += math.fsum(own * speed for (own, _), speed in zip(decoded, trial.speeds.tolist(), strict=True))
        return end + cheapest / float(trial.speeds.max()), work / float(trial.speeds.sum())


def simulate_rollouts(rollouts: Rollouts) -> dict[str, Any]:
    """Compute what each schedule would take. Local.

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
    trials = [RolloutTrial(rollouts, trial) for trial in rollouts.trials()]
    ends, busy, timeline = collected({name: _run(trial, name) for name in SCHEDULES} for trial in trials)
    bounds = [trial.bounds_s() for trial in trials]
    work = {name: float(own.sum()) for name, own in busy.items()}
    work[BOUND] = rollouts.ranks * math.fsum(shared for _, shared in bounds)
    generated = sum(own[-1][0] for trial in trials for own in trial.dealt_s)
    return {
        "workload": "grpo",
        "scenario": asdict(rollouts),
        **ratios({**ends, BOUND: [max(own) for own in bounds]}, work, BASELINE, rollouts.ranks),
        "generation_fraction": generated / work[BASELINE],
        "timeline": timeline,
    }


def _run(trial: RolloutTrial, name: str) -> Timing:
    """Compute what a minibatch takes under a schedule; ranks work when they generate or train."""
    decoded = trial.dealt_s
    free = [own[-1][0] for own in decoded]
    if name == "window/on_demand":
        return _shared(trial, sorted(each for own in decoded for each in own), free)
    transport, way = name.split("/")
    found = timing(trial.trial, trial.plan(name), transport, trial.rollouts.ticket_s)
    begins = [max(free)] * len(free) if way == "barrier" else free
    ends = [begin + (own[-1][1] if own else 0.0) for begin, own in zip(begins, found.timeline, strict=True)]
    timeline = [
        [(0.0, end), *((begin + began, begin + ended) for began, ended in own)]
        for end, begin, own in zip(free, begins, found.timeline, strict=True)
    ]
    return Timing(max(begins) + found.end_s if way == "barrier" else max(ends), timeline)


def _shared(trial: RolloutTrial, finished: Sequence[tuple[float, int]], free: Sequence[float]) -> Timing:
    """Let ranks that have generated draw shares of prompt groups, in the order in which these are finished."""
    ready, shares = zip(*((end, share) for end, group in finished for share in trial.shares(group)), strict=True)

    def duration(rank: int, k: int) -> float:
        return math.fsum(trial.trial.window_s(rank, each, is_first=False) for each in shares[k])

    found = drawn(ready, free, duration, trial.rollouts.ticket_s)
    return Timing(found.end_s, [[(0.0, end), *own] for end, own in zip(free, found.timeline, strict=True)])
