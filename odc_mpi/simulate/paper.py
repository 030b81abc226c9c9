"""What the ODC paper (arXiv 2601.19362) measured of the schedules compared here, to stand beside our figures."""

from collections.abc import Mapping
from typing import Any

from odc_mpi.simulate.scenario import Scenario

#: Speed-ups over FSDP with LB-Micro on A100s, with a model of 1.5 B parameters, by lengths, ranks and sequences per
#: rank.
PAPER: Mapping[tuple[str, int, int], Mapping[str, float]] = {
    ("longalign", 8, 4): {"window/lb_micro": 1.16, "window/lb_mini": 1.34},
}


def nearest(scenario: Scenario) -> dict[str, Any] | None:
    """Return the paper's figures for the scenario that is most like this one, and which that is. Local.

    Returns:
        None if the paper has none for these lengths, as far as we know it; else `source`, `lengths`, `ranks`,
        `per_rank`, `same`, whether all of these are this scenario's, and `speedup`, by schedule.
    """
    keys = [key for key in PAPER if key[0] == scenario.lengths]
    if not keys:
        return None
    wanted = (scenario.lengths, scenario.ranks, scenario.per_rank)
    lengths, ranks, per_rank = key = min(
        keys, key=lambda key: (abs(key[1] - scenario.ranks), abs(key[2] - scenario.per_rank))
    )
    return {
        "source": "arXiv 2601.19362, 1.5 B parameters on A100s",
        "lengths": lengths,
        "ranks": ranks,
        "per_rank": per_rank,
        "same": key == wanted,
        "speedup": dict(PAPER[key]),
    }
