"""What each transport and balance would make of a scenario, without running it.

    collective/BALANCE   all ranks synchronize at each unit of each microbatch, as FSDP and ZeRO-3 do
    window/BALANCE       they synchronize at the minibatch boundary only
    window/split         `dynamic`, where sequences too long for an even share are cut over ranks (`data.plan.context_parallel`)
    floor                no schedule of whole sequences can end earlier: not before the longest on the fastest rank, nor
                         before all work is done if nobody ever waits
    even_share           nor can any schedule, whatever it cuts, end before the latter

Speed-ups are ratios of the total time of all minibatches, over that of collective/lb_micro, what verl and the ODC paper
plan for collectives. Local, all of it; no MPI.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from odc_mpi.data.plan.balance import BALANCE_STRATEGIES, Plan
from odc_mpi.data.plan.context_parallel import split_longest
from odc_mpi.simulate.events import (
    Intervals,
    SimulatedTiming,
    merge_intervals,
    quartiles,
    simulate_collective,
    simulate_context_parallel,
    simulate_dynamic,
    simulate_static,
)
from odc_mpi.simulate.scenario import Scenario, SimulatedMinibatch

BASELINE = "collective/lb_micro"
#: What is compared, as TRANSPORT/BALANCE. LB-Mini and dynamic plans have no turns in which ranks could synchronize.
SCHEDULES = (
    BASELINE,
    "collective/local_sort",
    "window/local_sort",
    "window/lb_micro",
    "window/lb_mini",
    "window/dynamic",
    "window/split",
)
#: Plans by the name of their balance in `SCHEDULES`.
PLANS: dict[str, Callable[..., Plan]] = {**BALANCE_STRATEGIES, "split": split_longest}
FLOOR, EVEN_SHARE = "floor", "even_share"
#: What bounds schedules, by the same keys as theirs.
BOUNDS = (FLOOR, EVEN_SHARE)
#: Of a timeline, pauses below this are left out, in seconds.
PAUSE_S = 1e-3
#: Speed-ups over FSDP with LB-Micro that the ODC paper measured, and of what.
PAPER = {
    "source": "arXiv 2601.19362, 1.5 B parameters on A100s",
    "lengths": "longalign",
    "ranks": 8,
    "per_rank": 4,
    "speedup": {"window/lb_micro": 1.16, "window/lb_mini": 1.34},
}


@dataclass(frozen=True)
class SimulationResult:
    """What a simulation found.

    Attributes:
        scenario: Of what.
        speedup: Over collective/lb_micro, by schedule and for `BOUNDS`.
        idle_fraction: The part of the ranks' time in which they wait or run padding, likewise.
        idle_per_rank: The same of each rank, by schedule; `idle_fraction` is the mean.
        speedup_per_minibatch: Over collective/lb_micro, of each minibatch alone, likewise: quartiles.
        step_s: Mean seconds of a minibatch, likewise.
        longest_sequence_bound_fraction: The part of minibatches whose floor is the longest sequence, not the sum of all work.
        timeline: Of the first minibatch, by schedule: for each rank when it computes, in seconds, padding left out.
    """

    scenario: Scenario
    speedup: dict[str, float]
    idle_fraction: dict[str, float]
    idle_per_rank: dict[str, list[float]]
    speedup_per_minibatch: dict[str, dict[str, float]]
    step_s: dict[str, float]
    longest_sequence_bound_fraction: float
    timeline: dict[str, list[Intervals]]

    @classmethod
    def from_times(
        cls,
        scenario: Scenario,
        ends: Mapping[str, Sequence[float]],
        busy: Mapping[str, npt.NDArray[np.float64]],
        timeline: dict[str, list[Intervals]],
    ) -> "SimulationResult":
        """Sum up, and set the bounds beside.

        Args:
            scenario: Of what.
            ends: Seconds of each minibatch, by schedule.
            busy: Seconds that each rank computed, of all minibatches, float64 [ranks], by schedule.
            timeline: As for the attribute.
        """
        floors = [floor_s(minibatch, scenario.max_tokens) for minibatch in scenario.minibatches()]
        shared = [even for _, even in floors]
        each = {**ends, FLOOR: [max(floor) for floor in floors], EVEN_SHARE: shared}
        # The work of a bound is that of the fewest microbatches.
        bound = scenario.ranks * math.fsum(shared)
        work = {name: float(seconds.sum()) for name, seconds in busy.items()} | dict.fromkeys(BOUNDS, bound)
        return cls(
            scenario,
            **ratios(each, work, BASELINE, scenario.ranks),
            idle_per_rank={
                name: np.maximum(0.0, 1.0 - seconds / math.fsum(each[name])).tolist() for name, seconds in busy.items()
            },
            speedup_per_minibatch={
                name: quartiles([baseline / seconds for baseline, seconds in zip(each[BASELINE], ends_s, strict=True)])
                for name, ends_s in each.items()
            },
            longest_sequence_bound_fraction=sum(longest > even for longest, even in floors) / len(floors),
            timeline=timeline,
        )

    def as_json(self) -> dict[str, Any]:
        """Return all figures as one object, with those of the paper if it has these lengths."""
        # To copy the timeline would take as long as a minibatch of a thousand ranks.
        bare = asdict(replace(self, timeline={}))
        is_same = all(bare["scenario"][key] == PAPER[key] for key in ("ranks", "per_rank"))
        paper = {**PAPER, "same": is_same} if self.scenario.lengths == PAPER["lengths"] else None
        return {"floor": self.speedup[FLOOR], **bare, "timeline": self.timeline, "paper": paper}


def simulate(scenario: Scenario) -> SimulationResult:
    """Compute what each schedule would take.

    Args:
        scenario: What is tried; the same one gives the same outcome.

    Raises:
        UserError: Its lengths are not to be had.
    """
    return SimulationResult.from_times(
        scenario, *collect_timings(_timings(scenario, minibatch) for minibatch in scenario.minibatches())
    )


def _timings(scenario: Scenario, minibatch: SimulatedMinibatch) -> dict[str, SimulatedTiming]:
    plans = {name: plan(scenario, minibatch, name) for name in BALANCE_STRATEGIES}
    plans["split"] = plan(scenario, minibatch, "split", plans["dynamic"])
    found = {}
    for name in SCHEDULES:
        transport, balance = name.split("/")
        found[name] = simulate_timing(minibatch, plans[balance], transport, scenario.ticket_s, scenario.num_units)
    return found


def collect_timings(
    minibatches: Iterable[Mapping[str, SimulatedTiming]],
) -> tuple[dict[str, list[float]], dict[str, npt.NDArray[np.float64]], dict[str, list[Intervals]]]:
    """Collect the timings of minibatches, each given by schedule.

    Returns:
        By schedule: when each minibatch ends, the seconds that each rank is busy in all, and the first one's timeline.
    """
    ends: dict[str, list[float]] = {}
    busy: dict[str, npt.NDArray[np.float64]] = {}
    timeline: dict[str, list[Intervals]] = {}
    for minibatch in minibatches:
        for name, found in minibatch.items():
            if name not in timeline:
                ends[name], busy[name] = [], np.zeros(len(found.timeline))
                timeline[name] = [merge_intervals(intervals, PAUSE_S) for intervals in found.timeline]
            ends[name].append(found.end_s)
            busy[name] += [math.fsum(ended - began for began, ended in intervals) for intervals in found.timeline]
    return ends, busy, timeline


def ratios(
    ends: Mapping[str, Sequence[float]], work: Mapping[str, float], baseline: str, ranks: int
) -> dict[str, dict[str, float]]:
    """Return `speedup`, `idle_fraction` and `step_s` of an outcome.

    Args:
        ends: Seconds of each minibatch, by schedule or bound.
        work: Seconds that all ranks together are busy in all minibatches, likewise.
        baseline: The schedule that speed-ups are relative to.
        ranks: How many there are.
    """
    totals = {name: math.fsum(seconds) for name, seconds in ends.items()}
    return {
        "speedup": {name: totals[baseline] / total for name, total in totals.items()},
        "idle_fraction": {name: max(0.0, 1.0 - work[name] / (ranks * total)) for name, total in totals.items()},
        "step_s": {name: total / len(ends[name]) for name, total in totals.items()},
    }


def plan(scenario: Scenario, minibatch: SimulatedMinibatch, balance: str, *known: Plan) -> Plan:
    """Plan a minibatch by its lengths alone, as ranks would; the plan of `dynamic`, if known, is for `split`."""
    return PLANS[balance](minibatch.lengths, scenario.ranks, scenario.max_tokens, scenario.planned_cost, *known)


def simulate_timing(
    minibatch: SimulatedMinibatch, plan: Plan, transport: str, ticket_s: float = 0.0, num_units: int = 1
) -> SimulatedTiming:
    """Compute what a plan takes over a transport, `collective` or `window`."""
    if plan.pool or plan.splits:
        assert transport == "window", "collectives need to know who runs what"
        return _simulate_dynamic(minibatch, plan, ticket_s, num_units)
    ranks = list(enumerate(plan.microbatches))
    if transport == "window":
        return simulate_static(
            [
                [minibatch.window_s(rank, each, is_first=not k) for k, each in enumerate(filter(None, indices))]
                for rank, indices in ranks
            ]
        )
    durations = [[minibatch.duration_s(rank, each) if each else 0.0 for each in indices] for rank, indices in ranks]
    return simulate_collective(durations, [minibatch.duration_s(rank, ()) for rank, _ in ranks])


def _simulate_dynamic(minibatch: SimulatedMinibatch, plan: Plan, ticket_s: float, num_units: int) -> SimulatedTiming:
    chunk_timelines, available_at = _simulate_chunks(minibatch, plan, num_units)
    started = {rank for rank, intervals in enumerate(chunk_timelines) if intervals}

    def duration(rank: int, k: int) -> float:
        is_first = rank not in started
        started.add(rank)
        return minibatch.window_s(rank, plan.pool[k], is_first=is_first)

    whole = simulate_dynamic([0.0] * len(plan.pool), available_at, duration, ticket_s if plan.pool else 0.0)
    return SimulatedTiming(
        whole.end_s, [[*before, *after] for before, after in zip(chunk_timelines, whole.timeline, strict=True)]
    )


def _simulate_chunks(minibatch: SimulatedMinibatch, plan: Plan, num_units: int) -> tuple[list[Intervals], list[float]]:
    """Return the times at which each rank computes its pieces, and at which it has left the last of them."""
    timeline: list[Intervals] = [[] for _ in minibatch.speeds]
    free = [0.0] * len(timeline)
    for split in plan.splits:
        seconds = [
            minibatch.chunk_s(rank, split, index, is_first=not timeline[rank]) for index, rank in enumerate(split.ranks)
        ]
        found = simulate_context_parallel([free[rank] for rank in split.ranks], seconds, num_units)
        # A piece leaves its last unit when the pieces after it have.
        ends = list(accumulate((intervals[-1][1] for intervals in reversed(found)), max))[::-1]
        for rank, intervals, end in zip(split.ranks, found, ends, strict=True):
            timeline[rank] += intervals
            free[rank] = end
    return timeline, free


def floor_s(minibatch: SimulatedMinibatch, max_tokens: int) -> tuple[float, float]:
    """Return two times in seconds before which no schedule of whole sequences ends.

    Returns:
        The longest sequence's on the fastest rank, and that of all work, in as few microbatches as there can be, on
        ranks that never wait.
    """
    fewest = math.ceil(int(minibatch.lengths.sum()) / max_tokens)
    work = math.fsum(minibatch.sequence_s.tolist()) + fewest * minibatch.overhead_s
    communication_s = minibatch.communication_s - minibatch.cache_saving_s
    longest = (
        (float(minibatch.sequence_s.max()) + minibatch.overhead_s) / float(minibatch.speeds.max())
        + communication_s
        + minibatch.cache_cost_s
    )
    # Communication takes the same on each rank, work the less the faster it is.
    return longest, (work + fewest * communication_s * float(minibatch.speeds.min())) / float(minibatch.speeds.sum())
