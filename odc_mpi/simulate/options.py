"""Options of scenarios with their defaults, bounds and help texts, used by the command line and by the classes.

Keys are the fields of `simulate.scenario.Scenario` and `simulate.rollouts.RolloutScenario`. This module imports nothing
slow, because every command imports it for the help.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from odc_mpi.errors import UserError

#: Larger values are typos.
MAX_S = MAX_GB_PER_S = 10**6


class Option(NamedTuple):
    """Option of the command line. The bounds are inclusive, and values have the type of the default."""

    name: str
    default: Any
    minimum: float
    maximum: float
    help: str


def validate_options(options: Mapping[str, Option], values: Any) -> None:
    """Raise `UserError`, which names the option, if an attribute of `values` is out of the bounds of its option.

    `options` has the options by attribute name.
    """
    for field, option in options.items():
        value = getattr(values, field)
        if not option.minimum <= value <= option.maximum:  # nan fails both comparisons
            raise UserError(f"{option.name}: expected a number from {option.minimum} to {option.maximum}, got {value}")


LENGTHS = "longalign, swesmith, aime, equal or the path of a data set"
RANKS = Option("--ranks", 8, 1, 10**5, "number of ranks")
TICKET_S = Option("--ticket-s", 0.0, 0, MAX_S, "seconds to claim a ticket")
SCENARIO = {
    "per_rank": Option("--per-rank", 8, 1, 10**5, "sequences per rank and minibatch"),
    "num_minibatches": Option("--minibatches", 30, 1, 10**6, "number of simulated minibatches"),
    "seed": Option("--seed", 0, 0, 2**63, "seed of all random numbers"),
    "packing_ratio": Option("--packing-ratio", 1.0, 1, 10**6, "tokens in a microbatch, relative to the longest length"),
    "speed_variation": Option("--speed-variation", 0.0, 0, 10, "standard deviation of a rank's speed, whose mean is 1"),
    "cost_error": Option("--cost-error", 0.0, 0, 10, "standard deviation of the ratio of time to cost"),
    "overhead_s": Option("--overhead-s", 0.0, 0, MAX_S, "constant seconds of a microbatch"),
    "num_units": Option("--units", 28, 1, 10**4, "units of the model"),
    "unit_bytes": Option("--unit-bytes", 0, 0, 10**12, "bytes of a unit; 0: 1.5 B parameters in bf16 / --units"),
    "fetch_gb_per_s": Option("--fetch-gb-per-s", 0.0, 0, MAX_GB_PER_S, "speed of fetches; 0: free"),
    "push_gb_per_s": Option("--push-gb-per-s", 0.0, 0, MAX_GB_PER_S, "speed of pushes; 0: free"),
    "chunk_factor": Option("--chunk-factor", 1.08, 1, 10**3, "factor on the cost of a chunk of a split sequence"),
    "kv_gb_per_s": Option("--kv-gb-per-s", 0.0, 0, MAX_GB_PER_S, "speed of keys and values of other chunks; 0: free"),
}
CACHES = {
    f"{kind}_cache_bytes": Option(f"--{kind}-cache-bytes", 0, 0, 10**15, f"for windows: comm.{kind}_cache_bytes")
    for kind in ("parameter", "gradient")
}
#: Options of generation. Seconds are for 1.5 B parameters in bf16 on an A100 with 1.5 TB/s: a step reads the 3 GB of
#: parameters, each sequence the keys and values of 4,500 tokens on average (`simulate.scenario.KV_BYTES` each).
GENERATION = {
    "completions": Option("--completions", 8, 1, 10**4, "completions per prompt; a rank has --per-rank prompts"),
    "decode_step_s": Option("--decode-step-s", 2e-3, 0, MAX_S, "constant seconds of a decode step"),
    "decode_sequence_s": Option("--decode-sequence-s", 8.6e-5, 0, MAX_S, "seconds of each sequence in a decode step"),
}
