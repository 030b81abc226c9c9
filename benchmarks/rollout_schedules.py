"""Simulate schedules of GRPO: in each minibatch, ranks generate completions, then train on them. Does not use MPI.

    python benchmarks/rollout_schedules.py --speed-variation 0.1 [--json]

    collective/barrier     ranks generate, wait for each other, then train with collectives on balanced microbatches
    window/barrier         ranks generate, wait for each other, then claim microbatches to train on
    window/on_demand       no barrier: after generating, a rank trains on finished groups of any rank, the largest first
    window/stale_1, _2     with rl.max_staleness 1 and 2: instead of waiting, ranks decode for later steps
    bound                  lower bound: the time that all work takes if no rank ever waits or, if later, the earliest
                           time at which training on a completion of the last generated group can end

The options are those of `odc-mpi simulate`, except that `--per-rank` counts prompts and `--lengths` specifies the
lengths of completions, and those of generation (see `RolloutScenario`). The completions of a prompt form its prompt
group. A rank decodes all completions of its prompts together. Each decode step adds a token to every unfinished
completion, and takes a constant time plus a time per unfinished completion. Training on a group can begin only when its
last completion is finished, because its advantages are unknown until then.

The JSON object has `speedup` (total time of collective/barrier divided by that of the schedule), `idle_fraction` and
`step_s` for each schedule and for the bound; `generation_fraction`, the fraction of the busy time of collective/barrier
in which ranks generate; and the options in `scenario`.
"""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
from stale_rollouts import RolloutWork, StaleRollouts
from typing_extensions import override

from odc_mpi.cli.options import add_scenario
from odc_mpi.data.plan.balance import dynamic, lb_micro
from odc_mpi.data.plan.partition import first_fit
from odc_mpi.errors import UserError
from odc_mpi.simulate.events import SimulatedTiming
from odc_mpi.simulate.options import MAX_S, option_name
from odc_mpi.simulate.scenario import Scenario, SimulatedMinibatch
from odc_mpi.simulate.simulate import collect_timings, simulate_timing

SCHEDULES = BASELINE, BARRIER = "collective/barrier", "window/barrier"
BOUND = "bound"
#: Schedules of `StaleRollouts`, and their `rl.max_staleness`.
STALE = {"window/on_demand": 0, "window/stale_1": 1, "window/stale_2": 2}


@dataclass(frozen=True)
class RolloutScenario(Scenario):
    """Scenario of a GRPO run. `per_rank` counts prompts, and `lengths` specifies the lengths of completions.

    The default times are for 1.5 B parameters in bf16 on an A100 with 1.5 TB/s. A decode step reads 3 GB of parameters
    and, for each sequence, the keys and values of 4,500 tokens on average, at 28,672 bytes per token.

    Attributes:
        completions: Completions per prompt.
        decode_step_s: Constant seconds of a decode step.
        decode_sequence_s: Seconds of each sequence in a decode step.
        max_rows: Completions that a rank decodes at once in window/stale_*.
    """

    lengths: str = "aime"
    completions: int = 8
    decode_step_s: float = 2e-3
    decode_sequence_s: float = 8.6e-5
    max_rows: int = 128

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_islands != 1:
            raise UserError(f"--islands: expected 1, got {self.num_islands}")
        if not 1 <= self.completions <= 10**4:
            raise UserError(f"--completions: expected a number from 1 to {10**4}, got {self.completions}")
        for name in ("decode_step_s", "decode_sequence_s"):
            seconds = getattr(self, name)
            if not 0 <= seconds <= MAX_S:  # nan fails both comparisons
                raise UserError(f"{option_name(name)}: expected a number from 0 to {MAX_S}, got {seconds}")

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

    def train_s(self, group: int) -> float:
        """Return the seconds that a rank of speed 1 trains a group, which is not divided between ranks."""
        positions = self.positions(group)
        bins = first_fit(self.minibatch.lengths[list(positions)], self.scenario.max_tokens)
        microbatches = ([positions[k] for k in indices] for indices in bins)
        seconds = math.fsum(self.minibatch.window_s(0, each, is_first=False) for each in microbatches)
        return seconds * float(self.minibatch.speeds[0])

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
        work += math.fsum(end_s * speed for (end_s, _), speed in zip(decoded, minibatch.speeds.tolist(), strict=True))
        return end + cheapest / float(minibatch.speeds.max()), work / float(minibatch.speeds.sum())

    def simulate(self, schedule: str) -> SimulatedTiming:
        """Simulate one of `SCHEDULES`. Ranks are busy while they generate or train."""
        free = [ends_of_rank[-1][0] for ends_of_rank in self.assigned_decode_ends_s]
        scenario, begin = self.scenario, max(free)
        balance = lb_micro if schedule == BASELINE else dynamic
        plan = balance(self.minibatch.lengths, scenario.ranks, scenario.max_tokens, scenario.planned_cost)
        training = simulate_timing(self.minibatch, plan, schedule.split("/")[0])
        timeline = [
            [(0.0, end), *((begin + began, begin + ended) for began, ended in intervals)]
            for end, intervals in zip(free, training.timeline, strict=True)
        ]
        return SimulatedTiming(begin + training.end_s, timeline)


def rollout_works(minibatches: Sequence[SimulatedRollouts]) -> list[RolloutWork]:
    """Return the work of each minibatch for `StaleRollouts`."""
    return [
        RolloutWork(
            each.minibatch.lengths.reshape(-1, each.scenario.completions),
            [each.train_s(group) for group in range(each.scenario.num_groups)],
            each.minibatch.speeds.tolist(),
        )
        for each in minibatches
    ]


def simulate_rollouts(scenario: RolloutScenario) -> dict[str, Any]:
    """Simulate all schedules, and return the JSON object that the module's docstring describes."""
    minibatches = [SimulatedRollouts(scenario, minibatch) for minibatch in scenario.minibatches()]
    ends, busy, _ = collect_timings({name: each.simulate(name) for name in SCHEDULES} for each in minibatches)
    bounds = [minibatch.bounds_s() for minibatch in minibatches]
    work = {name: float(seconds.sum()) for name, seconds in busy.items()}
    totals = {name: math.fsum(seconds) for name, seconds in ends.items()}
    works = rollout_works(minibatches)
    for name, staleness in STALE.items():
        simulated = StaleRollouts(scenario, works, staleness)
        totals[name], work[name] = simulated.step_ends_s()[-1], simulated.busy_s
    work[BOUND] = scenario.ranks * math.fsum(shared for _, shared in bounds)
    totals[BOUND] = math.fsum(max(seconds) for seconds in bounds)
    generated = sum(seconds[-1][0] for minibatch in minibatches for seconds in minibatch.assigned_decode_ends_s)
    return {
        "scenario": asdict(scenario),
        "speedup": {name: totals[BASELINE] / total for name, total in totals.items()},
        "idle_fraction": {name: max(0.0, 1 - work[name] / (scenario.ranks * total)) for name, total in totals.items()},
        "step_s": {name: total / len(minibatches) for name, total in totals.items()},
        "generation_fraction": generated / work[BASELINE],
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a `RolloutScenario`."""
    add_scenario(parser, lengths=RolloutScenario.lengths)
    for field in ("completions", "decode_step_s", "decode_sequence_s", "max_rows"):
        default = getattr(RolloutScenario, field)
        parser.add_argument(f"--{field.replace('_', '-')}", type=type(default), default=default)


def build_scenario(arguments: argparse.Namespace) -> RolloutScenario:
    """Return the scenario of the command line. Raises `UserError` if it is invalid."""
    names = {field.name for field in fields(RolloutScenario)} & vars(arguments).keys()
    return RolloutScenario(**{name: getattr(arguments, name) for name in names})


def main() -> None:
    """Simulate the scenario of the command line, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_options(parser)
    arguments = parser.parse_args()
    try:
        result = simulate_rollouts(build_scenario(arguments))
    except UserError as error:
        parser.error(str(error))
    if arguments.json:
        print(json.dumps(result))
        return
    print(f"{'':20}{'speed-up':>10}{'idle':>8}{'s / step':>10}")
    for name, speedup in result["speedup"].items():
        print(f"{name:20}{speedup:10.3f}{result['idle_fraction'][name]:8.1%}{result['step_s'][name]:10.2f}")
    print(f"Generation is {result['generation_fraction']:.0%} of the work.")


if __name__ == "__main__":
    main()
