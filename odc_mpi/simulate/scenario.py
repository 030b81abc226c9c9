"""Scenarios of simulations: minibatches with the costs that ranks use for planning, and with true durations.

A scenario is independent of transports and balancing strategies. The simulator computes with the true durations, and
`bench.schedule` sleeps for them. Both use the same minibatches, which the seed determines.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from odc_mpi.data.plan.chunks import SequenceSplit
from odc_mpi.data.plan.cost import CostModel
from odc_mpi.errors import UserError
from odc_mpi.simulate.lengths import LengthDistribution, lengths_by_name
from odc_mpi.simulate.options import CACHES, MAX_S, RANKS, SCENARIO, TICKET_S, validate_options

Floats = npt.NDArray[np.float64]

#: Seconds of a sequence in a model of 1.5 B parameters on an A100: the fit in the reference implementation of ODC
#: (sail-sg/odc, examples/llm_training/packing.py), there per 32,000 tokens. The fit also has the constant
#: `REFERENCE_OVERHEAD_S`, which the reference omits when it plans, as does the default here.
REFERENCE_COST = CostModel(linear=2.611821 / 32_000, quadratic=1.982122 / 32_000**2)
REFERENCE_OVERHEAD_S = 0.666759
#: Size of the parameters of that model in bf16, in bytes.
MODEL_BYTES = 2 * 1_500_000_000
#: Size of the keys and values of a token in such a model in bf16, in bytes: 28 layers, two key-value heads of 128.
KV_BYTES = 28 * 2 * 2 * 128 * 2
#: Number of times that a chunk moves the keys and values of earlier chunks: read in the forward, read again in the
#: backward, and gradients of the same size.
KV_MOVES = 3
#: Larger values are typos.
MAX_SEQUENCES = 10**7


@dataclass(frozen=True)
class SimulatedMinibatch:
    """Minibatch to simulate. All durations are in seconds.

    Attributes:
        lengths: Number of tokens of each sequence, int64 [n].
        sequence_s: True duration of each sequence on a rank of speed 1, float64 [n].
        overhead_s: Constant part of the duration of a microbatch on a rank of speed 1. A dummy microbatch has it, too.
        communication_s: Duration of the fetches and pushes of a microbatch, which do not overlap with computation.
        speeds: Speed of each rank in this minibatch, float64 [ranks].
        cache_saving_s: Part of `communication_s` that caches save in each microbatch with windows.
        cache_cost_s: Additional duration of the first microbatch of a rank with windows, since it fills the caches.
        cost: Cost model that ranks use for planning.
    """

    lengths: npt.NDArray[np.int64]
    sequence_s: Floats
    overhead_s: float
    communication_s: float
    speeds: Floats
    cache_saving_s: float = 0.0
    cache_cost_s: float = 0.0
    cost: CostModel = REFERENCE_COST

    def work_s(self, microbatch: Sequence[int]) -> float:
        """Return the duration of a microbatch at speed 1 without communication. `microbatch`: indices of sequences."""
        return self.overhead_s + math.fsum(map(self._each_s.__getitem__, microbatch))

    def duration_s(self, rank: int, microbatch: Sequence[int]) -> float:
        """Return the duration of a microbatch on a rank, including communication without caches."""
        return self.work_s(microbatch) / float(self.speeds[rank]) + self.communication_s

    def window_s(self, rank: int, microbatch: Sequence[int], *, is_first: bool) -> float:
        """Return the duration of a microbatch on a rank with windows, including communication with caches."""
        return self.duration_s(rank, microbatch) - self.cache_saving_s + (self.cache_cost_s if is_first else 0.0)

    def chunk_s(self, rank: int, split: SequenceSplit, index: int, *, is_first: bool) -> float:
        """Return the duration of chunk `index` of a split sequence on a rank, without waits for other chunks."""
        begin, end = split.bounds[index : index + 2]
        moved_s = self.cost.earlier_tokens * begin
        error = self._each_s[split.position] / float(self.cost.sequence(self.lengths[split.position]))
        work_s = self.overhead_s + error * (self.cost.chunk(begin, end) - moved_s)
        saving_s = self.cache_saving_s - (self.cache_cost_s if is_first else 0.0)
        return work_s / float(self.speeds[rank]) + self.communication_s + moved_s - saving_s

    @cached_property
    def _each_s(self) -> list[float]:
        return self.sequence_s.tolist()


@dataclass(frozen=True)
class Scenario:
    """Run to simulate. A `UserError` for an invalid value names the option of `odc-mpi simulate`.

    For attributes that are not listed, see the options in `simulate.options`.

    Attributes:
        lengths: Name or path for `lengths_by_name`.
        packing_ratio: Maximum tokens of a microbatch, in multiples of the longest possible sequence; at least 1. With
            1, a microbatch holds one longest sequence or several shorter ones. This interprets the term of the paper.
        speed_variation: Standard deviation of a rank's speed, whose mean is 1. Speeds are log-normal, and each rank
            has a new speed in each minibatch. They model everything that slows a rank down for seconds.
        cost_error: Standard deviation of the ratio of a sequence's true duration to its cost. Ratios are log-normal
            with mean 1, so the cost is correct on average.
        cost: Cost model that ranks use for planning, in seconds on a rank of speed 1. Its constant is per microbatch.
        num_units: Number of units, parameters that are fetched and released together. In each microbatch, a unit is
            fetched twice, for forward and backward, and its gradient is pushed once.
        unit_bytes: Size of a unit in bytes. 0 means `MODEL_BYTES` divided by `num_units`.
        fetch_gb_per_s, push_gb_per_s: Speed of fetches and of pushes, in 10^9 bytes per second. 0 means no time.
        parameter_cache_bytes: Memory per rank for units that stay in memory for the whole minibatch, with windows.
        gradient_cache_bytes: Memory per rank for local gradient accumulation, with windows. Gradients are assumed to be
            as large as parameters.
        chunk_factor: Cost of a chunk relative to its share of the cost of the unsplit sequence.
        kv_gb_per_s: Speed of moving keys, values and their gradients, in 10^9 bytes per second. A chunk moves
            `KV_BYTES` `KV_MOVES` times for each earlier token. 0 means that this takes no time.
    """

    ranks: int = RANKS.default
    per_rank: int = SCENARIO["per_rank"].default
    lengths: str = "longalign"
    num_minibatches: int = SCENARIO["num_minibatches"].default
    seed: int = SCENARIO["seed"].default
    packing_ratio: float = SCENARIO["packing_ratio"].default
    speed_variation: float = SCENARIO["speed_variation"].default
    cost_error: float = SCENARIO["cost_error"].default
    cost: CostModel = REFERENCE_COST
    num_units: int = SCENARIO["num_units"].default
    unit_bytes: int = SCENARIO["unit_bytes"].default
    fetch_gb_per_s: float = SCENARIO["fetch_gb_per_s"].default
    push_gb_per_s: float = SCENARIO["push_gb_per_s"].default
    ticket_s: float = TICKET_S.default
    parameter_cache_bytes: int = CACHES["parameter_cache_bytes"].default
    gradient_cache_bytes: int = CACHES["gradient_cache_bytes"].default
    chunk_factor: float = SCENARIO["chunk_factor"].default
    kv_gb_per_s: float = SCENARIO["kv_gb_per_s"].default

    def __post_init__(self) -> None:
        validate_options({"ranks": RANKS, **SCENARIO, "ticket_s": TICKET_S, **CACHES}, self)
        if self.num_sequences > MAX_SEQUENCES:
            raise UserError(
                f"expected at most {MAX_SEQUENCES} sequences in a minibatch, got {self.num_sequences}: lower --per-rank"
            )
        if self.unit_bytes and not (self.fetch_gb_per_s or self.push_gb_per_s):
            raise UserError("--unit-bytes: expected --fetch-gb-per-s or --push-gb-per-s, too: set one of them")
        if self.communication_s > MAX_S:
            raise UserError(
                f"expected communication of at most {MAX_S} s a microbatch, got {self.communication_s:.3g} s: raise "
                "--fetch-gb-per-s and --push-gb-per-s, or lower --unit-bytes"
            )
        if self.kv_gb_per_s and self.planned_cost.earlier_tokens > 1:
            raise UserError(
                f"expected at most 1 s to move keys and values of a token, got "
                f"{self.planned_cost.earlier_tokens:.3g} s: raise --kv-gb-per-s"
            )

    @property
    def num_sequences(self) -> int:
        """Number of sequences in a minibatch."""
        return self.ranks * self.per_rank

    @property
    def overhead_s(self) -> float:
        """Constant part of the duration of a microbatch, in seconds."""
        return self.cost.constant

    @cached_property
    def length_distribution(self) -> LengthDistribution:
        """Distribution of the sequence lengths."""
        return lengths_by_name(self.lengths)

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens in a microbatch."""
        return int(self.packing_ratio * self.length_distribution.max_tokens)

    @property
    def communication_s(self) -> float:
        """Communication time of a microbatch, for fetches and pushes, in seconds."""
        fetch_s, push_s = self._model_s
        return 2 * fetch_s + push_s

    @property
    def cache_saving_s(self) -> tuple[float, float]:
        """Seconds that caches save in each microbatch with windows, and cost in the first one, which fills them."""
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
        size = self._model_bytes / 1e9
        fetch_s, push_s = (size / speed if speed else 0.0 for speed in (self.fetch_gb_per_s, self.push_gb_per_s))
        return fetch_s, push_s

    @property
    def planned_cost(self) -> CostModel:
        """Cost model that ranks use for planning, in seconds. The constant of a microbatch includes communication."""
        earlier = KV_MOVES * KV_BYTES / (1e9 * self.kv_gb_per_s) if self.kv_gb_per_s else 0.0
        constant = self.cost.constant + self.communication_s
        return replace(self.cost, constant=constant, chunk_factor=self.chunk_factor, earlier_tokens=earlier)

    def minibatches(self) -> Iterator[SimulatedMinibatch]:
        """Generate the minibatches. The same seed gives the same minibatches."""
        for index in range(self.num_minibatches):
            # Separate generators: lengths do not depend on the variation of speeds.
            lengths_rng, errors_rng, speeds_rng = (np.random.default_rng([self.seed, index, kind]) for kind in range(3))
            lengths = self.length_distribution.sample(self.num_sequences, lengths_rng)
            yield SimulatedMinibatch(
                lengths,
                self.cost.sequence(lengths) * _factors(len(lengths), self.cost_error, errors_rng),
                self.cost.constant,
                self.communication_s,
                _factors(self.ranks, self.speed_variation, speeds_rng),
                *self.cache_saving_s,
                self.planned_cost,
            )


def _factors(n: int, deviation: float, rng: np.random.Generator) -> Floats:
    """Sample `n` log-normal factors of mean 1. They are always positive, in contrast to normal ones."""
    variance = math.log1p(deviation**2)
    return np.exp(math.sqrt(variance) * rng.standard_normal(n) - variance / 2)
