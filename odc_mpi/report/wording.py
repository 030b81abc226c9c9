"""How figures of benchmarks are written for people, in tables as on pages."""

from collections.abc import Mapping
from typing import Any

#: Of sizes in bytes, from the smallest.
SUFFIXES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def told_ranks(result: Mapping[str, Any]) -> str:
    """Return on what a benchmark ran, by `library`, `ranks` and `nodes` of its object. Local."""
    ranks, nodes = result["ranks"], result["nodes"]
    return f"{result['library']}, {ranks} rank{'s'[: ranks != 1]} on {nodes} node{'s'[: nodes != 1]}"


def told_load(result: Mapping[str, Any]) -> str:
    """Return how busy the node was around a benchmark, by `load_average` of its object. Local."""
    return "load of the node: {:.1f} before, {:.1f} after".format(*result["load_average"])


def format_size(num_bytes: int) -> str:
    """Write a size the way it is read. Local."""
    for suffix, scale in reversed(SUFFIXES.items()):
        if num_bytes % scale == 0:
            return f"{num_bytes // scale}{suffix}"
    return str(num_bytes)
