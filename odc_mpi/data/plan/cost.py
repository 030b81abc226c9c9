"""Cost of a sequence: estimated work as a function of its length.

Plans depend on ratios of costs only, so the unit is arbitrary: tokens, FLOPs or seconds.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

#: Cost of a chunk computed separately, relative to its part of the sequence's cost: attention in two parts that are
#: joined, and smaller matrix products. An assumption. A prototype in plain torch, with 4,096 tokens in two chunks on
#: CPUs, had a factor of 1.01.
CHUNK_FACTOR = 1.08


@dataclass(frozen=True)
class CostModel:
    """Cost of a sequence of s tokens, linear * s + quadratic * s², and constant cost of a microbatch.

    Attributes:
        linear: Cost per token, of all operations on single tokens.
        quadratic: Cost per pair of tokens, of attention.
        constant: Cost of a microbatch of any content, of fetching units and launching kernels.
        piece_factor: Cost of a chunk relative to its part of the sequence's cost, at least 1.
        earlier: Additional cost of a chunk per token of earlier chunks, of reading their keys and values and
            accumulating the gradients of these.
    """

    linear: float = 1.0
    quadratic: float = 0.0
    constant: float = 0.0
    piece_factor: float = CHUNK_FACTOR
    earlier: float = 0.0

    def sequence(self, lengths: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Return the costs of sequences with these lengths in tokens, float64, in the shape of `lengths`."""
        tokens = np.asarray(lengths, dtype=np.float64)
        return self.linear * tokens + self.quadratic * tokens**2

    def chunk(self, begin: int, end: int) -> float:
        """Return the cost of a chunk, the tokens from `begin` to `end` of a sequence, without the constant.

        Under causal attention a token attends to all earlier tokens, so a chunk's part of the sequence's cost is the
        cost of `end` tokens minus that of `begin` tokens.
        """
        part = self.linear * (end - begin) + self.quadratic * (end * end - begin * begin)
        return self.piece_factor * part + self.earlier * begin

    def microbatch(self, lengths: npt.ArrayLike) -> float:
        """Return the cost of a microbatch of sequences with these lengths, [n], including the constant."""
        return self.constant + float(self.sequence(lengths).sum())


#: Constant cost of a microbatch, in tokens: each parameter's gradient is computed, flattened and pushed once, for any
#: number of tokens. Measured 79 on CPUs (benchmarks/notes/balance.md); memory bandwidth and matrix speed of an A100
#: suggest several hundred. Where it is 79, `dynamic` packs about equally well with 40 to 250; with 0 its microbatches
#: are far too small.
MICROBATCH_TOKENS = 100


def flops_cost(num_parameters: int, num_layers: int, hidden_size: int) -> CostModel:
    """Return the FLOPs of forward and backward through a decoder-only transformer as a cost.

    Matrices: a token passes every parameter once with one multiplication and one addition, 2 N in forward; backward
    computes two products of that size (for the inputs and for the weights), so 6 N per token (Kaplan et al. 2020,
    arXiv 2001.08361, section 2.1). `num_parameters` is without the embedding table, but with the output head.

    Attention: scores and weighted values are 2 s² h each per layer, so 4 s² h in forward; the causal mask leaves half
    of it, 2 s² h; backward is twice the forward: 6 s² h per layer. Recomputation by kernels in backward is not
    included. `hidden_size` is the number of heads times their dimension.

    The constant cost of a microbatch is that of `MICROBATCH_TOKENS` tokens.
    """
    linear = 6.0 * num_parameters
    return CostModel(linear, 6.0 * num_layers * hidden_size, MICROBATCH_TOKENS * linear)
