"""Options of a scenario: their defaults, bounds and meanings, for the command line and for code.

By the names of fields of `simulate.scenario.Scenario` and `simulate.rollouts.RolloutScenario`. Imports nothing that takes
time: every command shows them in its help.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from odc_mpi.errors import UserError

#: What is larger was a slip: seconds of a microbatch, speeds.
MAX_S = MAX_GB_PER_S = 10**6


class Option(NamedTuple):
    """An option.

    Attributes:
        name: On the command line.
        default: Of its type.
        minimum: Allowed.
        maximum: Allowed.
        help: For the help.
    """

    name: str
    default: Any
    minimum: float
    maximum: float
    help: str


def validate_options(options: Mapping[str, Option], values: Any) -> None:
    """Check the fields of an object that options are of.

    Raises:
        UserError: A value is out of bounds; names the option.
    """
    for field, option in options.items():
        value = getattr(values, field)
        if not option.minimum <= value <= option.maximum:  # not a number is neither
            raise UserError(f"expected {option.name} from {option.minimum} to {option.maximum}, got {value}")


#: Of --lengths.
LENGTHS = "longalign, swesmith, aime, equal or the path of a data set"
RANKS = Option("--ranks", 8, 1, 10**5, "number of ranks")
TICKET_S = Option("--ticket-s", 0.0, 0, MAX_S, "seconds to draw a ticket")
#: Of a scenario, besides ranks, lengths, tickets and caches.
SCENARIO = {
    "per_rank": Option("--per-rank", 8, 1, 10**5, "sequences per rank and minibatch"),
    "num_minibatches": Option("--minibatches", 30, 1, 10**6, "how many are drawn"),
    "seed": Option("--seed", 0, 0, 2**63, "everything follows from it"),
    "packing_ratio": Option("--packing-ratio", 1.0, 1, 10**6, "most tokens in a microbatch, in longest sequences"),
    "speed_variation": Option("--speed-variation", 0.0, 0, 10, "standard deviation of a rank's speed, of mean 1"),
    "cost_error": Option("--cost-error", 0.0, 0, 10, "standard deviation of a sequence's time to its cost"),
    "overhead_s": Option("--overhead-s", 0.0, 0, MAX_S, "seconds of a microbatch besides its sequences"),
    "num_units": Option("--units", 28, 1, 10**4, "units of the model"),
    "unit_bytes": Option(
        "--unit-bytes", 0, 0, 10**12, "bytes of a unit; 0: of a model of 1.5 B parameters in bf16, by its units"
    ),
    "fetch_gb_per_s": Option("--fetch-gb-per-s", 0.0, 0, MAX_GB_PER_S, "of a unit; 0 is free"),
    "push_gb_per_s": Option("--push-gb-per-s", 0.0, 0, MAX_GB_PER_S, "of a unit; 0 is free"),
    "piece_factor": Option(
        "--piece-factor", 1.08, 1, 10**3, "what a piece of a sequence takes, to its part of the whole"
    ),
    "kv_gb_per_s": Option("--kv-gb-per-s", 0.0, 0, MAX_GB_PER_S, "of the keys and values of other pieces; 0 is free"),
}
CACHES = {
    f"{what}_cache_bytes": Option(f"--{what}-cache-bytes", 0, 0, 10**15, f"over windows: as comm.{what}_cache_bytes")
    for what in ("parameter", "gradient")
}
#: Of generation. A decode step, and each sequence in it, of a model of 1.5 B parameters in bf16 on an A100: its 3 GB,
#: and the keys and values of 4,500 tokens in the mean (`simulate.scenario.KV_BYTES` each), at 1.5 TB/s.
GENERATION = {
    "completions": Option("--completions", 8, 1, 10**4, "completions of a prompt, of which each rank has --per-rank"),
    "decode_step_s": Option("--decode-step-s", 2e-3, 0, MAX_S, "seconds of a decode step, besides its sequences"),
    "decode_sequence_s": Option("--decode-sequence-s", 8.6e-5, 0, MAX_S, "seconds of each sequence in a decode step"),
}
