"""How many sequences per rank are enough: a table of what other numbers would bring. Local; no MPI."""

from collections.abc import Mapping
from dataclasses import replace

from odc_mpi.simulate.scenario import Scenario
from odc_mpi.simulate.simulate import simulate

#: Sequences per rank that the advice compares.
PER_RANK = (1, 2, 4, 8, 16)
#: The advice draws at most so many sequences for each, or one minibatch: a few seconds for all.
MAX_SIMULATED_SEQUENCES = 8_192
#: What the advice is about.
RECOMMENDED_SCHEDULE = "window/dynamic"


def recommend_batch_size(scenario: Scenario) -> str:
    """Return a table of speed-ups by the number of sequences per rank, and a sentence on it."""
    results = {}
    for per_rank in PER_RANK:
        max_per_rank = max(1, MAX_SIMULATED_SEQUENCES // (scenario.ranks * per_rank))
        results[per_rank] = simulate(
            replace(scenario, per_rank=per_rank, num_minibatches=min(max_per_rank, scenario.num_minibatches))
        )
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
    """Name the smallest number of sequences per rank that comes within 2 % of the best, and what it brings."""
    enough = next(per_rank for per_rank, rate in rates.items() if rate >= 0.98 * max(rates.values()))
    gain = rates[enough] / rates[PER_RANK[0]] - 1
    rest = max(rates.values()) / rates[enough] - 1
    return (
        f"With {RECOMMENDED_SCHEDULE}, {enough} per rank are enough: {gain:.0%} more sequences per second than with {PER_RANK[0]};\n"
        f"more of them bring at most {rest:.1%} on top."
    )
