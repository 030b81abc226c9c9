"""The cost of a sequence: estimated work as a function of its length.

Only ratios matter to a plan, so the unit is free: tokens, FLOPs or seconds.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

#: Cost of a piece of a sequence to the cost of its part: attention in two parts that are joined, and smaller products.
#: An assumption. A sketch in plain torch, 4,096 tokens in two pieces on CPUs, had 1.01.
CHUNK_FACTOR = 1.08


@dataclass(frozen=True)
class CostModel:
    """Cost of a sequence of s tokens: linear * s + quadratic * s²; and of a microbatch, a constant besides.

    Attributes:
        linear: Cost per token: all operations on single tokens.
        quadratic: Cost per pair of tokens: attention.
        constant: Cost of a microbatch of any content: fetching units, launching kernels.
        piece_factor: Cost of a piece of a sequence to the cost of its part, at least 1.
        earlier: Cost, in a piece, per token of the pieces before it: reading their keys and values, and adding to
            the gradients of these.
    """

    linear: float = 1.0
    quadratic: float = 0.0
    constant: float = 0.0
    piece_factor: float = CHUNK_FACTOR
    earlier: float = 0.0

    def sequence(self, lengths: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Return the cost of sequences of the given lengths.

        Args:
            lengths: Lengths in tokens, any shape.

        Returns:
            float64 array of the same shape.
        """
        tokens = np.asarray(lengths, dtype=np.float64)
        return self.linear * tokens + self.quadratic * tokens**2

    def chunk(self, begin: int, end: int) -> float:
        """Return the cost of the tokens from `begin` to `end` of a sequence, computed apart from the others.

        Under causal attention a token attends to all tokens before it, so the part's cost is that of `end` tokens less
        that of `begin`; the constant of a microbatch is not in there.
        """
        part = self.linear * (end - begin) + self.quadratic * (end * end - begin * begin)
        return self.piece_factor * part + self.earlier * begin

    def microbatch(self, lengths: npt.ArrayLike) -> float:
        """Return the cost of a microbatch of sequences of the given lengths, the constant too.

        Args:
            lengths: Lengths in tokens, [n]. An empty microbatch, run as padding, costs the constant.
        """
        return self.constant + float(self.sequence(lengths).sum())


#: The constant cost of a microbatch, in tokens: each parameter's gradient is made, laid out and added once
#: however few tokens there are. Measured 79 on CPUs (benchmarks/notes/balance.md); memory and matrix speed of an A100
#: suggest several hundred. From 40 to 250 `dynamic` cuts about as well where it is 79; with 0 it cuts far too small.
MICROBATCH_TOKENS = 100


def flops_cost(num_parameters: int, num_layers: int, hidden_size: int) -> CostModel:
    """Return the FLOPs of forward and backward through a decoder-only transformer.

    Matrices: a token passes every parameter once with one multiplication and one addition, 2 N in forward; backward
    computes two products of that size (for the inputs and for the weights), so 6 N per token (Kaplan et al. 2020,
    arXiv 2001.08361, section 2.1).

    Attention: scores and weighted values are 2 s² h each per layer, so 4 s² h in forward; the causal mask leaves half
    of it, 2 s² h; backward is twice the forward: 6 s² h per layer. What a kernel recomputes in backward is left out.

    The constant cost of a microbatch is that of `MICROBATCH_TOKENS` tokens.

    Args:
        num_parameters: Parameters that multiply, so without the embedding table (but with the output head).
        num_layers: Layers with attention.
        hidden_size: Heads times their dimension.
    """
    linear = 6.0 * num_parameters
    return CostModel(linear, 6.0 * num_layers * hidden_size, MICROBATCH_TOKENS * linear)
