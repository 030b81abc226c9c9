"""Simulation scenarios: minibatches with the costs that ranks use for planning, and with their true durations.

The simulator adds up the true durations, whereas `benchmarks/schedule_speed.py` sleeps for these durations.

Sequence lengths are sampled from those of a prepared data set, or as for a well-known data set: from a log-normal
distribution up to a maximum, with the mean that the ODC paper (arXiv 2601.19362) gives for the data set.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.data.plan.balance import SequenceSplit
from odc_mpi.data.plan.cost import CostModel
from odc_mpi.errors import UserError
from odc_mpi.formatting import did_you_mean
from odc_mpi.simulate.options import MAX_GB_PER_S, MAX_S, WIRE_BYTES, ScenarioOptions, option_name

Floats = npt.NDArray[np.float64]
Tokens = npt.NDArray[np.int64]

#: Seconds that a model with 1.5 B parameters takes for a sequence on an A100, from the fit in the reference
#: implementation of ODC (sail-sg/odc, examples/llm_training/packing.py), which is per 32,000 tokens. The fit also has a
#: constant of 0.666759 s, which is omitted here, as it is in the plans of the reference implementation.
REFERENCE_COST = CostModel(linear=2.611821 / 32_000, quadratic=1.982122 / 32_000**2)
#: Size in bytes of a parameter, and of all parameters of that model, in bf16.
PARAMETER_BYTES = 2
MODEL_BYTES = PARAMETER_BYTES * 1_500_000_000
#: Maximum number of sequences in a minibatch. Larger values are probably typos.
MAX_SEQUENCES = 10**7


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
    """Return the known distribution `name`, or that of the data set at this path, or raise `UserError`."""
    if name in KNOWN_DISTRIBUTIONS:
        return KNOWN_DISTRIBUTIONS[name]
    if not Path(name).exists() and "/" not in name and not name.endswith((".h5", ".hdf5")):
        hint = did_you_mean(name, KNOWN_DISTRIBUTIONS)
        known = ", ".join(KNOWN_DISTRIBUTIONS)
        raise UserError(f"--lengths: expected {known} or the path of a data set, got {name!r}{hint}")
    with Dataset(name, "--lengths") as dataset:
        return EmpiricalLengths(np.array(dataset.lengths, dtype=np.int64))


@dataclass(frozen=True)
class SimulatedMinibatch:
    """Minibatch of `scenario`. All durations are in seconds, and those of microbatches include communication.

    With windows, a rank's first microbatch takes longer because it fills the caches (`is_first` in the methods).

    Attributes:
        lengths: Number of tokens in each sequence, int64 `[n]`.
        sequence_s: True duration of each sequence on a rank of speed 1, float64 `[n]`.
        speeds: Speed of each rank in this minibatch, float64 `[ranks]`.
    """

    scenario: "Scenario"
    lengths: Tokens
    sequence_s: Floats
    speeds: Floats

    def duration_s(self, rank: int, microbatch: Sequence[int]) -> float:
        """Return the duration of a microbatch, given as sequence indices, on a rank without caches."""
        work_s = self.scenario.overhead_s + math.fsum(map(self._each_s.__getitem__, microbatch))
        return work_s / float(self.speeds[rank]) + self.scenario.communication_s

    def window_s(self, rank: int, microbatch: Sequence[int], *, is_first: bool) -> float:
        """Return the duration of a microbatch on a rank with parameter and gradient caches."""
        saving_s, cost_s = self.scenario.cache_saving_s
        return self.duration_s(rank, microbatch) - saving_s + (cost_s if is_first else 0.0)

    def chunk_s(self, rank: int, split: SequenceSplit, index: int, *, is_first: bool) -> float:
        """Return the duration of chunk `index` of a split sequence on a rank, not counting waits for other chunks."""
        begin, end = split.bounds[index : index + 2]
        scenario, cost = self.scenario, self.scenario.cost
        error = self._each_s[split.position] / float(cost.sequence(self.lengths[split.position]))
        work_s = scenario.overhead_s + error * cost.chunk(begin, end)
        saving_s = scenario.cache_saving_s[0] - (scenario.cache_saving_s[1] if is_first else 0.0)
        return work_s / float(self.speeds[rank]) + scenario.communication_s - saving_s

    @cached_property
    def _each_s(self) -> list[float]:
        return self.sequence_s.tolist()


@dataclass(frozen=True)
class Scenario(ScenarioOptions):
    """Scenario of a simulated run, whose seed determines all minibatches. Raises `UserError` if options are invalid.

    `cost` is the cost model for planning, in seconds on a rank of speed 1, without `overhead_s`. A microbatch has at
    most as many tokens as the longest possible sequence (packing ratio 1 in the ODC paper).
    """

    cost: CostModel = REFERENCE_COST

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_sequences > MAX_SEQUENCES:
            raise UserError(
                f"expected at most {MAX_SEQUENCES} sequences in a minibatch, got {self.num_sequences}: lower --per-rank"
            )
        if self.unit_bytes and not (self.fetch_gb_per_s or self.push_gb_per_s or self.link_gb_per_s):
            raise UserError("--unit-bytes: expected --fetch-gb-per-s or --push-gb-per-s, too: set one of them")
        if self.ranks % self.num_islands:
            raise UserError(f"--islands: expected a divisor of {self.ranks} ranks, got {self.num_islands}")
        for field in ("link_gb_per_s", "sync_every"):
            if getattr(self, field) and self.num_islands == 1:
                raise UserError(f"{option_name(field)}: expected --islands of 2 or more, got 1: set --islands, too")
        if self.wire not in WIRE_BYTES:
            raise UserError(f"--wire: expected {' or '.join(WIRE_BYTES)}, got {self.wire}")
        if self.wire != ScenarioOptions.wire and not self.sync_every:
            raise UserError(f"--wire: expected --sync-every of 1 or more with {self.wire}, got 0: set it, too")
        if self.communication_s > MAX_S:
            raise UserError(
                f"expected communication of at most {MAX_S} s a microbatch, got {self.communication_s:.3g} s: raise "
                "--fetch-gb-per-s and --push-gb-per-s, or lower --unit-bytes"
            )

    @property
    def num_sequences(self) -> int:
        """Number of sequences in a minibatch."""
        return self.ranks * self.per_rank

    @cached_property
    def length_distribution(self) -> LengthDistribution:
        """Distribution of the sequence lengths."""
        return lengths_by_name(self.lengths)

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens in a microbatch."""
        return self.length_distribution.max_tokens

    @cached_property
    def communication_s(self) -> float:
        """Seconds that the fetches and pushes of a microbatch take without caches. Computation does not hide them."""
        fetch_s, push_s = self._model_s
        return 2 * fetch_s + push_s

    @cached_property
    def cache_saving_s(self) -> tuple[float, float]:
        """Seconds that caches save in each microbatch, and seconds spent filling them in a rank's first microbatch.

        Collectives have no caches.
        """
        num_bytes = self._model_bytes
        fetch_s, push_s = self._model_s
        fetch_s *= min(1.0, self.parameter_cache_bytes / num_bytes)
        push_s *= min(1.0, self.gradient_cache_bytes / num_bytes)
        return 2 * fetch_s + push_s, fetch_s + push_s

    @property
    def _model_bytes(self) -> int:
        return self.num_units * self.unit_bytes if self.unit_bytes else MODEL_BYTES

    @property
    def _model_s(self) -> tuple[float, float]:
        """Seconds to fetch all units once, and to push all gradients once."""
        size, island_share = self._model_bytes / 1e9, 1 / self.num_islands
        fetch_s, push_s = (
            island_share * size / speed if speed else 0.0 for speed in (self.fetch_gb_per_s, self.push_gb_per_s)
        )
        between_islands_s = (1 - island_share) * size / self.link_gb_per_s if self.link_gb_per_s else 0.0
        return fetch_s + between_islands_s, push_s + between_islands_s

    @property
    def exchange_s(self) -> float:
        """Seconds that a rank needs to exchange its shards of gradients and then of parameters with other islands."""
        num_bytes = 2 * self._model_bytes * (self.num_islands - 1) / self.ranks
        return num_bytes / 1e9 / self.link_gb_per_s if self.link_gb_per_s else 0.0

    @property
    def outer_exchange_s(self) -> float:
        """Mean seconds per minibatch that an outer loop spends exchanging parameters between islands.

        Once every `sync_every` minibatches, each rank receives its share of the parameters from each other island.
        """
        if not (self.sync_every and self.link_gb_per_s):
            return 0.0
        share_numel = self._model_bytes / PARAMETER_BYTES * self.num_islands / self.ranks
        num_bytes = (self.num_islands - 1) * share_numel * WIRE_BYTES[self.wire]
        return num_bytes / 1e9 / self.link_gb_per_s / self.sync_every

    @cached_property
    def in_island(self) -> "Scenario":
        """Scenario in which ranks only fetch from, and push to, their own island."""
        # Not 0, which would be refused with `unit_bytes`.
        fetch_gb_per_s = self.fetch_gb_per_s or MAX_GB_PER_S
        without_outer = replace(self, sync_every=0, wire=ScenarioOptions.wire)
        return replace(without_outer, num_islands=1, link_gb_per_s=0.0, fetch_gb_per_s=fetch_gb_per_s)

    @cached_property
    def planned_cost(self) -> CostModel:
        """Cost model for planning, in seconds, including the overhead and communication of each microbatch."""
        return replace(self.cost, constant=self.overhead_s + self.communication_s)

    def minibatches(self) -> Iterator[SimulatedMinibatch]:
        """Yield the minibatches, which depend only on the options."""
        for index in range(self.num_minibatches):
            # Separate generators: lengths do not depend on the variation of speeds.
            lengths_rng, errors_rng, speeds_rng = (np.random.default_rng([self.seed, index, kind]) for kind in range(3))
            lengths = self.length_distribution.sample(self.num_sequences, lengths_rng)
            sequence_s = self.cost.sequence(lengths) * _factors(len(lengths), self.cost_error, errors_rng)
            speeds = _factors(self.ranks, self.speed_variation, speeds_rng)
            yield SimulatedMinibatch(self, lengths, sequence_s, speeds)


def _factors(n: int, deviation: float, rng: np.random.Generator) -> Floats:
    """Sample `n` log-normal factors with mean 1. Unlike normally distributed factors, they are always positive."""
    variance = math.log1p(deviation**2)
    return np.exp(math.sqrt(variance) * rng.standard_normal(n) - variance / 2)
