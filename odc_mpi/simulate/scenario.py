"""What a schedule is tried on: minibatches, what ranks believe of them, and what they really take.

A scenario knows neither transports nor balances. The simulator computes with its times, and a benchmark of the real
runtime can sleep for them: both see the same minibatches, since everything follows from the seed.
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

#: Seconds of a sequence through a model of 1.5 B parameters on an A100: the fit in the reference implementation of ODC
#: (sail-sg/odc, examples/llm_training/packing.py), there per 32,000 tokens. It has a constant of
#: `REFERENCE_OVERHEAD_S`, too, which the reference leaves out when it plans, and so does the default here.
REFERENCE_COST = CostModel(linear=2.611821 / 32_000, quadratic=1.982122 / 32_000**2)
REFERENCE_OVERHEAD_S = 0.666759
#: Of that model's parameters, in bf16.
MODEL_BYTES = 2 * 1_500_000_000
#: Keys and values of a token in all layers of such a model, in bf16: 28 layers, two key-value heads of 128.
KV_BYTES = 28 * 2 * 2 * 128 * 2
#: Times that a piece moves the keys and values of the pieces before it: read in forward, read again in backward, and
#: as many bytes of gradients added.
KV_MOVES = 3
#: What is larger was a slip.
MAX_SEQUENCES = 10**7


@dataclass(frozen=True)
class SimulatedMinibatch:
    """One minibatch.

    Attributes:
        lengths: Of its sequences in tokens, int64 [n].
        sequence_s: What each really takes on a rank of speed 1, in seconds, float64 [n].
        overhead_s: What a microbatch takes besides on a rank of speed 1, an empty one too, in seconds.
        communication_s: What a microbatch takes besides on any rank: fetches and pushes that nothing hides, in seconds.
        speeds: Of each rank in this minibatch, float64 [ranks].
        cache_saving_s: Of `communication_s`, what windows save where units stay and gradients are added up, in seconds.
        cache_cost_s: What a rank pays for that in its first microbatch of a minibatch, in seconds.
        cost: What ranks plan with, in seconds.
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
        """Return the seconds of a microbatch, given as positions in the minibatch, on a rank of speed 1."""
        return self.overhead_s + math.fsum(map(self._each_s.__getitem__, microbatch))

    def duration_s(self, rank: int, microbatch: Sequence[int]) -> float:
        """Return the seconds for which a rank is busy with a microbatch."""
        return self.work_s(microbatch) / float(self.speeds[rank]) + self.communication_s

    def window_s(self, rank: int, microbatch: Sequence[int], *, is_first: bool) -> float:
        """Return the same over windows, where a rank may keep units and gradients."""
        return self.duration_s(rank, microbatch) - self.cache_saving_s + (self.cache_cost_s if is_first else 0.0)

    def chunk_s(self, rank: int, split: SequenceSplit, index: int, *, is_first: bool) -> float:
        """Return the seconds for which a rank is busy with a piece of a sequence, without waiting for others."""
        begin, end = split.bounds[index : index + 2]
        moved_s = self.cost.earlier * begin
        error = self._each_s[split.sequence] / float(self.cost.sequence(self.lengths[split.sequence]))
        work_s = self.overhead_s + error * (self.cost.chunk(begin, end) - moved_s)
        saving_s = self.cache_saving_s - (self.cache_cost_s if is_first else 0.0)
        return work_s / float(self.speeds[rank]) + self.communication_s + moved_s - saving_s

    @cached_property
    def _each_s(self) -> list[float]:
        return self.sequence_s.tolist()


@dataclass(frozen=True)
class Scenario:
    """A run to try schedules on. Wrong values raise a `UserError` that names the option of `odc-mpi simulate`.

    Attributes:
        ranks: Number of ranks.
        per_rank: Sequences per rank and minibatch.
        lengths: Where lengths come from: a name, or the path of a data set; see `lengths.find`.
        num_minibatches: How many minibatches.
        seed: Everything follows from it.
        packing_ratio: The most tokens in a microbatch, in multiples of the longest possible sequence; at least 1. Our
            reading of the paper's term: with 1 a microbatch holds one longest sequence or several shorter ones.
        speed_variation: Standard deviation of a rank's speed, whose mean is 1; each rank has one in each minibatch,
            drawn anew from a log-normal distribution. It stands for everything that slows a rank for seconds.
        cost_error: Standard deviation of the factor, of mean 1, by which a sequence's time differs from its cost; each
            sequence has one, drawn from a log-normal distribution. The cost is right on average.
        cost: Seconds of a sequence on a rank of speed 1, as everybody plans with; its constant is a microbatch's.
        num_units: Units of the model: each is fetched twice per microbatch, for forward and backward, and pushed once.
        unit_bytes: Of each unit; 0: of a model of 1.5 B parameters, `MODEL_BYTES` by units.
        fetch_gb_per_s: 10^9 bytes of a unit that a fetch moves per second; 0: fetches cost nothing.
        push_gb_per_s: The same for pushes.
        ticket_s: Seconds that it takes to draw a ticket.
        parameter_cache_bytes: Of a rank over windows, for fetched units that stay for the minibatch.
        gradient_cache_bytes: Of a rank over windows, for gradients that are added up and pushed once; they are taken to
            be as large as parameters.
        piece_factor: What a piece of a sequence takes to the part that it is of the whole.
        kv_gb_per_s: 10^9 bytes of keys and values, or of their gradients, that a piece moves per second, of
            `KV_BYTES` a token and `KV_MOVES` times; 0: they cost nothing.
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
    piece_factor: float = SCENARIO["piece_factor"].default
    kv_gb_per_s: float = SCENARIO["kv_gb_per_s"].default

    def __post_init__(self) -> None:
        validate_options({"ranks": RANKS, **SCENARIO, "ticket_s": TICKET_S, **CACHES}, self)
        self._check_together()

    def _check_together(self) -> None:
        if self.num_sequences > MAX_SEQUENCES:
            raise UserError(
                f"expected at most {MAX_SEQUENCES} sequences in a minibatch, got {self.num_sequences}: lower --per-rank"
            )
        if self.unit_bytes and not (self.fetch_gb_per_s or self.push_gb_per_s):
            raise UserError("--unit-bytes: expected --fetch-gb-per-s or --push-gb-per-s, too, got neither")
        if self.communication_s > MAX_S:
            raise UserError(
                f"expected communication of at most {MAX_S} s a microbatch, got {self.communication_s:.3g} s: raise "
                "--fetch-gb-per-s and --push-gb-per-s, or lower --unit-bytes"
            )
        if self.kv_gb_per_s and self.planned_cost.earlier > 1:
            raise UserError(
                f"expected keys and values of a token to move within a second, got {self.planned_cost.earlier:.3g} s: "
                "raise --kv-gb-per-s"
            )

    @property
    def num_sequences(self) -> int:
        """Sequences of a minibatch."""
        return self.ranks * self.per_rank

    @property
    def overhead_s(self) -> float:
        """Seconds of a microbatch besides its sequences."""
        return self.cost.constant

    @cached_property
    def length_distribution(self) -> LengthDistribution:
        """Where lengths come from."""
        return lengths_by_name(self.lengths)

    @property
    def max_tokens(self) -> int:
        """The most tokens in a microbatch."""
        return int(self.packing_ratio * self.length_distribution.max_tokens)

    @property
    def communication_s(self) -> float:
        """Seconds of a microbatch's fetches and pushes."""
        fetch_s, push_s = self._model_s
        return 2 * fetch_s + push_s

    @property
    def cache_saving_s(self) -> tuple[float, float]:
        """Seconds that the caches save in a microbatch over windows, and cost in a rank's first of a minibatch."""
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
        """The cost that ranks plan with, in seconds; communication is part of a microbatch's constant."""
        earlier = KV_MOVES * KV_BYTES / (1e9 * self.kv_gb_per_s) if self.kv_gb_per_s else 0.0
        constant = self.cost.constant + self.communication_s
        return replace(self.cost, constant=constant, piece_factor=self.piece_factor, earlier=earlier)

    def minibatches(self) -> Iterator[SimulatedMinibatch]:
        """Yield the minibatches, the same ones each time."""
        for index in range(self.num_minibatches):
            # A generator for each kind: whether speeds vary does not change which sequences are drawn.
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
    """Draw log-normal factors of mean 1 with this standard deviation; never 0 or below, as normal ones would be."""
    variance = math.log1p(deviation**2)
    return np.exp(math.sqrt(variance) * rng.standard_normal(n) - variance / 2)
