"""How figures of benchmarks are written for people, in tables as on pages."""

from collections.abc import Mapping
from typing import Any


def told_ranks(result: Mapping[str, Any]) -> str:
    """Return on what a benchmark ran, by `library`, `ranks` and `nodes` of its object. Local."""
    ranks, nodes = result["ranks"], result["nodes"]
    return f"{result['library']}, {ranks} rank{'s'[: ranks != 1]} on {nodes} node{'s'[: nodes != 1]}"


def told_load(result: Mapping[str, Any]) -> str:
    """Return how busy the node was around a benchmark, by `load_average` of its object. Local."""
    return "load of the node: {:.1f} before, {:.1f} after".format(*result["load_average"])
