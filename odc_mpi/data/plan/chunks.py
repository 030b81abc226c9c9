"""Splitting a sequence into chunks of about equal cost under causal attention.

Each token attends to all earlier tokens, so later tokens cost more, and the first chunk is the longest. Striped
Attention (arXiv 2311.09431) and Llama 3 (arXiv 2407.21783, section 3.3.2) balance the cost by giving each rank tokens
from several parts of the sequence. Here, each chunk is one contiguous range of tokens.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

from odc_mpi.data.plan.cost import CostModel

NUM_BISECTIONS = 20  # in the search for the cost of the costliest chunk


@dataclass(frozen=True)
class SequenceSplit:
    """A sequence that is split into chunks on different ranks. Chunk `i` contains the tokens `bounds[i]:bounds[i + 1]`.

    Attributes:
        position: Position of the sequence in the minibatch.
        bounds: Bounds of the chunks in tokens, [num_chunks + 1], increasing from 0 to the length of the sequence.
        ranks: Rank of each chunk, [num_chunks]. No rank occurs twice.
    """

    position: int
    bounds: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.bounds) == len(self.ranks) + 1, f"ranks {self.ranks} for chunks between {self.bounds}"
        assert len(set(self.ranks)) == len(self.ranks), f"two chunks of one sequence on a rank: {self.ranks}"
        assert self.bounds[0] == 0 and all(a < b for a, b in pairwise(self.bounds)), f"bounds {self.bounds}"


def even_bounds(length: int, count: int, max_tokens: int, cost: CostModel) -> tuple[int, ...]:
    """Split a sequence into at most `count` chunks so that the costliest chunk is as cheap as possible.

    `length` is the number of tokens in the sequence, at most `count * max_tokens`. Each chunk has at most `max_tokens`
    tokens. Returns the bounds of the chunks, as in `SequenceSplit.bounds`. There are fewer than `count` chunks only if
    more chunks would not make the costliest chunk cheaper.
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
    """Return the bounds of chunks that are as long as `max_cost` and `max_tokens` allow, starting at the first token.

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
    # The root is rounded, so correct the end using the cost itself.
    while end > begin and cost.chunk(begin, end) > max_cost:
        end -= 1
    while end < length and cost.chunk(begin, end + 1) <= max_cost:
        end += 1
    return end
