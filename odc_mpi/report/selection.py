"""Which of many ranks a picture shows. Local."""

from collections.abc import Sequence

#: More than this many lines cannot be told apart in a picture.
MAX_RANKS = 32


def choose(busy_s: Sequence[float], most: int = MAX_RANKS) -> list[int]:
    """Return all ranks, or of many the most busy, the least and some between, by rank. Local.

    Args:
        busy_s: What decides, for each rank.
        most: How many are readable.
    """
    count = len(busy_s)
    if count <= most:
        return list(range(count))
    by_work = sorted(range(count), key=lambda rank: busy_s[rank])
    return sorted({by_work[i * (count - 1) // (most - 1)] for i in range(most)})
