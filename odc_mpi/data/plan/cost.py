"""Cost of a sequence: its estimated work as a function of its length.

Plans depend only on ratios of costs, so the unit is arbitrary: for example tokens, FLOPs or seconds.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

#: Cost of a chunk relative to its part of the sequence's cost. A chunk costs more than this part because its attention
#: is computed in two parts that are joined, and its matrix products are smaller. This is an assumption. A prototype
#: in plain torch, with 4,096 tokens in two chunks on CPUs, had a factor of 1.01.
CHUNK_FACTOR = 1.08


@dataclass(frozen=True)
class CostModel:
    """Model of the costs of sequences, microbatches and chunks, all in the same, arbitrary unit.

    A sequence of s tokens costs linear * s + quadratic * s². A microbatch costs `constant` in addition to its
    sequences.

    Attributes:
        linear: Cost per token of all operations that process tokens separately.
        quadratic: Cost of attention, per square of the number of tokens in a sequence.
        constant: Cost of a microbatch for any number of tokens, for fetching parameters and launching kernels.
        chunk_factor: Cost of a chunk, divided by its share of the cost of the unsplit sequence, at least 1.
    """

    linear: float = 1.0
    quadratic: float = 0.0
    constant: float = 0.0
    chunk_factor: float = CHUNK_FACTOR

    def sequence(self, lengths: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Return the cost of each sequence, float64 in the shape of `lengths`, which are numbers of tokens."""
        tokens = np.asarray(lengths, dtype=np.float64)
        return self.linear * tokens + self.quadratic * tokens**2

    def chunk(self, begin: int, end: int) -> float:
        """Return the cost of the tokens `begin:end` of a sequence as a chunk, without `constant`.

        Under causal attention, a token attends to all earlier tokens. So the cost is `chunk_factor` times the
        difference of the costs of two sequences, with `end` and `begin` tokens.
        """
        return self.chunk_factor * (self.linear * (end - begin) + self.quadratic * (end * end - begin * begin))

    def microbatch(self, lengths: npt.ArrayLike) -> float:
        """Return the cost of a microbatch of sequences with these lengths in tokens, [n], including `constant`."""
        return self.constant + float(self.sequence(lengths).sum())


#: Constant cost of a microbatch, as the number of tokens with that cost. This cost exists because each parameter's
#: gradient is computed, flattened and pushed once, for any number of tokens. Measured: 79 on CPUs
#: (benchmarks/notes/balance.md). Memory bandwidth and matrix speed of an A100 suggest several hundred. Where 79 was
#: measured, `dynamic` packs about equally well with values of 40 to 250. With 0, its microbatches are far too small.
MICROBATCH_TOKENS = 100


def flops_cost(num_parameters: int, num_layers: int, hidden_size: int) -> CostModel:
    """Return a cost model in FLOPs for the forward and backward pass of a decoder-only transformer.

    Matrix products: the forward pass has one multiplication and one addition per token and parameter. The backward pass
    computes two products of the same size. The total for N parameters is 6 N per token (Kaplan et al. 2020, arXiv
    2001.08361, section 2.1).

    Attention: for s tokens, the scores and the weighted sum of the values need 2 s² h FLOPs each, per layer. The causal
    mask halves these 4 s² h. The backward pass has twice the FLOPs of the forward pass, so the total is 6 s² h per
    layer. Recomputation in the backward pass is not counted. The constant cost is that of `MICROBATCH_TOKENS` tokens.

    Args:
        num_parameters: Number N of parameters, including the output head, but not the embedding table.
        hidden_size: Number of attention heads times their dimension, h.
    """
    linear = 6.0 * num_parameters
    return CostModel(linear, 6.0 * num_layers * hidden_size, MICROBATCH_TOKENS * linear)
