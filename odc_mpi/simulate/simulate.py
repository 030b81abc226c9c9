"""Simulation of a scenario with all transports and balancing strategies.

    collective/BALANCE   all ranks synchronize at each unit of each microbatch, as in FSDP and ZeRO-3
    window/BALANCE       ranks synchronize only at the end of a minibatch
    islands/BALANCE      as window/BALANCE, but each island holds all parameters (`comm.islands`), and ranks exchange
                         gradients and parameters with other islands at the end of a minibatch
    outer/BALANCE        as islands/BALANCE, but an outer loop exchanges parameters once every `sync_every` minibatches
    window/split         `dynamic` with context parallelism: sequences that are too long for an even share are split
                         over ranks (`data.plan.context_parallel`)
    floor                lower bound without split sequences: the larger of `even_share` and the time of the longest
                         sequence on the fastest rank
    even_share           lower bound for all schedules: the time that all work takes if no rank ever waits

The speed-up of a schedule is the total time of collective/lb_micro for all minibatches, divided by that of the
schedule. verl and the ODC paper use lb_micro with collectives.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
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
    simulate_collective,
    simulate_context_parallel,
    simulate_dynamic,
    simulate_static,
)
from odc_mpi.simulate.scenario import Scenario, SimulatedMinibatch

BASELINE, ON_DEMAND, SPLIT = "collective/lb_micro", "window/dynamic", "window/split"
#: Schedules to compare, as TRANSPORT/BALANCE. With lb_mini and dynamic, ranks run different numbers of microbatches,
#: which rules out collectives.
SCHEDULES = (
    BASELINE,
    "collective/local_sort",
    "window/local_sort",
    "window/lb_micro",
    "window/lb_mini",
    ON_DEMAND,
    SPLIT,
)
#: Balances that are also simulated with islands.
ISLAND_BALANCES = ("lb_mini", "dynamic")
#: Functions that plan a minibatch, by the name of the balance in `SCHEDULES`.
STRATEGIES: dict[str, Callable[..., Plan]] = {**BALANCE_STRATEGIES, "split": split_longest}
FLOOR, EVEN_SHARE = BOUNDS = "floor", "even_share"
#: Pauses shorter than this time, in seconds, are omitted from timelines.
PAUSE_S = 1e-3


def simulate(scenario: Scenario) -> dict[str, Any]:
    """Simulate all schedules for a scenario, and return the result of `summarize`, which is deterministic."""
    timings = (_timings(scenario, minibatch) for minibatch in scenario.minibatches())
    return summarize(scenario, *collect_timings(timings))


def summarize(
    scenario: Scenario,
    ends: Mapping[str, Sequence[float]],
    busy: Mapping[str, npt.NDArray[np.float64]],
    timeline: dict[str, list[Intervals]],
) -> dict[str, Any]:
    """Return the result of a simulation or a benchmark as a JSON object.

    The other arguments have the form that `collect_timings` returns. Keys of the result, besides `scenario`:
        floor: Speed-up over collective/lb_micro if each minibatch took only as long as the larger of an even share of
            the work and the longest sequence.
        speedup: Speed-up of each schedule and of `BOUNDS` over collective/lb_micro.
        idle_fraction: Fraction of the time that ranks wait or run dummy microbatches, for each schedule and `BOUNDS`.
        idle_per_rank: Idle fraction of each rank, by schedule.
        step_s: Mean duration of a minibatch in seconds, for each schedule and `BOUNDS`.
        longest_sequence_bound_fraction: Fraction of minibatches in which the longest sequence determines the floor.
        timeline: Busy intervals of each rank in the first minibatch, in seconds, by schedule.
    """
    floors = [floor_s(minibatch) for minibatch in scenario.minibatches()]
    shared = [even for _, even in floors]
    each = {**ends, FLOOR: [max(floor) for floor in floors], EVEN_SHARE: shared}
    totals = {name: math.fsum(seconds) for name, seconds in each.items()}
    # Bounds assume the fewest possible microbatches.
    bound = scenario.ranks * math.fsum(shared)
    work = {name: float(seconds.sum()) for name, seconds in busy.items()} | dict.fromkeys(BOUNDS, bound)
    speedup = {name: totals[BASELINE] / total for name, total in totals.items()}
    return {
        "floor": speedup[FLOOR],
        "scenario": asdict(scenario),
        "speedup": speedup,
        "idle_fraction": {name: max(0.0, 1 - work[name] / (scenario.ranks * total)) for name, total in totals.items()},
        "step_s": {name: total / len(floors) for name, total in totals.items()},
        "idle_per_rank": {
            name: np.maximum(0.0, 1.0 - seconds / totals[name]).tolist() for name, seconds in busy.items()
        },
        "longest_sequence_bound_fraction": sum(longest > even for longest, even in floors) / len(floors),
        "timeline": timeline,
    }


def _timings(scenario: Scenario, minibatch: SimulatedMinibatch) -> dict[str, SimulatedTiming]:
    plans = {name: plan(minibatch, name) for name in BALANCE_STRATEGIES}
    plans["split"] = plan(minibatch, "split", unsplit=plans["dynamic"])  # planning `dynamic` again takes long
    timings = {}
    for name in SCHEDULES:
        transport, balance = name.split("/")
        timings[name] = simulate_timing(minibatch, plans[balance], transport)
    if scenario.num_islands > 1:
        in_island = replace(minibatch, scenario=scenario.in_island)
        for balance in ISLAND_BALANCES:
            timing = simulate_timing(in_island, plans[balance], "window")
            timings[f"islands/{balance}"] = replace(timing, end_s=timing.end_s + scenario.exchange_s)
            if scenario.sync_every:
                timings[f"outer/{balance}"] = replace(timing, end_s=timing.end_s + scenario.outer_exchange_s)
    return timings


def collect_timings(
    minibatches: Iterable[Mapping[str, SimulatedTiming]],
) -> tuple[dict[str, list[float]], dict[str, npt.NDArray[np.float64]], dict[str, list[Intervals]]]:
    """Collect the timings of all minibatches. Each item of `minibatches` maps schedules to their timings.

    Returns three mappings, keyed by schedule: the duration of each minibatch, in seconds; the total busy time of each
    rank, in seconds, float64 `[ranks]`; and the timeline of the first minibatch.
    """
    ends: dict[str, list[float]] = {}
    busy: dict[str, npt.NDArray[np.float64]] = {}
    timeline: dict[str, list[Intervals]] = {}
    for minibatch in minibatches:
        for name, timing in minibatch.items():
            if name not in timeline:
                ends[name], busy[name] = [], np.zeros(len(timing.timeline))
                timeline[name] = [merge_intervals(intervals, PAUSE_S) for intervals in timing.timeline]
            ends[name].append(timing.end_s)
            busy[name] += [math.fsum(ended - began for began, ended in intervals) for intervals in timing.timeline]
    return ends, busy, timeline


def plan(minibatch: SimulatedMinibatch, balance: str, **arguments: Plan) -> Plan:
    """Plan a minibatch from its sequence lengths, as ranks do. `arguments` are passed to the planning function."""
    scenario = minibatch.scenario
    return STRATEGIES[balance](
        minibatch.lengths, scenario.ranks, scenario.max_tokens, scenario.planned_cost, **arguments
    )


def simulate_timing(minibatch: SimulatedMinibatch, plan: Plan, transport: str) -> SimulatedTiming:
    """Simulate one minibatch with the transport "window" or "collective".

    Plans with split sequences, or with a pool of microbatches to claim, require "window".
    """
    if plan.pool or plan.splits:
        assert transport == "window", "collectives require a static plan without split sequences"
        return _simulate_dynamic(minibatch, plan)
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


def _simulate_dynamic(minibatch: SimulatedMinibatch, plan: Plan) -> SimulatedTiming:
    chunk_timelines, available_at = _simulate_chunks(minibatch, plan)
    started = {rank for rank, intervals in enumerate(chunk_timelines) if intervals}

    def duration(rank: int, k: int) -> float:
        is_first = rank not in started
        started.add(rank)
        return minibatch.window_s(rank, plan.pool[k], is_first=is_first)

    pool = simulate_dynamic(len(plan.pool), available_at, duration)
    timeline = [[*chunks, *unsplit] for chunks, unsplit in zip(chunk_timelines, pool.timeline, strict=True)]
    return SimulatedTiming(pool.end_s, timeline)


def _simulate_chunks(minibatch: SimulatedMinibatch, plan: Plan) -> tuple[list[Intervals], list[float]]:
    """Return the intervals in which each rank computes chunks, and the time at which each rank has finished them.

    The chunks of a sequence wait for each other in every unit.
    """
    timeline: list[Intervals] = [[] for _ in minibatch.speeds]
    free = [0.0] * len(timeline)
    for split in plan.splits:
        seconds = [
            minibatch.chunk_s(rank, split, index, is_first=not timeline[rank]) for index, rank in enumerate(split.ranks)
        ]
        chunks = simulate_context_parallel([free[rank] for rank in split.ranks], seconds, minibatch.scenario.num_units)
        # A chunk ends its backward after all later chunks.
        ends = list(accumulate((intervals[-1][1] for intervals in reversed(chunks)), max))[::-1]
        for rank, intervals, end in zip(split.ranks, chunks, ends, strict=True):
            timeline[rank] += intervals
            free[rank] = end
    return timeline, free


def floor_s(minibatch: SimulatedMinibatch) -> tuple[float, float]:
    """Return two lower bounds, in seconds, on the duration of a minibatch without split sequences.

    The first is the duration of the longest sequence on the fastest rank. The second is the time that all work takes
    in the fewest possible microbatches if no rank ever waits.
    """
    scenario = minibatch.scenario
    fewest = math.ceil(int(minibatch.lengths.sum()) / scenario.max_tokens)
    work = math.fsum(minibatch.sequence_s.tolist()) + fewest * scenario.overhead_s
    saving_s, cost_s = scenario.cache_saving_s
    communication_s = scenario.communication_s - saving_s
    computed_s = (float(minibatch.sequence_s.max()) + scenario.overhead_s) / float(minibatch.speeds.max())
    longest = computed_s + communication_s + cost_s
    # Communication does not depend on the speed of a rank.
    return longest, (work + fewest * communication_s * float(minibatch.speeds.min())) / float(minibatch.speeds.sum())
