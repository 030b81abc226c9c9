"""How long the sequences of known data sets are, as distributions to draw from; or those of a prepared data set.

Of the data sets of the ODC paper (arXiv 2601.19362) mean lengths are published, and of LongAlign the range. Lengths of
sequences look log-normal in general, cut at the longest; how wide they spread, sigma, is an assumption, said in `KNOWN_DISTRIBUTIONS`
for each. Local, all of it.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from odc_mpi.data.dataset import Dataset
from odc_mpi.errors import UserError
from odc_mpi.formatting import did_you_mean

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class LogNormal:
    """Log-normal lengths; longer ones are cut to the longest.

    Attributes:
        mean_tokens: Mean length, after the cut.
        max_tokens: The longest length.
        sigma: Standard deviation of the logarithm, before the cut.
    """

    mean_tokens: float
    max_tokens: int
    sigma: float

    def location(self) -> float:
        """Return the mean of the logarithm that leads to `mean_tokens`, by bisection."""
        low, high = math.log(self.mean_tokens) - self.sigma**2, math.log(self.max_tokens) + 8 * self.sigma
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (middle, high) if self._mean(middle) < self.mean_tokens else (low, middle)
        return low

    def sample(self, n: int, rng: np.random.Generator) -> Tokens:
        """Return lengths, int64 [n], from 1 to `max_tokens`."""
        lengths = np.exp(self.location() + self.sigma * rng.standard_normal(n))
        return np.clip(np.rint(lengths), 1, self.max_tokens).astype(np.int64)

    def _mean(self, location: float) -> float:
        """Return E[min(X, cut)] for X log-normal."""
        sigma, edge = self.sigma, math.log(self.max_tokens)
        below = math.exp(location + sigma**2 / 2) * _normal((edge - location - sigma**2) / sigma)
        return below + self.max_tokens * (1 - _normal((edge - location) / sigma))


def _normal(x: float) -> float:
    """Return the standard normal distribution function."""
    return 0.5 * math.erfc(-x / math.sqrt(2))


@dataclass(frozen=True)
class EmpiricalLengths:
    """Lengths of sequences that there are, drawn with replacement.

    Attributes:
        lengths: int64 [sequences].
    """

    lengths: Tokens

    @cached_property
    def max_tokens(self) -> int:
        """The longest length."""
        return int(self.lengths.max())

    def sample(self, n: int, rng: np.random.Generator) -> Tokens:
        """Return lengths, int64 [n]."""
        return rng.choice(self.lengths, n)


#: Where lengths come from: the longest possible length, and lengths drawn by a generator.
LengthDistribution: TypeAlias = LogNormal | EmpiricalLengths

#: By name. Means from the ODC paper.
KNOWN_DISTRIBUTIONS: dict[str, LengthDistribution] = {
    "equal": EmpiricalLengths(np.array([16_500])),  # there is nothing to balance
    # 10,000 instructions "of 8k-64k in length" (LongAlign, arXiv 2401.18058): with 0.65 three quarters are in there and
    # 0.7 % are cut. What follows for 8 ranks of 4 with sigma 0.5, 0.65, 0.8: LB-Mini 1.20, 1.26, 1.27.
    "longalign": LogNormal(16_500, 65_536, 0.65),
    # Transcripts of agents that work under the same limits are more alike. Longest length: a model's usual 128K.
    "swesmith": LogNormal(34_700, 131_072, 0.5),
    # Answers of a reasoning model, from short ones to those that run into the limit of 32K, 1.6 % of them.
    "aime": LogNormal(9_000, 32_768, 0.75),
}


def lengths_by_name(name: str) -> LengthDistribution:
    """Return the source of lengths of a name among `KNOWN_DISTRIBUTIONS`, or of a data set that `odc-mpi prepare` wrote.

    Raises:
        UserError: There is neither.
    """
    if name in KNOWN_DISTRIBUTIONS:
        return KNOWN_DISTRIBUTIONS[name]
    if not Path(name).exists() and "/" not in name and not name.endswith((".h5", ".hdf5")):
        hint = did_you_mean(name, KNOWN_DISTRIBUTIONS)
        raise UserError(
            f"expected --lengths among {', '.join(KNOWN_DISTRIBUTIONS)} or the path of a data set, got {name!r}{hint}"
        )
    try:
        with Dataset(name) as dataset:
            return EmpiricalLengths(np.array(dataset.lengths, dtype=np.int64))
    except UserError as error:  # which names the setting of a run
        raise UserError(str(error).replace("data.path", "--lengths")) from error
