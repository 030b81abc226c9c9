"""Cost of a sequence: the estimated work as a function of its length."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

#: Cost of a chunk relative to its share of the sequence's cost. A chunk costs more than this share because its
#: attention is computed in two parts that are then joined, and because its matrix products are smaller. The value is an
#: assumption: on CPUs, the factor was 1.01 for 4,096 tokens in two chunks.
CHUNK_FACTOR = 1.08


@dataclass(frozen=True)
class CostModel:
    """Model of the costs of sequences, microbatches and chunks, all in the same arbitrary unit, such as FLOPs.

    A sequence of `s` tokens costs `linear * s + quadratic * s**2`. A microbatch adds `constant` to its sequences' cost.

    Attributes:
        linear: Cost per token of all operations that process tokens independently.
        quadratic: Cost of attention, divided by the square of the number of tokens in the sequence.
        constant: Cost of a microbatch regardless of its tokens, for fetching parameters and launching kernels.
        chunk_factor: Cost of a chunk divided by its share of the cost of the unsplit sequence. Must be at least 1.
    """

    linear: float = 1.0
    quadratic: float = 0.0
    constant: float = 0.0
    chunk_factor: float = CHUNK_FACTOR

    def sequence(self, lengths: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Return each sequence's cost, float64, in the shape of `lengths`, which contains the numbers of tokens."""
        tokens = np.asarray(lengths, dtype=np.float64)
        return self.linear * tokens + self.quadratic * tokens**2

    def chunk(self, begin: int, end: int) -> float:
        """Return the cost, without `constant`, of a chunk that consists of the tokens `begin:end` of a sequence.

        Under causal attention, a token attends to all earlier tokens, so the cost is `chunk_factor` times the
        difference between the costs of two sequences, one of `end` tokens and one of `begin` tokens.
        """
        return self.chunk_factor * (self.linear * (end - begin) + self.quadratic * (end * end - begin * begin))


#: Constant cost of a microbatch, as the number of tokens with that cost. It exists because each parameter's gradient is
#: computed, flattened and pushed once, regardless of the number of tokens. It was measured to be 79 on CPUs
#: (benchmarks/notes/balance.md), where `dynamic` packs about equally well with 40 to 250.
MICROBATCH_TOKENS = 100


def flops_cost(num_parameters: int, num_layers: int, hidden_size: int) -> CostModel:
    """Return a cost model in FLOPs for the forward and backward passes of a decoder-only transformer.

    Matrix products need 6 N FLOPs per token for N parameters (Kaplan et al. 2020, arXiv 2001.08361, section 2.1).
    Attention needs 6 s² h FLOPs per layer for s tokens under a causal mask: the scores and the weighted sum of the
    values need s² h each in the forward pass, and twice as much in the backward pass. Recomputation is not counted. N
    (`num_parameters`) includes the output head but not the embedding table. h (`hidden_size`) is the number of heads
    times their dimension. The constant cost is that of `MICROBATCH_TOKENS` tokens without attention.
    """
    linear = 6.0 * num_parameters
    return CostModel(linear, 6.0 * num_layers * hidden_size, MICROBATCH_TOKENS * linear)
