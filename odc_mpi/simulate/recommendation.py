"""Recommendation of a number of sequences per rank, with a table of alternatives."""

from collections.abc import Mapping
from dataclasses import replace

from odc_mpi.simulate.scenario import Scenario
from odc_mpi.simulate.simulate import simulate

#: Numbers of sequences per rank to compare.
PER_RANK = (1, 2, 4, 8, 16)
#: Maximum number of sequences to simulate for each of these numbers, but at least one minibatch. Takes a few seconds.
MAX_SIMULATED_SEQUENCES = 8_192
RECOMMENDED_SCHEDULE = "window/dynamic"


def recommend_batch_size(scenario: Scenario) -> str:
    """Simulate several numbers of sequences per rank, and return a table of the results with a recommendation."""
    results = {}
    for per_rank in PER_RANK:
        max_minibatches = max(1, MAX_SIMULATED_SEQUENCES // (scenario.ranks * per_rank))
        num_minibatches = min(max_minibatches, scenario.num_minibatches)
        results[per_rank] = simulate(replace(scenario, per_rank=per_rank, num_minibatches=num_minibatches))
    lines = [f"{'sequences':>12}{'speed-up':>12}{'':20}{'idle':>12}{'sequences':>14}"]
    lines.append(f"{'per rank':>12}{'lb_mini':>12}{'dynamic':>10}{'split':>10}{'dynamic':>12}{'per s':>14}")
    rates = {}
    for per_rank, result in results.items():
        rates[per_rank] = scenario.ranks * per_rank / result.step_s[RECOMMENDED_SCHEDULE]
        lines.append(
            f"{per_rank:12}{result.speedup['window/lb_mini']:12.3f}{result.speedup[RECOMMENDED_SCHEDULE]:10.3f}"
            f"{result.speedup['window/split']:10.3f}{result.idle_fraction[RECOMMENDED_SCHEDULE]:12.1%}{rates[per_rank]:14.2f}"
        )
    return "\n".join([*lines, "", _sentence(rates)])


def _sentence(rates: Mapping[int, float]) -> str:
    """Recommend the smallest number of sequences per rank whose rate is within 2 % of the best."""
    enough = next(per_rank for per_rank, rate in rates.items() if rate >= 0.98 * max(rates.values()))
    gain = rates[enough] / rates[PER_RANK[0]] - 1
    rest = max(rates.values()) / rates[enough] - 1
    return (
        f"With {RECOMMENDED_SCHEDULE}, {enough} per rank are enough: {gain:.0%} more sequences per second than with "
        f"{PER_RANK[0]}.\nLarger minibatches add at most {rest:.1%}."
    )
