"""What a sequence costs: estimated work as a function of its length.

Only ratios matter to a plan, so the unit is free: tokens, FLOPs or seconds.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Cost:
    """Cost of a sequence of s tokens: linear * s + quadratic * s².

    Attributes:
        linear: Cost per token: everything that treats each token alone.
        quadratic: Cost per pair of tokens: attention.
    """

    linear: float = 1.0
    quadratic: float = 0.0

    def sequence(self, lengths: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Return the cost of sequences of the given lengths.

        Local.

        Args:
            lengths: Lengths in tokens, any shape.

        Returns:
            float64 array of the same shape.
        """
        tokens = np.asarray(lengths, dtype=np.float64)
        return self.linear * tokens + self.quadratic * tokens**2


def flops_cost(num_parameters: int, num_layers: int, hidden_size: int) -> Cost:
    """Return the FLOPs of forward and backward through a decoder-only transformer.

    Matrices: a token passes every parameter once with one multiplication and one addition, 2 N in forward; backward
    computes two products of that size (for the inputs and for the weights), so 6 N per token (Kaplan et al. 2020,
    arXiv 2001.08361, section 2.1).

    Attention: scores and weighted values are 2 s² h each per layer, so 4 s² h in forward; the causal mask leaves half
    of it, 2 s² h; backward is twice the forward: 6 s² h per layer. What a kernel recomputes in backward is left out.

    Local.

    Args:
        num_parameters: Parameters that multiply, so without the embedding table (but with the output head).
        num_layers: Layers with attention.
        hidden_size: Heads times their dimension.
    """
    return Cost(linear=6.0 * num_parameters, quadratic=6.0 * num_layers * hidden_size)
