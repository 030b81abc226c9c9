"""Splitting a sequence into chunks of about equal cost under causal attention. Does not use MPI.

A token attends to all earlier tokens, so later tokens cost more, and the first chunk is the longest. Ring attention
(arXiv 2310.01889) splits into equal numbers of tokens. Striped Attention (arXiv 2311.09431) and Llama 3 (arXiv
2407.21783, section 3.3.2) balance the cost by giving each rank tokens from several parts of the sequence. Here a chunk
is a single range of tokens, and the ranges differ in length.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

from odc_mpi.data.plan.cost import CostModel

#: Number of bisections in the search for the cost of the costliest chunk. The first interval is as wide as the cost of
#: the last token, or wider by a power of 4.
NUM_BISECTIONS = 20


@dataclass(frozen=True)
class SequenceSplit:
    """A sequence that is split into chunks on different ranks. Chunk `i` contains the tokens bounds[i]:bounds[i + 1].

    Attributes:
        position: Position of the sequence in the minibatch.
        bounds: Bounds of the chunks, in tokens, increasing from 0 to the length of the sequence, [chunks + 1].
        ranks: Rank of each chunk, [chunks]. All ranks are different.
    """

    position: int
    bounds: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.bounds) == len(self.ranks) + 1, f"ranks {self.ranks} for chunks between {self.bounds}"
        assert len(set(self.ranks)) == len(self.ranks), f"two chunks of one sequence on a rank: {self.ranks}"
        assert self.bounds[0] == 0 and all(a < b for a, b in pairwise(self.bounds)), f"bounds {self.bounds}"


def even_bounds(length: int, count: int, max_tokens: int, cost: CostModel) -> tuple[int, ...]:
    """Split a sequence into at most `count` chunks whose largest cost is minimal, and return `SequenceSplit.bounds`.

    The minimum is found by bisection. For a given maximum cost, the fewest chunks result from making each chunk as long
    as possible, beginning at the first token. The result has fewer chunks than `count` only if more chunks would not
    reduce the largest cost.

    `length` is the number of tokens of the sequence, from 1 to `count * max_tokens`. A chunk has at most `max_tokens`.
    """
    assert count * max_tokens >= length, f"{count} chunks of {max_tokens} tokens for {length}"
    # The costliest chunk costs at least an equal share.
    low = cost.chunk(0, length) / count
    margin = cost.chunk(length - 1, length)
    while (bounds := _longest_first(length, count, max_tokens, cost, low + margin)) is None:
        low, margin = low + margin, 4 * margin
    high = low + margin
    for _ in range(NUM_BISECTIONS):
        middle = (low + high) / 2
        cheaper = _longest_first(length, count, max_tokens, cost, middle)
        if cheaper is None:
            low = middle
        else:
            bounds, high = cheaper, middle
    return bounds


def _longest_first(
    length: int, count: int, max_tokens: int, cost: CostModel, max_cost: float
) -> tuple[int, ...] | None:
    """Return the bounds of chunks as long as `max_cost` and `max_tokens` allow, from the first token on.

    Returns None if more than `count` chunks would be needed.
    """
    bounds = [0]
    while bounds[-1] < length and len(bounds) <= count:
        end = min(_reach(bounds[-1], cost, max_cost, length), bounds[-1] + max_tokens)
        if end <= bounds[-1]:
            return None
        bounds.append(end)
    return tuple(bounds) if bounds[-1] == length else None


def _reach(begin: int, cost: CostModel, max_cost: float, length: int) -> int:
    """Return the largest end, at most `length`, of a chunk that begins at `begin` and costs at most `max_cost`."""
    # chunk_factor * (linear * (e - b) + quadratic * (e² - b²)) = max_cost, solved for e, without cancellation.
    total = max_cost / cost.chunk_factor + cost.linear * begin + cost.quadratic * begin * begin
    if max_cost <= 0:
        return begin
    root = math.sqrt(cost.linear * cost.linear + 4 * cost.quadratic * total)
    end = min(int(2 * total / (cost.linear + root)), length)
    # The root is rounded, so correct it by the cost itself.
    while end > begin and cost.chunk(begin, end) > max_cost:
        end -= 1
    while end < length and cost.chunk(begin, end + 1) <= max_cost:
        end += 1
    return end
