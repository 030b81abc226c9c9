"""Distributions of sequence lengths, for well-known data sets and for prepared data sets.

The ODC paper (arXiv 2601.19362) gives the mean lengths of its data sets. Lengths are assumed to be log-normally
distributed up to a maximum.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.errors import UserError
from odc_mpi.formatting import did_you_mean

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class LogNormal:
    """Log-normal distribution of lengths, clipped to `max_tokens`.

    Before clipping, the logarithm of a length has the mean `location` and the standard deviation `sigma`.
    """

    location: float
    sigma: float
    max_tokens: int

    def sample(self, n: int, rng: np.random.Generator) -> Tokens:
        """Sample `n` lengths, int64 `[n]`, clipped to the range from 1 to `max_tokens`."""
        lengths = np.exp(self.location + self.sigma * rng.standard_normal(n))
        return np.clip(np.rint(lengths), 1, self.max_tokens).astype(np.int64)


@dataclass(frozen=True)
class EmpiricalLengths:
    """Distribution that draws with replacement from the lengths of existing sequences, int64 `[sequences]`."""

    lengths: Tokens

    @cached_property
    def max_tokens(self) -> int:
        """Length of the longest sequence."""
        return int(self.lengths.max())

    def sample(self, n: int, rng: np.random.Generator) -> Tokens:
        """Sample `n` lengths, int64 `[n]`."""
        return rng.choice(self.lengths, n)


LengthDistribution: TypeAlias = LogNormal | EmpiricalLengths

#: Distributions by name. After clipping, their mean lengths are those in the ODC paper: 16,500 (longalign), 34,700
#: (swesmith) and 9,000 (aime) tokens.
KNOWN_DISTRIBUTIONS: dict[str, LengthDistribution] = {
    "equal": EmpiricalLengths(np.array([16_500])),  # perfectly balanced
    # 10,000 instructions "of 8k-64k in length" (LongAlign, arXiv 2401.18058). With sigma 0.65, three quarters are in
    # this range and 0.7 % are clipped. Speed-up of LB-Mini for 8 ranks with 4 sequences each and sigma 0.5, 0.65, 0.8:
    # 1.20, 1.26, 1.27.
    "longalign": LogNormal(9.5076828889233, 0.65, 65_536),
    # Transcripts of agents under the same limits vary less. Longest: 128K, a common context length of models.
    "swesmith": LogNormal(10.330653796542368, 0.5, 131_072),
    # Answers of a reasoning model, from short ones to the 1.6 % that reach the limit of 32K.
    "aime": LogNormal(8.849234551767974, 0.75, 32_768),
}


def lengths_by_name(name: str) -> LengthDistribution:
    """Return the known distribution `name`, or that of the data set at this path. Raises a `UserError` otherwise."""
    if name in KNOWN_DISTRIBUTIONS:
        return KNOWN_DISTRIBUTIONS[name]
    if not Path(name).exists() and "/" not in name and not name.endswith((".h5", ".hdf5")):
        hint = did_you_mean(name, KNOWN_DISTRIBUTIONS)
        known = ", ".join(KNOWN_DISTRIBUTIONS)
        raise UserError(f"--lengths: expected {known} or the path of a data set, got {name!r}{hint}")
    try:
        with Dataset(name) as dataset:
            return EmpiricalLengths(np.array(dataset.lengths, dtype=np.int64))
    except UserError as error:  # its message has the name of the setting of a run
        raise UserError(str(error).replace("data.path", "--lengths")) from error
