"""Pieces of a sequence: where to cut it so that under causal attention all pieces cost the same. Pure.

A token attends to all tokens before it, so later tokens cost more and the first piece is the longest. Ring attention
(arXiv 2310.01889) cuts into equal numbers of tokens, and Striped Attention (arXiv 2311.09431) and Llama 3 (arXiv
2407.21783, section 3.3.2) even that out by giving each rank tokens from several places. Here a piece stays one range
of tokens, and the ranges differ in length.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

from odc_mpi.data.plan.cost import CostModel

#: Halvings of the interval in which the cost of the costliest piece is searched, at first that of one token.
NUM_BISECTIONS = 20


@dataclass(frozen=True)
class SequenceSplit:
    """A sequence that is cut into pieces, each for another rank. The piece `i` has the tokens bounds[i]:bounds[i + 1].

    Attributes:
        sequence: Position of the sequence in the minibatch.
        bounds: Where pieces begin and end, in tokens: rising, from 0 to the length of the sequence, [pieces + 1].
        ranks: The rank of each piece, all different, [pieces].
    """

    sequence: int
    bounds: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.bounds) == len(self.ranks) + 1, f"{self.ranks} ranks for pieces between {self.bounds}"
        assert len(set(self.ranks)) == len(self.ranks), f"two pieces of one sequence on a rank: {self.ranks}"
        assert self.bounds[0] == 0 and all(a < b for a, b in pairwise(self.bounds)), f"bounds {self.bounds}"


def even_bounds(length: int, count: int, max_tokens: int, cost: CostModel) -> tuple[int, ...]:
    """Return bounds of at most so many pieces of a sequence, whose costliest piece is as cheap as can be.

    The least cost is found by bisection: for a cost that no piece may exceed, pieces as long as possible, from the
    first token on, are the fewest.

    Args:
        length: Tokens of the sequence, at least 1.
        count: The most pieces.
        max_tokens: The most tokens in a piece; `count` times this is at least `length`.
        cost: Says what a piece costs.

    Returns:
        Rising, from 0 to `length`; fewer pieces than `count` only if more of them would make none cheaper.
    """
    assert count * max_tokens >= length, f"{count} pieces of {max_tokens} tokens for {length}"
    # All pieces together cost at least what they would without tokens before them; the costliest, its share of that.
    low = cost.chunk(0, length) / count
    margin = cost.chunk(length - 1, length)
    while (found := _longest_first(length, count, max_tokens, cost, low + margin)) is None:
        low, margin = low + margin, 4 * margin
    high = low + margin
    for _ in range(NUM_BISECTIONS):
        middle = (low + high) / 2
        tried = _longest_first(length, count, max_tokens, cost, middle)
        if tried is None:
            low = middle
        else:
            found, high = tried, middle
    return found


def _longest_first(
    length: int, count: int, max_tokens: int, cost: CostModel, max_cost: float
) -> tuple[int, ...] | None:
    """Cut into pieces as long as a cost allows, from the first token on; None if they would be too many."""
    bounds = [0]
    while bounds[-1] < length and len(bounds) <= count:
        end = min(_reach(bounds[-1], cost, max_cost, length), bounds[-1] + max_tokens)
        if end <= bounds[-1]:
            return None
        bounds.append(end)
    return tuple(bounds) if bounds[-1] == length else None


def _reach(begin: int, cost: CostModel, max_cost: float, length: int) -> int:
    """Return the largest end, at most `length`, of a piece from `begin` that costs at most so much."""
    # piece_factor * (linear * (e - b) + quadratic * (e² - b²)) + earlier * b = most, solved for e without cancellation.
    part = (max_cost - cost.earlier * begin) / cost.piece_factor
    total = part + cost.linear * begin + cost.quadratic * begin * begin
    if part <= 0:
        return begin
    root = math.sqrt(cost.linear * cost.linear + 4 * cost.quadratic * total)
    end = min(int(2 * total / (cost.linear + root)), length)
    # The root is rounded: the cost itself decides.
    while end > begin and cost.chunk(begin, end) > max_cost:
        end -= 1
    while end < length and cost.chunk(begin, end + 1) <= max_cost:
        end += 1
    return end
